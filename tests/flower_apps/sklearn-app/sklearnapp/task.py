"""Logistic regression with scikit-learn, on its digits."""

import warnings

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression


def load_data(partition_id, num_partitions):
    digits = load_digits()
    order = np.random.default_rng(3).permutation(len(digits.target))[partition_id::num_partitions]
    points, labels = digits.data[order] / 16.0, digits.target[order]
    cut = int(0.8 * len(labels))
    return points[:cut], points[cut:], labels[:cut], labels[cut:]


def create_model(penalty, local_epochs):
    model = LogisticRegression(C=1e4 if penalty == "none" else 1.0, max_iter=local_epochs, warm_start=True)
    model.classes_ = np.arange(10)
    model.coef_, model.intercept_ = np.zeros((10, 64)), np.zeros(10)
    return model


def get_params(model):
    return [model.coef_, model.intercept_]


def set_params(model, params):
    model.coef_, model.intercept_ = params


def fit(model, points, labels):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(points, labels)

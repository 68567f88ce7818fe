"""Logistic regression with NumPy, on points of two classes."""

import numpy as np

DIM = 20


def load_data(partition_id: int, num_partitions: int) -> tuple[np.ndarray, np.ndarray]:
    """The points of a partition, and their classes. The same for each call."""
    rng = np.random.default_rng(7)
    truth = rng.normal(size=DIM)
    points = rng.normal(size=(2000, DIM))
    labels = (points @ truth + rng.normal(scale=0.5, size=2000) > 0).astype(float)
    return points[partition_id::num_partitions], labels[partition_id::num_partitions]


def probabilities(weights: np.ndarray, points: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-(points @ weights[:-1] + weights[-1])))


def train(weights: np.ndarray, points: np.ndarray, labels: np.ndarray, learning_rate: float) -> np.ndarray:
    weights = weights.copy()
    for _ in range(20):
        error = probabilities(weights, points) - labels
        weights[:-1] -= learning_rate * points.T @ error / len(labels)
        weights[-1] -= learning_rate * error.mean()
    return weights


def test(weights: np.ndarray, points: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    found = probabilities(weights, points).clip(1e-9, 1 - 1e-9)
    loss = -(labels * np.log(found) + (1 - labels) * np.log(1 - found)).mean()
    return float(loss), float(((found > 0.5) == labels).mean())

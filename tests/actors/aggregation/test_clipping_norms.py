"""Norms for reports."""

from __future__ import annotations

import math

import pytest
import torch

from gradbus.actors.aggregation.clipping import l2_distance, l2_norm


@pytest.mark.parametrize("dim", [0, 1, 100, 30 * 1024, 30 * 1024 + 1, 100_000])
def test_norms_are_those_of_torch(dim: int) -> None:
    torch.manual_seed(dim)
    a, b = torch.randn(dim), torch.randn(dim)
    assert l2_norm(a) == pytest.approx(float(torch.linalg.vector_norm(a.double())), rel=1e-5)
    expected = float(torch.linalg.vector_norm(a.double() - b.double()))
    assert l2_distance(a, b.requires_grad_()) == pytest.approx(expected, rel=1e-5)


def test_a_norm_that_does_not_fit_is_not_finite_and_no_error() -> None:
    huge = torch.full((10,), 3e38)
    assert l2_norm(huge) == math.inf
    assert l2_distance(huge, -huge) == math.inf
    assert math.isnan(l2_distance(torch.tensor([math.nan]), torch.zeros(1)))

"""Norms for reports."""

from __future__ import annotations

import math

import pytest
import torch

from gradbus.codecs.base import l2_norm


@pytest.mark.parametrize("dim", [0, 1, 100, 30 * 1024, 30 * 1024 + 1, 100_000])
def test_norms_are_those_of_torch(dim: int) -> None:
    torch.manual_seed(dim)
    a = torch.randn(dim)
    assert l2_norm(a.requires_grad_()) == pytest.approx(float(torch.linalg.vector_norm(a.detach().double())), rel=1e-5)


def test_a_norm_that_does_not_fit_is_not_finite_and_no_error() -> None:
    assert l2_norm(torch.full((10,), 3e38)) == math.inf
    assert math.isnan(l2_norm(torch.tensor([math.nan])))

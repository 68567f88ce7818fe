"""uint8 between minimum and maximum: how far off, and what becomes of values that are no numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradbus.codecs.bytegrad import MinMax, dequantize_min_max, min_max_bytes, quantize_min_max

finite = st.floats(-(2.0**100), 2.0**100, width=32)


def there_and_back(x: Tensor, chunk_elems: int) -> Tensor:
    return dequantize_min_max(quantize_min_max(x, chunk_elems), chunk_elems)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(values=st.lists(finite, max_size=50), chunk_elems=st.integers(1, 60))
def test_each_value_comes_back_within_half_a_step(values: list[float], chunk_elems: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    back = there_and_back(x, chunk_elems)
    for start in range(0, x.numel(), chunk_elems):
        chunk = x[start : start + chunk_elems].double()
        spread = float(chunk.max() - chunk.min())
        rounding = 1e-6 * (float(chunk.abs().max()) + spread) + 255 * torch.finfo(torch.float32).tiny
        error = float((back[start : start + chunk_elems].double() - chunk).abs().max())
        assert error <= spread / 255 / 2 + rounding


def test_minimum_maximum_and_equal_values_come_back_as_they_are() -> None:
    x = torch.tensor([-1.0, 254.0, 3.0, 7.5, 7.5, 7.5, 0.0, 0.0])
    assert there_and_back(x, 3).tolist() == x.tolist()


def test_small_differences_far_from_zero_survive() -> None:
    x = 1e6 + torch.arange(0, 16, dtype=torch.float32)
    assert float((there_and_back(x, 16) - x).abs().max()) <= 16 / 255 / 2 + 0.0625  # float32 has 1/16 here


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_chunk_with_a_bad_value_comes_back_as_nan_and_the_others_unharmed(bad: float) -> None:
    x = torch.arange(12, dtype=torch.float32)
    x[5] = bad
    back = there_and_back(x, 4)
    assert back[4:8].isnan().all()
    assert there_and_back(x[:4], 4).equal(back[:4])
    assert there_and_back(x[8:], 4).equal(back[8:])


def test_a_spread_beyond_float32_counts_as_not_finite() -> None:
    assert there_and_back(torch.tensor([-3e38, 3e38]), 2).isnan().all()


def test_sizes_are_those_announced() -> None:
    parts = quantize_min_max(torch.randn(1000), 64)
    assert sum(part.numel() * part.element_size() for part in parts) == min_max_bytes(1000, 64) == 1000 + 8 * 16
    assert min_max_bytes(0, 64) == 0
    assert there_and_back(torch.empty(0), 64).shape == (0,)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="float32"):
        quantize_min_max(torch.zeros(3, dtype=torch.float64), 2)
    with pytest.raises(ValueError, match="chunk_elems"):
        quantize_min_max(torch.zeros(3), 0)
    with pytest.raises(ValueError, match="must have shape"):
        dequantize_min_max(MinMax(torch.zeros(1), torch.zeros(1), torch.zeros(3, dtype=torch.uint8)), 2)

"""int8 quantisation: the error bound, and the ends of the range of float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus import codecs

FLT_MAX = torch.finfo(torch.float32).max
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    values=st.lists(FINITE, min_size=1, max_size=40), chunk_elems=st.integers(1, 12), version=st.sampled_from([1, 2])
)
def test_every_element_is_within_half_a_scale(values: list[float], chunk_elems: int, version: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    payload = codecs.get("q8", chunk_elems=chunk_elems, version=version).encode(x)
    x_hat = codecs.decode(payload, expected_dim=len(values)).vector.double()
    for start in range(0, len(values), chunk_elems):
        chunk = x[start : start + chunk_elems].double()
        scale = max(float(chunk.abs().max()) / 127, torch.finfo(torch.float32).tiny)
        # float32 rounds the scale, the quotient and the product: 127 steps of relative error 2**-24 each.
        bound = scale * (0.5 + 127 * 2**-22)
        assert (x_hat[start : start + chunk_elems] - chunk).abs().max() <= bound


@pytest.mark.parametrize("name", ["q8", "sq8"])
@pytest.mark.parametrize("peak", [FLT_MAX, 1e-38, 1e-44, 1e-45])
def test_the_ends_of_the_range_stay_finite_and_ordered(name: str, peak: float) -> None:
    options = {"density": 1.0} if name == "sq8" else {}
    x = torch.tensor([peak, -peak, peak / 2, 0.0])
    x_hat = codecs.decode(codecs.get(name, **options).encode(x), expected_dim=4).vector
    assert x_hat.isfinite().all()
    assert (x_hat - x).abs().max() <= max(peak / 127, 2e-38)


def test_rounding_is_half_to_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])  # the scale is 1
    assert codecs.decode(codecs.get("q8").encode(x), expected_dim=6).vector.tolist() == [127, 0, 2, 2, 0, -2]


def test_a_large_value_spoils_only_its_own_chunk() -> None:
    x = torch.cat((torch.full((64,), 0.01), torch.full((64,), 1000.0)))
    x_hat = codecs.decode(codecs.get("q8", chunk_elems=64).encode(x), expected_dim=128).vector
    assert torch.allclose(x_hat, x, rtol=1e-6)

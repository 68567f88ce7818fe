"""Which tensors go as they are, and which are looked at more closely."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradbus.torch.shapes import are_ready

USUAL = torch.zeros(2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_plain_tensors_of_one_dtype_go_as_they_are(dtype: torch.dtype) -> None:
    assert are_ready(torch.zeros(3, dtype=dtype), [torch.zeros(2, 2, dtype=dtype), torch.zeros((), dtype=dtype)])


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(3, 2).t(),
        torch.zeros(4)[::2],
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3).to_sparse(),
        torch.zeros((1,) * 17),
        torch.zeros(2, dtype=torch.complex64).conj().imag,
    ],
    ids=["dtype", "transposed", "strided", "with a gradient", "meta", "sparse", "too many dimensions", "negated"],
)
def test_any_other_tensor_is_looked_at_more_closely(other: Tensor) -> None:
    assert not are_ready(USUAL, [USUAL, other])
    assert not are_ready(other, [USUAL, USUAL])


def test_conjugates_are_looked_at_more_closely() -> None:
    usual = torch.zeros(2, dtype=torch.complex64)
    assert not are_ready(usual, [usual, usual.conj()])


def test_tensors_that_cannot_be_sent_are_looked_at_more_closely() -> None:
    bits = torch.empty(2, 3, dtype=torch.bits8)
    assert not are_ready(bits, [bits, bits])

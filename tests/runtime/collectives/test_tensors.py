"""Tensors as bytes and back: every dtype and layout, descriptions from the wire."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradbus.runtime.collectives import tensors
from gradbus.runtime.collectives.tensors import (
    as_bytes,
    check_sendable,
    describe,
    empty_like_described,
    is_plain,
    payload_bytes,
    plain,
)
from gradbus.runtime.errors import CollectiveError

MATRIX = torch.arange(20.0).reshape(4, 5)
LAYOUTS = {
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0),
    "empty of stride 0": torch.from_numpy(np.empty(0, np.float32) + 0),
    "no rows": torch.empty(0, 3),
    "transposed": MATRIX.t(),
    "every second": MATRIX[:, ::2],
    "one of a column": MATRIX[1:2, 3],
    "one of every second": torch.arange(5.0)[::2][2:],
    "an offset": MATRIX[2:],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 7),
    "expanded to one": torch.tensor(2.0).expand(1),
    "channels last": torch.arange(48.0).reshape(2, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "imaginary part": torch.complex(MATRIX, -MATRIX).imag,
    "conjugate": torch.complex(MATRIX, -MATRIX).conj(),
    "negative": torch.complex(MATRIX, -MATRIX).conj().imag,
    "parameter": torch.nn.Parameter(MATRIX.clone()),
    "result with a gradient": torch.nn.Parameter(MATRIX.clone()) * 2,
}
each_layout = pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS.keys())


@each_layout
def test_every_layout_becomes_the_bytes_of_its_values_in_order(tensor: Tensor) -> None:
    expected = tensor.detach().resolve_conj().resolve_neg().numpy().tobytes()
    assert as_bytes(plain(tensor)).tobytes() == expected


@each_layout
def test_plain_memory_is_shared_and_other_memory_is_copied(tensor: Tensor) -> None:
    made = plain(tensor)
    assert is_plain(made)
    assert (made.data_ptr() == tensor.data_ptr()) == is_plain(tensor) or not tensor.numel()
    if tensor.numel():
        assert as_bytes(made).ctypes.data == made.data_ptr()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", tensors.DTYPES.values(), ids=tensors.DTYPES.keys())
def test_a_description_says_dtype_and_shape(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3,), (2, 0, 5), (1,) * 16):
        tensor = torch.empty(shape, dtype=dtype)
        check_sendable(tensor)
        made = empty_like_described(describe(tensor), 1 << 20)
        assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
        assert len(as_bytes(made)) == tensor.nbytes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a tensor"),
        ("float32", "at most 3"),  # a scalar of four bytes
        ("float31 3", "not a tensor"),
        ("qint8 3", "not a tensor"),
        ("float32 3,", "not a tensor"),
        ("float32 -3", "not a tensor"),
        ("float32 3.5", "not a tensor"),
        ("float32 " + ",".join("1" * 17), "not a tensor"),
        ("float32 " + "9" * 19, "not a tensor"),
        ("float32 999999999999999999,999999999999999999", "at most 3"),
        ("float32 0,1152921504606846976", "not a tensor"),  # nothing, but torch cannot hold such a size
        ("float32 0,999999999999999999,999999999999999999", "."),
        ("uint8 4", "at most 3"),
    ],
)
def test_a_description_out_of_limits_is_refused_and_allocates_nothing(text: str, why: str) -> None:
    with pytest.raises(CollectiveError, match=why):
        empty_like_described(text, 3)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.empty(3, device="meta"), "meta tensors"),
        (torch.empty((1,) * 17), "17 dimensions"),
        (torch.empty(3, dtype=torch.uint4), "uint4"),
        ([1.0, 2.0], "expected a tensor, got list"),
        (None, "expected a tensor, got NoneType"),
    ],
)
def test_what_has_no_values_in_plain_memory_is_refused(tensor: Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_sendable(tensor)


@pytest.mark.parametrize(
    "payload",
    [
        b"abc",
        bytearray(b"abc"),
        memoryview(b"xabcx")[1:4],
        np.frombuffer(b"abc", np.uint8),
        b"",
        np.empty(0),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.float64(2.5),
        memoryview(np.arange(4.0)),
    ],
    ids=lambda payload: type(payload).__name__,
)
def test_any_contiguous_bytes_like_object_is_a_payload(payload: object) -> None:
    assert payload_bytes(payload).tobytes() == memoryview(payload).tobytes()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "payload",
    ["text", 5, None, [1, 2], {"a": 1}, memoryview(b"abcdef")[::2], np.arange(6).reshape(2, 3).T, object()],
    ids=lambda payload: type(payload).__name__,
)
def test_what_has_no_contiguous_bytes_is_refused(payload: object) -> None:
    with pytest.raises(ValueError, match="bytes"):
        payload_bytes(payload)

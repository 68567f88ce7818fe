"""Tensors as bytes and back: any dtype, any layout in memory, no copy where the tensor allows it."""

from __future__ import annotations

import ctypes as ct
import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.runtime.collectives.staging import can_be_staged, to_host
from gradbus.runtime.errors import CollectiveError

MAX_DIMS = 16

Bytes = NDArray[np.uint8]  # shape (bytes,)

NOTHING: Bytes = np.empty(0, np.uint8)

_NEWER = ("float8_e8m0fnu", "float4_e2m1fn_x2")  # torch 2.6 does not have them
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        *(getattr(torch, name) for name in _NEWER if hasattr(torch, name)),
    )
}


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def describe(tensor: Tensor) -> str:
    """Dtype and shape in words: ``float32 3,4``; a scalar is ``float32 ``."""
    return f"{dtype_name(tensor.dtype)} {','.join(map(str, tensor.shape))}"


def can_be_sent(dtype: torch.dtype) -> bool:
    """Whether there is a name for it on the wire."""
    return dtype in _NAMES


def dtype_name(dtype: torch.dtype) -> str:
    """Its name on the wire. Raises ValueError for one that cannot be sent (quantised types, for example)."""
    name = _NAMES.get(dtype)
    if name is None:
        raise ValueError(f"tensors of {dtype} cannot be sent; there are {', '.join(DTYPES)}")
    return name


def empty_like_described(text: str, max_bytes: int) -> Tensor:
    """A new tensor of the dtype and shape in a text of :func:`describe`, contents undefined.

    Raises:
        CollectiveError: not a description, or a tensor of more than ``max_bytes``.
    """
    name, _, sizes = text.partition(" ")
    dtype = DTYPES.get(name)
    parts = sizes.split(",") if sizes else []
    if dtype is None or len(parts) > MAX_DIMS or not all(part.isdecimal() and len(part) <= 18 for part in parts):
        raise CollectiveError(f"not a tensor that can be received: {text[:80]!r}")
    shape = [int(part) for part in parts]
    size = math.prod(shape) * dtype.itemsize
    if size > max_bytes or math.prod(max(1, extent) for extent in shape) >= 1 << 60:  # torch counts strides in int64
        raise CollectiveError(f"a tensor {text} of {size} bytes; at most {max_bytes} are accepted (max_payload_bytes)")
    return torch.empty(shape, dtype=dtype)


def check_sendable(tensor: Tensor) -> None:
    """Raises ValueError for a tensor whose values do not lie in memory that can be reached."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_meta:
        where = "meta tensors" if tensor.is_meta else f"tensors of layout {tensor.layout}"
        raise ValueError(f"{where} have no values in plain memory; make the tensor dense first")
    dtype_name(tensor.dtype)
    if not (tensor.is_cpu or can_be_staged(tensor)):
        raise ValueError(
            f"a tensor on {tensor.device}, which is no accelerator that torch uses here; give tensor.cpu()"
        )
    if tensor.dim() > MAX_DIMS:
        raise ValueError(f"a tensor of {tensor.dim()} dimensions, at most {MAX_DIMS}")


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory can be used as it is: on the CPU, contiguous, not a lazy conjugate or negation."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: Tensor) -> Tensor:
    """The same values in plain memory: the tensor itself, or a copy of one that is strided, or on another device."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if is_plain(tensor):
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous() if tensor.is_cpu else to_host(tensor)


def as_bytes(tensor: Tensor) -> Bytes:
    """The memory of a plain tensor: uint8, shape (bytes,), shared with it and keeping it alive.

    Not through ``Tensor.numpy``, which makes the storage of the user's tensor unfit for resizing for ever.
    """
    size = tensor.nbytes
    if size == 0:
        return NOTHING
    memory: Any = _array_type(size).from_address(tensor.data_ptr())
    memory.owner = tensor
    return np.frombuffer(memory, np.uint8)


@functools.lru_cache(maxsize=256)
def _array_type(size: int) -> Any:
    return ct.c_uint8 * size  # a new type; to make one takes longer than to use it


def payload_bytes(payload: Any) -> Bytes:
    """The memory of any contiguous bytes-like object: uint8, shape (bytes,)."""
    try:
        view = memoryview(payload)
    except TypeError:
        raise ValueError(f"expected bytes, a bytes-like object or a tensor, got {type(payload).__name__}") from None
    if not view.c_contiguous:
        raise ValueError("a bytes-like object must be contiguous; copy it with bytes() first")
    return np.frombuffer(view, np.uint8) if view.nbytes else NOTHING

"""What tensors must be like: on this rank, and compared with those of the others. Errors name both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gradbus.runtime.collectives.staging import host_tensor
from gradbus.runtime.collectives.tensors import MAX_DIMS, can_be_sent, check_sendable, dtype_name, is_plain

_MAX_TEXT = 48  # characters of shapes, in frames


def check(*tensors: Tensor) -> None:
    """Raises ValueError for a tensor that cannot be sent or filled; the text has the remedy."""
    for tensor in tensors:
        check_sendable(tensor)


def check_dtypes(tensors: Sequence[Tensor], like: Tensor) -> None:
    """Raises ValueError: they do not all have the dtype of ``like``."""
    for tensor in tensors:
        if tensor.dtype != like.dtype:
            raise ValueError(f"tensors of one collective have one dtype, got {tensor.dtype} and {like.dtype}")


def are_ready(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether tensors are as most are, and can be sent or filled as they are: with nothing that :func:`check` would
    refuse, of one dtype, in plain memory, without gradients. It looks at each thing once, and makes nothing."""
    dtype = tensor.dtype
    return can_be_sent(dtype) and _is_ready(tensor, dtype) and all(_is_ready(other, dtype) for other in others)


def _is_ready(tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_conj()
        and tensor.dim() <= MAX_DIMS
    )


def staging_tensor(tensor: Tensor) -> Tensor:
    """Plain memory for what is to come into a tensor: its own, or, if that is strided or on an accelerator, new memory
    to be copied."""
    if not is_plain(tensor):
        return host_tensor(tensor.shape, tensor.dtype, tensor.device)
    return tensor.detach() if tensor.requires_grad else tensor


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors share memory."""
    a, b = one.data_ptr(), other.data_ptr()
    return a < b + other.nbytes and b < a + one.nbytes


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors are the very same bytes."""
    return one.data_ptr() == other.data_ptr() and one.nbytes == other.nbytes


@lru_cache(maxsize=1024)
def described(dtype: torch.dtype, shape: torch.Size) -> str:
    """``float32 3,4``: the description of a tensor that its sender sends. Cut where it has very many dimensions."""
    return f"{dtype_name(dtype)} {','.join(map(str, shape))}"[:_MAX_TEXT]


def readable(described: str) -> str:
    """A description for people: ``float32 of shape (3,4)``."""
    dtype, _, sizes = described.partition(" ")
    return f"{dtype} of shape ({sizes})"


@lru_cache(maxsize=1024)
def shape_signature(*shapes: torch.Size) -> str:
    """Shapes as a part of a signature, which must be equal on all ranks: ``(3,4)``.

    Dimensions of 1 are left out: a scalar and a tensor of one element are the same to a reduction.
    """
    texts = [f"({','.join(str(extent) for extent in shape if extent != 1)})" for shape in shapes]
    text = texts[0] if len(set(texts)) == 1 else " ".join(texts)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."

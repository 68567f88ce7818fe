"""What several algorithms are made of: which tensors they compress, the mean of the others, and sparse messages."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbus.codecs import CodecError, decode_indices, encode_indices, top_k
from gradbus.codecs.base import are_finite
from gradbus.codecs.bytegrad import MinMax, dequantize_min_max, quantize_min_max
from gradbus.codecs.index_coding import max_index_bytes
from gradbus.codecs.quantize import num_chunks
from gradbus.runtime.algorithms.requests import AllReduce, Program

_HEAD = struct.Struct("<BBHII")  # 1: finite; coding of the indices, reserved, bytes of the indices, number of entries


def split_by_size(tensors: Mapping[str, Tensor], min_numel: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors that are compressed, and the rest: of fewer than two dimensions, or than ``min_numel`` entries.

    Biases and normalization layers are few entries, and sensitive.
    """
    large = {name: t for name, t in tensors.items() if t.dim() >= 2 and t.numel() >= min_numel}
    return large, {name: tensor for name, tensor in tensors.items() if name not in large}


@torch.no_grad()
def mean_of(name: str, tensors: Mapping[str, Tensor], divisor: int) -> Program[None]:
    """Replace the tensors by their means over the ranks, in one request; none if there are no tensors."""
    if not tensors:
        return
    flat = flattened(tensors)
    yield AllReduce(name, flat, "mean", out=flat, divisor=divisor)
    copy_into(tensors, flat)


def flattened(tensors: Mapping[str, Tensor]) -> Tensor:
    """A copy of all tensors, one after the other: float32, shape (n,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


@torch.no_grad()
def copy_into(tensors: Mapping[str, Tensor], flat: Tensor) -> None:
    """The inverse."""
    start = 0
    for tensor in tensors.values():
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


def entries_of(density: float, numel: int) -> int:
    """How many of ``numel`` entries are sent: at least one, if there is one."""
    return min(numel, max(1, math.ceil(round(numel * density, 9))))  # 100 * 0.07 is 7.000000000000001


@torch.no_grad()
def take_largest(flat: Tensor, sizes: Sequence[int], density: float) -> tuple[Tensor, Tensor]:
    """Take the largest entries of each part out of a vector, which has zeros there after this.

    Args:
        flat: float32, shape (n,). sizes: of its parts. density: share of the entries of a part; at least one is taken.

    Returns:
        The message of these entries, and what it leaves: ``flat`` itself. A vector with NaN or infinity makes a message
        that says so, and holds nothing else.
    """
    if not are_finite([flat]):
        return torch.frombuffer(bytearray(_HEAD.pack(0, 0, 0, 0, 0)), dtype=torch.uint8), flat
    found, start = [], 0
    for size in sizes:
        found.append(top_k(flat[start : start + size], entries_of(density, size)).indices + start)
        start += size
    indices = torch.cat(found)
    message = encode_sparse(indices, flat[indices], flat.numel())
    flat[indices] = 0
    return message, flat


def encode_sparse(indices: Tensor, values: Tensor, dim: int) -> Tensor:
    """A message of some entries of a vector: uint8, shape (bytes,).

    Args:
        indices: int64, shape (k,), strictly ascending, below ``dim``. values: float32, shape (k,), finite.
    """
    coding, packed = encode_indices(indices, dim)
    head = _HEAD.pack(1, coding, 0, len(packed), indices.numel())
    return torch.frombuffer(bytearray(head + packed + values.contiguous().numpy().tobytes()), dtype=torch.uint8)


def max_sparse_bytes(sizes: Sequence[int], density: float) -> int:
    """Length of the longest message of :func:`take_largest` with these sizes: a limit for receivers."""
    k = sum(entries_of(density, size) for size in sizes)
    return _HEAD.size + max_index_bytes(sum(sizes), k) + 4 * k


def decode_sparse(message: Tensor, dim: int) -> tuple[Tensor, Tensor] | None:
    """Indices and values of a message of :func:`encode_sparse`; None: the vector was not finite.

    Raises:
        CodecError: bytes that are no such message of a vector of ``dim`` entries.
    """
    data = memoryview(message.contiguous().numpy().tobytes())
    if len(data) < _HEAD.size:
        raise CodecError(f"sparse message of {len(data)} bytes: the header needs {_HEAD.size}")
    is_finite, coding, reserved, index_bytes, k = _HEAD.unpack_from(data)
    if not is_finite:
        return None
    expected = _HEAD.size + index_bytes + 4 * k
    if len(data) != expected or k > dim or is_finite != 1 or reserved:
        raise CodecError(f"sparse message: {len(data)} bytes with {k} of {dim} entries, expected {expected} bytes")
    indices = decode_indices(coding, data[_HEAD.size : _HEAD.size + index_bytes], dim, k)
    return indices, torch.frombuffer(bytearray(data[_HEAD.size + index_bytes :]), dtype=torch.float32)


@torch.no_grad()
def sum_sparse(messages: Sequence[Tensor], into: Tensor) -> None:
    """Add the entries of all messages to ``into``, shape (dim,), in rank order; all NaN if one is not finite."""
    for message in messages:
        entries = decode_sparse(message, into.numel())
        if entries is None:
            into.fill_(math.nan)
            return
        into[entries[0]] += entries[1]  # each index occurs once in a message


def quantized(values: Tensor, chunk_elems: int) -> Tensor:
    """8 bits for each value: uint8, shape (bytes,): smallest values and steps of all chunks, then a byte each.

    Args:
        values: float32, shape (n,). chunk_elems: that share a smallest value and a step.
    """
    lows, steps, q = quantize_min_max(values.contiguous(), chunk_elems)
    return torch.cat([lows.view(torch.uint8), steps.view(torch.uint8), q])


def dequantized(message: Tensor, numel: int, chunk_elems: int) -> Tensor:
    """The inverse: float32, shape (numel,). Raises CodecError: a message of another length."""
    count = 4 * num_chunks(numel, chunk_elems)
    if message.numel() != 2 * count + numel:
        raise CodecError(f"{message.numel()} bytes for {numel} values in chunks, expected {2 * count + numel}")
    lows, steps, q = message.split_with_sizes([count, count, numel])
    # Cloned: a view as float32 needs an aligned start.
    parts = MinMax(lows.clone().view(torch.float32), steps.clone().view(torch.float32), q)
    return dequantize_min_max(parts, chunk_elems)

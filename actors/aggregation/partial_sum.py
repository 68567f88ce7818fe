"""The exact sum of some clients' updates as bytes: what the Controller of a site sends to the one above it.

It holds the integers of :class:`.exact_sum.ExactMean`, not their mean: integers add without rounding, so a sum of sums
has the bits of one sum over all clients. docs/wire.md has the layout. Of 64 bits only those bytes are sent that a block
of integers needs, which is lossless.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.actors.aggregation.sum_summary import SumSummary
from gradbus.codecs import CodecError, DimMismatchError
from gradbus.codecs.base import Payload, as_view

MAGIC = b"GBXS"
VERSION = 1
FRACTION_BITS = 30
BLOCK_ELEMS = 4096  # integers that share a width
MAX_RANGES = 65_536  # of client ids
MAX_LOSS_PARTS = 40  # an exact sum of floats of any size needs no more
LARGEST_LOSS = 1e130  # of a part: losses beyond 1e100 are not counted, and no sum has 2^64 samples

_HEADER = struct.Struct("<4sBBHQQIIQII")
_CARRIED = 1  # flag: a second set of integers follows, in units of 2^32


class NotAPartialSum(CodecError):
    """The bytes are something else, such as the update of one client."""


class Integers(Protocol):
    """Integers of some dimension."""

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Place and int64 values, block by block. The tensor is reused for the next block."""

    def largest(self) -> int:
        """The largest absolute value, or a number that is no lower."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedIntegers:
    """Integers that are still packed, checked for length alone.

    Attributes:
        dim: how many. widths: uint8, bytes of each integer, by block. data: uint8, all blocks.
    """

    dim: int
    widths: NDArray[np.uint8]
    data: NDArray[np.uint8]

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Place and int64 values, block by block. The tensor is reused for the next block."""
        padded = np.empty((BLOCK_ELEMS, 8), np.uint8)
        values = padded.reshape(-1).view("<i8")
        offset = 0
        for number, width in enumerate(self.widths.tolist()):
            start = number * BLOCK_ELEMS
            size = min(BLOCK_ELEMS, self.dim - start)
            end = offset + size * width
            padded[:size, : 8 - width] = 0
            padded[:size, 8 - width :] = self.data[offset:end].reshape(size, width)
            if width < 8:
                np.right_shift(values[:size], 8 * (8 - width), out=values[:size])  # which extends the sign
            offset = end
            yield slice(start, start + size), torch.from_numpy(values[:size])

    def largest(self) -> int:
        """The largest absolute value."""
        found = 0
        for _, values in self.blocks():
            low, high = torch.aminmax(values)
            found = max(found, -int(low), int(high))
        return found


class CountedTwice(ValueError):
    """A client is in the sums of two sites."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialSum:
    """A sum of updates.

    Attributes:
        summary: of it. low: the sum, in units of 2^-30. carried: what did not fit, in units of 4; None: all of it fits.
    """

    summary: SumSummary
    low: Integers
    carried: Integers | None


def max_bytes(dim: int) -> int:
    """The longest message of a sum of ``dim`` integers."""
    return _HEADER.size + 8 * MAX_RANGES + 8 * MAX_LOSS_PARTS + 2 * (_blocks(dim) + 8 * dim)


def encode(summary: SumSummary, low: Tensor, carried: Tensor | None) -> bytes:
    """The message of a sum; see :class:`PartialSum`. ``low``, ``carried``: int64, shape (D,), on the CPU.

    Raises:
        ValueError: the ids of the clients have more than MAX_RANGES gaps.
    """
    clients, parts = summary.clients, summary.loss_parts
    if len(clients) > MAX_RANGES:
        raise ValueError(f"the ids of the clients are {len(clients):,} ranges, at most {MAX_RANGES:,} can be sent")
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        FRACTION_BITS,
        0 if carried is None else _CARRIED,
        low.numel(),
        summary.num_samples,
        summary.updates,
        len(clients),
        summary.loss_samples,
        len(parts),
        0,
    )
    ids = np.array([(each.start, len(each)) for each in clients], "<u4").tobytes()
    pieces = [header, ids, np.array(parts, "<f8").tobytes()]
    for integers in (low, carried):
        if integers is not None:
            pieces += _pack(integers)
    return b"".join(pieces)


def _pack(integers: Tensor) -> list[bytes]:
    """The widths of the blocks, then the blocks."""
    widths, pieces = bytearray(), []
    for start in range(0, integers.numel(), BLOCK_ELEMS):
        block = integers[start : start + BLOCK_ELEMS]
        low, high = torch.aminmax(block)
        bits = max((~int(low) if low < 0 else int(low)).bit_length(), int(high).bit_length() if high >= 0 else 0)
        width = 0 if low == high == 0 else bits // 8 + 1  # one bit more, for the sign
        widths.append(width)
        as_bytes = block.numpy().astype("<i8", copy=False).view(np.uint8).reshape(-1, 8)
        pieces.append(as_bytes[:, :width].tobytes())
    return [bytes(widths), *pieces]


def parse(payload: Payload, *, expected_dim: int, max_samples: int) -> PartialSum:
    """Check a message and make its content readable.

    Args:
        payload: any contiguous buffer; kept alive by the result.
        expected_dim: elements of our own model. max_samples: the largest number of samples that is believed.

    Raises:
        NotAPartialSum: it does not begin as one.
        DimMismatchError: of a model of another size.
        CodecError: another version, a wrong length, or figures that contradict each other.
    """
    view = as_view(payload)
    if view[:4] != MAGIC:
        raise NotAPartialSum(
            f"bytes that begin with {bytes(view[:4])!r}: expected the exact sum of a site, {MAGIC!r}. A client belongs "
            f"to the Controller of a site; here sites alone take part (clients.kind)"
        )
    if len(view) < _HEADER.size:
        raise CodecError(f"partial sum cut short: {len(view)} bytes, its header has {_HEADER.size}")
    _, version, fraction_bits, flags, dim, num_samples, updates, num_ranges, loss_samples, num_parts, reserved = (
        _HEADER.unpack_from(view)
    )
    if version != VERSION:
        raise CodecError(f"partial sum of version {version}, this Controller reads {VERSION}: use one version")
    if fraction_bits != FRACTION_BITS or flags & ~_CARRIED or reserved:
        raise CodecError(f"partial sum with {fraction_bits} fraction bits and flags {flags:#x}: unknown here")
    if dim != expected_dim:
        raise DimMismatchError(f"partial sum of {dim:,} values, the model has {expected_dim:,}: set the same model")
    if not 1 <= updates <= num_samples <= max_samples:
        raise CodecError(
            f"partial sum of {updates:,} updates with {num_samples:,} samples: expected at least one sample for each "
            f"update, and at most limits.max_samples = {max_samples:,}"
        )
    if num_ranges > MAX_RANGES or num_parts > MAX_LOSS_PARTS or loss_samples > num_samples:
        raise CodecError(f"partial sum with {num_ranges} ranges of ids, {num_parts} parts of a loss of {loss_samples}")
    sets, position = 1 + flags * (flags == _CARRIED), _HEADER.size + 8 * (num_ranges + num_parts)
    if len(view) < position + sets * _blocks(dim):
        raise CodecError(f"partial sum cut short: {len(view)} bytes, at least {position + sets * _blocks(dim)} follow")
    clients, parts = _read_summary(view, num_ranges, num_parts, updates)
    found: list[PackedIntegers] = []
    for _ in range(sets):
        position, integers = _unpacked(view, position, dim)
        found.append(integers)
    if position != len(view):
        raise CodecError(f"partial sum of {len(view)} bytes: expected {position}")
    carried = found[1] if sets == 2 else None
    return PartialSum(SumSummary(num_samples, updates, clients, parts, loss_samples), found[0], carried)


def _read_summary(
    view: memoryview, num_ranges: int, num_parts: int, updates: int
) -> tuple[tuple[range, ...], tuple[float, ...]]:
    """The ids of the clients and the parts of the loss, which follow the header."""
    ids = np.frombuffer(view, "<u4", 2 * num_ranges, _HEADER.size).reshape(-1, 2).tolist()
    clients = tuple(range(first, first + count) for first, count in ids)
    if not _is_ascending(clients) or sum(map(len, clients)) > updates:
        raise CodecError(f"partial sum of {updates} updates: its ids of clients do not ascend, or are more than that")
    parts = np.frombuffer(view, "<f8", num_parts, _HEADER.size + 8 * num_ranges).tolist()
    if not all(math.isfinite(part) and abs(part) < LARGEST_LOSS for part in parts):
        raise CodecError("partial sum whose loss is not finite")
    return clients, tuple(parts)


def _is_ascending(clients: tuple[range, ...]) -> bool:
    earlier = -1
    for each in clients:
        if not len(each) or each.start <= earlier:
            return False
        earlier = each.stop  # the id after it would belong to the same range
    return True


def _unpacked(view: memoryview, position: int, dim: int) -> tuple[int, PackedIntegers]:
    """Return where the next set begins, and this one."""
    blocks = _blocks(dim)
    if len(view) < position + blocks:
        raise CodecError(f"partial sum cut short: {len(view)} bytes, at least {position + blocks} expected")
    widths = np.frombuffer(view, np.uint8, blocks, position)
    if blocks and int(widths.max()) > 8:
        raise CodecError(f"partial sum with integers of {int(widths.max())} bytes: at most 8")
    size = BLOCK_ELEMS * int(widths.sum(dtype=np.int64))
    if blocks:
        size -= (blocks * BLOCK_ELEMS - dim) * int(widths[-1])
    position += blocks
    if len(view) < position + size:
        raise CodecError(f"partial sum cut short: {len(view)} bytes, at least {position + size} expected")
    return position + size, PackedIntegers(dim, widths, np.frombuffer(view, np.uint8, size, position))


def _blocks(dim: int) -> int:
    return -(-dim // BLOCK_ELEMS)

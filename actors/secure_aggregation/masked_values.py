"""Masked updates: integers modulo 2^56 or 2^16 as bytes, and their sum.

An update of n samples is, value by value, n times the difference to the base model, rounded once to a multiple of 2^-30
as in the exact sum (:mod:`gradbus.actors.aggregation.exact_sum`), plus the masks. Where the integers of each of the
members are below 2^55 divided by their number, their sum is the number that it is modulo 2^56: nothing is lost. Seven
bytes for each value hold it, where a float32 takes four. With the small integers of a common grid
(:mod:`gradbus.actors.aggregation.common_grid`) two do: they are as small as the number of members asks for.
docs/wire.md has the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.actors.aggregation.common_grid import (
    EXACT,
    KEPT_SHARE,
    CommonGrid,
    GridIntegers,
    Rounding,
    SpreadIntegers,
)
from gradbus.actors.aggregation.exact_sum import GridRounding
from gradbus.actors.aggregation.partial_sum import Integers
from gradbus.actors.secure_aggregation.keys import Roster
from gradbus.actors.secure_aggregation.masks import Words
from gradbus.codecs import CodecError, DenseBlock, DimMismatchError, Parsed, get, parse
from gradbus.codecs.base import Payload, as_view

MAGIC = b"GBXM"
VERSION = 2
VALUE_BYTES = 7
SMALL_BYTES = 2  # of each value on a common grid of small integers
BITS = 8 * VALUE_BYTES
_PAD_BYTES = 1  # after values of seven bytes, so that the last one can be read as eight, too

_HEADER = struct.Struct("<4sBBHIIQQ")
_BLOCK_ELEMS = 30 * 1024  # as in the exact sum


class TooLarge(ValueError):
    """An update has no room in the sum of all members. The text says how large it is, and stays with its client."""


def size_of(count: int, value_bytes: int = VALUE_BYTES) -> int:
    """Bytes of a masked update of so many values: always the same."""
    return _HEADER.size + value_bytes * count + _PAD_BYTES * (value_bytes == VALUE_BYTES)


def zeros(grid: CommonGrid, dim: int) -> Words:
    """No masks and no values, for sums of updates of a model of ``dim``: shape (count,), modulo 2^16 or 2^64."""
    return np.zeros(grid.count(dim), np.uint16 if grid.is_small else np.uint64)


class UpdateMasks(NamedTuple):
    """The masks of one update.

    Attributes:
        roster: of the attempt that they are for. client_id: whose they are. members: clients that have shared, whose
            updates may be in the sum.
        total: as of :func:`zeros`: the sum of all masks of this client. No two vectors are masked with it.
        positions: of the roster.
    """

    roster: Roster
    client_id: int
    members: int
    total: Words
    positions: NDArray[np.int64] | None = None


class Encoded(NamedTuple):
    """A masked update.

    Attributes:
        data: its bytes. residual: that its client keeps: float32, shape (D,), what the grid of the attempt leaves out;
            None: nothing but the rounding to 2^-30. clamped: values that came to the limit of small integers.
    """

    data: memoryview
    residual: Tensor | None
    clamped: int = 0


def encode(update: Parsed, base: Tensor, masks: UpdateMasks, num_samples: int) -> Encoded:
    """An update as it goes out.

    Args:
        update: the client's own, with every value; with a codec that compresses it has the residual before.
        base: float32, shape (D,): the model that it started from.
        masks: are used up. num_samples: that it was trained on; the roster says what that weighs.

    Raises:
        TooLarge: times its weight, a value leaves no room for those of the others. Small integers are clamped instead.
    """
    grid, weight = masks.roster.grid, masks.roster.weight(num_samples)
    if grid != EXACT:
        change, positions, clamped = _difference(update, base), masks.positions, 0
        sent = change if positions is None else change[torch.from_numpy(positions)]
        if grid.is_small:
            count = len(masks.total)
            data = _begun(masks, count, SMALL_BYTES, weight)
            values = np.frombuffer(data, "<i2", count, _HEADER.size)
            seed = masks.roster.dither_seed(masks.client_id)
            rounding = Rounding(grid, positions, len(masks.roster.members), weight, seed)
            clamped = rounding.round(sent, values)
            np.add(values.view("<u2"), masks.total, out=values.view("<u2"))
        else:
            update = parse(get("fp32").encode(sent), expected_dim=len(sent))
            data = _exactly(update, torch.empty(0, dtype=torch.float32), masks, weight)
            sent.zero_()
        if positions is not None:
            change.mul_(KEPT_SHARE)[torch.from_numpy(positions)] = sent
        return Encoded(data, change, clamped)
    return Encoded(_exactly(update, base, masks, weight), None)


def _difference(update: Parsed, base: Tensor) -> Tensor:
    """Return what an update changes, float32, shape (D,)."""
    found = torch.empty(update.dim, dtype=torch.float32)
    for block in update.blocks(_BLOCK_ELEMS):
        assert isinstance(block, DenseBlock), "an update of every value"
        found[block.start : block.start + block.values.numel()] = block.values
    return found if update.is_delta else found.sub_(base)


def _begun(masks: UpdateMasks, count: int, value_bytes: int, weight: int) -> memoryview:
    """Memory for a message, with its header."""
    data = np.empty(size_of(count, value_bytes), np.uint8).data
    _HEADER.pack_into(data, 0, MAGIC, VERSION, value_bytes, 0, masks.roster.attempt.number, 0, count, weight)
    return data


def _exactly(update: Parsed, base: Tensor, masks: UpdateMasks, weight: int) -> memoryview:
    """The message with the integers of the exact sum."""
    rounding, members = GridRounding(), masks.members
    limit = 2.0 ** (BITS - 1) / members
    bound = rounding.bound(update, base, weight)
    if not bound < limit:
        raise TooLarge(
            f"the update has a value of {bound / weight / 2**30:.3g}, which with {weight:,} samples has no room in the "
            f"sum of {members} clients: at most {limit / 2**30:,.0f} for samples times value. Lower the learning rate, "
            f"or set limits.cap_samples"
        )
    data = _begun(masks, update.dim, VALUE_BYTES, weight)
    values = _as_words(data, update.dim)
    scratch = np.empty(_BLOCK_ELEMS, np.uint64)
    for place, integers in rounding.blocks(update, base, weight, bound):
        assert isinstance(place, slice), "an update of every value"
        masked = scratch[: len(integers)]
        np.add(integers.view(np.uint64), masks.total[place], out=masked)
        values[place] = masked
    data[-_PAD_BYTES:] = bytes(_PAD_BYTES)
    return data


def _as_words(view: memoryview, count: int) -> NDArray[np.uint64]:
    """The values of seven bytes as uint64, whose eighth byte is the first one of the next value.

    To write seven bytes of each takes four to eight times as long. So values are written in ascending order, by
    assignment, which NumPy does from the first element to the last one: each then mends what the one before has
    written over it. And they are added as they are read: bytes above the seventh do not matter modulo 2^56. The array
    does not hold the view: its caller does.
    """
    return np.ndarray(count, "<u8", view, _HEADER.size, (VALUE_BYTES,))


@dataclass(frozen=True, slots=True, eq=False)
class MaskedValues:
    """A masked update whose header has been checked.

    Attributes:
        count: of its values. value_bytes: of each. attempt: at the round. weight: what its client has multiplied it by.
    """

    count: int
    value_bytes: int
    attempt: int
    weight: int
    data: memoryview

    @classmethod
    def parse(cls, payload: Payload, *, expected_dim: int, value_bytes: int = VALUE_BYTES) -> MaskedValues:
        """Check the header and the length. ``expected_dim``: values that are expected, of so many bytes.

        Raises:
            DimMismatchError: of a model of another size.
            CodecError: it is no masked update, or of another version, width or length.
        """
        view = as_view(payload)
        if len(view) < _HEADER.size or view[:4] != MAGIC:
            raise CodecError(
                f"update of {len(view)} bytes that begins with {bytes(view[:4])!r}: with federated.secure_aggregation "
                f"masked ones are expected, {MAGIC!r}"
            )
        _, version, width, flags, attempt, reserved, count, weight = _HEADER.unpack_from(view)
        if (version, width, flags, reserved) != (VERSION, value_bytes, 0, 0):
            raise CodecError(
                f"masked update of version {version} with {width} bytes a value and flags {flags:#x}: expected version "
                f"{VERSION} with {value_bytes} and no flags in this attempt"
            )
        if count != expected_dim:
            raise DimMismatchError(f"masked update of {count:,} values: expected {expected_dim:,}")
        if len(view) != size_of(count, width):
            raise CodecError(f"masked update of {len(view)} bytes: expected {size_of(count, width)}")
        if width == VALUE_BYTES and view[-1]:
            raise CodecError(f"masked update that ends with {view[-1]:#x}: expected 0 after its values")
        return cls(count, width, attempt, weight, view)

    def add_to(self, total: Words) -> None:
        """Add the values to those of :func:`zeros`, in place, modulo 2^56 or 2^16: of 64 bits the highest eight mean
        nothing."""
        if self.value_bytes == SMALL_BYTES:
            np.add(total, np.frombuffer(self.data, "<u2", self.count, _HEADER.size), out=total)
            return
        np.add(total, _as_words(self.data, self.count), out=total)


@dataclass(frozen=True, slots=True, eq=False)
class SignedIntegers:
    """An unmasked sum modulo 2^56 as the integers that it stands for, from -2^55 to 2^55 - 1: the content of a
    :class:`~gradbus.actors.aggregation.partial_sum.PartialSum`. ``values``: uint64, shape (D,)."""

    values: NDArray[np.uint64]

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Place and int64 values, block by block. The tensor is reused for the next block."""
        scratch = np.empty(_BLOCK_ELEMS, np.int64)
        for start in range(0, len(self.values), _BLOCK_ELEMS):
            own = self.values[start : start + _BLOCK_ELEMS].view(np.int64)
            block = scratch[: len(own)]
            np.left_shift(own, 64 - BITS, out=block)
            np.right_shift(block, 64 - BITS, out=block)  # which extends the sign
            yield slice(start, start + len(own)), torch.from_numpy(block)

    def largest(self) -> int:
        """Return a bound on the absolute values."""
        return 1 << (BITS - 1)


def integers_of(total: Words, roster: Roster, positions: NDArray[np.int64] | None, dim: int) -> Integers:
    """Return what an unmasked sum of an attempt stands for in a model of ``dim`` values, in units of 2^-30."""
    sent: Integers
    if roster.grid.is_small:
        sent = GridIntegers(total.view(np.int16), roster.grid, positions, len(roster.members))
    else:
        sent = SignedIntegers(total.astype(np.uint64, copy=False))
    return sent if positions is None else SpreadIntegers(sent, positions, dim)

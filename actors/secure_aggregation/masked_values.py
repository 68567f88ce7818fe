"""Masked updates: integers modulo 2^56 as bytes, and their sum.

An update of n samples is, value by value, n times the difference to the base model, rounded once to a multiple of 2^-30
as in the exact sum (:mod:`gradbus.actors.aggregation.exact_sum`), plus the masks. Where the integers of each of the
members are below 2^55 divided by their number, their sum is the number that it is modulo 2^56: nothing is lost. Seven
bytes for each value hold it, where a float32 takes four. docs/wire.md has the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.actors.aggregation.exact_sum import GridRounding
from gradbus.actors.secure_aggregation.keys import Roster
from gradbus.codecs import CodecError, DimMismatchError, Parsed
from gradbus.codecs.wire import Payload, as_view

MAGIC = b"GBXM"
VERSION = 1
VALUE_BYTES = 7
BITS = 8 * VALUE_BYTES

_HEADER = struct.Struct("<4sBBHIIQQ")
_BLOCK_ELEMS = 30 * 1024  # as in the exact sum


class TooLarge(ValueError):
    """An update has no room in the sum of all members. The text says how large it is, and stays with its client."""


def size_of(dim: int) -> int:
    """Bytes of a masked update of so many values: always the same."""
    return _HEADER.size + VALUE_BYTES * dim


class UpdateMasks(NamedTuple):
    """The masks of one update.

    Attributes:
        roster: of the attempt that they are for. members: clients that have shared, whose updates may be in the sum.
        total: uint64, shape (D,): the sum of all masks of this client. No two vectors are masked with it.
    """

    roster: Roster
    members: int
    total: NDArray[np.uint64]


def encode(update: Parsed, base: Tensor, masks: UpdateMasks, num_samples: int) -> memoryview:
    """The bytes of a masked update.

    Args:
        update: the client's own, as of its codec. base: float32, shape (D,): the model that it started from.
        masks: are used up. num_samples: that it was trained on; the roster says what that weighs.

    Raises:
        TooLarge: times its weight, a value leaves no room for those of the others.
    """
    rounding, members, weight = GridRounding(), masks.members, masks.roster.weight(num_samples)
    limit = 2.0 ** (BITS - 1) / members
    bound = rounding.bound(update, base, weight)
    if not bound < limit:
        raise TooLarge(
            f"the update has a value of {bound / weight / 2**30:.3g}, which with {weight:,} samples has no room in the "
            f"sum of {members} clients: at most {limit / 2**30:,.0f} for samples times value. Lower the learning rate, "
            f"or set limits.cap_samples"
        )
    dim = base.numel()
    data = np.empty(size_of(dim), np.uint8).data
    _HEADER.pack_into(data, 0, MAGIC, VERSION, VALUE_BYTES, 0, masks.roster.attempt.number, 0, dim, weight)
    places = _places(data, dim)
    scratch = np.empty(_BLOCK_ELEMS, np.uint64)
    for place, integers in rounding.blocks(update, base, weight, bound):
        assert isinstance(place, slice), "an update of every value"
        masked = scratch[: integers.numel()]
        np.add(integers.numpy().view(np.uint64), masks.total[place], out=masked)
        for to, part in zip(places, _parts(masked), strict=True):
            to[place] = part
    return data


def _places(view: memoryview, dim: int) -> list[NDArray[np.unsignedinteger[Any]]]:
    """Where the lowest four bytes of each value, the next two, and the last one are."""
    middle = _HEADER.size + 4 * dim
    return [
        np.frombuffer(view, "<u4", dim, _HEADER.size),
        np.frombuffer(view, "<u2", dim, middle),
        np.frombuffer(view, np.uint8, dim, middle + 2 * dim),
    ]


def _parts(values: NDArray[np.uint64]) -> list[NDArray[np.unsignedinteger[Any]]]:
    """Return the same parts of uint64 values, of which the eighth byte is left out: views."""
    values = values.astype("<u8", copy=False)
    return [values.view("<u4")[::2], values.view("<u2")[2::4], values.view(np.uint8)[6::8]]


@dataclass(frozen=True, slots=True, eq=False)
class MaskedValues:
    """A masked update whose header has been checked.

    Attributes:
        dim: number of values. attempt: at the round. weight: what its client has multiplied it by.
    """

    dim: int
    attempt: int
    weight: int
    data: memoryview

    @classmethod
    def parse(cls, payload: Payload, *, expected_dim: int) -> MaskedValues:
        """Check the header and the length.

        Raises:
            DimMismatchError: of a model of another size.
            CodecError: it is no masked update, or of another version or length.
        """
        view = as_view(payload)
        if len(view) < _HEADER.size or view[:4] != MAGIC:
            raise CodecError(
                f"update of {len(view)} bytes that begins with {bytes(view[:4])!r}: with federated.secure_aggregation "
                f"masked ones are expected, {MAGIC!r}"
            )
        _, version, width, flags, attempt, reserved, dim, weight = _HEADER.unpack_from(view)
        if (version, width, flags, reserved) != (VERSION, VALUE_BYTES, 0, 0):
            raise CodecError(f"masked update of version {version} with {width} bytes a value: unknown here")
        if dim != expected_dim:
            raise DimMismatchError(f"masked update of {dim:,} values, the model has {expected_dim:,}")
        if len(view) != size_of(dim):
            raise CodecError(f"masked update of {len(view)} bytes: expected {size_of(dim)}")
        return cls(dim, attempt, weight, view)

    def add_to(self, total: NDArray[np.uint64]) -> None:
        """Add the values to uint64, shape (D,), in place, modulo 2^64."""
        places, scratch = _places(self.data, self.dim), np.zeros(_BLOCK_ELEMS, "<u8")
        for start in range(0, self.dim, _BLOCK_ELEMS):
            own = total[start : start + _BLOCK_ELEMS]
            values = scratch[: len(own)]
            for part, place in zip(_parts(values), places, strict=True):
                part[:] = place[start : start + len(own)]
            np.add(own, values, out=own)


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

"""One grid for the updates of all clients of a round, so that small integers add up to their sum.

Each codec that compresses takes a scale, and a choice of entries, from the update that it encodes. The sum of such
updates is no integer, and what each of them chose would show something of it. With secure aggregation all clients
therefore round to the same steps, at the same positions, which are known before anybody has trained:

    q_i = clamp(round_half_even(n_i * p_i / 2^e + u_i), -L, L)        p_i = delta_i + residual_i

with ``n_i`` samples and the exponent ``e`` of the value's block. The sum over clients is ``2^e * sum(q_i)``: a multiple
of 2^-30, as e >= -30, so it goes into the exact sum (:mod:`.exact_sum`) as it is, and divided by ``sum(n_i)`` it is the
weighted mean. Whatever rounding and clamping take away stays with the client, ``p_i - q_i * 2^e / n_i``, and is added
to its next update, as with any codec (:mod:`gradbus.codecs.feedback`). Weights are exact: a client of few samples has
coarser steps for its own update, and what it lacks now comes later.

The sum of N clients has 16 bits, so each has as many as are left: with ``N <= 2^b``, ``L = 2^(15 - b) - 1``, which is
16383 with 2 clients, and 127 with 255. The grid says how far a block reaches, 2^r, and its step follows: ``e = r - 15 +
b``. A power of two, so a roster of some clients more or less seldom makes other integers.

``u_i`` is a dither (Schuchman, Dither Signals and Their Effect on Quantization Noise, 1964), drawn from the run, the
round and the client. Clients that agree would all round in the same direction: with 255 of them a value of which each
has 0.4 steps would be missing in the sum of a round, all 102 steps of it. Errors with a dither are independent, and in
an attempt that is repeated they are the same. Differs from the paper: ``u_i`` is within -7/16 and 7/16, and not a half.
So what is below 1/16 of a step is rounded to 0 and waits: where steps are by far too coarse, no value is one of them.

Differs from error feedback: of a value whose position is not chosen in a round half is kept. Its client trains from the
same global value again, and finds most of that change again: with all of it, a value that is sent every tenth time
would move ten times as far as any of its trainings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.actors.aggregation.partial_sum import FRACTION_BITS, Integers
from gradbus.codecs import random_k
from gradbus.codecs.quantize import num_chunks
from gradbus.codecs.seeded_stream import SeededStream

SUM_BITS = 15  # and the sign
MIN_EXPONENT = 7 - FRACTION_BITS  # of a reach of 127 steps: none is finer than 2^-30
MAX_EXPONENT = 23  # 255 clients of 127 steps of 2^16 stay below 2^61 in the exact sum, which takes less than 2^62
MAX_SCALES = 16 * 1024  # one byte each, in a control message
MAX_BLOCK_ELEMS = 1 << 30
KEPT_SHARE = 0.5  # of a value that waits for its turn
MAX_ADDENDS = 255
DEAD_ZONE = 1 / 16  # of a step: what is smaller is 0
_MAX_SENT = 1 << 40
_BLOCK_ELEMS = 30 * 1024  # as in the exact sum


@dataclass(frozen=True, slots=True)
class CommonGrid:
    """Which values all clients of an attempt send, and in which steps. By default all of them, in steps of 2^-30.

    Attributes:
        sent: number of values, at positions that a seed chooses; 0: all.
        block_elems: neighbouring values of the model that share a step; 0: all steps are 2^-30.
        exponents: int8, one for each block: it reaches 2^exponent, of samples times value.
    """

    sent: int = 0
    block_elems: int = 0
    exponents: bytes = b""

    def __post_init__(self) -> None:
        """Raises ValueError: out of the limits that hold for every model."""
        if not 0 <= self.sent <= _MAX_SENT:
            raise ValueError(f"a grid with {self.sent} values: expected 0 to {_MAX_SENT}")
        if bool(self.block_elems) != bool(self.exponents) or not 0 <= self.block_elems <= MAX_BLOCK_ELEMS:
            raise ValueError(
                f"a grid with {len(self.exponents)} steps for blocks of {self.block_elems} values: expected both or "
                f"none, and at most {MAX_BLOCK_ELEMS} values"
            )
        if len(self.exponents) > MAX_SCALES:
            raise ValueError(f"a grid with {len(self.exponents)} steps: expected at most {MAX_SCALES}")
        if self.exponents and not MIN_EXPONENT <= min(self._signed) <= max(self._signed) <= MAX_EXPONENT:
            raise ValueError(
                f"a grid that reaches 2^{min(self._signed)} to 2^{max(self._signed)}: expected exponents of "
                f"{MIN_EXPONENT} to {MAX_EXPONENT}"
            )

    @property
    def _signed(self) -> NDArray[np.int8]:
        return np.frombuffer(self.exponents, np.int8)

    @property
    def is_small(self) -> bool:
        """Whether values are small integers, whose sums have 16 bits."""
        return bool(self.exponents)

    @property
    def largest(self) -> int:
        """A bound on the absolute sum of up to 255 clients, in units of 2^-30."""
        return (1 << SUM_BITS) << (int(self._signed.max()) - MIN_EXPONENT)

    def check(self, dim: int) -> None:
        """Raises ValueError: it is of a model of another size than ``dim`` values."""
        if self.sent > dim:
            raise ValueError(f"a grid with {self.sent} values of a model of {dim}")
        if self.is_small and len(self.exponents) != num_chunks(dim, self.block_elems):
            raise ValueError(
                f"a grid with {len(self.exponents)} steps for blocks of {self.block_elems} values: expected "
                f"{num_chunks(dim, self.block_elems)} for a model of {dim}"
            )

    def count(self, dim: int) -> int:
        """Number of values in an update of a model of ``dim``."""
        return self.sent or dim

    def positions(self, dim: int, seed: bytes) -> NDArray[np.int64] | None:
        """Where the values are in the model, ascending, int64, shape (count,); None: everywhere."""
        return random_k(dim, self.sent, seed).numpy() if self.sent else None

    def by_value(self, table: NDArray[Any], start: int, stop: int, positions: NDArray[np.int64] | None) -> NDArray[Any]:
        """For the values ``start .. stop`` of an update what ``table`` has for their blocks, shape (stop - start,)."""
        if positions is not None:
            found: NDArray[Any] = table[positions[start:stop] // self.block_elems]
            return found
        first, last = start // self.block_elems, -(-stop // self.block_elems)
        ends = np.minimum(np.arange(first + 1, last + 1) * self.block_elems, stop)
        return np.repeat(table[first:last], np.diff(ends, prepend=start))

    def steps(self, members: int) -> NDArray[np.float64]:
        """The step of each block, of samples times value, in a sum of so many clients."""
        exponents = self._signed.astype(np.int32) - _bits_for(members)
        return np.ldexp(1.0, np.maximum(exponents, -FRACTION_BITS))


EXACT = CommonGrid()
"""All values, in the steps of the exact sum."""


def _bits_for(members: int) -> int:
    """Bits of an integer beside its sign, of which so many, 2 to 255, have room in the sum: 7 to 14."""
    return SUM_BITS - (members - 1).bit_length()


def limit_for(members: int) -> int:
    """The largest integer of a client in a sum of so many: 127 to 16383."""
    return (1 << _bits_for(members)) - 1


class Dither:
    """Return the numbers that are added before rounding, between -7/16 and 7/16, equal for equal seeds."""

    def __init__(self, seed: bytes) -> None:
        """``seed``: any bytes: of the run, the round and the client."""
        self._stream = SeededStream(seed)

    def next(self, out: NDArray[np.float64]) -> None:
        """Fill with the next ones, four of each 8 bytes; what is left of four is not used."""
        drawn = self._stream.words(-(-len(out) // 4)).view("<i2")[: len(out)]
        np.multiply(drawn, (1 - 2 * DEAD_ZONE) / (1 << 16), out=out)


def pieces(count: int) -> Iterator[tuple[int, int]]:
    """Ranges of values that stay in the cache."""
    return ((start, min(start + _BLOCK_ELEMS, count)) for start in range(0, count, _BLOCK_ELEMS))


@dataclass(frozen=True, slots=True, eq=False)
class Rounding:
    """How one client rounds to a grid.

    Attributes:
        grid, positions: of the values that it sends. members: clients of the attempt. weight: samples of this one.
        seed: of its dither.
    """

    grid: CommonGrid
    positions: NDArray[np.int64] | None
    members: int
    weight: int
    seed: bytes

    def round(self, change: Tensor, out: NDArray[np.int16]) -> int:
        """Round one client's update to the steps of the grid. Returns the number of values that came to the limit.

        Args:
            change: float32, shape (count,), finite: the values that are sent, of the difference to the base model with
                the residual. They become the new residual, in place.
            out: int16, shape (count,): the integers, within the limit for so many members.
        """
        grid, limit, clamped = self.grid, limit_for(self.members), 0
        values, dither = change.numpy(), Dither(self.seed)
        scratch = np.empty((3, min(len(out), _BLOCK_ELEMS)))
        steps = grid.steps(self.members)
        down, up = self.weight / steps, steps / self.weight
        for start, stop in pieces(len(out)):
            exact, whole, drawn = scratch[:, : stop - start]
            exact[:] = values[start:stop]
            np.multiply(exact, grid.by_value(down, start, stop, self.positions), out=whole)
            dither.next(drawn)
            np.clip(np.rint(np.add(whole, drawn, out=whole), out=whole), -limit, limit, out=whole)
            out[start:stop] = whole
            np.multiply(whole, grid.by_value(up, start, stop, self.positions), out=whole)
            values[start:stop] = np.subtract(exact, whole, out=whole)
            if max(out[start:stop].max(), -out[start:stop].min()) == limit:
                clamped += int(np.count_nonzero(np.abs(out[start:stop]) == limit))
        return clamped


@dataclass(frozen=True, slots=True, eq=False)
class GridIntegers:
    """A sum of small integers as the multiples of 2^-30 that it stands for.

    Attributes:
        values: int16, shape (count,): the sum over clients. grid, positions: of these values. members: clients of the
            attempt, with or without a value in the sum.
    """

    values: NDArray[np.int16]
    grid: CommonGrid
    positions: NDArray[np.int64] | None
    members: int

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Place among the values that were sent, and int64 values, block by block. The tensor is reused."""
        scratch = np.empty(_BLOCK_ELEMS, np.int64)
        units = (self.grid.steps(self.members) * 2.0**FRACTION_BITS).astype(np.int64)
        for start, stop in pieces(len(self.values)):
            block = scratch[: stop - start]
            block[:] = self.values[start:stop]
            np.multiply(block, self.grid.by_value(units, start, stop, self.positions), out=block)
            yield slice(start, stop), torch.from_numpy(block)

    def largest(self) -> int:
        """A bound on the absolute values."""
        return self.grid.largest


@dataclass(frozen=True, slots=True, eq=False)
class SpreadIntegers:
    """Integers at some positions of a model, and zeros everywhere else.

    Attributes:
        sent: the integers that are not zero. positions: of each, int64, ascending. dim: of the model.
    """

    sent: Integers
    positions: NDArray[np.int64]
    dim: int

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Place in the model and int64 values, block by block. The tensor is reused for the next block."""
        values, scratch = np.empty(len(self.positions), np.int64), np.empty(_BLOCK_ELEMS, np.int64)
        for place, block in self.sent.blocks():
            values[place] = block.numpy()
        for start, stop in pieces(self.dim):
            first, last = np.searchsorted(self.positions, [start, stop])
            spread = scratch[: stop - start]
            spread.fill(0)
            spread[self.positions[first:last] - start] = values[first:last]
            yield slice(start, stop), torch.from_numpy(spread)

    def largest(self) -> int:
        """The largest absolute value, or a number that is no lower."""
        return self.sent.largest()

"""The exact mean: a weighted sum of vectors that does not depend on their order.

Every contribution ``n_i * delta_i`` is rounded once, to a multiple of 2^-30, and added as an integer. Integers add
without rounding, so any order gives the same bits. The sum has the size of two models, however many clients there are.

Whether an update fits depends on that update alone: else a hostile one could take all the room. So a sum that outgrows
64 bits is carried into a second one of the same size, made only then. Both together are the same integer.

Rounding error of the mean: at most ``clients * 2^-31 / sum(n_i)``, below the last bit of a float32 weight of 0.001 as
soon as each client has a handful of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.actors.aggregation.partial_sum import FRACTION_BITS, PartialSum, encode
from gradbus.actors.aggregation.sum_summary import SumSummary
from gradbus.codecs import DenseBlock, Parsed

_LIMIT = 2.0**62  # of n_i * max|delta_i| * 2^30, and of a sum of such before it is carried: int64 does not overflow
_CARRIED_LIMIT = 2**52  # of a carried sum, exact in float64
_NOISE_LIMIT = 2.0**56  # of noise: 2^11 standard deviations of the largest that there may be
_LOW_BITS = 32  # what a carry leaves; the rest stays below 2^53, exact in float64, for some eight million updates
LARGEST = _LIMIT / 2.0**FRACTION_BITS  # of the samples of an update times its largest value
# 240 KiB of float64 stay in the second-level cache. And torch computes fewer than 32,768 elements on the calling
# thread: on a busy machine, waiting for helper threads at every step took a hundred times as long as the step.
BLOCK_ELEMS = 30 * 1024
# To add 1.5 * 2^52 to a float64 below 2^51 rounds it to a whole number, to even as rint does, which is then the
# difference of the bits of the sum to those of the constant. That takes a third of the time of rint and conversion.
_ROUNDER = 1.5 * 2.0**52
_ROUNDER_BITS = int(np.float64(_ROUNDER).view(np.int64))
_ROUNDER_LIMIT = 2.0**51


class OutOfRange(ValueError):
    """An update is so large that it alone does not fit the sum."""


class GridRounding:
    """Rounds updates to the grid of the exact sum, block by block, with memory of its own for one block."""

    def __init__(self) -> None:
        # NumPy stays on the calling thread, and converts as it computes: torch would convert first, in a pass of its
        # own. And a call of it takes less time than one of torch.
        self._scaled = np.empty(BLOCK_ELEMS)
        self._scratch = torch.from_numpy(self._scaled)
        self._integers = self._scaled.view(np.int64)

    def bound(self, update: Parsed, base: Tensor, num_samples: int) -> float:
        """Return a bound on the integers of :meth:`blocks`; infinite or NaN: values are not finite.

        Raises:
            ValueError: weights in a sparse message.
        """
        if update.is_sparse and not update.is_delta:
            raise ValueError(f"a sparse {update.codec} update holds weights: expected a difference")
        return num_samples * 2.0**FRACTION_BITS * _max_abs(update, base, self._scratch)

    def blocks(
        self, update: Parsed, base: Tensor, num_samples: int, bound: float
    ) -> Iterator[tuple[slice | Tensor, NDArray[np.int64]]]:
        """Place and integers of each block: the differences to the base, times ``num_samples``, in units of
        2^-30. The integers are used up before the next block; a place is a slice, or the indices of a sparse update.
        ``bound``: of the update, below 2^63.
        """
        scale = float(num_samples * (1 << FRACTION_BITS))
        round_ = self._round_small if bound < _ROUNDER_LIMIT else self._round
        base_values = base.numpy()
        for block in update.blocks(BLOCK_ELEMS):
            values, size = block.values.numpy(), block.values.numel()
            scaled = self._scaled[:size]
            place = slice(block.start, block.start + size) if isinstance(block, DenseBlock) else block.indices
            if update.is_delta or not isinstance(place, slice):
                np.multiply(values, scale, out=scaled, dtype=np.float64)
            else:
                np.subtract(values, base_values[place], out=scaled, dtype=np.float64)
                np.multiply(scaled, scale, out=scaled)
            del block, values  # before the next one is decoded
            yield place, round_(size)

    def _round(self, size: int) -> NDArray[np.int64]:
        """Round the first values of the scratch memory to even, in place, and return them."""
        scaled, integers = self._scaled[:size], self._integers[:size]
        integers[:] = np.rint(scaled, out=scaled).astype(np.int64)
        return integers

    def _round_small(self, size: int) -> NDArray[np.int64]:
        """The same, of values below 2^51."""
        scaled, integers = self._scaled[:size], self._integers[:size]
        np.add(scaled, _ROUNDER, out=scaled)
        return np.subtract(integers, _ROUNDER_BITS, out=integers)


class ExactMean:
    """Weighted mean of differences to a base vector, in 64-bit fixed point.

    Attributes:
        num_samples: sum of the weights so far.
        count: vectors so far.
    """

    def __init__(self, dim: int) -> None:
        self._sum = torch.empty(dim, dtype=torch.int64)  # the first vector overwrites it: zeros are never written
        self._carried: Tensor | None = None  # int64, in units of 2^32, once there was need of it
        self._scratch = torch.empty(BLOCK_ELEMS, dtype=torch.float64)
        self._rounding = GridRounding()
        self._bound = 0.0
        self.num_samples = 0
        self.count = 0

    def reset(self) -> None:
        """Start a new mean; the memory is kept."""
        self._carried = None  # rarely needed again
        self._bound, self.num_samples, self.count = 0.0, 0, 0

    def add(self, update: Parsed, *, base: Tensor, num_samples: int) -> None:
        """Add one vector with weight ``num_samples``.

        Args:
            update: checked bytes of an update. If it carries weights, ``base`` is taken off first.
            base: float32, shape (D,): the model that the client started from.
            num_samples: its weight, >= 1.

        Raises:
            OutOfRange: its samples times its largest value are too much, whatever else is in the sum. Nothing has been
                added.
            ValueError: weights in a sparse message. Nothing has been added.
        """
        bound = self._rounding.bound(update, base, num_samples)
        if not bound < _LIMIT:
            raise OutOfRange(f"update with {num_samples} samples: its largest value does not fit the exact sum")
        if not self._bound + bound < _LIMIT:
            self._carry()
        if not self.count and update.is_sparse:
            self._sum.zero_()
        total = self._sum.numpy()
        for place, integers in self._rounding.blocks(update, base, num_samples, bound):
            if not isinstance(place, slice):
                self._sum.index_add_(0, place, torch.from_numpy(integers))
            elif self.count:
                np.add(total[place], integers, out=total[place])
            else:
                total[place] = integers
        self._bound += bound
        self.num_samples += num_samples
        self.count += 1

    def add_sum(self, partial: PartialSum) -> None:
        """Add what another exact sum holds: the integers are then those of one sum over the vectors of both.

        Raises:
            OutOfRange: its integers are larger than so many updates can make them. Nothing has been added.
        """
        summary, largest, carried = partial.summary, partial.low.largest(), partial.carried
        # An update is below 2^62 and leaves at most 2^31 of that to the carried sum, with what a carry rounds down.
        most = min(summary.updates << (_LOW_BITS - 1), _CARRIED_LIMIT)
        if largest >= _LIMIT or (carried is not None and carried.largest() > most):
            raise OutOfRange(f"partial sum of {summary.updates} updates: its values are larger than theirs can be")
        if not self._bound + largest < _LIMIT:
            self._carry()
        for place, values in partial.low.blocks():
            part = self._sum[place]
            (part.add_ if self.count else part.copy_)(values)
        if carried is not None:
            if self._carried is None:
                self._carried = torch.zeros_like(self._sum)
            for place, values in carried.blocks():
                self._carried[place].add_(values)
        self._bound += largest
        self.num_samples += summary.num_samples
        self.count += summary.updates

    def add_noise(self, draw: Callable[[int], Tensor]) -> None:
        """Add an integer to each of the sum, in units of 2^-30, before anything of it becomes a floating-point number.

        Args:
            draw: gives so many integers, int64, which are changed by none. Called for one piece after the other.

        Raises:
            ValueError: nothing has been added.
            OutOfRange: one of the integers is 2^56 or more.
        """
        if not self.count:
            raise ValueError("the sum of no updates takes no noise: add at least one")
        if not self._bound + _NOISE_LIMIT < _LIMIT:
            self._carry()
        for place in self._places():
            piece = self._sum[place]
            noise = draw(piece.numel())
            if noise.numel() and int(noise.abs().max()) >= _NOISE_LIMIT:
                raise OutOfRange("noise of 2^56 or more: its scale is far too large for the exact sum")
            piece.add_(noise)
        self._bound += _NOISE_LIMIT

    def encode(self, clients: tuple[range, ...], loss_parts: Iterable[float], loss_samples: int) -> bytes:
        """The message of this sum, with what the next level needs to know of it: see ``SumSummary``.

        Raises:
            ValueError: nothing has been added, or the ids of the clients have too many gaps.
        """
        if not self.count:
            raise ValueError("the sum of no updates is not sent: add at least one")
        summary = SumSummary(self.num_samples, self.count, clients, tuple(loss_parts), loss_samples)
        return encode(summary, self._sum, self._carried)

    def _carry(self) -> None:
        """Make room: keep the lowest bits, and carry the others."""
        if self._carried is None:
            self._carried = torch.zeros_like(self._sum)
        for place in self._places():
            piece = self._sum[place]
            self._carried[place].add_(torch.bitwise_right_shift(piece, _LOW_BITS))
            piece.bitwise_and_((1 << _LOW_BITS) - 1)
        self._bound = 2.0**_LOW_BITS

    def _places(self) -> Iterator[slice]:
        dim = self._sum.numel()
        return (slice(start, min(start + BLOCK_ELEMS, dim)) for start in range(0, dim, BLOCK_ELEMS))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The mean in pieces: (place, float64 values). The tensor is reused for the next piece.

        Raises:
            ValueError: nothing has been added.
        """
        if self.num_samples == 0:
            raise ValueError("the mean of no vectors is not defined: add at least one")
        if self._carried is not None:
            self._carry()  # so that both parts are exact in float64, and their sum is rounded once, as an int64 is
        scale = 1.0 / (self.num_samples * 2.0**FRACTION_BITS)
        for place in self._places():
            low = self._sum[place]
            values = self._scratch[: low.numel()]
            if self._carried is None:
                values.copy_(low)
            else:
                values.copy_(self._carried[place]).mul_(2.0**_LOW_BITS).add_(low)
            yield place, values.mul_(scale)


def fits(update: Parsed, base: Tensor, num_samples: int) -> bool:
    """Whether :meth:`ExactMean.add` takes this update."""
    scratch = torch.empty(BLOCK_ELEMS, dtype=torch.float64)
    return num_samples * 2.0**FRACTION_BITS * _max_abs(update, base, scratch) < _LIMIT


def _max_abs(update: Parsed, base: Tensor, scratch: Tensor) -> float:
    """The largest |value| of the update as a difference to the base. ``scratch``: float64, for a block."""
    if update.is_delta and update.max_abs is not None:
        return update.max_abs
    largest = 0.0
    for block in update.blocks(BLOCK_ELEMS):
        values, size = block.values, block.values.numel()
        if not update.is_delta and isinstance(block, DenseBlock):
            values = scratch[:size].copy_(values).sub_(base[block.start : block.start + size])
        if size:
            low, high = torch.aminmax(values)
            if math.isnan(float(high)):  # made by a strategy that scales values: no maximum would show it
                return math.inf
            largest = max(largest, -float(low), float(high))
        del block, values  # as above
    return largest

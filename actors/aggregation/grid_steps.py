"""How far the common grid reaches in the next round, from the sum of the last one.

The first round is exact, in steps of 2^-30. From then on a block reaches some times as far as the largest value of its
last sum over N clients: so far that rounding still errs by about 1/256 of that value, which is 32 times with 4 clients,
5 times with 10, and with more than 32 clients 9/8 times. The more, the better: where the updates of clients cancel in
the sum, as near an optimum of very unequal clients, each is larger than their sum. What one client alone has changed
fits. A sum as large as the limit of one client may be of one that was clamped, and makes its block reach eight times as
far. None reaches more than 16 times as far in the next round, so one false value leaves steps that are of use.

A block reaches less far by a factor of 2 in each round, or at once as far as its sum asks for where that is an eighth
or less: too coarse a step holds back what all have trained, and lets it go together. A sum of zeros says that no value
was larger than what is rounded to 0, or that nobody trains the block: it comes down to that of the other blocks which
reaches least far, and stays there, to be found when somebody changes it again.

Nothing enters but the sum, which the Controller has in any case, and whoever has two models in a row, with a strategy
that adds it to the model. What comes out is part of the checkpoint: a round that is repeated has the same grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.actors.aggregation.common_grid import (
    DEAD_ZONE,
    MAX_ADDENDS,
    MAX_EXPONENT,
    MAX_SCALES,
    MIN_EXPONENT,
    CommonGrid,
    limit_for,
)
from gradbus.actors.aggregation.partial_sum import FRACTION_BITS, Integers, PartialSum
from gradbus.actors.aggregation.strategies import Strategy, WrappedStrategy
from gradbus.actors.aggregation.updates import Facts
from gradbus.codecs import Codec
from gradbus.codecs.quantize import num_chunks
from gradbus.codecs.s4 import TopKCodec
from gradbus.runtime.choices import CODECS
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.logs import get_logger

log = get_logger("controller")

STEPS = "grid_steps"  # in a checkpoint
MASKED_CODECS = ("fp32", "q8", "s4", "sq8")  # whose updates can be masked
_LEVELS = 128  # of the largest value of a sum, times the square root of the clients: errs by 1/256 of it
_LEAST_REACH = 9 / 8
_AT_LIMIT = 1 / 16  # from the reach, as a share
_RISE_AT_LIMIT = 3  # bits: where no client was clamped, they are taken back at once
_MOST_RISE = 4  # bits in a round
_FAR_TOO_FAR = 3  # bits


class CommonSteps(WrappedStrategy):
    """Chooses the common grid of each round in front of a strategy that takes sums."""

    def __init__(self, inner: Strategy, dim: int, *, block_elems: int = 0, sent: int = 0) -> None:
        """A first round without steps.

        Args:
            dim: of the model. block_elems: neighbouring values that share a step; 0: no value is rounded to small
                integers. sent: values of a round; 0: all.

        Raises:
            ConfigError: that makes more steps than can be sent.
        """
        super().__init__(inner)
        self._dim, self._block_elems, self._sent = dim, block_elems, sent
        count = num_chunks(dim, block_elems) if block_elems else 0
        if count > MAX_SCALES:
            raise ConfigError(
                f"federated.codec.chunk_elems is {block_elems}: with secure aggregation the scales of all chunks are "
                f"sent to all clients, which for a model of {dim:,} values makes {count:,}, and there may be "
                f"{MAX_SCALES:,}. Set it to {num_chunks(dim, MAX_SCALES)} or more"
            )
        self._exponents = np.zeros(0, np.int8)  # none: the round is exact
        self._next = self._exponents

    @property
    def masked_grid(self) -> CommonGrid:
        if not len(self._exponents):
            return CommonGrid(self._sent)
        return CommonGrid(self._sent, self._block_elems, self._exponents.tobytes())

    def begin(self, round_id: int, base: Tensor) -> None:
        self._next = self._exponents
        super().begin(round_id, base)

    def add_masked(self, partial: PartialSum, facts: Sequence[Facts]) -> None:
        super().add_masked(partial, facts)
        if self._block_elems:
            self._next = next_exponents(self._exponents, self._peaks(partial.low), len(facts))
            self._note(self._next)

    def _note(self, found: NDArray[np.int8]) -> None:
        """Log where much may have been clamped."""
        risen = int((found > self._exponents).sum()) if len(self._exponents) else 0
        largest = int((found == MAX_EXPONENT).sum())
        if risen or largest:
            note = log.warning if largest else log.info
            note(
                "values reach further than the common grid",
                blocks=len(found),
                made_coarser=risen,
                at_the_largest_step=largest,
                effect="what was clamped comes in later rounds",
            )

    def _peaks(self, total: Integers) -> NDArray[np.float64]:
        """The largest absolute value of each block of the sum, of samples times value."""
        peaks = np.zeros(num_chunks(self._dim, self._block_elems))
        for place, values in total.blocks():
            first = place.start // self._block_elems
            inside = np.arange(first + 1, -(-place.stop // self._block_elems)) * self._block_elems - place.start
            found = np.maximum.reduceat(np.abs(values.numpy()), np.concatenate(([0], inside)))
            own = peaks[first : first + len(found)]
            np.maximum(own, found, out=own)
        return peaks / 2.0**FRACTION_BITS

    def finish(self, weights: Tensor) -> None:
        super().finish(weights)
        self._exponents = self._next

    def state(self) -> Mapping[str, Tensor]:
        return {**super().state(), STEPS: torch.from_numpy(self._exponents.copy())}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the steps of a checkpoint. Where it has none for this number of blocks, the next round is exact.

        Raises:
            CheckpointError: they are out of the limits.
        """
        super().load_state(state)
        found = state.get(STEPS)
        count = num_chunks(self._dim, self._block_elems) if self._block_elems else 0
        if count and found is not None and found.dtype == torch.int8 and tuple(found.shape) == (count,):
            exponents = found.numpy()
            if not MIN_EXPONENT <= exponents.min() <= exponents.max() <= MAX_EXPONENT:
                raise CheckpointError(
                    f"{STEPS} of {exponents.min()} to {exponents.max()}: expected {MIN_EXPONENT} to {MAX_EXPONENT}. "
                    f"The checkpoint is damaged: start from another one"
                )
            self._exponents = exponents.copy()


def shape_of(codec: Codec, dim: int) -> tuple[int, int]:
    """Values that are sent of a model of ``dim`` values on the common grid of a codec, 0: all; and how many
    neighbouring ones share a reach once there is one, 0: there never is."""
    if codec.lossless:
        return 0, 0
    return codec.count_v2(dim) if isinstance(codec, TopKCodec) else 0, int(getattr(codec, "chunk_elems", 0))


def on_common_grid(strategy: Strategy, config: FederatedConfig, dim: int) -> Strategy:
    """The strategy, behind the grid of its rounds where updates are masked, with a codec that compresses them."""
    codec = CODECS.make(config.codec)
    if not config.secure_aggregation.enabled or codec.lossless or codec.name not in MASKED_CODECS:
        return strategy
    sent, block_elems = shape_of(codec, dim)
    return CommonSteps(strategy, dim, block_elems=block_elems, sent=sent)


def next_exponents(before: NDArray[np.int8], peaks: NDArray[np.float64], clients: int) -> NDArray[np.int8]:
    """The exponents of the reaches in the next round: int8, shape (blocks,).

    Args:
        before: of this round; shape (0,): it was exact. peaks: the largest absolute value of each block of the sum, of
            samples times value, shape (blocks,). clients: whose updates are in it, 1 to 255.
    """
    count = min(max(2, clients), MAX_ADDENDS)
    limit = limit_for(count)
    reach, is_still = max(_LEAST_REACH, limit / _LEVELS / math.sqrt(count)), peaks == 0
    if not len(before) and is_still.all():
        return before
    wanted = _exponents_for(reach * peaks)
    least = wanted[~is_still].min(initial=MAX_EXPONENT)
    if not len(before):  # blocks that nobody has changed, as yet: they reach no further than any other
        return np.where(is_still, least, wanted).astype(np.int8)
    now = before.astype(np.int64)
    unseen = _exponents_for(reach * count * DEAD_ZONE / (limit + 1) * np.ldexp(1.0, now))  # rounded to 0 by each
    floor = least if not is_still.all() else MIN_EXPONENT
    still = np.minimum(now, np.maximum(unseen, floor))
    reached = np.abs(peaks / np.ldexp(1.0, now) - 1.0) <= _AT_LIMIT
    wanted = np.where(reached, np.maximum(wanted, now + _RISE_AT_LIMIT), wanted)
    changed = np.where(wanted <= now - _FAR_TOO_FAR, wanted, np.maximum(wanted, now - 1))
    found = np.where(is_still, still, np.minimum(changed, now + _MOST_RISE))
    return found.clip(MIN_EXPONENT, MAX_EXPONENT).astype(np.int8)


def _exponents_for(largest: NDArray[np.float64]) -> NDArray[np.int64]:
    """The exponents of the least reaches that are larger, within the limits."""
    return np.frexp(largest)[1].astype(np.int64).clip(MIN_EXPONENT, MAX_EXPONENT)

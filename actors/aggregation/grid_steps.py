"""The steps of the common grid in the next round, from the sum of the last one.

The first round is exact, in steps of 2^-30. From then on a block reaches 8 / sqrt(N) times as far as the largest value
of its last sum over N clients. Were their updates independent, that is eight times what each of them has sent; where
one client alone has changed a value, it still fits with 64 clients, and comes in several rounds with more. A block
reaches further at once, and less far by a factor of 2 in each round: updates differ from round to round, and a step
that is too small costs more than one that is too large. Clients that come out at the limit, all of them, make it reach
further. Where the updates of clients cancel in the sum, as near an optimum of very unequal clients, some are clamped
until what they lack shows in a sum.

Nothing enters but the sum, which the Controller has in any case, and whoever has two models in a row, with a strategy
that adds it to the model. The steps are part of the checkpoint: a round that is repeated has the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.actors.aggregation.common_grid import (
    MAX_ADDENDS,
    MAX_SCALES,
    MIN_EXPONENT,
    CommonGrid,
    exponent_for,
)
from gradbus.actors.aggregation.partial_sum import FRACTION_BITS, Integers, PartialSum
from gradbus.actors.aggregation.strategies import Strategy, WrappedStrategy
from gradbus.actors.aggregation.updates import Facts
from gradbus.codecs.quantize import num_chunks
from gradbus.codecs.s4 import TopKCodec
from gradbus.runtime.choices import CODECS
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError

STEPS = "grid_steps"  # in a checkpoint
MASKED_CODECS = ("fp32", "q8", "s4", "sq8")  # whose updates can be masked
_REACH = 8.0


class CommonSteps(WrappedStrategy):
    """Chooses the common grid of each round in front of a strategy that takes sums."""

    def __init__(self, inner: Strategy, dim: int, *, block_elems: int = 0, sent: int = 0) -> None:
        """A first round without steps.

        Args:
            dim: of the model. block_elems: neighbouring values that share a step; 0: no value is rounded to 8 bits.
            sent: values of a round; 0: all.

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
    def grid(self) -> CommonGrid:  # type: ignore[override]
        if not len(self._exponents):
            return CommonGrid(self._sent)
        return CommonGrid(self._sent, self._block_elems, self._exponents.tobytes())

    def begin(self, round_id: int, base: Tensor) -> None:
        self._next = self._exponents
        super().begin(round_id, base)

    def add_masked(self, partial: PartialSum, facts: Sequence[Facts]) -> None:
        super().add_masked(partial, facts)
        if self._block_elems:
            peaks = self._peaks(partial.low)
            self._next = next_exponents(self._exponents, peaks, len(facts))

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
        """Of another number of blocks, or of a run without, there are no steps: the next round is exact."""
        super().load_state(state)
        found = state.get(STEPS)
        count = num_chunks(self._dim, self._block_elems) if self._block_elems else 0
        if found is not None and found.dtype == torch.int8 and tuple(found.shape) == (count,):
            self._exponents = found.numpy().copy()


def on_common_grid(strategy: Strategy, config: FederatedConfig, dim: int) -> Strategy:
    """The strategy, behind the grid of its rounds where updates are masked, with a codec that compresses them."""
    codec = CODECS.make(config.codec)
    if not config.secure_aggregation.enabled or codec.lossless or codec.name not in MASKED_CODECS:
        return strategy
    sent = codec.count_v2(dim) if isinstance(codec, TopKCodec) else 0
    return CommonSteps(strategy, dim, block_elems=getattr(codec, "chunk_elems", 0), sent=sent)


def next_exponents(before: NDArray[np.int8], peaks: NDArray[np.float64], clients: int) -> NDArray[np.int8]:
    """The exponents of the next round: int8, shape (blocks,).

    Args:
        before: of this round; shape (0,): it was exact. peaks: the largest absolute value of each block of the sum, of
            samples times value, shape (blocks,). clients: whose updates are in it.
    """
    reach = _REACH / math.sqrt(min(max(1, clients), MAX_ADDENDS))
    wanted = np.array([exponent_for(reach * peak) if peak else MIN_EXPONENT for peak in peaks], np.int8)
    if len(before):
        return np.maximum(wanted, before - 1).clip(MIN_EXPONENT).astype(np.int8)
    if peaks.any():  # blocks that nobody has changed, as yet: no coarser than any other
        wanted[peaks == 0] = wanted[peaks > 0].min()
        return wanted
    return before

"""Fixed limits on the norm and the weight of one update, in front of any strategy.

With a limit on the norm a hostile client moves the model no further than an honest one (Sun et al., Can You Really
Backdoor Federated Learning?, arXiv:1911.07963), and with a limit on the samples it has no more weight. Those of
:mod:`.bounds` follow what is typical.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradbus.actors.aggregation.partial_sum import PartialSum
from gradbus.actors.aggregation.strategies import Strategy, WrappedStrategy
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.codecs import DenseBlock, Parsed, SparseBlock
from gradbus.codecs.base import Block
from gradbus.runtime.config.federated import FederatedConfig

_BLOCK_ELEMS = 30 * 1024  # stays in the cache, and torch computes so few on the calling thread


CAPPED = "samples capped"  # in the marks of a round's report
CLIPPED = "clipped"


class LimitedStrategy(WrappedStrategy):
    """Clips the updates for another strategy to ``clip_norm`` and ``cap_samples``."""

    def __init__(self, inner: Strategy, *, clip_norm: float | None = None, cap_samples: int | None = None) -> None:
        """Limits in front of ``inner``; None: no limit.

        Args:
            clip_norm: an update with a larger L2 norm, as a difference to the base, is scaled down to it. Sections
                beside the model's stay as they are: SCAFFOLD's control variate is a gradient, however long the step.
            cap_samples: an update with more samples counts as one of so many.
        """
        super().__init__(inner)
        self._clip_norm = clip_norm
        self._cap_samples = cap_samples
        self._base: Tensor | None = None
        self._marks: dict[str, set[int]] = {}

    def begin(self, round_id: int, base: Tensor) -> None:
        self._base = base
        self._marks = {}
        self._inner.begin(round_id, base)

    def add(self, update: Update, facts: Facts) -> None:
        assert self._base is not None, "begin() comes first"
        short, many = update.model, facts.num_samples
        if self._clip_norm is not None:
            short = clipped(short, self._base, self._clip_norm)
        few = many if self._cap_samples is None else min(many, self._cap_samples)
        self._inner.add(update.with_model(short), dataclasses.replace(facts, num_samples=few))
        for mark, applied in ((CLIPPED, short is not update.model), (CAPPED, few < many)):
            if applied:
                self._marks.setdefault(mark, set()).add(facts.client_id)

    def add_masked(self, partial: PartialSum, facts: Sequence[Facts]) -> None:
        """The clients themselves have kept to the cap on samples, and there is no other limit."""
        self._inner.add_masked(partial, facts)
        if (most := self._cap_samples) is not None:
            capped = {one.client_id for one in facts if one.num_samples > most}
            self._marks.update({CAPPED: capped} if capped else {})

    def marks(self) -> Mapping[str, tuple[int, ...]]:
        return {**{mark: tuple(sorted(ids)) for mark, ids in self._marks.items()}, **self._inner.marks()}


def clipped(update: Parsed, base: Tensor, limit: float) -> Parsed:
    """The update itself if its norm is within the limit, else the same direction at that length, as a difference.

    Raises:
        ValueError: weights in a sparse message, which say nothing of most of the model; values that are not finite.
    """
    if update.is_sparse and not update.is_delta:
        raise ValueError(f"a sparse {update.codec} update holds weights: expected a difference")
    norm = norm_of(update, base)
    if norm <= limit:
        return update
    if not math.isfinite(norm):
        raise ValueError(f"update of norm {norm}: expected finite values")
    return scaled(update, base, limit / norm)


def norm_of(update: Parsed, base: Tensor) -> float:
    """The L2 norm of an update, as a difference to the base."""
    # In float64: the largest float32 has a square, too.
    return math.sqrt(sum(float(block.values.double().square_().sum()) for block in differences(update, base)))


def scaled(update: Parsed, base: Tensor, factor: float) -> Parsed:
    """The update as a difference to the base, times the factor."""

    def shortened(block_elems: int) -> Iterator[Block]:
        for block in differences(update, base, block_elems):
            yield dataclasses.replace(block, values=block.values * factor)

    return update.replaced(shortened, is_sparse=update.is_sparse)


def differences(update: Parsed, base: Tensor, block_elems: int = _BLOCK_ELEMS) -> Iterator[Block]:
    """The blocks of an update as a difference to the base."""
    for block in update.blocks(block_elems):
        if update.is_delta or isinstance(block, SparseBlock):
            yield block
        else:
            yield DenseBlock(block.start, block.values - base[block.start : block.start + block.values.numel()])


def within_limits(strategy: Strategy, config: FederatedConfig) -> Strategy:
    """The strategy behind the configured limits, if there are any."""
    limits = config.limits
    if not limits.limits_single_updates:
        return strategy
    return LimitedStrategy(strategy, clip_norm=limits.clip_norm, cap_samples=limits.cap_samples)

"""Limits on what one update can do, in front of any strategy: its length, and its weight.

A client that lies can still turn its update in any direction; with a limit on the norm it moves the model no further
than an honest one (Sun et al., Can You Really Backdoor Federated Learning?, arXiv:1911.07963), and with a limit on the
samples it has no more weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from gradbus.actors.aggregation.sample_cap import CAPPED
from gradbus.actors.aggregation.strategy import Strategy
from gradbus.codecs import DenseBlock, Parsed, SparseBlock
from gradbus.codecs.base import Block
from gradbus.runtime.config.federated import FederatedConfig

_BLOCK_ELEMS = 30 * 1024  # stays in the cache, and torch computes so few on the calling thread

CLIPPED = "clipped"


class Limited(Strategy):
    """Another strategy, which sees updates of at most ``clip_norm`` and ``cap_samples``."""

    def __init__(self, inner: Strategy, *, clip_norm: float | None = None, cap_samples: int | None = None) -> None:
        """Limits in front of ``inner``.

        Args:
            clip_norm: an update whose L2 norm, as a difference to the base, is larger is scaled down to it.
            cap_samples: an update with more samples counts as one of so many. Either may be None: no limit.
        """
        self._inner = inner
        self.weighs_samples = inner.weighs_samples
        self._clip_norm = clip_norm
        self._cap_samples = cap_samples
        self._base: Tensor | None = None
        self._marks: dict[str, set[int]] = {}

    @property
    def name(self) -> str:
        return self._inner.name

    def check(self, config: FederatedConfig) -> None:
        self._inner.check(config)

    def begin(self, round_id: int, base: Tensor) -> None:
        self._base = base
        self._marks = {}
        self._inner.begin(round_id, base)

    def add(self, client_id: int, update: Parsed, num_samples: int) -> None:
        assert self._base is not None, "begin() comes first"
        short = update if self._clip_norm is None else clipped(update, self._base, self._clip_norm)
        few = num_samples if self._cap_samples is None else min(num_samples, self._cap_samples)
        self._inner.add(client_id, short, few)
        for mark, applied in ((CLIPPED, short is not update), (CAPPED, few < num_samples)):
            if applied:
                self._marks.setdefault(mark, set()).add(client_id)

    def finish(self, weights: Tensor) -> None:
        self._inner.finish(weights)

    def marks(self) -> Mapping[str, tuple[int, ...]]:
        return {**{mark: tuple(sorted(ids)) for mark, ids in self._marks.items()}, **self._inner.marks()}

    def state(self) -> Mapping[str, Tensor]:
        return self._inner.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._inner.load_state(state)


def clipped(update: Parsed, base: Tensor, limit: float) -> Parsed:
    """The update itself if its norm is within the limit, else the same direction at that length, as a difference.

    Raises:
        ValueError: weights in a sparse message, which say nothing of most of the model; values that are not finite.
    """
    if update.is_sparse and not update.is_delta:
        raise ValueError(f"a sparse {update.codec} update holds weights: expected a difference")
    # In float64: the largest float32 has a square, too.
    norm = math.sqrt(sum(float(block.values.double().square_().sum()) for block in differences(update, base)))
    if norm <= limit:
        return update
    if not math.isfinite(norm):
        raise ValueError(f"update of norm {norm}: expected finite values")
    scale = limit / norm

    def shortened(block_elems: int) -> Iterator[Block]:
        for block in differences(update, base, block_elems):
            yield dataclasses.replace(block, values=block.values * scale)

    return dataclasses.replace(update, is_delta=True, make_blocks=shortened)


def differences(update: Parsed, base: Tensor, block_elems: int = _BLOCK_ELEMS) -> Iterator[Block]:
    """The blocks of an update as a difference to the base, whatever it carries."""
    for block in update.blocks(block_elems):
        if update.is_delta or isinstance(block, SparseBlock):
            yield block
        else:
            yield DenseBlock(block.start, block.values - base[block.start : block.start + block.values.numel()])

"""PowerSGD whose rank follows the loss: up where it is unsteady, down where it is steady.

The rule, once ``window_steps`` losses are there, of l_1 .. l_n, each the mean over all ranks:

    r = l - (its least-squares line);  spread = sqrt(mean(r^2)) / |mean(l)|
    rank + 1 if spread > grow_above;  rank - 1 if spread < shrink_below;  then a new window begins

The line is taken out because a loss that falls steadily is not unsteady, and the spread is relative, so that the rule
is the same for a loss in other units. The losses have equal bits on all ranks, and sums are exact (``math.fsum``), so
all ranks change the rank in the same step. Q keeps its columns: the last one is left out, or one is drawn.

Source: the rule is this project's own; there is no paper. PowerSGD as in :mod:`.powersgd`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, model_validator

from gradbus.runtime.algorithms.base import Step
from gradbus.runtime.algorithms.powersgd import PowerSGD


class AdaptivePowerSGD(PowerSGD):
    """PowerSGD with a rank between two bounds, by how steady the loss is."""

    choice = "adaptive-powersgd"
    needs_loss = True
    shared = PowerSGD.shared | {"rank", "losses"}

    class Options(PowerSGD.Options):
        """Options of ``adaptive-powersgd``."""

        rank: int = Field(default=4, ge=1, le=1024)
        """Rank at the start."""
        smallest_rank: int = Field(default=2, ge=1, le=1024)
        """Rank that it does not go below."""
        largest_rank: int = Field(default=8, ge=1, le=1024)
        """Rank that it does not go above. Tensors for which it would be too large, by min_rate, are sent dense."""
        window_steps: int = Field(default=10, ge=3, le=10_000)
        """Number of steps between two decisions."""
        grow_above: float = Field(default=0.1, gt=0)
        """Spread of the losses of a window, relative to their mean, above which the rank grows."""
        shrink_below: float = Field(default=0.01, ge=0)
        """Spread below which it shrinks."""

        @model_validator(mode="after")
        def _in_order(self) -> AdaptivePowerSGD.Options:
            if not self.smallest_rank <= self.rank <= self.largest_rank:
                raise ValueError(
                    f"expected smallest_rank <= rank <= largest_rank, got {self.smallest_rank}, {self.rank}, "
                    f"{self.largest_rank}"
                )
            if self.shrink_below >= self.grow_above:
                raise ValueError(f"shrink_below {self.shrink_below} has to be less than grow_above {self.grow_above}")
            return self

    options: Any

    @property
    def largest_rank(self) -> int:
        return int(self.options.largest_rank)

    def decide_rank(self, step: Step) -> int:
        """Decided from the state before the step, so that it is the same for all of its buckets."""
        options = self.options
        kept_rank, kept_losses = self.memory.find("rank", "now"), self.memory.find("losses", "window")
        rank: int = options.rank if kept_rank is None else int(kept_rank)
        losses = [] if kept_losses is None else kept_losses.tolist()
        if not math.isnan(step.loss):
            losses.append(step.loss)
        if len(losses) >= options.window_steps:
            spread = relative_spread(losses)
            rank += (spread > options.grow_above) - (spread < options.shrink_below)
            losses = []
        rank = min(max(rank, options.smallest_rank), options.largest_rank)
        self.memory.stage("rank", "now", torch.tensor(rank))
        self.memory.stage("losses", "window", torch.tensor(losses, dtype=torch.float64))
        return rank


def relative_spread(values: Sequence[float]) -> float:
    """Standard deviation around the least-squares line, relative to the mean's magnitude; infinite where that is 0 and
    the values are not."""
    count = len(values)
    mean = math.fsum(values) / count
    places = [place - (count - 1) / 2 for place in range(count)]
    slope = math.fsum(x * (y - mean) for x, y in zip(places, values, strict=True)) / math.fsum(x * x for x in places)
    square = math.fsum((y - mean - slope * x) ** 2 for x, y in zip(places, values, strict=True))
    if not square:
        return 0.0
    return math.sqrt(square / count) / abs(mean) if mean else math.inf

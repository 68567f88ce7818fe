"""Who has how many batches in which step of an epoch: pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Steps of an epoch on ranks that need not have equally many batches.

    A rank that has run out of data goes on exchanging, with gradients of zero, until the last one has (a join). The
    mean is then over those that have data.

    Attributes:
        batches: of each rank. accumulation_steps: batches that make a step; a rank's last one may have fewer.
    """

    batches: tuple[int, ...]
    accumulation_steps: int = 1

    @classmethod
    def of(cls, batches: Sequence[int], accumulation_steps: int) -> EpochPlan:
        """Raises ValueError: no rank has data, or a number of batches is negative."""
        if any(count < 0 for count in batches) or not any(batches):
            raise ValueError(f"an epoch needs at least one batch on some rank, got {list(batches)} on ranks 0..")
        return cls(tuple(batches), accumulation_steps)

    @property
    def steps(self) -> int:
        """Steps of the epoch, for all ranks."""
        return max(map(self._steps_of, range(len(self.batches))))

    def active(self, step: int) -> int:
        """Ranks that have data in this step, >= 1. ``step`` counts from 0 within the epoch."""
        return sum(self._steps_of(rank) > step for rank in range(len(self.batches)))

    def weight(self, rank: int, step: int) -> float:
        """Return what a rank's mean gradient of this step is multiplied by, before the mean over those that have
        data."""
        return 1.0

    def pick(self, batches: Callable[[int, int], Iterator[Any]], rank: int, step: int) -> Iterator[Any]:
        """The batches of a rank from this step on. ``batches``: gives those of one of so many ranks."""
        return itertools.islice(batches(rank, len(self.batches)), step * self.accumulation_steps, None)

    def batches_in(self, rank: int, step: int) -> int:
        """Batches of a rank in this step, 0 if it has run out."""
        return min(self.accumulation_steps, max(0, self.batches[rank] - step * self.accumulation_steps))

    def _steps_of(self, rank: int) -> int:
        return -(-self.batches[rank] // self.accumulation_steps)

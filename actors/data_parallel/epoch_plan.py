"""Who has data in which step of an epoch, known to all ranks before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
        """Raises ValueError: nobody has data, or a number of batches is negative."""
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

    def batches_in(self, rank: int, step: int) -> int:
        """Batches of a rank in this step, 0 if it has run out."""
        return min(self.accumulation_steps, max(0, self.batches[rank] - step * self.accumulation_steps))

    def _steps_of(self, rank: int) -> int:
        return -(-self.batches[rank] // self.accumulation_steps)

"""Which batches of an epoch a rank of an elastic group takes: pure arithmetic.

All ranks share one order, the batches that one process alone would have: it follows from seed and epoch. The ranks of a
generation take the next ones of it in turn. Where the ranks change, the next generation begins behind the last step
that was committed: no batch is lost or taken twice, however many ranks there are; those of a step that failed are taken
again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.runtime.config.data_parallel import DataParallelConfig


@dataclass(frozen=True, slots=True)
class ElasticPlan(EpochPlan):
    """The rest of an epoch for the ranks of one generation.

    Attributes:
        batches: of each rank, in the rest of the epoch. total: batches of the whole epoch, of all ranks.
        done: those before this plan. first_step: steps of the epoch before this plan.
        follows: ranks that get no data yet, as they have not the state of the run.
    """

    total: int = 0
    done: int = 0
    first_step: int = 0
    follows: frozenset[int] = frozenset()

    @classmethod
    def rest_of(
        cls,
        total: int,
        world: int,
        accumulation_steps: int,
        *,
        done: int,
        first_step: int,
        follows: Collection[int] = (),
    ) -> ElasticPlan:
        """Raises ValueError: there are no batches at all, or nobody to take them."""
        if total < 1 or len(follows) >= world:
            raise ValueError(f"an epoch needs at least one batch and one rank, got {total} batches for {world} ranks")
        blank = cls((0,) * world, accumulation_steps, total, done, first_step, frozenset(follows))
        steps = range(first_step, blank.steps)
        counts = (sum(blank.batches_in(rank, step) for step in steps) for rank in range(world))
        return replace(blank, batches=tuple(counts))

    @classmethod
    def steps_of_run(cls, config: DataParallelConfig, batches: int, world: int) -> int:
        """Return the steps of a whole run with so many batches in an epoch, if so many ranks make all of it."""
        in_epoch = cls.rest_of(batches, world, config.accumulation_steps, done=0, first_step=0).steps
        return min(in_epoch * config.epochs, config.max_steps or in_epoch * config.epochs)

    @property
    def steps(self) -> int:
        """Steps of the epoch, those before this generation included."""
        return self.first_step - (self.done - self.total) // self._in_step

    def active(self, step: int) -> int:
        """Ranks that have data in this step."""
        return sum(self.batches_in(rank, step) > 0 for rank in range(len(self.batches)))

    def batches_in(self, rank: int, step: int) -> int:
        """Batches of a rank in this step: as evenly divided as they can be."""
        first, last = self._bounds(rank, step)
        return last - first

    def weight(self, rank: int, step: int) -> float:
        """So that each batch of the step has the same part in the mean over the ranks that have data."""
        own, count = self.batches_in(rank, step), self.batches_done(step + 1) - self.batches_done(step)
        active = self.active(step)
        return 1.0 if own * active == count or not own else own * active / count

    def is_at_end(self, step: int) -> bool:
        """Return whether so many steps of the epoch are all of it, or the first of this plan."""
        return step >= self.steps or step <= self.first_step + 1

    def batches_done(self, step: int) -> int:
        """Batches of all ranks in the epoch, before this step."""
        return min(self.total, self.done + (step - self.first_step) * self._in_step)

    def pick(self, batches: Callable[[int, int], Iterator[Any]], rank: int, step: int) -> Iterator[Any]:
        """The batches of a rank from this step on, of those that one process alone would have."""
        order, number = batches(0, 1), 0
        for later in range(step, self.steps):
            first, last = self._bounds(rank, later)
            yield from itertools.islice(order, first - number, last - number)
            number = last

    @property
    def _world(self) -> int:
        """Return the number of the ranks that get data."""
        return len(self.batches) - len(self.follows)

    @property
    def _in_step(self) -> int:
        return self._world * self.accumulation_steps

    def _bounds(self, rank: int, step: int) -> tuple[int, int]:
        start = self.batches_done(step)
        if rank in self.follows:
            return start, start
        rank -= sum(other < rank for other in self.follows)  # its place among those that get data
        share, more = divmod(self.batches_done(step + 1) - start, self._world)
        first = start + rank * share + min(rank, more)
        return first, first + share + (rank < more)

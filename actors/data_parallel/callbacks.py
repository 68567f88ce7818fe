"""The user's own code at certain points of a run: after steps, epochs and evaluations, and at the end.

A callback is any object with some of these methods. They are called on the compute thread, one after the other, on the
rank that has the callback; the model does not change meanwhile.

    on_step(report: StepReport)         after each step
    on_evaluation(report: EpochReport)  after an epoch that was evaluated
    on_epoch(report: EpochReport)       after each epoch
    on_end(summary: WorkerSummary)      after the last one; not if the run fails

The first three may return True: all ranks end the run together. :class:`gradbus.runtime.callbacks.Callbacks` calls
them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from gradbus.runtime.collectives import CollectiveHandle, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A step as this rank saw it.

    Attributes:
        step: counts from 1. epoch: from 0. rank, world: of this process.
        loss: mean over this rank's batches of the step; NaN if it had none.
        skipped: all ranks skipped the step, for some rank had NaN or infinity. lr: learning rate of the first group.
        metrics: those of this rank's batches, as the task reports them.
    """

    step: int
    epoch: int
    rank: int
    world: int
    loss: float
    skipped: bool
    lr: float
    metrics: Mapping[str, float]


_END, _REST, _READY = 1, 2, 4  # bits of a vote
_EVERY_SHIFT = 3  # above them, the binary logarithm of the steps until the next vote

MAX_STEPS_BETWEEN_VOTES = 32


class StopVotes:
    """Whether any rank wants the run to end, or to rest so that others can join or leave: all ranks find the same,
    after the same step.

    The votes of a step travel while the next one is computed, and the run ends one step later. They take time of the
    processor all the same, which is much of a step of a few milliseconds: so with a vote each rank says after how many
    steps it would vote again, and the fewest count for all.

    Attributes:
        after_steps, after_epochs: whether the ranks vote then.
        every: steps from the newest vote that was counted to the next one, equal on all ranks.
        ranks: that have voted for the end, in the newest vote.
        rest: whether a rank has voted for a rest, in any vote.
        ready: the ranks that have said that they are, in any vote.
        newest_at, newest_s: the step of this rank's newest vote, or from which on it votes, and when that was, by
            ``time.perf_counter``.
    """

    def __init__(self, group: Group, *, timeout_s: float, after_steps: bool, after_epochs: bool) -> None:
        """``after_steps``, ``after_epochs``: whether the ranks vote then, equal on all of them."""
        self.after_steps = after_steps
        self.after_epochs = after_epochs
        self._group = group
        self._timeout_s = timeout_s
        self._handle: CollectiveHandle[list[bytes]] | None = None
        self._wanted_end = False  # this rank, in a vote that is not counted yet
        self.every = 1
        self.newest_at, self.newest_s = 0, 0.0
        self.ranks: list[int] = []
        self.ready: set[int] = set()
        self.rest = False

    def send_vote(
        self,
        wants_end: bool,
        name: str,
        *,
        step: int,
        wants_rest: bool = False,
        is_ready: bool = False,
        every: int = 1,
    ) -> None:
        """Send this rank's vote.

        Args:
            name: of the occasion; with ``step`` it is unique.
            is_ready: this rank has the state of the run, and may get data.
            every: steps after which this rank would vote again, rounded down to a power of two, at most
                ``MAX_STEPS_BETWEEN_VOTES``.
        """
        exponent = max(1, min(every, MAX_STEPS_BETWEEN_VOTES)).bit_length() - 1
        vote = bytes([_END * wants_end + _REST * wants_rest + _READY * is_ready + (exponent << _EVERY_SHIFT)])
        self._wanted_end = wants_end
        self.begin_at(step)
        self._handle = self._group.all_gather(f"worker/stop/{name}", vote, round_id=step, timeout_s=self._timeout_s)

    def begin_at(self, step: int) -> None:
        """Count steps and time until the next vote from this step on."""
        self.newest_at, self.newest_s = step, time.perf_counter()

    def steps_in(self, seconds: float, step: int) -> int:
        """Return how many steps are made in so much time, as those since the newest vote until ``step`` were."""
        return int(seconds * (step - self.newest_at) / max(time.perf_counter() - self.newest_s, 1e-6))

    @property
    def is_pending(self) -> bool:
        """Whether this rank has sent a vote whose result it has not read."""
        return self._handle is not None

    async def counted(self) -> bool:
        """Whether a rank has voted for the end, in the newest vote; False if there was none."""
        if self._handle is None:
            return False
        handle, self._handle = self._handle, None
        votes = [int.from_bytes(vote) for vote in await handle]
        self._wanted_end = False
        self.every = min(MAX_STEPS_BETWEEN_VOTES, 1 << (min(votes) >> _EVERY_SHIFT))
        self.ranks = [rank for rank, vote in enumerate(votes) if vote & _END]
        self.rest |= any(vote & _REST for vote in votes)
        self.ready |= {rank for rank, vote in enumerate(votes) if vote & _READY}
        return bool(self.ranks)

    def cancel(self) -> bool:
        """Give up a vote that is on its way. Returns whether this rank has wanted the end in one that was not
        counted."""
        if self._handle is not None:
            self._handle.cancel()
        return self._wanted_end

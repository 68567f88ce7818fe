"""A client's budget: how much of its machine training takes, kept between batches on the thread that trains.

Training is not interrupted: it asks ``should_stop()`` before each batch, and there it waits as long as the share of a
core asks for, and learns that the time of the round is over. What a function does that never asks is seen after each
step of an optimizer of torch; it can be slowed down there, but not ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from gradbus.runtime.config.federated import BudgetSettings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.native_threads import ThreadFamily

CREDIT_S = 0.5  # of its share that a training may catch up on, of sleep that lasted too long for example
SHORTEST_PAUSE_S = 0.002  # a shorter one waits for the next batch: the system does not sleep more exactly

log = get_logger("client")


class ShareLimit:
    """Says how long to pause so that processor time stays a share of the time. Pure: times in, pauses out.

    It is a leaky bucket of processor time, which runs out at ``share`` seconds a second. In any time of ``T`` seconds
    at most ``share * (T + CREDIT_S)`` seconds are used, and those of one batch.
    """

    def __init__(self, share: float) -> None:
        """``share``: seconds of processor time a second, above 0."""
        self._share = share
        self._owed_s = 0.0  # used too early; negative: what may be caught up on
        self._cpu_s = self._now_s = 0.0
        self._has_begun = False

    def resume(self, cpu_s: float, now_s: float) -> None:
        """Go on at these times. What was used since the last pause is not counted."""
        if self._has_begun:
            self._pay(now_s - self._now_s)
        self._cpu_s, self._now_s, self._has_begun = cpu_s, now_s, True

    def pause_s(self, cpu_s: float, now_s: float) -> float:
        """Return how long to pause now, in seconds; 0: not at all."""
        self._owed_s += cpu_s - self._cpu_s
        self._pay(now_s - self._now_s)
        self._cpu_s, self._now_s = cpu_s, now_s
        pause_s = self._owed_s / self._share
        return pause_s if pause_s >= SHORTEST_PAUSE_S else 0.0

    def _pay(self, elapsed_s: float) -> None:
        self._owed_s = max(self._owed_s - self._share * elapsed_s, -self._share * CREDIT_S)


class Pacer:
    """Holds the trainings of one client to its budget, one after the other."""

    def __init__(
        self,
        budget: BudgetSettings,
        cpu_s: Callable[[], float],
        wait: Callable[[float], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            cpu_s: processor time of what trains, in seconds.
            wait: waits for so many seconds, or until training is called off; one that goes on after that still waits.
            clock: in seconds.
        """
        self._budget = budget
        self._cpu_s = cpu_s
        self._wait = wait
        self._clock = clock
        self._limit = None if budget.core_share is None else ShareLimit(budget.core_share)

    def begin(self, is_called_off: Callable[[], bool]) -> PacedTraining:
        """Begin the training of a round, on the thread that trains."""
        if self._limit is not None:
            self._limit.resume(self._cpu_s(), self._clock())
        return PacedTraining(self, is_called_off, self._clock, self._budget.seconds_per_round)

    def pause(self, at_most_s: float) -> None:
        """Wait as long as the share of a core asks for, at most so long (more than 0)."""
        if self._limit is not None and (pause_s := self._limit.pause_s(self._cpu_s(), self._clock())) > 0.0:
            self._wait(min(pause_s, at_most_s))


class PacedTraining:
    """One training within a budget. All methods are for the thread that trains.

    Attributes:
        is_out_of_time: training was asked to stop as the time of the round is over: what it has done counts.
    """

    def __init__(
        self,
        pacer: Pacer | None,
        is_called_off: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        seconds: float | None = None,
    ) -> None:
        """``pacer``: None: there is no budget. ``seconds``: of the round; None: there is no limit."""
        self._pacer = pacer
        self._clock = clock
        self._seconds = seconds
        self.is_called_off = is_called_off
        self._began_s = clock()
        self._until_s = float("inf")
        self.is_out_of_time = False

    def limit_to(self, share: float) -> None:
        """Have what follows end when this share of the time of the round is over."""
        self.is_out_of_time = False
        if self._seconds is not None:
            self._until_s = self._began_s + share * self._seconds

    def should_stop(self) -> bool:
        """Whether to train no longer; where training goes on, this has waited as the budget asks for."""
        if self.is_called_off():
            return True
        if self._clock() < self._until_s:
            self.pause()
        if self._clock() >= self._until_s and not self.is_called_off():
            self.is_out_of_time = True
        return self.is_out_of_time or self.is_called_off()

    def pause(self, *_: Any) -> None:
        """Wait as the budget asks for: within the time of the round not longer than that, and after it, in a training
        that goes on, in full."""
        if self._pacer is not None:
            left_s = self._until_s - self._clock()
            self._pacer.pause(left_s if left_s > 0.0 else float("inf"))

    @property
    def overtime_s(self) -> float:
        """Return for how long training has gone on after its time, in seconds; 0: it has not."""
        return max(0.0, self._clock() - self._until_s)


class TrainingBudget:
    """The budget of one client, and the threads that keep it.

    Attributes:
        pacer: of its trainings; None: they have no budget.
    """

    def __init__(self, settings: BudgetSettings, wait: Callable[[float], object]) -> None:
        """``wait``: as of a :class:`Pacer`."""
        self._settings = settings
        self._threads = ThreadFamily()
        self._has_warned = False
        self.pacer = Pacer(settings, self.cpu_s, wait) if settings.is_set else None

    def cpu_s(self) -> float:
        """Return the processor time of what trains, in seconds."""
        return self._threads.cpu_s()

    def enter(self) -> None:
        """Have what computes on this thread keep to the budget. Called before anything is computed on it.

        Raises:
            ConfigError: it cannot run on the cores.
        """
        if not self._settings.is_set:
            return
        cores = self._settings.cores
        self._threads.enter(cores)
        if cores and (threads := torch.get_num_threads()) > len(cores) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "more threads than cores",
                threads=threads,
                cores=sorted(cores),
                effect="they take the cores from each other",
                remedy=f"call torch.set_num_threads({len(cores)}) before the client runs, or set task.threads",
            )


class ScriptBudget(TrainingBudget):
    """The budget of a script, which trains on a thread of its own: all of its process counts, and stays where it is."""

    @staticmethod
    def check(settings: BudgetSettings) -> None:
        """Raises ConfigError: it is not for a script."""
        if settings.cores:
            raise ConfigError(
                f"client.budget.cores is {sorted(settings.cores)}: a script trains on its own thread, which is not to "
                f"be moved. Leave it out, and call os.sched_setaffinity(0, {{...}}) before the script makes its first "
                f"tensor"
            )

    def cpu_s(self) -> float:
        return time.process_time()

    def enter(self) -> None:
        pass

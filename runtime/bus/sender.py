"""The writer thread of a bus: everything large leaves through it, so that no write ever blocks the event loop.

Jobs take turns frame by frame. A job whose reader does not take its data, or that has to wait for something, waits
without holding up the others.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gradbus.runtime.drive import OwnThread
from gradbus.runtime.errors import BusClosed, WriteTimeout
from gradbus.runtime.transport.api import Outlet
from gradbus.runtime.transport.channels import Channel, traffic_name

Sample = tuple[tuple[Any, ...], tuple[Any, ...]]  # fields before the payload, parts of the payload
Pause = float  # seconds: there is nothing to write just now, ask again when they have passed, or earlier
_LAP_S = 0.01  # between two questions to a job that pauses, if it has not asked for more


@dataclass(slots=True, eq=False)
class Job:
    """Samples to write, in order, made one at a time, and pauses where there is none yet.

    ``finished`` is called once, on the writer thread, with the bytes written or the error.
    """

    writer: Outlet
    samples: Iterator[Sample | Pause]
    finished: Callable[[int | Exception], None]
    stall_timeout_s: float
    pending: Sample | None = None
    written_bytes: int = 0
    progressed_s: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    writing: threading.RLock = field(
        default_factory=threading.RLock
    )  # who makes the samples may find that it must cancel

    def cancel(self) -> None:
        """Write no further sample. When this returns none is being written or made, so the payload may change. It waits
        for the write in progress, ``block_s`` of the topic at most, and for a sample that is being made."""
        with self.writing:
            self.cancelled = True


class Sender(OwnThread):
    """The jobs of a bus, and the thread that writes them. Who submits bounds their number: the bus by its slots, a
    group by its pending collectives.

    :meth:`step` is one turn of that work. In production the thread that :meth:`start` starts calls it; any other driver
    may call it instead of the thread, and :meth:`drop_rest` after the last step.
    """

    def __init__(self) -> None:
        super().__init__(self._run, name="gradbus-write")
        self._jobs: deque[Job] = deque()
        self._pauses: dict[Job, Pause] = {}  # of those that had nothing to write, since something was written
        self._wakeup = threading.Condition()
        self.stopping = False
        self._woken = False  # a job that pauses may have something to write now
        self.sent_bytes: Counter[str] = Counter()

    # From any thread

    def count(self, channel: Channel, num_bytes: int) -> None:
        """Note that so many octets were sent. All inboxes count as one: they are as many as processes."""
        self.sent_bytes[traffic_name(channel)] += num_bytes

    def submit(self, job: Job) -> None:
        """Add a job. Raises BusClosed after :meth:`stop`."""
        with self._wakeup:
            if self.stopping:
                raise BusClosed("the bus is closed: nothing more can be sent")
            self._jobs.append(job)
            self._wakeup.notify()
        self._note_step_due()

    def wake(self) -> None:
        """Ask the jobs that pause now: what they wait for may have come."""
        with self._wakeup:
            self._woken = True
            self._wakeup.notify()
        self._note_step_due()

    def stop(self) -> None:
        """End at once; jobs that are left fail with BusClosed."""
        with self._wakeup:
            self.stopping = True
            self._wakeup.notify()
        self._note_step_due()

    def _note_step_due(self) -> None:
        if (step_due := self._driver.step_due) is not None:
            step_due()

    @property
    def idle(self) -> bool:
        return not self._jobs

    # On the thread

    def step(self) -> float:
        """Write one sample of the job whose turn it is.

        One thread at a time may call it: a driver calls it in place of :meth:`start`.

        Returns:
            Seconds until something is due: 0 if a job may have more to write, the pause if all of them pause, infinite
            if there is none. :meth:`submit` and :meth:`wake` make a step due at once, :meth:`stop` the end.
        """
        with self._wakeup:
            if not self._jobs or self.stopping:
                return math.inf
            if len(self._pauses) >= len(self._jobs):  # and they are over
                self._woken = False
                self._pauses.clear()
            job = self._jobs[0]
        finished = True
        try:
            with job.writing:
                pause_s = None if job.cancelled else self._write_sample(job)
            finished = pause_s is None
            if pause_s:
                self._pauses[job] = pause_s
            else:
                self._pauses.clear()
            outcome: int | Exception = job.written_bytes
        except Exception as error:
            finished, outcome = True, error
            self._pauses.clear()
        with self._wakeup:
            self._jobs.popleft()
            if not finished:
                self._jobs.append(job)
            due_in_s = self._due_in_s()
        if finished:
            job.finished(outcome)
        return due_in_s

    def _due_in_s(self) -> float:
        if not self._jobs:
            return math.inf
        if self._woken or len(self._pauses) < len(self._jobs):
            return 0.0
        longest_s = max(self._pauses.values())  # many must not take more time to ask than one
        return max(longest_s, min(sum(self._pauses.values()), _LAP_S))

    def drop_rest(self) -> None:
        """Fail the jobs that are left with BusClosed: after the last step, on the thread that has called it."""
        for job in self._jobs:
            job.finished(BusClosed("the bus was closed before all was sent"))
        self._jobs.clear()
        self._pauses.clear()  # with the payloads of these jobs

    def _run(self) -> None:
        while not self.stopping:
            if self.step():  # no job is held here, nor its payload, which may be large, while the thread sleeps
                self._sleep()
        self.drop_rest()

    def _sleep(self) -> None:
        with self._wakeup:
            pause_s = self._due_in_s()  # a job may have come, or news for one that pauses
            if pause_s and not self.stopping:
                self._wakeup.wait(None if pause_s == math.inf else pause_s)

    def _write_sample(self, job: Job) -> Pause | None:
        """Write one sample of the job. Returns how long it need not be asked again: 0, it has more to write; None, it
        has nothing more at all."""
        sample = job.pending if job.pending is not None else next(job.samples, None)
        if sample is None:
            return None
        if isinstance(sample, Pause):
            job.progressed_s = time.monotonic()  # it is not a reader that it waits for
            return sample
        fields, parts = sample
        if job.writer.write(fields, parts):
            size = sum(len(part) for part in parts)
            job.pending = None
            job.written_bytes += size
            job.progressed_s = time.monotonic()
            self.count(job.writer.channel, size)
            return 0.0
        job.pending = sample
        if time.monotonic() - job.progressed_s > job.stall_timeout_s:
            raise WriteTimeout(job.writer.channel.name, job.stall_timeout_s)
        return 0.0

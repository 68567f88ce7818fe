"""The writer thread of a bus: everything large leaves through it, so that no DDS write ever blocks the event loop.

Jobs take turns frame by frame. A job whose reader does not take its data, or that has to wait for something, waits
without holding up the others.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gradbus.runtime.dds.participant import Writer
from gradbus.runtime.errors import BusClosed, WriteTimeout

Sample = tuple[tuple[Any, ...], tuple[Any, ...]]  # fields before the payload, parts of the payload
Pause = float  # seconds: there is nothing to write just now, ask again when they have passed, or earlier
_LAP_S = 0.01  # between two questions to a job that pauses, if it has not asked for more


@dataclass(slots=True, eq=False)
class Job:
    """Samples to write, in order, made one at a time, and pauses where there is none yet.

    ``finished`` is called once, on the writer thread, with the bytes written or the error.
    """

    writer: Writer
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


class Sender(threading.Thread):
    """One thread for the jobs of a bus. Who submits bounds their number: the bus by its slots, a group by its pending
    collectives."""

    def __init__(self) -> None:
        super().__init__(name="gradbus-write", daemon=True)
        self._jobs: deque[Job] = deque()
        self._wakeup = threading.Condition()
        self._stop_flag = False
        self._woken = False
        self.sent_bytes: Counter[str] = Counter()

    def submit(self, job: Job) -> None:
        """Add a job. Raises BusClosed after :meth:`stop`."""
        with self._wakeup:
            if self._stop_flag:
                raise BusClosed("the bus is closed: nothing more can be sent")
            self._jobs.append(job)
            self._wakeup.notify()

    def wake(self) -> None:
        """Ask the jobs that pause now: what they wait for may have come."""
        with self._wakeup:
            self._woken = True
            self._wakeup.notify()

    def stop(self) -> None:
        """End at once; jobs that are left fail with BusClosed."""
        with self._wakeup:
            self._stop_flag = True
            self._wakeup.notify()

    @property
    def idle(self) -> bool:
        return not self._jobs

    def run(self) -> None:
        pauses: dict[Job, Pause] = {}  # of those that had nothing to write, since something was written
        while True:
            with self._wakeup:
                if pauses and len(pauses) >= len(self._jobs) and not self._stop_flag:
                    if not self._woken:
                        longest_s = max(pauses.values())  # many must not take more time to ask than one
                        self._wakeup.wait(max(longest_s, min(sum(pauses.values()), _LAP_S)))
                    self._woken = False
                    pauses.clear()
                while not self._jobs and not self._stop_flag:
                    self._wakeup.wait()
                if self._stop_flag:
                    break
                job = self._jobs[0]
            finished = True
            try:
                with job.writing:
                    pause_s = None if job.cancelled else self._step(job)
                finished = pause_s is None
                if pause_s:
                    pauses[job] = pause_s
                else:
                    pauses.clear()
                outcome: int | Exception = job.written_bytes
            except Exception as error:
                finished, outcome = True, error
                pauses.clear()
            with self._wakeup:
                self._jobs.popleft()
                if not finished:
                    self._jobs.append(job)
            if finished:
                job.finished(outcome)
            del job  # and with it the payload, which may be large, while the thread sleeps
        for job in self._jobs:
            job.finished(BusClosed("the bus was closed before all was sent"))
        self._jobs.clear()

    def _step(self, job: Job) -> Pause | None:
        """Write one sample of the job. Returns how long it need not be asked again: 0, it has more to write; None, it
        has nothing more at all."""
        sample = job.pending if job.pending is not None else next(job.samples, None)
        if sample is None:
            return None
        if isinstance(sample, Pause):
            job.progressed_s = time.monotonic()  # it is not DDS that it waits for
            return sample
        fields, parts = sample
        if job.writer.write(fields, parts):
            size = sum(len(part) for part in parts)
            job.pending = None
            job.written_bytes += size
            job.progressed_s = time.monotonic()
            self.sent_bytes[job.writer.topic.name] += size
            return 0.0
        job.pending = sample
        if time.monotonic() - job.progressed_s > job.stall_timeout_s:
            raise WriteTimeout(job.writer.topic.name, job.stall_timeout_s)
        return 0.0

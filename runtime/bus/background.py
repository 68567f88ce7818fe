"""A bus in a background thread with an event loop of its own, for programs without asyncio, such as those of torch.

Frequent work (collectives) does not pass here: only forming and leaving groups does, and the watch of deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import Field

from gradbus.runtime import forks
from gradbus.runtime.bus.bus import Bus, connect
from gradbus.runtime.bus.transport_factory import reach_of
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.settings import Settings, load_settings
from gradbus.runtime.errors import BusError
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security.settings import Security, rank_security
from gradbus.runtime.transport.api import Reachable

_PREFIX = "GRADBUS_BUS__"
JOB_KEY = "gradbus/job"  # in the store of a process group: the number of its job
# A bus is open within 0.1 s, or some seconds on a machine that has much to do. No argument: torch gives a group a time
# for its other processes, and this waits for none of them.
OPEN_S = 60.0
_CLOSE_S = 15.0

T = TypeVar("T")


class _Environment(Settings):
    bus: BusSettings = Field(default_factory=BusSettings)


def settings_from_environment() -> BusSettings:
    """The settings of the bus: ``GRADBUS_BUS__DOMAIN=3`` and so on. Raises ConfigError."""
    ours = {name: text for name, text in os.environ.items() if name.startswith(_PREFIX)}
    return load_settings(_Environment, environment=ours).bus


def reach() -> Reachable:
    """Return how far the bus of this process will reach. Raises ConfigError."""
    settings = settings_from_environment()
    return reach_of(settings.domain, NetworkConfig.of(settings))


def numbered_job(number: str, settings: BusSettings) -> str:
    """The job whose name is set, made that of one store by the store's number."""
    return f"{settings.job[:40]}-{number}"


class BusThread:
    """A thread that keeps one bus open until it is released as often as it was acquired."""

    def __init__(self, job: str, settings: BusSettings, rank: int) -> None:
        """Open the bus. ``rank``: of this process among all of the job. Raises ConfigError; BusError: the transport
        refuses it, or it was not open in time."""
        self.job = job
        self.users = 0
        self._made_in = forks.generation
        self._settings = settings
        self._security: Security = rank_security(settings, rank)
        self._opened: Future[Bus] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="gradbus-torch-loop", daemon=True)
        self._thread.start()
        if not wait([self._opened], OPEN_S).done:
            self.call(self._stop.set)  # one that opens later closes at once
            raise BusError(
                f"the bus of job {job!r} was not open after {OPEN_S:g} s, domain {settings.domain} on "
                f"{reach().attachment}. See what holds this process up, such as a disk of its key or log that does not "
                f"answer, and try 'gradbus doctor' on this machine"
            )
        self.bus = self._opened.result()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Raises ForkedProcess: in a child by fork, which has no such thread."""
        forks.check(self._made_in, "the bus")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Any, *arguments: Any) -> None:
        """Call a function on the loop, soon."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Close the bus and end the thread; takes a bounded time."""
        self.call(self._stop.set)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        runner = asyncio.Runner(loop_factory=lambda: self._loop)
        try:
            runner.run(self._hold())
        finally:
            # To end the executor, asyncio starts a thread, which Python 3.12 refuses while the interpreter ends.
            with contextlib.suppress(RuntimeError):
                runner.close()

    async def _hold(self) -> None:
        settings = self._settings
        try:
            async with connect(
                self.job,
                domain=settings.domain,
                network=NetworkConfig.of(settings),
                stall_timeout_s=settings.stall_timeout_s,
                security=self._security,
            ) as bus:
                self._opened.set_result(bus)
                await self._stop.wait()
        except Exception as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)


@dataclass(slots=True)
class _Job:
    """The thread of one job of this process.

    Attributes:
        lock: held while its bus opens or closes, for which other jobs do not wait.
        calls: of :func:`_exclusive` that hold the lock or wait for it.
        thread: None: nobody uses the bus.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: int = 0
    thread: BusThread | None = None


jobs: dict[tuple[int, str], _Job] = {}  # by process (a fork does not inherit threads) and name
_lock = forks.ForkLock()  # of the table, held for no longer than a look into it


@contextlib.contextmanager
def _exclusive(name: str) -> Iterator[_Job]:
    """The job of this name, which no other thread opens or closes meanwhile."""
    key = os.getpid(), name
    with _lock:
        job = jobs.setdefault(key, _Job())
        job.calls += 1
    try:
        with job.lock:
            yield job
    finally:
        with _lock:
            job.calls -= 1
            if not job.calls and job.thread is None:
                jobs.pop(key, None)


def acquire(job: str, settings: BusSettings, rank: int) -> BusThread:
    """The thread for a job, opened for its first user. :func:`release` gives it back.

    Args:
        settings: of the bus, as the first user has them.
        rank: of this process among all of the job, not of one of its process groups.

    Raises:
        ConfigError: a setting is wrong. BusError: the transport cannot be started, or the bus was not open in time.
    """
    with _exclusive(job) as shared:
        if shared.thread is None:
            shared.thread = BusThread(job, settings, rank)
        shared.thread.users += 1
        return shared.thread


def release(thread: BusThread) -> None:
    """One user less; the last one closes the bus, and who wants the next one waits for that."""
    with _exclusive(thread.job) as shared:
        thread.users -= 1
        if not thread.users:
            if shared.thread is thread:  # in a child by fork it is one of the child's own, or none
                shared.thread = None
            thread.close()

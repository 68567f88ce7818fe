"""The event loop behind the backend: a background thread that owns one bus, for all process groups of this process.

torch calls from threads of its own and knows no event loop. What happens often (collectives) does not come by here:
only forming and leaving groups does, and what looks after deadlines.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from pydantic import Field
from torch._C._distributed_c10d import PrefixStore, Store

from gradbus.runtime import forks
from gradbus.runtime.bus.bus import Bus, connect
from gradbus.runtime.config.federated import BusSettings, Settings, load_settings
from gradbus.runtime.dds.missing_peers import Reach
from gradbus.runtime.dds.network import NetworkConfig
from gradbus.runtime.security.settings import Security, rank_security

_PREFIX = "GRADBUS_BUS__"
_JOB_KEY = "gradbus/job"
_CLOSE_S = 15.0

T = TypeVar("T")


class _Environment(Settings):
    bus: BusSettings = Field(default_factory=BusSettings)


def settings_from_environment() -> BusSettings:
    """The settings of the bus: ``GRADBUS_BUS__DOMAIN=3`` and so on. Raises ConfigError."""
    ours = {name: text for name, text in os.environ.items() if name.startswith(_PREFIX)}
    return load_settings(_Environment, environment=ours).bus


def reach() -> Reach:
    """How far the bus of this process will reach. Raises ConfigError."""
    settings = settings_from_environment()
    return Reach.of(settings.domain, _network(settings))


def _network(settings: BusSettings) -> NetworkConfig:
    return NetworkConfig(
        profile=settings.network, interface=settings.interface, peers=settings.peers, multicast=settings.multicast,
        lease_s=settings.lease_s, shared_memory=settings.shared_memory,
    )  # fmt: skip


def job_of(store: Store, settings: BusSettings) -> str:
    """The DDS job that all processes of a store share: the name that is set, and a number of this store.

    The number lies under all prefixes: process groups that were made apart, and meet in a third one later, must be on
    one bus.
    """
    root = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    return numbered_job(root.compare_set(_JOB_KEY, "", secrets.token_hex(8)).decode(), settings)


def numbered_job(number: str, settings: BusSettings) -> str:
    """The same, of processes that know their number."""
    return f"{settings.job[:40]}-{number}"


class BusThread:
    """Runs until it is released as often as it was acquired."""

    def __init__(self, job: str, settings: BusSettings, rank: int) -> None:
        """Open the bus. ``rank``: of this process among all of the job. Raises ConfigError, BusError."""
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
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._hold())

    async def _hold(self) -> None:
        settings = self._settings
        try:
            async with connect(
                self.job, domain=settings.domain, network=_network(settings), stall_timeout_s=settings.stall_timeout_s,
                security=self._security,
            ) as bus:  # fmt: skip
                self._opened.set_result(bus)
                await self._stop.wait()
        except Exception as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)


_threads: dict[tuple[int, str], BusThread] = {}  # by process (a fork does not inherit threads) and job
_lock = forks.new_lock()


def acquire(store: Store, rank: int) -> BusThread:
    """The thread for the processes of this store, opened for its first user. :func:`release` gives it back.

    Args:
        rank: of this process among all of the job, not of one of its process groups.

    Raises:
        ConfigError: a setting is wrong. BusError: DDS cannot be started.
    """
    settings = settings_from_environment()
    return acquire_job(job_of(store, settings), settings, rank)


def acquire_job(job: str, settings: BusSettings, rank: int) -> BusThread:
    """The same for a job that is known; ``settings`` are for its first user."""
    with _lock:
        thread = _threads.get((os.getpid(), job))
        if thread is None:
            thread = _threads[os.getpid(), job] = BusThread(job, settings, rank)
        thread.users += 1
        return thread


def release(thread: BusThread) -> None:
    """One user less; the last one closes the bus, and who wants the next one waits for that."""
    with _lock:
        thread.users -= 1
        if not thread.users:
            _threads.pop((os.getpid(), thread.job), None)
            thread.close()

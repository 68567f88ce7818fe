"""One gradbus group for each process group: how it forms through torch's store, and how it is left."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol, runtime_checkable

from torch._C._distributed_c10d import Store

from gradbus.runtime.bus import background
from gradbus.runtime.collectives.engine import Engine
from gradbus.runtime.collectives.group import Group, join_group
from gradbus.runtime.errors import BusClosed, ConfigError, GradbusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.traffic import Traffic
from gradbus.torch.formation import WORLD, RankLocations, RankLock, Rendezvous, agreed_name, root_of

WATCH_S = 0.25  # how often deadlines are checked
_CHECK_S = 2.0  # how often to look whether a group that does not form ever can
_LEAVE_S = 10.0
_FORM_S = 10.0  # so long may a group take to form, also if its collectives may not

Watch = Callable[[float], None]

log = get_logger("torch")


class HeldGroup(Protocol):
    """What holds a group open on the event loop of a bus."""

    thread: background.BusThread

    def watch_with(self, watch: Watch) -> None:
        """See :meth:`TorchGroup.watch_with`."""

    def end(self, reason: str, *, abruptly: bool, keep_bus: bool) -> None:
        """Leave the group; see :meth:`TorchGroup.close`."""


@runtime_checkable
class FormedStore(Protocol):
    """A store whose ranks have formed their group already, as those of an elastic generation have."""

    def hold(self) -> tuple[Group, HeldGroup]:
        """Return the group of all ranks."""


def job_number(store: Store) -> str:
    """The number of the job of all processes of a store.

    It lies under all prefixes of the store: process groups that were made apart, and meet in a third one later, must be
    on one bus.
    """
    return root_of(store).compare_set(background.JOB_KEY, "", secrets.token_hex(8)).decode()


def acquire_bus(number: str, rank: int) -> background.BusThread:
    """The bus of all processes of a job; :func:`~gradbus.runtime.bus.background.release` gives it back.

    Args:
        number: see :func:`job_number`. rank: of this process among all of the job, not of one of its process groups.

    Raises:
        ConfigError: a setting is wrong. BusError: DDS cannot be started.
    """
    settings = background.settings_from_environment()
    return background.acquire(background.numbered_job(number, settings), settings, rank)


class TorchGroup:
    """This process's place in one process group.

    Attributes:
        engine: its collectives. name: of the group, one that no group had before.
    """

    def __init__(self, engine: Engine, name: str, membership: HeldGroup | None = None) -> None:
        """``membership``: that holds it. None: it has one rank, and needs no bus."""
        self.engine = engine
        self.name = name
        self.rank = engine.rank
        self.world = engine.world
        self._membership = membership

    @classmethod
    def form(cls, place: Rendezvous, check_wanted: Callable[[], None]) -> TorchGroup:
        """Form the group with the other ranks.

        Args:
            check_wanted: called now and then until the group has formed; what it raises ends the wait.

        Raises:
            BarrierTimeout: some ranks have not come. ConfigError: the ranks do not fit together, or a setting is wrong.
            BusError: DDS cannot be used as it is set.
        """
        if not 0 <= place.rank < place.world:
            raise ConfigError(
                f"process group {place.label!r}: expected a rank of 0 .. {place.world - 1}, got {place.rank}"
            )
        root = root_of(place.store)
        if place.label == WORLD and not place.name and isinstance(root, FormedStore):
            return cls._of(*root.hold())
        if place.world == 1:
            if not place.name:
                agreed_name(place)
            return cls(Engine(place.label, 0, 1, _NoLink(), early_bytes=0, early_age_s=60.0), place.label)
        with contextlib.ExitStack() as undo:
            lock = None
            if place.label == WORLD and not place.name:
                lock = RankLock(place)
                undo.callback(lock.release)
            name = place.name or agreed_name(place, background.reach())
            thread = acquire_bus(place.job or job_number(place.store), place.job_rank)
            undo.callback(background.release, thread)
            membership = GroupMembership(thread, lock)
            check = check_wanted if place.name else RankLocations(place, name, thread.bus.reach).check
            group = membership.begin(place, name, check)
            undo.pop_all()
        return cls._of(group, membership)

    @classmethod
    def _of(cls, group: Group, membership: HeldGroup) -> TorchGroup:
        group.calls_may_block()
        engine = group._engine  # noqa: SLF001 - users of a Group have the collectives, not what runs them
        return cls(engine, group.name, membership)

    @property
    def traffic(self) -> Traffic:
        """Return the count of what this process exchanges over the bus, in all groups of the job."""
        return self.engine.traffic if self._membership is None else self._membership.thread.bus.traffic

    def watch_with(self, watch: Watch) -> None:
        """Have a function called now and then on the event loop with ``time.monotonic``; it must not wait. A group of
        one rank has no loop, and nothing to wait for."""
        if self._membership is not None:
            self._membership.watch_with(watch)

    def later(self, function: Callable[[], None]) -> None:
        """Call a function on the event loop, or here if there is none."""
        if self._membership is None:
            function()
        else:
            self._membership.thread.call(function)

    def close(self, reason: str = "", *, abruptly: bool = True, keep_bus: bool = False) -> None:
        """Leave the group.

        Args:
            reason: why it cannot go on, for the others. abruptly: what they have under way then fails at once, and not
                only where it misses something of this rank.
            keep_bus: do not close the bus, also if it has no other user.
        """
        self.engine.close(BusClosed(f"process group {self.name!r} is destroyed{reason and ': '}{reason}"))
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.end(reason, abruptly=abruptly, keep_bus=keep_bus)


class GroupMembership:
    """Holds a group open on the event loop of a bus."""

    def __init__(self, thread: background.BusThread, lock: RankLock | None = None) -> None:
        self.thread = thread
        self._watch: Watch = _nothing
        self._lock = lock
        self._leave = asyncio.Event()
        self._reason = ""
        self._abruptly = True
        self._joined: Future[Group] = Future()
        self._task: Future[None] | None = None

    def begin(self, place: Rendezvous, name: str, check: Callable[[], None]) -> Group:
        """Wait until the group has formed. ``check`` is called now and then, and raises where it never will."""
        self._task = self.thread.start(self._hold(place, name))
        while True:
            try:
                return self._joined.result(_CHECK_S)
            except TimeoutError:
                if self._joined.done():  # a BarrierTimeout is one, too
                    return self._joined.result()
            if self._task.done() and not self._joined.done():
                raise BusClosed(f"the bus was closed while process group {place.label!r} formed")
            try:
                check()
            except Exception as error:
                if isinstance(error, ConfigError):
                    time.sleep(2 * _CHECK_S)  # the others look as well, and rank 0 may take the store away with it
                self._task.cancel()
                raise

    def watch_with(self, watch: Watch) -> None:
        """See :meth:`TorchGroup.watch_with`."""
        self._watch = watch

    def end(self, reason: str, *, abruptly: bool, keep_bus: bool) -> None:
        """See :meth:`TorchGroup.close`."""
        self._reason, self._abruptly = reason, abruptly
        try:
            self.thread.call(self._leave.set)
            if self._task is not None:
                with contextlib.suppress(TimeoutError, CancelledError):  # the bus closes under it, or has done so
                    self._task.exception(_LEAVE_S)
        finally:
            if self._lock is not None:
                self._lock.release()
            if not keep_bus:
                background.release(self.thread)

    async def _hold(self, place: Rendezvous, name: str) -> None:
        reason: GradbusError | None = None
        form_s = place.timeout_s if place.name else max(place.timeout_s, _FORM_S)
        try:
            async with join_group(
                self.thread.bus,
                rank=place.rank,
                world=place.world,
                name=name,
                timeout_s=form_s,
                collective_timeout_s=place.timeout_s,
                stall_warning_s=0.0,
            ) as group:
                self._joined.set_result(group)
                await self._watch_until_left(name)
                if self._reason and not self._abruptly:
                    group.farewell = self._reason
                elif self._reason:
                    reason = GradbusError(self._reason)  # the others get the error with which this block is left
                    raise reason
        except Exception as error:
            if not self._joined.done():
                self._joined.set_exception(error)
            elif error is not reason:
                log.exception("left group", group=name)

    async def _watch_until_left(self, name: str) -> None:
        failed = False
        while not self._leave.is_set():
            try:
                self._watch(time.monotonic())
            except Exception:  # of what it watches: the group and its deadlines go on
                if not failed:
                    failed = True
                    with contextlib.suppress(Exception):  # a log that takes no line
                        log.exception("watch failed", group=name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._leave.wait()


def _nothing(now_s: float) -> None:
    """Watch nothing, as no collective has started yet."""


class _NoLink:
    """The way out of a world of one."""

    def send(self, *_: Any, **__: Any) -> None:
        raise AssertionError("there is no other rank")

"""One gradbus group for each process group: how it forms through torch's store, and how it is left."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

from torch._C._distributed_c10d import PrefixStore, Store

from gradbus.runtime.bus import background
from gradbus.runtime.collectives.engine import Engine
from gradbus.runtime.collectives.group import Group, join_group
from gradbus.runtime.collectives.operation import Finished, OperationKey, Sending
from gradbus.runtime.collectives.tensors import Bytes
from gradbus.runtime.errors import BusClosed, ConfigError, GradbusError
from gradbus.runtime.logs import get_logger
from gradbus.torch.formation import WORLD, RankLocations, RankLock, agreed_name
from gradbus.torch.stall_report import WARNING_S

WATCH_S = 0.25  # how often deadlines are looked at that nobody waits for
_CHECK_S = 2.0  # how often to look whether a group that does not form ever can
_LEAVE_S = 10.0
_FORM_S = 10.0  # so long may a group take to form, also if its collectives may not

Watch = Callable[[float], None]

log = get_logger("torch")


def acquire_bus(store: Store, rank: int) -> background.BusThread:
    """The bus of all processes of a store; :func:`~gradbus.runtime.bus.background.release` gives it back.

    The number of its job lies under all prefixes of the store: process groups that were made apart, and meet in a third
    one later, must be on one bus.

    Args:
        rank: of this process among all of the job, not of one of its process groups.

    Raises:
        ConfigError: a setting is wrong. BusError: DDS cannot be started.
    """
    root = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    settings = background.settings_from_environment()
    number = root.compare_set(background.JOB_KEY, "", secrets.token_hex(8)).decode()
    return background.acquire(background.numbered_job(number, settings), settings, rank)


class TorchGroup:
    """This process's place in one process group."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.rank = engine.rank
        self.world = engine.world
        self._thread: background.BusThread | None = None
        self._life: _Life | None = None
        self._claim: RankLock | None = None

    @classmethod
    def form(
        cls, store: Store, rank: int, world: int, label: str, timeout_s: float, watch: Watch, *, job_rank: int
    ) -> TorchGroup:
        """Form the group with the other ranks.

        Args:
            store: of this process group alone.
            job_rank: which rank this is among all.
            label: what people call the group.
            timeout_s: how long to wait for the others.
            watch: called now and then on the event loop with ``time.monotonic``; it must not wait.

        Raises:
            BarrierTimeout: some ranks have not come. ConfigError: the ranks do not fit together, or a setting is wrong.
            BusError: DDS cannot be used as it is set.
        """
        if not 0 <= rank < world:
            raise ConfigError(f"process group {label!r}: expected a rank of 0 .. {world - 1}, got {rank}")
        if world == 1:
            agreed_name(store, rank, world, label, timeout_s)
            return cls(Engine(label, 0, 1, _NoLink(), early_bytes=0, early_age_s=60.0), label)
        with contextlib.ExitStack() as undo:
            claim = None
            if label == WORLD:
                claim = RankLock(store, rank, world, label)
                undo.callback(claim.release)
            reach = background.reach()
            name = agreed_name(store, rank, world, label, timeout_s, reach)
            thread = acquire_bus(store, job_rank)
            undo.callback(background.release, thread)
            places = RankLocations(store, name, rank, world, thread.bus.reach)
            life = _Life(watch)
            group = life.begin(thread, rank, world, name, timeout_s, partial(places.check, label))
            undo.pop_all()
        group.calls_may_block()
        formed = cls(group._engine, name)
        formed._thread, formed._life, formed._claim = thread, life, claim
        return formed

    def later(self, function: Callable[[], None]) -> None:
        """Call a function on the event loop, or here if there is none."""
        if self._thread is None:
            function()
        else:
            self._thread.call(function)

    def close(self, reason: str = "", *, abruptly: bool = True, keep_bus: bool = False) -> None:
        """Leave the group.

        Args:
            reason: why it cannot go on, for the others. abruptly: what they have under way then fails at once, and not
                only where it misses something of this rank.
            keep_bus: do not close the bus, also if nobody uses it any more.
        """
        self.engine.close(BusClosed(f"process group {self.name!r} is destroyed{reason and ': '}{reason}"))
        thread, self._thread = self._thread, None
        if thread is None or self._life is None:
            return
        try:
            self._life.end(thread, reason, abruptly=abruptly)
        finally:
            if self._claim is not None:
                self._claim.release()
            if not keep_bus:
                background.release(thread)


class _Life:
    """Holds the group open on the event loop."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._leave = asyncio.Event()
        self._reason = ""
        self._abruptly = True
        self._joined: Future[Group] = Future()
        self._task: Future[None] | None = None

    def begin(
        self, thread: background.BusThread, rank: int, world: int, name: str, timeout_s: float,
        check: Callable[[], None],
    ) -> Group:  # fmt: skip
        """Wait until the group has formed. ``check`` is called now and then, and raises where it never will."""
        self._task = thread.start(self._live(thread, rank, world, name, timeout_s))
        while True:
            try:
                return self._joined.result(_CHECK_S)
            except TimeoutError:
                if self._joined.done():  # a BarrierTimeout is one, too
                    return self._joined.result()
            try:
                check()
            except ConfigError:
                time.sleep(2 * _CHECK_S)  # the others look as well, and rank 0 may take the store away with it
                self._task.cancel()
                raise

    def end(self, thread: background.BusThread, reason: str, *, abruptly: bool) -> None:
        self._reason, self._abruptly = reason, abruptly
        thread.call(self._leave.set)
        if self._task is not None:
            with contextlib.suppress(TimeoutError, CancelledError):  # the bus closes under it, or has done so
                self._task.exception(_LEAVE_S)

    async def _live(self, thread: background.BusThread, rank: int, world: int, name: str, timeout_s: float) -> None:
        last_word: GradbusError | None = None
        try:
            async with join_group(
                thread.bus, rank=rank, world=world, name=name, timeout_s=max(timeout_s, _FORM_S),
                collective_timeout_s=timeout_s, stall_warning_s=WARNING_S,
            ) as group:  # fmt: skip
                self._joined.set_result(group)
                await self._watch_until_left(name)
                if self._reason and not self._abruptly:
                    group.farewell = self._reason
                elif self._reason:
                    last_word = GradbusError(self._reason)  # leaving with an error is what the others are told of
                    raise last_word
        except Exception as error:
            if not self._joined.done():
                self._joined.set_exception(error)
            elif error is not last_word:
                log.exception("left group", group=name)

    async def _watch_until_left(self, name: str) -> None:
        failed = False
        while not self._leave.is_set():
            try:
                self._watch(time.monotonic())
            except Exception:  # of what it looks after: the group and its deadlines go on
                if not failed:
                    failed = True
                    with contextlib.suppress(Exception):  # a log that takes no line
                        log.exception("watch failed", group=name)
            try:
                async with asyncio.timeout(WATCH_S):
                    await self._leave.wait()
            except TimeoutError:
                continue


class _NoLink:
    """The way out of a world of one."""

    def send(
        self, key: OperationKey, to: int | None, part: int, payload: Bytes, *, signature: str, meta: str = "",
        only: Sequence[int] | None = None, written: Callable[[int], None] | None = None, finished: Finished,
    ) -> Sending | None:  # fmt: skip
        raise AssertionError("nobody else is there")

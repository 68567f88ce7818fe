"""A rank's way to the arbiter of a store: requests that are repeated until they are answered, from any thread.

The caller's thread writes its request and sleeps; the receive thread of the bus wakes it. The event loop of the bus
only joins, and looks whether the arbiter is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from torch.distributed import DistNetworkError

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.liveness import DOUBT_S, Reachability
from gradbus.runtime.dds.missing_peers import WaitLog
from gradbus.runtime.dds.participant import Writer
from gradbus.runtime.dds.topics import store_topic
from gradbus.runtime.errors import BarrierTimeout, BusError, FrameError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.security.liveness_challenge import SESSION_TOPIC
from gradbus.runtime.wire.frames import Frame
from gradbus.runtime.wire.messages import new_incarnation
from gradbus.torch.store.messages import (
    MAX_OPEN,
    VERSION,
    Message,
    RankInUse,
    StoreAnswer,
    StoreClosed,
    StoreJoin,
    StoreLeave,
    StoreRefused,
    StoreRequest,
    StoreWelcome,
    decode,
    frame_of,
)
from gradbus.torch.store.requests import Backlog, PendingRequests

JOIN_S = 0.1  # how often to ask to be let in
REPEAT_S = 0.25  # when to repeat a request first, then after twice as long, up to
MAX_REPEAT_S = 1.0
_BYTES_PER_S = 10e6  # a large request is not repeated while it may still be on its way
_LOOK_S = 3600.0
_MAX_NEWS = 64  # messages but answers that wait for the loop, and those that wait for join

log = get_logger("store")


class StoreClient:
    """The side of a rank other than 0."""

    def __init__(self, bus: Bus, name: str, rank: int, world: int, host: str, failed: Callable[[str], None]) -> None:
        """Open topics and listen. Only from inside the event loop of the bus.

        Args:
            name: of the store, for people. host: host name and process id, for people.
            failed: called once, with the reason, when the arbiter is gone.
        """
        self.incarnation = new_incarnation()
        self._bus = bus
        self._name = name
        self._rank = rank
        self._world = world
        self._host = host
        self._failed = failed
        self._arbiter = 0  # its incarnation
        self._arbiter_host = ""
        self._arbiter_process = ""
        self._backlog = Backlog(_MAX_NEWS)
        self._news: asyncio.Queue[tuple[int, Message, str]] = asyncio.Queue(_MAX_NEWS)
        self.pending = PendingRequests()
        self._watcher: asyncio.Task[None] | None = None
        self._port = bus.raw_endpoints()
        self._reader = self._port.open_reader(store_topic(self.incarnation), self._take)
        self._writer = self._port.open_writer(store_topic())
        if not self._port.is_sealed:  # a sealed rank 0 cannot answer, but greets: that makes the doubt of the bus
            self._port.open_reader(replace(SESSION_TOPIC, to_message=store_topic().to_message), self._take)

    async def join(self, timeout_s: float, patience_s: float) -> None:
        """Find the arbiter.

        Args:
            patience_s: how long to ask again when a process with this rank is there already: it may be a dead one.

        Raises:
            DistNetworkError: there is none within ``timeout_s``, or it does not let this rank in.
            BusError.
        """
        heard = ""
        held_s: float | None = None
        next_s = time.monotonic()
        waiting = WaitLog(log, self._bus.reach, store=self._name, rank=self._rank)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._arbiter:
                    now_s = time.monotonic()
                    waiting.look([0], reason=heard or self._nobody(), misconfiguration=self._bus.misconfiguration)
                    if self._bus.access_policy.refusal:
                        raise DistNetworkError(f"{self._name}: rank {self._rank}: {self._bus.access_policy.refusal}")
                    if now_s >= next_s:  # an answer that says no is none to ask again for at once
                        next_s = now_s + JOIN_S
                        if self._writer.matched:
                            self._send(StoreJoin(VERSION, self._world, self._host), to=0)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(next_s - now_s):
                            incarnation, message, process = await self._news.get()
                            match message:
                                case StoreWelcome():
                                    self._arbiter, self._arbiter_host = incarnation, message.host
                                    self._arbiter_process = process
                                case StoreRefused():
                                    raise DistNetworkError(f"{self._name}: {message.why}")
                                case RankInUse():
                                    heard = self._told(message)
                                    held_s = (held_s or time.monotonic()) if message.alive else None
                                case StoreClosed():
                                    heard = message.why
                                case _:
                                    pass
                    if held_s is not None and time.monotonic() - held_s > patience_s:
                        raise DistNetworkError(f"{self._name}: {heard}")
        except TimeoutError:
            misconfiguration = f" Likely reason: {self._bus.misconfiguration}." if self._bus.misconfiguration else ""
            raise DistNetworkError(
                f"{self._name}: rank {self._rank} could not join within {timeout_s:g} s: {heard or self._nobody()}."
                f"{misconfiguration} {self._bus.reach.advice()}"
            ) from None
        self._watcher = asyncio.create_task(self._watch(), name=f"gradbus-store-{self._rank}")

    def _told(self, said: RankInUse) -> str:
        if said.alive:
            return (
                f"rank {self._rank} is taken, by {said.holder}. Give each process a rank of its own, and each job a "
                f"name of its own"
            )
        return (
            f"rank {self._rank} took part already, as {said.holder}, which has left or died. Start rank 0 anew as "
            f"well; now it is on {said.host}"
        )

    def _nobody(self) -> str:
        what = "there is a rank 0, which does not answer" if self._writer.matched else "there is no rank 0"
        absence = self._bus.access_policy.absence
        return f"{what}. Here that is {absence}" if absence else what

    # Requests

    def call(self, request: StoreRequest, timeout_s: float) -> StoreAnswer | None:
        """Ask, on this thread. None: there is no answer within ``timeout_s``, or there are none any more.

        Args:
            request: its id is set here; ``wait_s`` counts from now.
        """
        slot = self.pending.add()
        began_s = time.monotonic()
        pause_s = REPEAT_S + sum(map(len, request.values)) / _BYTES_PER_S
        try:
            while not slot.event.is_set() and (passed_s := time.monotonic() - began_s) < timeout_s:
                wait_s = max(0.0, request.wait_s - passed_s)
                waiting = self.pending.up_to(slot)
                if len(waiting) > MAX_OPEN:
                    text = f"rank {self._rank} has more than {MAX_OPEN} requests open at a time"
                    return StoreAnswer(slot.number, "error", [], [], 0, text)
                asked = replace(request, id=slot.number, open=waiting, wait_s=wait_s)
                self._send(asked, to=self._arbiter)
                slot.event.wait(min(pause_s, timeout_s - passed_s))
                pause_s = max(pause_s, min(2 * pause_s, MAX_REPEAT_S))
        finally:
            self.pending.remove(slot)
        return slot.answer

    def _send(self, message: Message, to: int) -> None:
        """What DDS does not take now is said again."""
        frame = frame_of(message, sender=self._rank, incarnation=self.incarnation, to=to)
        with contextlib.suppress(BusError):
            self._port.write(self._writer, frame)

    # What comes in

    def _take(self, frame: Frame) -> None:
        """On the receive thread."""
        key = frame.key
        if key.job != self.incarnation:
            return
        try:
            message = decode(frame.data)
        except FrameError:
            return  # asked for again, or the deadline will tell
        if isinstance(message, StoreAnswer):
            if key.incarnation == self._arbiter:
                self.pending.give(message)
        else:
            self._backlog.post(self._on_news, key.incarnation, message, key.name)

    def _on_news(self, incarnation: int, message: Message, process: str) -> None:
        if not self._arbiter:
            with contextlib.suppress(asyncio.QueueFull):
                self._news.put_nowait((incarnation, message, process))
        elif incarnation == self._arbiter and isinstance(message, StoreClosed):
            self._fail(f"it has been closed: {message.why}")
        elif incarnation != self._arbiter and isinstance(message, StoreWelcome):
            self._send(StoreLeave(), to=incarnation)  # of two arbiters one gives way; this one is not ours

    async def _watch(self) -> None:
        """Fail as soon as the arbiter is gone."""
        reachable = Reachability(self._arbiter_process, self._bus.lease_s)

        def is_gone() -> bool:
            return reachable.is_gone(self._reader.reader.matched > 0, time.monotonic())

        try:
            while not is_gone():
                if reachable.in_doubt:
                    await asyncio.sleep(DOUBT_S)
                else:
                    with contextlib.suppress(BarrierTimeout):
                        await self._bus.matched(lambda: is_gone() or reachable.in_doubt, timeout_s=_LOOK_S)
            gone = f"rank 0 on {self._arbiter_host} is gone, and the keys with it. Start all ranks anew"
            self._fail(self._bus.access_policy.refusal or gone)
        except BusError as error:
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        if not self.pending.ended:
            self._failed(why)
            self.pending.end()

    # The end

    def say_goodbye(self) -> None:
        """The arbiter need not wait for this rank."""
        self._send(StoreLeave(), to=self._arbiter)

    def writers(self) -> list[Writer]:
        """Of which all that was written should be taken over before they go."""
        return [self._writer]

    async def close(self) -> None:
        """Take everything out of DDS."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self._port.close()

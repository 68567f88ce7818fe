"""The arbiter of a store: holds the table in the process of rank 0 and answers all ranks, over DDS and in memory.

All of it belongs to the event loop of the bus. What comes in is bounded: frames that wait for the loop, processes that
want to join, requests that are open. Whoever is not answered asks again, so anything may be dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.liveness import DOUBT_S
from gradbus.runtime.dds.missing_peers import EVERY_S, WaitLog
from gradbus.runtime.dds.participant import Writer
from gradbus.runtime.dds.topics import store_topic
from gradbus.runtime.errors import BarrierTimeout, BusError, FrameError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.frames import Frame
from gradbus.runtime.wire.messages import new_incarnation
from gradbus.torch.store.messages import (
    VERSION,
    ArbiterStatus,
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
from gradbus.torch.store.peer import RequestTable, StorePeer
from gradbus.torch.store.requests import Backlog, PendingRequests
from gradbus.torch.store.table import StoreTable, answer

HERE_S = 0.1  # how often arbiters of one name tell each other
_LOOK_S = 60.0
_HURRY_S = 0.1  # how often to look whether the process is ending
_MAX_STRANGERS = 64  # processes that have not been let in
_MAX_FRAMES = 1024  # that wait for the loop
_MAX_HOST_BYTES = 256  # of what a process calls itself, where that is a part of a text

log = get_logger("store")


class StoreServer:
    """Rank 0's side of a store."""

    def __init__(self, bus: Bus, name: str, world: int, host: str, failed: Callable[[str], None]) -> None:
        """Open topics and listen. Only from inside the event loop of the bus.

        Args:
            name: of the store, for people. host: host name and process id, for people.
            failed: called once, with the reason, when there is another arbiter of the store or the bus is closed.
        """
        self.incarnation = new_incarnation()
        self.closing = False  # set by any thread: no others are let in, and another arbiter may begin
        self.until_s = 0.0  # set by any thread: how long to stay for the others when closing
        self.pending = PendingRequests()
        self._bus = bus
        self._name = name
        self._world = world
        self._host = host
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._table = StoreTable()
        self._local = RequestTable(self._table)
        self._peers: dict[int, StorePeer] = {}  # by incarnation
        self._ranks: dict[int, StorePeer] = {}  # who has joined, also those that are gone
        self._left = asyncio.Event()  # somebody has
        self._removals: set[asyncio.Task[None]] = set()
        self._backlog = Backlog(_MAX_FRAMES)
        self._port = bus.raw_endpoints()
        self._port.open_reader(store_topic(), self._take)
        self._others = self._port.open_writer(store_topic())  # its own reader takes what it writes, too
        self._watcher = asyncio.create_task(self._watch(), name=f"gradbus-store-{name}")

    # The own process

    def call(self, request: StoreRequest, timeout_s: float) -> StoreAnswer | None:
        """A request of rank 0 itself, on any thread. None: there is no answer within ``timeout_s``, or there are none
        any more. Its id is set here."""
        slot = self.pending.add()
        try:
            self._loop.call_soon_threadsafe(self._ask, replace(request, id=slot.number))
            slot.event.wait(timeout_s)
        except RuntimeError:  # the loop is closed
            return None
        finally:
            self.pending.remove(slot)
        return slot.answer

    def _ask(self, request: StoreRequest) -> None:
        self._local.ask(request, lambda result: self.pending.give(self._explained(request, result)))

    def _explained(self, request: StoreRequest, result: StoreAnswer) -> StoreAnswer:
        """A timeout says which ranks have not come."""
        absent = self._absent
        if result.outcome != "timeout" or not absent:
            return result
        text = f"ranks {absent[:16]} of {self._world} have not joined the store"
        return answer(request, "timeout", keys=result.keys, text=text)

    @property
    def _absent(self) -> list[int]:
        return [rank for rank in range(1, self._world) if rank not in self._ranks]

    # What comes in

    def _take(self, frame: Frame) -> None:
        """On the receive thread."""
        if frame.key.job in (0, self.incarnation):
            self._backlog.post(self._hear, frame)

    def _hear(self, frame: Frame) -> None:
        key = frame.key
        try:
            message = decode(frame.data)
        except FrameError as error:
            log.warning("store message refused", store=self._name, sender=key.sender, reason=str(error))
            return
        peer = self._peers.get(key.incarnation)
        match message:
            case StoreJoin():
                if not self.closing:
                    self._on_join(key.sender, key.incarnation, message, key.name)
            case ArbiterStatus() if key.incarnation != self.incarnation:
                self._on_here(key.incarnation, message)
            case StoreRequest() if peer is not None and self._has_joined(peer):
                peer.ask(message, self._explained)
            case StoreLeave() if peer is not None:
                self._forget(peer)
            case _:
                pass

    def _has_joined(self, peer: StorePeer) -> bool:
        return self._ranks.get(peer.rank) is peer

    def _on_join(self, rank: int, incarnation: int, said: StoreJoin, process: str) -> None:
        peer = self._peers.get(incarnation) or self._open(rank, incarnation, said.host, process)
        if peer is None:
            return
        peer.heard()
        why = self._misfit(rank, said)
        if why:
            peer.tell(StoreRefused(why))
            return
        holder = self._ranks.setdefault(rank, peer)
        if holder is peer:
            peer.tell(StoreWelcome(self._host))
        else:
            peer.tell(RankInUse(holder.incarnation in self._peers and holder.look(), holder.host, self._host))

    def _misfit(self, rank: int, said: StoreJoin) -> str:
        if said.version != VERSION:
            return (
                f"it speaks version {said.version} of the store's messages, rank 0 on {self._host} {VERSION}: use one "
                f"version of gradbus everywhere"
            )
        if said.world != self._world or not 0 < rank < self._world:
            host = said.host.encode()[:_MAX_HOST_BYTES].decode(errors="ignore")
            return (
                f"rank {rank} on {host} has world_size={said.world}, rank 0 on {self._host} has "
                f"world_size={self._world}: give all ranks the same"
            )
        return ""

    def _open(self, rank: int, incarnation: int, host: str, process: str) -> StorePeer | None:
        strangers = [peer for peer in self._peers.values() if not self._has_joined(peer)]
        for peer in strangers:
            if peer.is_silent:
                self._forget(peer)
        if len(strangers) >= _MAX_STRANGERS:
            return None
        peer = self._peers[incarnation] = StorePeer(
            self._bus, self._table, self.incarnation, rank, incarnation, host, process
        )  # fmt: skip
        return peer

    def _on_here(self, incarnation: int, said: ArbiterStatus) -> None:
        """Another process has the same store. Who has all its ranks goes on; else who came first."""
        complete = not self._absent
        if self.closing or (complete and not said.complete):
            return
        if said.complete == complete and (complete or incarnation > self.incarnation):
            return
        self._fail(
            f"there is another rank 0, on {said.host}. If both belong to one job, start it once; if not, give each job "
            f"a name of its own"
        )

    # Who is there

    async def _watch(self) -> None:
        waiting = WaitLog(log, self._bus.reach, store=self._name, rank=0)
        try:
            while True:
                if self._absent and not self.closing:
                    waiting.look(self._absent[:16], misconfiguration=self._bus.misconfiguration)
                if self._bus.access_policy.refusal:
                    self._fail(self._bus.access_policy.refusal)
                    return
                if self._is_contested:
                    here = ArbiterStatus(not self._absent, self._host)
                    self._port.write(self._others, frame_of(here, sender=0, incarnation=self.incarnation, to=0))
                    await asyncio.sleep(HERE_S)
                elif self._is_in_doubt:
                    await asyncio.sleep(DOUBT_S)
                else:
                    with contextlib.suppress(BarrierTimeout):
                        await self._bus.matched(self._has_news, timeout_s=EVERY_S if self._absent else _LOOK_S)
                for peer in [peer for peer in self._peers.values() if not peer.look()]:
                    self._forget(peer)
        except BusError as error:
            self._fail(str(error))

    @property
    def _is_in_doubt(self) -> bool:
        """Whether DDS has lost somebody, who may be found again."""
        return any(peer.in_doubt for peer in self._peers.values())

    @property
    def _is_contested(self) -> bool:
        """Whether another arbiter may be there."""
        return self._others.matched > 1 and not self.closing

    def _has_news(self) -> bool:
        here = [peer.look() for peer in self._peers.values()]  # all of them: it notes who has been seen
        return self._is_contested or self._is_in_doubt or not all(here) or bool(self._bus.access_policy.refusal)

    def _forget(self, peer: StorePeer) -> None:
        """It has left, or its process is gone."""
        self._left.set()
        del self._peers[peer.incarnation]
        removal = asyncio.create_task(peer.close())
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    # The end

    def _fail(self, why: str) -> None:
        if self.pending.ended:
            return
        self.closing = True
        for peer in self._peers.values():
            peer.tell(StoreClosed(why.encode()[:1000].decode(errors="ignore")))
        self._failed(why)
        self.pending.end()

    async def linger(self) -> None:
        """Stay until all others have left, or until ``until_s``: they may still want to know something."""
        while time.monotonic() < self.until_s and any(map(self._has_joined, self._peers.values())):
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HURRY_S):
                    await self._left.wait()

    def say_goodbye(self) -> None:
        """Tell those that are left."""
        for peer in self._peers.values():
            peer.tell(StoreClosed(f"rank 0 on {self._host} needs it no more"))

    def writers(self) -> list[Writer]:
        """Of which all that was written should be taken over before they go."""
        return [peer.writer for peer in self._peers.values() if peer.look()]

    async def close(self) -> None:
        """Take everything out of DDS."""
        self._watcher.cancel()
        self._local.give_up(lambda _: True)
        for peer in list(self._peers.values()):
            self._forget(peer)
        if self._removals:
            await asyncio.wait(self._removals)
        await self._port.close()

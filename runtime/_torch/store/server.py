"""The arbiter of a store: holds the table in the process of rank 0 and answers all ranks, over DDS and in memory.

All of it belongs to the event loop of the bus. What comes in is bounded: frames that wait for the loop, processes that
want to join, requests that are open. What is not answered is requested again, so anything may be dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.liveness import DOUBT_S
from gradbus.runtime.errors import BarrierTimeout, BusError, FrameError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.transport.api import Outlet
from gradbus.runtime.transport.channels import store_channel
from gradbus.runtime.transport.wait_log import EVERY_S, WaitLog
from gradbus.runtime.wire.frames import Frame, FrameKey
from gradbus.torch.store.address import Address
from gradbus.torch.store.endpoint import StoreEnd
from gradbus.torch.store.messages import (
    VERSION,
    ArbiterStatus,
    StoreJoin,
    StoreLeave,
    StoreRequest,
    StoreStatus,
    cut,
    decode,
    frame_of,
)
from gradbus.torch.store.peer import Session, StorePeer
from gradbus.torch.store.table import StoreTable

ANNOUNCE_S = 0.1  # how often arbiters of one name announce themselves to each other
_LOOK_S = 60.0
_HURRY_S = 0.1  # how often to look whether the process is ending
_MAX_STRANGERS = 64  # processes that have not been let in
_MAX_FRAMES = 1024  # that wait for the loop
_MAX_HOST_BYTES = 256  # of what a process calls itself, where that is a part of a text

log = get_logger("store")


class StoreServer(StoreEnd):
    """Rank 0's end of a store."""

    def __init__(self, bus: Bus, address: Address, host: str, failed: Callable[[str], None]) -> None:
        """Open topics and listen. See :class:`StoreEnd`; the store has failed when there is another arbiter of it, or
        the bus is closed."""
        super().__init__(bus, address, host, failed, _MAX_FRAMES)
        self._closing = False  # no others are let in, and another arbiter may begin
        self._until_s = 0.0  # how long to stay for the others when closing
        self._table = StoreTable(self._why_late)
        self._local = Session(self._table, 0, self.give)
        self.peers: dict[int, StorePeer] = {}  # by incarnation
        self._ranks: dict[int, StorePeer] = {}  # that have joined, also those that are gone
        self._left = asyncio.Event()  # some process has
        self._removals: set[asyncio.Task[None]] = set()
        self._port.open_reader(store_channel(), self._take)
        self._others = self._port.open_writer(store_channel())  # its own reader takes what it writes, too
        self._watcher = asyncio.create_task(self._watch(), name=f"gradbus-store-{address.name}")

    def _request(self, request: StoreRequest) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._local.submit, request)

    def _why_late(self) -> str:
        """For the answer to a wait that has timed out: ranks that have not come."""
        absent = self._absent
        return f"ranks {absent[:16]} of {self._address.world} have not joined the store" if absent else ""

    @property
    def _absent(self) -> list[int]:
        return [rank for rank in range(1, self._address.world) if rank not in self._ranks]

    # What comes in

    def _take(self, frame: Frame) -> None:
        """On the receive thread."""
        if frame.key.job in (0, self.incarnation):
            self._post(self._receive, frame)

    def _receive(self, frame: Frame) -> None:
        key = frame.key
        try:
            message = decode(frame.data)
        except FrameError as error:
            log.warning("store message refused", store=self._address.name, sender=key.sender, reason=str(error))
            return
        peer = self.peers.get(key.incarnation)
        match message:
            case StoreJoin() if not self._closing:
                self._on_join(key, message)
            case StoreJoin():
                self._forget_former(key.sender, message)
            case ArbiterStatus() if key.incarnation != self.incarnation:
                self._on_arbiter(key.incarnation, message)
            case StoreRequest() if peer is not None and self._has_joined(peer):
                peer.note_received()
                peer.session.submit(message)
            case StoreLeave() if peer is not None:
                self._forget(peer)
            case _:
                pass

    def _forget_former(self, rank: int, message: StoreJoin) -> None:
        """Take a process that looks for the next store for one that has left this one, which is closing: its StoreLeave
        was lost. Until this arbiter has gone, the next one in its process, whose bus it shares, gets nothing."""
        host = cut(message.host, _MAX_HOST_BYTES)
        for peer in [peer for peer in self.peers.values() if (peer.rank, peer.host) == (rank, host)]:
            self._forget(peer)

    def _has_joined(self, peer: StorePeer) -> bool:
        return self._ranks.get(peer.rank) is peer

    def _on_join(self, key: FrameKey, message: StoreJoin) -> None:
        peer = self.peers.get(key.incarnation) or self._open(key, message)
        if peer is not None:
            peer.note_received()
            peer.send(self._status_of(peer, message))

    def _status_of(self, peer: StorePeer, message: StoreJoin) -> StoreStatus:
        rank, world = peer.rank, self._address.world
        if message.version != VERSION:
            return StoreStatus(
                "refused",
                f"it has version {message.version} of the store's messages, rank 0 on {self._host} {VERSION}: use one "
                f"version of gradbus everywhere",
            )
        if message.world != world or not 0 < rank < world:
            return StoreStatus(
                "refused",
                f"rank {rank} on {peer.host} has world_size={message.world}, rank 0 on {self._host} has "
                f"world_size={world}: give all ranks the same",
            )
        holder = self._ranks.setdefault(rank, peer)
        if holder is peer:
            return StoreStatus("joined", self._host)
        if holder.incarnation in self.peers and holder.is_there():
            return StoreStatus(
                "taken",
                f"rank {rank} is taken, by {holder.host}. Give each process a rank of its own, and each job a name of "
                f"its own",
            )
        return StoreStatus(
            "departed",
            f"rank {rank} took part already, as {holder.host}, which has left or died. Start rank 0 anew as well; now "
            f"it is on {self._host}",
        )

    def _open(self, key: FrameKey, message: StoreJoin) -> StorePeer | None:
        strangers = [peer for peer in self.peers.values() if not self._has_joined(peer)]
        for peer in strangers:
            if peer.is_silent:
                self._forget(peer)
        if len(strangers) >= _MAX_STRANGERS:
            return None
        host = cut(message.host, _MAX_HOST_BYTES)
        peer = self.peers[key.incarnation] = StorePeer(self._bus, self._table, self.incarnation, key, host)
        return peer

    def _on_arbiter(self, incarnation: int, other: ArbiterStatus) -> None:
        """Another process has the same store. The one that has all its ranks goes on; else the one that came first."""
        complete = not self._absent
        if self._closing or (complete and not other.complete):
            return
        if other.complete == complete and (complete or incarnation > self.incarnation):
            return
        self._fail(
            f"there is another rank 0, on {other.host}. If both belong to one job, start it once; if not, give each "
            f"job a name of its own"
        )

    # Which processes are there

    async def _watch(self) -> None:
        waiting = WaitLog(log, self._bus.reach, store=self._address.name, rank=0)
        try:
            while not self._bus.access_policy.refusal:
                if self._absent and not self._closing:
                    waiting.look(self._absent[:16], misconfiguration=self._bus.misconfiguration)
                if self._is_contested:
                    status = ArbiterStatus(not self._absent, self._host)
                    self._port.write(self._others, frame_of(status, sender=0, incarnation=self.incarnation, to=0))
                    await asyncio.sleep(ANNOUNCE_S)
                elif self._is_in_doubt:
                    await asyncio.sleep(DOUBT_S)
                else:
                    with contextlib.suppress(BarrierTimeout):
                        await self._bus.matched(self._has_news, timeout_s=EVERY_S if self._absent else _LOOK_S)
                for peer in [peer for peer in self.peers.values() if not peer.is_there()]:
                    self._forget(peer)
            self._fail(self._bus.access_policy.refusal)
        except BusError as error:
            self._fail(str(error))

    @property
    def _is_in_doubt(self) -> bool:
        """Whether DDS has lost a process that may be found again."""
        return any(peer.in_doubt for peer in self.peers.values())

    @property
    def _is_contested(self) -> bool:
        """Whether another arbiter may be there."""
        return self._others.matched > 1 and not self._closing

    def _has_news(self) -> bool:
        here = [peer.is_there() for peer in self.peers.values()]  # all of them: it notes which have been matched
        return self._is_contested or self._is_in_doubt or not all(here) or bool(self._bus.access_policy.refusal)

    def _forget(self, peer: StorePeer) -> None:
        """It has left, or its process is gone."""
        self._left.set()
        del self.peers[peer.incarnation]
        removal = asyncio.create_task(peer.close())
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    # The end

    def _fail(self, why: str) -> None:
        if not self._ended:
            self._closing = True
            self._close_to_others(why)
        super()._fail(why)

    def _close_to_others(self, why: str) -> None:
        for peer in self.peers.values():
            peer.send(StoreStatus("closed", cut(why)))

    def begin_closing(self, stay_s: float) -> None:
        until_s = time.monotonic() + stay_s
        self._until_s = min(self._until_s or until_s, until_s)
        self._closing = True

    async def leave(self) -> list[Outlet]:
        """Stay until all others have left, or the time is over: they may still have requests."""
        while time.monotonic() < self._until_s and any(map(self._has_joined, self.peers.values())):
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HURRY_S):
                    await self._left.wait()
        self._close_to_others(f"rank 0 on {self._host} needs it no more")
        return [peer.writer for peer in self.peers.values() if peer.is_there()]

    async def close(self) -> None:
        self._watcher.cancel()
        self._local.end()
        for peer in list(self.peers.values()):
            self._forget(peer)
        if self._removals:
            await asyncio.wait(self._removals)
        await self._port.close()

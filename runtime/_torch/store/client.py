"""A rank's end of a store: requests go to the arbiter and are repeated until they are answered, from any thread.

The caller's thread writes its request and sleeps; the receive thread of the bus wakes it. The event loop of the bus
only joins, and watches whether the arbiter is there.
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
from gradbus.runtime.errors import BarrierTimeout, BusError, FrameError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.security.membership import SESSION_TOPIC
from gradbus.runtime.transport.api import Outlet
from gradbus.runtime.transport.channels import store_channel
from gradbus.runtime.transport.wait_log import WaitLog
from gradbus.runtime.wire.frames import Frame, FrameKey
from gradbus.torch.store.address import Address
from gradbus.torch.store.endpoint import StoreEnd
from gradbus.torch.store.messages import (
    VERSION,
    Message,
    StoreAnswer,
    StoreJoin,
    StoreLeave,
    StoreRequest,
    StoreStatus,
    decode,
    frame_of,
)

JOIN_S = 0.1  # how often to ask to be let in
_LOOK_S = 3600.0
MAX_BACKLOG = 64  # messages but answers that wait for the loop

log = get_logger("store")


class StoreClient(StoreEnd):
    """The end of a rank other than 0."""

    def __init__(self, bus: Bus, address: Address, host: str, failed: Callable[[str], None]) -> None:
        """Open topics and listen. See :class:`StoreEnd`; the store has failed when the arbiter is gone."""
        super().__init__(bus, address, host, failed, MAX_BACKLOG)
        self._arbiter = 0  # its incarnation
        self._status: StoreStatus | None = None  # the newest one before the store is joined
        self._taken_s: float | None = None  # since when another process has this rank
        self._decided = asyncio.Event()
        self._reachable = Reachability("", bus.lease_s)  # of the arbiter
        self._watcher: asyncio.Task[None] | None = None
        self._reader = self._port.open_reader(store_channel(self.incarnation), self._take)
        self._writer = self._port.open_writer(store_channel())
        if (
            not self._port.is_sealed
        ):  # an encrypting rank 0 cannot answer, but greets: Bus.misconfiguration then has the reason
            self._port.open_reader(replace(SESSION_TOPIC, to_message=store_channel().to_message), self._take)

    async def join(self, timeout_s: float, patience_s: float) -> None:
        """Find the arbiter.

        Args:
            patience_s: how long to ask again when a process with this rank is there already: it may be a dead one.

        Raises:
            DistNetworkError: there is none within ``timeout_s``, or it does not let this rank in.
            BusError.
        """
        bus, name, rank = self._bus, self._address.name, self._address.rank
        waiting = WaitLog(log, bus.reach, store=name, rank=rank)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._arbiter:
                    waiting.look([0], reason=self._why_not(), misconfiguration=bus.misconfiguration)
                    if bus.access_policy.refusal:
                        raise DistNetworkError(f"{name}: rank {rank}: {bus.access_policy.refusal}")
                    if self._writer.matched:
                        self._send(StoreJoin(VERSION, self._address.world, self._host), to=0)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(JOIN_S):
                            await self._decided.wait()
                    refused = self._status is not None and self._status.state == "refused"
                    if refused or (self._taken_s is not None and time.monotonic() - self._taken_s > patience_s):
                        raise DistNetworkError(f"{name}: {self._why_not()}")
        except TimeoutError:
            likely = f" Likely reason: {bus.misconfiguration}." if bus.misconfiguration else ""
            raise DistNetworkError(
                f"{name}: rank {rank} could not join within {timeout_s:g} s: {self._why_not()}.{likely} "
                f"{bus.reach.advice()}"
            ) from None
        self._watcher = asyncio.create_task(self._watch(), name=f"gradbus-store-{rank}")

    def _why_not(self) -> str:
        """Why the store is not joined yet."""
        if self._status is not None:
            return self._status.text
        what = "there is a rank 0, which does not answer" if self._writer.matched else "there is no rank 0"
        absence = self._bus.access_policy.absence
        return f"{what}. Here that is {absence}" if absence else what

    def _request(self, request: StoreRequest) -> None:
        self._send(request, to=self._arbiter)

    def _send(self, message: Message, to: int) -> None:
        frame = frame_of(message, sender=self._address.rank, incarnation=self.incarnation, to=to)
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
            return  # it is requested again, or the deadline passes
        if isinstance(message, StoreStatus):
            self._post(self._on_status, key, message)
        elif isinstance(message, StoreAnswer) and key.incarnation == self._arbiter:
            self.give(message)

    def _on_status(self, key: FrameKey, status: StoreStatus) -> None:
        if not self._arbiter:
            self._status = status
            self._taken_s = (self._taken_s or time.monotonic()) if status.state == "taken" else None
            if status.state == "joined":
                self._arbiter = key.incarnation
                self._reachable = Reachability(key.name, self._bus.lease_s)
            if status.state in ("joined", "refused"):
                self._decided.set()
        elif key.incarnation == self._arbiter and status.state == "closed":
            self._fail(f"it has been closed: {status.text}")
        elif key.incarnation != self._arbiter and status.state == "joined":
            self._send(StoreLeave(), to=key.incarnation)  # of two arbiters one gives way; another one was joined

    async def _watch(self) -> None:
        """Fail as soon as the arbiter is gone."""
        assert self._status is not None
        gone = f"rank 0 on {self._status.text} is gone, and the keys with it. Start all ranks anew"
        try:
            while not self._is_gone():
                if self._reachable.in_doubt:
                    await asyncio.sleep(DOUBT_S)
                else:
                    with contextlib.suppress(BarrierTimeout):
                        await self._bus.matched(lambda: self._is_gone() or self._reachable.in_doubt, timeout_s=_LOOK_S)
            self._fail(self._bus.access_policy.refusal or gone)
        except BusError as error:
            self._fail(str(error))

    def _is_gone(self) -> bool:
        return self._reachable.is_gone(self._reader.inlet.matched > 0, time.monotonic())

    # The end

    async def leave(self) -> list[Outlet]:
        self._send(StoreLeave(), to=self._arbiter)
        return [self._writer]

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        await self._port.close()

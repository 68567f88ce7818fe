"""Sending an update: request, frames on a grant, repairs, until there is a receipt. A controller of this machine may
read it in this process's memory instead.

The request is repeated until there is a receipt, as messages may be lost, or dropped by a controller that had no room.
DDS delivers what it accepts, so that is rare, and a controller that is slow to answer is not: each wait for an answer
is twice as long as the one before. Where updates are held until all clients have announced theirs, no answer is due at
once, and the first wait is longer. Otherwise the requests of thousands of clients would keep the controller busy. What
does call for another request, such as a new command or another controller, interrupts the wait.

A controller that sees no frame for a while requests it again, also if the link is slow and the frame on its way. Then
it would arrive twice, and hold up the others. So nothing is sent again that the transport has not delivered yet, unless
that takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradbus.actors.federated.protocol import ON_THE_WAY_S, REPEAT_AFTER_S
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import SharedPayload
from gradbus.runtime.testing.journal import Probe, no_probe
from gradbus.runtime.wire.control import Grant, Receipt, RetransmitRequest, UploadRequest
from gradbus.runtime.wire.frames import FrameKey
from gradbus.runtime.wire.messages import ClientUpdate, Identity

if TYPE_CHECKING:  # loading torch takes a second and 500 MB, which the nodes of an app without it are spared
    from torch import Tensor

HELD_REPEAT_AFTER_S = 4.0  # without an answer, where the controller holds updates
MAX_REPEAT_AFTER_S = 8.0  # most, below the time after which a controller gives up an upload that stands still
ANSWERS = (Grant, RetransmitRequest, Receipt)

log = get_logger("client")


def note_receipt(probe: Probe, receipt: Receipt, **client: int) -> None:
    """Note in the journal what answer an update got. ``client``: its id, where the journal is of several clients."""
    probe.note(
        "receipt",
        **client,
        run=f"{receipt.run_id:016x}",
        round=receipt.round_id,
        transfer=receipt.transfer,
        accepted=receipt.accepted,
        reason=receipt.reason,
    )


@dataclass(frozen=True, slots=True, eq=False)
class EncodedUpdate:
    """An encoded update.

    Attributes:
        key: of its frames. request: to upload it. payload: its bytes.
        state: tensors that the client keeps if it is accepted, the codec's residual among them.
        buffers: the block of merged buffers that follows the payload, until that is offered.
        sealed: the shared memory with the payload, for a controller of this machine; None: it is in this process alone.
    """

    key: FrameKey
    request: UploadRequest
    payload: bytes | memoryview
    state: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: bytes = b""
    sealed: SharedPayload | None = None

    @property
    def whole(self) -> bytes | memoryview:
        """Return its bytes with the block."""
        return b"".join([self.payload, self.buffers]) if self.buffers else self.payload


class UpdateSender:
    """Sends one update at a time.

    Attributes:
        phase: offering or uploading while there is an update, else idle.
        bytes_up: payload of updates so far, as they are encoded, whether sent in frames or read by the controller in
            memory; with frames that were sent again, without headers. Without these repairs and updates that did not
            count, the sum over all clients is ``bytes_up`` of the rounds.
    """

    def __init__(self, bus: Bus, identity: Identity, probe: Probe | None = None) -> None:
        self._bus = bus
        self._probe = probe or no_probe()
        self._identity = identity
        self._update: EncodedUpdate | None = None
        self._receipt: Receipt | None = None
        self._sending: asyncio.Task[None] | None = None
        self._is_counted = False  # bytes of the update are in bytes_up
        self._answered = asyncio.Event()
        self._is_hurried = False  # since an interrupt
        self._sent_s: float | None = None  # when frames of the update were sent last, by the loop's clock
        self.phase = "idle"
        self.bytes_up = 0

    async def deliver(
        self, update: EncodedUpdate, *, check: Callable[[], bool], is_held: bool = False
    ) -> Receipt | None:
        """Request the upload until there is a receipt.

        Args:
            check: returns whether the controller is still the one that the update is for, and may raise. A newer
                command is no reason to stop: the residual depends on whether this update counts. What changes its
                answer calls :meth:`interrupt`.
            is_held: the controller adds no update of the round before all are announced.

        Returns:
            The receipt; None: there will be none.
        """
        self._begin(update)
        first_s = max(REPEAT_AFTER_S, HELD_REPEAT_AFTER_S if is_held else 0.0)
        wait_s = first_s
        try:
            while True:
                if self._receipt is not None:
                    return self._receipt
                if not check():
                    return None
                self._answered.clear()
                with contextlib.suppress(BusError):
                    await self._bus.publish(self._identity, update.request)
                    self._probe.reached("after_offer", update.key.round_id)
                try:
                    async with asyncio.timeout(wait_s):
                        await self._answered.wait()
                    wait_s = first_s
                except TimeoutError:
                    wait_s = min(2 * wait_s, max(first_s, MAX_REPEAT_AFTER_S))
                if self._is_hurried:
                    wait_s = REPEAT_AFTER_S
        finally:
            self._update, self.phase = None, "idle"
            if self._sending is not None:
                self._sending.cancel()
            if update.sealed is not None:
                update.sealed.hide()

    def _begin(self, update: EncodedUpdate) -> None:
        self._update, self._receipt, self._is_counted, self.phase = update, None, False, "offering"
        self._is_hurried, self._sent_s = False, None

    def on_answer(self, body: Grant | RetransmitRequest | Receipt, group: asyncio.TaskGroup) -> bool:
        """The controller has answered; tasks that send belong to ``group``. Returns whether it is about the update."""
        update = self._update
        if update is None or body.transfer != update.key.transfer or body.round_id != update.key.round_id:
            return False
        match body:
            case Receipt():
                if body.accepted and self._receipt is None and not self._is_counted:
                    # It was read in memory, or has arrived before the call that sends it has returned. Counted now: the
                    # end of the run may come before the task of this update runs.
                    self._count(update.request.total_bytes)
                self._receipt = body
                self._answered.set()
            case Grant():
                self._start(update, None, group)
            case RetransmitRequest():
                self._start(update, body.seqs, group)
        return True

    def is_sending(self, round_id: int, transfer: int) -> bool:
        """Whether this is the update that it sends."""
        key = None if self._update is None else self._update.key
        return key is not None and (key.round_id, key.transfer) == (round_id, transfer)

    def interrupt(self) -> None:
        """Check at once whether the update is still wanted, and soon again: an answer comes now, or never."""
        self._is_hurried, self._sent_s = True, None
        self._answered.set()

    def _count(self, num_bytes: int) -> None:
        self.bytes_up += num_bytes
        self._is_counted = True

    def _start(self, update: EncodedUpdate, only: Sequence[int] | None, group: asyncio.TaskGroup) -> None:
        """Send, unless frames are being sent, or on their way: those that are missing then will be requested again."""
        if (self._sending is None or self._sending.done()) and not self._is_on_the_way():
            self._probe.reached("after_grant_before_upload", update.key.round_id)
            name = f"client-{self._identity.sender}-send"
            self._sending = group.create_task(self._send(update, only), name=name)

    def _is_on_the_way(self) -> bool:
        """Return whether the transport has not delivered yet what was sent last."""
        if self._sent_s is None or asyncio.get_running_loop().time() - self._sent_s >= ON_THE_WAY_S:
            return False
        return not self._bus.is_delivered(ClientUpdate)

    async def _send(self, update: EncodedUpdate, only: Sequence[int] | None) -> None:
        self.phase = "uploading"
        try:
            size = await self._bus.send_update(update.key, update.request.num_samples, update.payload, only=only)
            self._sent_s = asyncio.get_running_loop().time()
            if self._receipt is None:  # else the receipt has counted it
                self._count(size)
        except BusError as error:
            log.warning("update not sent", round=update.key.round_id, reason=str(error))

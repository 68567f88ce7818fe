"""Receiving updates: request, grant, frames, sum, receipt.

A client requests the upload and sends on a grant, so the controller holds a bounded number of bytes however many
clients there are. An update is added when all its bytes are there and checked: it counts in full or not at all.

The update of a client of this machine may lie in frozen shared memory. It needs no grant, no copy and nothing of the
budget: it is added from there. Where it cannot be read, it is granted and sent like all others.

An update may come in packets (``packets_in.py``), each of which is requested and granted by itself. When all are here
they are added to one vector, which counts as any other update does: as weights or a difference, within all limits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from gradbus.actors.aggregation.clipping import ENOUGH, SampleCap
from gradbus.actors.aggregation.packet_sum import sum_packets
from gradbus.actors.aggregation.partial_sum import CountedTwice, PartialSum
from gradbus.actors.aggregation.partial_sum import parse as parse_sum
from gradbus.actors.aggregation.strategies import NoRoom, Strategy
from gradbus.actors.aggregation.sum_summary import SumSummary
from gradbus.actors.aggregation.updates import Facts
from gradbus.actors.aggregation.updates import parse as parse_update
from gradbus.actors.federated.asynchronous import BaseGone, Bases
from gradbus.actors.federated.masked_attempt import MaskedAttempt
from gradbus.actors.federated.packets_in import PacketCollector
from gradbus.actors.federated.participation import Quarantine, Strike
from gradbus.actors.federated.report import RoundTiming
from gradbus.actors.federated.rounds import REPEATED, STALE, SURPLUS, Round, RoundTotals
from gradbus.actors.federated.state import RunContext
from gradbus.actors.federated.uploads import UNEXPECTED, IncomingUpload, RequestedUpload, Uploads
from gradbus.codecs import CodecError, NonFiniteError
from gradbus.runtime.dds.topics import TOPICS
from gradbus.runtime.errors import FrameError, WriteTimeout
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import SharedMemoryFault, is_here
from gradbus.runtime.shm.shared_payload import read
from gradbus.runtime.tasks import TaskGroup
from gradbus.runtime.testing.journal import update_name
from gradbus.runtime.wire.control import Body, PacketRequest, UploadRequest
from gradbus.runtime.wire.frames import FrameKey
from gradbus.runtime.wire.messages import ClientUpdate

ALONE = "no second update"  # why the only update of an attempt does not count
MAX_STEPS = 0xFFFF_FFFF
_NO_STRIKE = {CountedTwice: "counted twice", BaseGone: STALE, NoRoom: "no room"}
_NOTED = 100  # refusals of one kind in a round that a journal lists

log = get_logger("controller")


def facts_of(client_id: int, request: UploadRequest, weight: int) -> Facts:
    """Return what a client has announced, where its update counts with this weight."""
    return Facts(
        client_id=client_id, num_samples=weight, round_id=request.round_id, steps=request.steps,
        loss=request.loss if math.isfinite(request.loss) else None, metrics=request.metrics,
    )  # fmt: skip


class UpdateRefusal(NamedTuple):
    """The reason why an update does not count. ``is_strike``: no honest client sends such an update."""

    reason: str
    text: str
    is_strike: bool = False


def _unusable(error: ValueError) -> UpdateRefusal:
    """The refusal of an update that could not be added."""
    if (reason := _NO_STRIKE.get(type(error))) is not None:
        return UpdateRefusal(reason, str(error))
    malformed = "malformed" if isinstance(error, CodecError) else "refused"
    return UpdateRefusal("non-finite" if isinstance(error, NonFiniteError) else malformed, str(error), True)


class Settling(Enum):
    """Whether the updates of a first round can be weighed."""

    WAIT = "for more requests"
    ALONE = "there will be no second one in this attempt"
    SETTLED = "the cap on samples is known"


class UpdateAdmission:
    """Decides which uploads are admitted. Pure: no bus, no clock, no tensors.

    Attributes:
        steps: numbers of optimizer steps that the open round asks for, where it is counted in them.
        steps_per_sample: most optimizer steps that it allows for each announced sample, where it is counted in epochs.
        max_staleness: rounds by which the base of an update may be behind that of the open round.
    """

    def __init__(
        self, quarantine: Quarantine, cap: SampleCap, *, run_id: int, max_bytes: int, budget_bytes: int,
        max_samples: int,
    ) -> None:  # fmt: skip
        """``max_bytes``, ``max_samples``: of an honest update. ``budget_bytes``: of granted updates, one of which is
        always admitted."""
        self.quarantine = quarantine
        self.cap = cap
        self.run_id = run_id
        self._max_bytes = max_bytes
        self.budget_bytes = budget_bytes
        self._max_samples = max_samples
        self.steps: Container[int] = ()
        self.steps_per_sample = MAX_STEPS
        self.max_staleness = 0

    def refusal(self, update: RequestedUpload, round_: Round | None) -> UpdateRefusal | None:
        """The reason to refuse this update while this round is open; None: it is admitted."""
        client_id, request = update.client_id, update.request
        if round_ is None or request.run_id != self.run_id or round_.staleness(request.round_id) < 0:
            return UpdateRefusal(STALE, f"round {request.round_id} is not open")
        if (staleness := round_.staleness(request.round_id)) > self.max_staleness:
            return UpdateRefusal(STALE, f"its model is {staleness} rounds old, at most {self.max_staleness} are taken")
        if (why := self.quarantine.exclusion_reason(client_id, request.round_id)) is not None:
            return UpdateRefusal("quarantine", why)
        if (why := round_.may_send(client_id)) is not None:
            return UpdateRefusal("unexpected", f"client {client_id} is {why} in this round")
        if not 1 <= request.num_samples <= self._max_samples:
            return UpdateRefusal("samples", f"{request.num_samples} samples are out of range", True)
        if request.steps > self.steps_per_sample * request.num_samples and request.steps not in self.steps:
            text = f"{request.steps} steps on {request.num_samples} samples: at most {self.steps_per_sample} for each"
            asked = f"{request.steps} steps, which is not what was asked for"
            return UpdateRefusal("steps", text if self.steps_per_sample else asked, True)
        if not 0 < request.total_bytes <= self._max_bytes and not isinstance(request, PacketRequest):
            text = f"{request.total_bytes} bytes, at most {self._max_bytes} with this codec and model"
            return UpdateRefusal("oversized", text, True)
        return None

    def has_room(self, request: UploadRequest, granted: Iterable[UploadRequest], kept_bytes: int = 0) -> bool:
        """Whether an update may be granted beside the granted ones. ``kept_bytes``: of packets that are here."""
        in_flight = kept_bytes + sum(other.total_bytes for other in granted)
        return not in_flight or in_flight + request.total_bytes <= self.budget_bytes

    def settle(self, round_: Round, announced: Mapping[int, int], now_s: float) -> Settling:
        """Fix the cap on samples in a first round, once enough clients have ``announced`` theirs."""
        if not round_.has_enough_requests(announced.keys(), now_s):
            return Settling.WAIT
        if self.cap.clients(announced) < min(ENOUGH, round_.minimum):
            # The round needs a second update anyhow. By itself, this one would set its own cap.
            return Settling.ALONE if round_.open <= announced.keys() else Settling.WAIT
        self.cap.settle(announced)
        return Settling.SETTLED


@dataclass(slots=True, eq=False)
class _IncomingUpdate(IncomingUpload):
    """An update on its way.

    Attributes:
        adding: it is being read, decoded and added. crc32: of its payload, where the journal needs it later.
        packets: payloads of all its packets, where it came in such, until they are added.
    """

    adding: bool = False
    crc32: int = 0
    packets: Sequence[memoryview] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here, and will count or be refused in a moment."""
        return self.adding or self.payload is not None or bool(self.packets)


class _MaskedUpdate(NamedTuple):
    """An update that is in the sum of an attempt with secure aggregation. ``weight``: in front of the strategy."""

    update: RequestedUpload
    weight: int
    crc32: int

    @property
    def client_id(self) -> int:
        return self.update.client_id

    @property
    def request(self) -> UploadRequest:
        return self.update.request


class UpdateReceiver:
    """Receives the updates of one round at a time. All methods are called on the loop.

    Attributes:
        totals: sums over the updates that count. timing: moments of the round. dropped: what did not count, by reason.
        capped: samples announced by the clients that weigh less in this round.
        masked: the attempt at the open round, with secure aggregation; its updates count once they are unmasked.
        counted: what was announced of the updates that count, until it is taken; None: nothing takes it.
        bases: of asynchronous rounds, in which what comes between two of them waits for the next; None: of others.
    """

    def __init__(
        self, context: RunContext, strategy: Strategy, admission: UpdateAdmission, *, dim: int,
        on_strike: Callable[[Strike], Awaitable[None]], on_change: Callable[[], None],
    ) -> None:  # fmt: skip
        """``on_strike`` is called with each strike, ``on_change`` when an update was counted or refused."""
        self._context = context
        self._strategy = strategy
        self._admission = admission
        self._dim = dim
        self._on_strike = on_strike
        self._on_change = on_change
        self._uploads: Uploads[_IncomingUpdate] = Uploads(self._send)
        self._round: Round | None = None
        self._to_begin: tuple[int, Tensor] | None = None  # a round that the strategy has not begun yet, and its base
        self._requests: dict[int, RequestedUpload] = {}  # by client, in order of arrival
        self._transfers: dict[FrameKey, _IncomingUpdate] = {}
        self._packets: PacketCollector | None = None  # made with the first packet
        self._complete: deque[_IncomingUpdate] = deque()
        self._counted: dict[int, FrameKey] = {}  # client -> its last update that counted
        self._unreadable: dict[int, int] = {}  # client -> incarnation whose memory cannot be read from here
        self._folding = asyncio.Lock()
        self._work = asyncio.Event()
        self._repaired_s = 0.0
        self.totals = RoundTotals()
        self.timing = RoundTiming()
        self.dropped: Counter[str] = Counter()
        self.capped: dict[int, int] = {}
        self._rejected_before: Counter[str] = Counter()
        self.counted: list[Facts] | None = None
        self.bases: Bases | None = None
        self.masked: MaskedAttempt | None = None
        self._masked_updates: dict[int, _MaskedUpdate] = {}  # by client: in the sum of the attempt
        self._waiting: dict[int, RequestedUpload] = {}  # with bases: requests that came while no round was open

    def open(self, round_: Round, base: Tensor, masked: MaskedAttempt | None = None) -> None:
        """Take updates for this round. Another attempt at it goes on with the updates that count.

        Args:
            base: float32, shape (D,): the model that the clients hold.
            masked: with secure aggregation: what the updates are masked for.
        """
        self.masked = masked
        self._masked_updates = {}
        if not round_.accepted:
            self.totals = RoundTotals()
            self.capped = {}
            self.timing.begin()
            self._to_begin = round_.round_id, base
        self._work.set()
        self._round = round_
        if self._packets is not None:
            self._packets.keep(lambda round_id: 0 <= round_.staleness(round_id) <= self._admission.max_staleness)
        if self.bases is None:
            self._requests.clear()

    def take_dropped(self) -> dict[str, int]:
        """Updates, frames and invalid samples that did not count since the last call, by reason."""
        rejected = self._context.bus.rejected
        dropped = self.dropped + (rejected - self._rejected_before)
        self._rejected_before = rejected
        self.dropped = Counter()
        return dict(dropped)

    async def close(self) -> None:
        """Take no more updates. Returns when none is being added any more."""
        self._round = None
        if self.bases is None:
            self._requests.clear()
            self._packets = None
            for key in list(self._transfers):
                self._drop(key)
        async with self._folding:
            pass

    async def on_request(self, client_id: int, incarnation: int, request: UploadRequest) -> None:
        """A client requests an upload."""
        update = RequestedUpload(client_id, incarnation, request)
        if self._counted.get(client_id) == update.whole_key:  # the receipt was lost
            await self._send_receipt(update)
            return
        if self.masked is not None and self._is_put_off(self.masked, update):
            return
        if self._round is None and self.bases is not None:
            self._waiting[client_id] = update
            return
        refusal = (
            self._admission.refusal(update, self._round) or self._masked_refusal(update) or self._packet_refusal(update)
        )
        if refusal is not None:
            await (self._reject if refusal.is_strike else self._refuse)(update, refusal)
            return
        granted = [t for t in self._transfers.values() if t.source.client_id == client_id]
        if any(transfer.is_complete for transfer in granted):
            return  # only then another one may come
        if self._packets is not None and await self._is_answered(self._packets, update):
            return
        if update.is_announced:
            self.timing.offered(client_id, incarnation, request)
        for transfer in granted:
            if not transfer.source.goes_with(update):
                self._drop(transfer.key)  # its client trained again: only the newest update counts
        if not any(transfer.source.repeats(update) for transfer in granted):
            await self._wait_or_take_in(update)
        await self._grant_more()

    async def _is_answered(self, packets: PacketCollector, update: RequestedUpload) -> bool:
        """Whether packets that are here leave nothing to do for this request."""
        if packets.is_outdated(update):
            return True
        packets.follow(update)
        if packets.has(update):
            await self._answer_packet(packets, update)
            return True
        return False

    async def _wait_or_take_in(self, update: RequestedUpload) -> None:
        """Take in an update that may be sent now, or let it wait for what is not known yet of a first round."""
        if not self._admission.cap.is_settled and update.is_announced:
            self._requests[update.client_id] = update
            await self._settle()
        else:
            self._take_in(update)

    def _is_put_off(self, masked: MaskedAttempt, update: RequestedUpload) -> bool:
        """Whether the answer to a request has to wait, with secure aggregation: it is repeated."""
        held, request = self._masked_updates.get(update.client_id), update.request
        if held is not None and held.update.key == update.key:
            return True  # it is here, and counts if the attempt comes to a sum
        if self._round is None:
            return True  # whether the attempt comes to a sum, or there is another one, is not known yet
        is_of_round = request.round_id == self._round.round_id
        return is_of_round and request.attempt not in (0, masked.number)  # its client will hear of the newer attempt

    def _masked_refusal(self, update: RequestedUpload) -> UpdateRefusal | None:
        """The reason why an update cannot be in the sum of the attempt; None: it can, or there is none."""
        if self.masked is None:
            return None
        if not update.request.attempt:
            return UpdateRefusal("not masked", "this run takes masked updates alone", True)
        if not self.masked.takes(update.client_id):
            return UpdateRefusal("unexpected", f"the attempt goes on without client {update.client_id}")
        return None

    def _packet_refusal(self, update: RequestedUpload) -> UpdateRefusal | None:
        """The reason why an update is refused because of this packet; None: there is none, or it is no packet."""
        if not isinstance(update.request, PacketRequest):
            return None
        if self.masked is not None or self._context.config.clients.kind == "sites":
            return UpdateRefusal("packets", "this run takes masked updates, or sums of sites, each in one piece", True)
        if self._packets is None:
            self._packets = PacketCollector(self._dim)
        if self._packets.is_outdated(update) or not (fault := self._packets.fault(update)):
            return None
        self._packets.forget(update.client_id, update.incarnation)
        return UpdateRefusal("packets", fault, True)

    async def settle_masked(self, partial: PartialSum | None) -> None:
        """End an attempt with secure aggregation: with its sum all of its updates count; None: it has failed.

        Raises:
            ValueError: the sum cannot be used, and nothing counts; the text says why.
        """
        updates = list(self._masked_updates.values())
        if partial is None:
            self._masked_updates, self.totals, self.capped = {}, RoundTotals(), {}
            return
        await self._context.compute.run(self._add_unmasked, partial, updates)
        self._counted.update({held.client_id: held.update.key for held in updates})
        self._masked_updates = {}
        if self.counted is not None:
            self.counted += [facts_of(one.client_id, one.request, one.weight) for one in updates]
        for held in updates:
            await self._send_receipt(held.update)

    def _add_unmasked(self, partial: PartialSum, updates: Sequence[_MaskedUpdate]) -> None:
        """Give the sum to the strategy, off the loop. The journal notes the updates before their receipts go out."""
        self._strategy.add_masked(partial, [facts_of(one.client_id, one.request, one.weight) for one in updates])
        for one in updates:
            self._note_counted(one.update.key, one.request, one.weight, one.crc32)

    async def _settle(self) -> None:
        """Take in the updates of a first round, once their weights can be fixed."""
        round_ = self._round
        here = (transfer.source for transfer in self._transfers.values())  # of asynchronous rounds, from the one before
        updates = (update for update in (*here, *self._requests.values()) if update.is_announced)
        announced = {update.client_id: update.request.num_samples for update in updates}
        if self._admission.cap.is_settled or round_ is None or not announced:
            return
        match self._admission.settle(round_, announced, time.monotonic()):
            case Settling.ALONE:
                for client_id in announced:
                    round_.fail(client_id, ALONE)
                self._on_change()
            case Settling.SETTLED:
                for update in list(self._requests.values()):
                    self._take_in(update)
                self._work.set()
                await self._grant_more()

    def _take_in(self, update: RequestedUpload) -> None:
        """Read the update in its client's memory, or let its request wait for a grant."""
        unreadable = self._unreadable.get(update.client_id) == update.incarnation
        if self._context.bus.memory.here and is_here(update.request.memory) and not unreadable:
            self._requests.pop(update.client_id, None)
            self._complete.append(self._begin(update, in_memory=True))
            self._work.set()
        else:
            self._requests[update.client_id] = update

    def _begin(self, update: RequestedUpload, *, in_memory: bool = False) -> _IncomingUpdate:
        transfer = self._transfers[update.key] = _IncomingUpdate(update, time.monotonic(), in_memory)
        return transfer

    async def on_frame(self, message: ClientUpdate) -> None:
        """A frame of an update."""
        try:
            complete = self._uploads.feed(message)
        except FrameError as error:
            is_late = error.reason == UNEXPECTED and self._round is None
            self.dropped["late frame" if is_late else error.reason] += 1
            return
        if complete is not None:
            self.timing.note(complete.source.client_id, "received")
            if isinstance(complete.request, PacketRequest):
                await self._on_packet(complete)
                return
            self._complete.append(complete)
            self._work.set()

    async def _on_packet(self, transfer: _IncomingUpdate) -> None:
        """A packet is here: its update is complete, or its client is told so."""
        update, payload = transfer.source, transfer.payload
        assert payload is not None
        self._transfers.pop(transfer.key, None)
        if (refusal := self._packet_refusal(update)) is not None:  # of packets that came meanwhile
            await self._reject(update, refusal)
            return
        assert self._packets is not None, "made with the refusal"
        whole = self._packets.add(update, payload)
        if whole is not None:
            self._begin(whole.source).packets = whole.packets
            self._complete.append(self._transfers[whole.source.key])
            self._work.set()
        if whole is None or not update.is_announced:
            await self._answer_packet(self._packets, update)
        await self._grant_more()

    async def _answer_packet(self, packets: PacketCollector, update: RequestedUpload) -> None:
        """Tell a client that a packet is here, and with the last one which others are not."""
        await self._send(packets.missing(update) or update.receipt())

    def forget(self, client_id: int, incarnation: int) -> None:
        """Drop the incomplete update of a client that is gone."""
        if self._packets is not None and self._packets.forget(client_id, incarnation):
            self.dropped["cut short"] += 1
        if client_id in self._waiting and self._waiting[client_id].incarnation == incarnation:
            del self._waiting[client_id]
        offered = self._requests.get(client_id)
        if offered is not None and offered.incarnation == incarnation:
            del self._requests[client_id]
        for transfer in list(self._transfers.values()):
            if transfer.source[:2] == (client_id, incarnation) and not transfer.is_complete:
                self._drop(transfer.key)
                self.dropped["cut short"] += 1

    async def run(self) -> None:
        """Add complete updates, one after the other; request missing frames. Runs until cancelled."""
        async with TaskGroup() as receipts:
            while True:
                try:
                    async with asyncio.timeout(self._uploads.repair_period_s):
                        await self._work.wait()
                except TimeoutError:
                    await self._settle()  # a client may be lost, or the time be over
                    await self._repair()
                    continue
                self._work.clear()
                if self._to_begin is not None:  # beside the command, and before any update is added
                    beginning, self._to_begin = self._to_begin, None
                    await self._context.compute.run(self._begin_round, *beginning)
                while self._waiting and self._round is not None:
                    await self.on_request(*self._waiting.pop(next(iter(self._waiting))))
                while self._complete and self._takes_more:
                    async with self._folding:
                        await self._fold(self._complete.popleft(), receipts)
                    await self._grant_more()
                    await self._repair_if_due()
                await self._repair_if_due()

    def _begin_round(self, round_id: int, base: Tensor) -> None:
        """Make the strategy ready, on the compute thread."""
        self._strategy.begin(round_id, base)
        if self.bases is not None:
            self.bases.keep(round_id, base)

    @property
    def _takes_more(self) -> bool:
        """Whether complete updates are to be added now; those of asynchronous rounds may wait for the next one."""
        if self._to_begin is not None:  # the next round was opened while a grant was sent: its sum comes first
            return False
        if self.bases is None:
            return True
        # What came before may wait for a cap that is not known yet: without it, it would count as it was announced.
        return self._round is not None and not self._round.is_full and self._admission.cap.is_settled

    def _unreadable_from_here(self, transfer: _IncomingUpdate, error: SharedMemoryFault) -> None:
        """The update is not in its client's memory: have it sent."""
        update = transfer.source
        log.warning("no shared memory", client=update.client_id, reason=str(error), effect="its updates go over DDS")
        self._unreadable[update.client_id] = update.incarnation
        self._drop(transfer.key)
        self._requests[update.client_id] = update

    async def _fold(self, transfer: _IncomingUpdate, receipts: TaskGroup) -> None:
        """Add an update to the sum, and have its receipt sent while the next one is added."""
        update, round_ = transfer.source, self._round
        if round_ is None or self._transfers.get(transfer.key) is not transfer:
            return  # the round ended meanwhile
        if round_.may_send(update.client_id) in (REPEATED, SURPLUS):
            self._drop(transfer.key)  # no client counts twice, and no update beyond those that are enough
            return
        staleness = round_.staleness(update.request.round_id)
        if staleness < 0:
            self._drop(transfer.key)  # of another round, which was left without a close()
            return
        started_s = time.perf_counter()
        weight = self._admission.cap.weight(update.request.num_samples)
        self.timing.note(update.client_id, "adding")
        transfer.adding = True
        try:
            partial = await self._context.compute.run(self._add, transfer, weight, staleness)
        except SharedMemoryFault as error:
            if self._transfers.get(transfer.key) is transfer:  # else it is no longer wanted, and may well be gone
                self._unreadable_from_here(transfer, error)
        except ValueError as error:
            await self._reject(update, _unusable(error))
        else:
            self.totals.aggregate_s += time.perf_counter() - started_s
            self._count(round_, update, weight, from_memory=transfer.in_memory, partial=partial)
            if self.masked is not None:
                self._masked_updates[update.client_id] = _MaskedUpdate(update, weight, transfer.crc32)
            else:
                self._counted[update.client_id] = update.whole_key
                receipts.create_task(self._send_receipt(update), name="receipt")
        finally:
            self._transfers.pop(transfer.key, None)
            if transfer.in_memory and transfer.payload is not None:
                self._context.bus.memory.read_bytes[TOPICS[ClientUpdate].name] += len(transfer.payload)
            transfer.payload, transfer.packets = None, ()  # also where an error's traceback holds the transfer

    def _count(
        self, round_: Round, update: RequestedUpload, weight: int, *, from_memory: bool, partial: SumSummary | None
    ) -> None:
        client_id, request = update.client_id, update.request
        staleness = round_.staleness(request.round_id)
        self.totals.count(
            client_id, request, weight, from_memory=from_memory, partial=partial, staleness=staleness
        )  # fmt: skip
        if self.counted is not None and self.masked is None:  # a masked one may still be lost with its attempt
            self.counted.append(dataclasses.replace(facts_of(client_id, request, weight), staleness=staleness))
        if weight < request.num_samples:
            log.warning(
                "samples capped", client=client_id, round=request.round_id, announced=request.num_samples, weight=weight
            )
            self.capped[client_id] = request.num_samples
        self.timing.counted(client_id, request)
        round_.accept(client_id, time.monotonic())
        self._on_change()

    def _add(self, transfer: _IncomingUpdate, weight: int, staleness: int) -> SumSummary | None:
        """Read, decode and add, off the loop. The journal notes it before the receipt goes out. ``staleness``: of its
        base. Returns what a site has reported of its clients; None: it is the update of a client."""
        key, request, history = transfer.key, transfer.source.request, self._context.history
        payload = transfer.payload
        if transfer.packets:
            payload = transfer.payload = sum_packets(transfer.packets, dim=self._dim)
        elif payload is None:
            payload = transfer.payload = read(request.memory, request.total_bytes)
        summary = None
        if self.masked is not None:
            self.masked.add(key.sender, payload, request.num_samples)
            transfer.crc32 = history.checksum(payload)
            return None
        if self._context.config.clients.kind == "sites":
            summary = self._add_sum(key.sender, payload, weight)
        else:
            update = parse_update(payload, expected_dim=self._dim, others=self._strategy.sections)
            if self.bases is not None:
                update = update.with_model(self.bases.brought(update.model, key.round_id, staleness))
            facts = facts_of(key.sender, request, weight)
            self._strategy.add(update, dataclasses.replace(facts, staleness=staleness))
        history.keep(update_name(key.round_id, key.sender, key.incarnation, key.transfer), payload)
        self._note_counted(key, request, weight, history.checksum(payload))
        return summary

    def _note_counted(self, key: FrameKey, request: UploadRequest, weight: int, crc32: int) -> None:
        self._context.history.note(
            "counted", round=key.round_id, client=key.sender, incarnation=key.incarnation, transfer=key.transfer,
            num_samples=request.num_samples, bytes=request.total_bytes, crc32=crc32, weight=weight,
            steps=request.steps,
            loss=request.loss if math.isfinite(request.loss) else None, metrics=request.metrics,
        )  # fmt: skip

    def _add_sum(self, site_id: int, payload: memoryview, announced: int) -> SumSummary:
        """Add the exact sum of a site."""
        partial = parse_sum(payload, expected_dim=self._dim, max_samples=self._context.config.limits.max_samples)
        summary = partial.summary
        if summary.num_samples != announced:
            raise CodecError(f"partial sum of {summary.num_samples:,} samples, {announced:,} were announced")
        for other_id, other in self.totals.sums.items():
            if other_id != site_id and (client_id := summary.shared_client(other)) is not None:
                raise CountedTwice(
                    f"client {client_id} counts already, in the sum of site {other_id}: a client belongs to one site, "
                    f"and its id to one client of the whole tree"
                )
        self._strategy.add_sum(partial)
        return summary

    async def _grant_more(self) -> None:
        """Grant requests in order of arrival while the budget lasts."""
        # Evaluated anew after each grant: while it is sent, requests come and go.
        while (update := self._next_to_grant()) is not None:
            del self._requests[update.client_id]
            self.timing.note(update.client_id, "granted")
            await self._uploads.grant(self._begin(update))

    def _next_to_grant(self) -> RequestedUpload | None:
        """The request that is granted next; None: there is none, or no room for it. Beyond the budget there is room for
        the oldest update in packets: else those of several clients could wait for each other."""
        waiting = self._requests
        if not self._admission.cap.is_settled:
            waiting = {client_id: update for client_id, update in waiting.items() if not update.is_announced}
        if (first := next(iter(waiting.values()), None)) is None:
            return None
        on_their_way = (other.request for other in self._transfers.values() if not other.in_memory)
        packets = self._packets
        if self._admission.has_room(first.request, on_their_way, 0 if packets is None else packets.num_bytes):
            return first
        oldest = None if packets is None else packets.oldest
        if oldest is None or any(other.source.client_id == oldest for other in self._transfers.values()):
            return None
        return waiting.get(oldest)

    async def _repair_if_due(self) -> None:
        """Request missing frames also where :meth:`run` never waits for long: with many updates in memory, or with ones
        that are complete one by one, each before a wait is over."""
        if time.monotonic() - self._repaired_s > 2 * self._uploads.repair_period_s:
            await self._repair()

    async def _repair(self) -> None:
        self._repaired_s = time.monotonic()
        for transfer in await self._uploads.repair():
            self.dropped["stalled"] += 1
            self._drop(transfer.key)
            await self._grant_more()

    def _drop(self, key: FrameKey) -> None:
        transfer = self._transfers.pop(key, None)
        if transfer is not None and transfer in self._complete:  # one whose bytes are still in its client's memory
            self._complete.remove(transfer)
        self._uploads.drop(key)

    async def _reject(self, update: RequestedUpload, refusal: UpdateRefusal) -> None:
        """Refuse an update whose client is not waited for in this round any more."""
        client_id, round_id = update.client_id, update.request.round_id
        log.warning("update dropped", client=client_id, round=round_id, reason=refusal.reason, detail=refusal.text)
        if self._round is not None:
            self._round.fail(client_id, refusal.reason)
            self._on_change()
        await self._refuse(update, refusal)
        if refusal.is_strike:
            strike = self._admission.quarantine.strike(client_id, round_id, refusal.reason, refusal.text)
            if strike is not None:
                await self._on_strike(strike)

    async def _refuse(self, update: RequestedUpload, refusal: UpdateRefusal) -> None:
        self.dropped[refusal.reason] += 1
        if self.dropped[refusal.reason] <= _NOTED:  # endless requests fill no disk; the count is noted with the round
            facts = {"client": update.client_id, "incarnation": update.incarnation, "reason": refusal.reason}
            self._context.history.note("refused", round=update.request.round_id, **facts)
        await self._send_receipt(update, refusal.text or refusal.reason)

    async def _send_receipt(self, update: RequestedUpload, refusal: str = "") -> None:
        await self._send(update.receipt(refusal))

    async def _send(self, body: Body) -> None:
        try:
            await self._context.publish(body)
        except WriteTimeout as error:  # the client repeats its request
            log.warning("message not sent", message=type(body).__name__, reason=str(error))

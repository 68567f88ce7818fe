"""Receiving updates: request, grant, frames, sum, receipt.

A client requests the upload and sends on a grant, so the controller holds a bounded number of bytes however many
clients there are. An update is added when all its bytes are there and checked: it counts in full or not at all. Where
clients may lie, it is held until the bounds of the round are known: see ``held_updates.py``.

The update of a client of this machine may lie in frozen shared memory. It needs no grant, no copy and nothing of the
budget: it is added from there. Where it cannot be read, it is granted and sent like all others.

An update may come in packets (``packets_in.py``), each of which is requested and granted by itself. When all are here
they are added to one vector, which counts as any other update does: as weights or a difference, within all limits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Awaitable, Callable

from torch import Tensor

from gradbus.actors.aggregation.partial_sum import PartialSum
from gradbus.actors.aggregation.sum_summary import SumSummary
from gradbus.actors.aggregation.updates import Facts
from gradbus.actors.federated.controller.held_updates import HeldUpdates, Settling
from gradbus.actors.federated.controller.masked_attempt import MaskedAttempt
from gradbus.actors.federated.controller.packets_in import PacketCollector
from gradbus.actors.federated.controller.report import RoundTiming
from gradbus.actors.federated.controller.rounds import REPEATED, SURPLUS, Round, RoundTotals
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.controller.update_admission import Strike, UpdateAdmission, UpdateRefusal
from gradbus.actors.federated.controller.update_answers import UpdateAnswers
from gradbus.actors.federated.controller.update_sum import IncomingUpdate, MaskedUpdate, UpdateSum, facts_of, unusable
from gradbus.actors.federated.controller.uploads import UNEXPECTED, ByClient, RequestedUpload, Uploads
from gradbus.runtime.errors import FrameError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import SharedMemoryFault, is_here
from gradbus.runtime.tasks import TaskGroup
from gradbus.runtime.transport.channels import CHANNELS
from gradbus.runtime.wire.control import PacketRequest, UploadRequest
from gradbus.runtime.wire.frames import FrameKey
from gradbus.runtime.wire.messages import ClientUpdate

UNCOMPARED = "too few updates to compare"  # why none of an attempt counts, where clients may lie

log = get_logger("controller")


class UpdateReceiver:
    """Receives the updates of one round at a time. All methods are called on the loop.

    Attributes:
        totals: sums over the updates that count. timing: moments of the round.
        masked: the attempt at the open round, with secure aggregation; its updates count once they are unmasked.
    """

    def __init__(
        self,
        context: RunContext,
        admission: UpdateAdmission,
        update_sum: UpdateSum,
        *,
        on_strike: Callable[[Strike], Awaitable[None]],
        on_change: Callable[[], None],
        keeps_counted: bool = False,
    ) -> None:
        """An update receiver without an open round.

        Args:
            update_sum: to which updates are added.
            on_strike: called with each strike. on_change: called when an update was counted or refused.
            keeps_counted: :meth:`take_counted` is called.
        """
        self._context = context
        self._dropped = context.dropped
        self._admission = admission
        self._sum = update_sum
        self._is_asynchronous = update_sum.form.bases is not None
        self._on_strike = on_strike
        self._on_change = on_change
        self._answers = UpdateAnswers(context)
        self._uploads: Uploads[IncomingUpdate] = Uploads(self._answers.send)
        self._round: Round | None = None
        self._to_begin: tuple[int, Tensor] | None = None  # a round that the strategy has not begun yet, and its base
        # In order of arrival. Of each client those of one update: several only where it comes in packets.
        self._requests: ByClient[RequestedUpload] = ByClient(lambda update: update.request.total_bytes)
        self._transfers: ByClient[IncomingUpdate] = ByClient(
            lambda transfer: 0 if transfer.in_memory else transfer.request.total_bytes
        )
        self._packets: PacketCollector | None = None  # made with the first packet
        self._complete: deque[IncomingUpdate] = deque()
        self._unreadable: dict[int, int] = {}  # client -> incarnation whose memory cannot be read from here
        self._folding = asyncio.Lock()
        self._work = asyncio.Event()
        self._repaired_s = 0.0
        self.totals = RoundTotals()
        self.timing = RoundTiming()
        self._keeps_counted = keeps_counted
        self._newly_counted: list[Facts] = []
        self.masked: MaskedAttempt | None = None
        self._masked_updates: dict[int, MaskedUpdate] = {}  # by client: in the sum of the attempt
        # In asynchronous rounds: requests that came while no round was open, by client and whether they announce it.
        self._waiting: dict[tuple[int, bool], RequestedUpload] = {}
        self._held = None if update_sum.bounds is None else HeldUpdates(update_sum.bounds)

    def open_round(self, round_: Round, base: Tensor, masked: MaskedAttempt | None = None) -> None:
        """Take updates for this round. Another attempt at it goes on with the updates that count.

        Args:
            base: float32, shape (D,): the model that the clients hold.
            masked: with secure aggregation: what the updates are masked for.
        """
        self.masked = masked
        self._masked_updates = {}
        if not round_.accepted:
            self.totals = RoundTotals()
            if self._held is not None:
                self._held.begin()
            self.timing.begin()
            self._to_begin = round_.round_id, base
        self._work.set()
        self._round = round_
        if self._packets is not None:
            self._packets.keep(lambda round_id: 0 <= round_.staleness(round_id) <= self._admission.max_staleness)
        if not self._is_asynchronous:
            self._requests.clear()

    def take_counted(self) -> list[Facts]:
        """Return what was announced of the updates that count since the last call."""
        counted, self._newly_counted = self._newly_counted, []
        return counted

    async def close(self) -> None:
        """Take no more updates. Returns when none is being added any more."""
        self._round = None
        if not self._is_asynchronous:
            self._requests.clear()
            self._packets = None
            for key in list(self._transfers):
                self._drop(key)
        async with self._folding:
            pass

    async def on_request(self, client_id: int, incarnation: int, request: UploadRequest) -> None:
        """A client requests an upload."""
        update = RequestedUpload(client_id, incarnation, request)
        if self._answers.is_counted(update):  # the receipt was lost
            await self._answers.send_receipt(update)
            return
        if self.masked is not None and self._is_put_off(self.masked, update):
            return
        if self._round is None and self._is_asynchronous:
            self._waiting[client_id, update.is_announced] = update
            return
        refusal = (
            self._answers.earlier_refusal(update)
            or self._admission.refusal(update, self._round)
            or self._masked_refusal(update)
            or self._packet_refusal(update)
            or self._announcement_refusal(update)
        )
        if refusal is not None:
            await (self._reject if refusal.is_strike else self._answers.refuse)(update, refusal)
            return
        granted = self._transfers.of(client_id)
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
            self._take_in(update)
            await self._settle()
        await self._grant_more()

    async def _is_answered(self, packets: PacketCollector, update: RequestedUpload) -> bool:
        """Whether packets that are here leave nothing to do for this request."""
        if packets.is_outdated(update):
            return True
        packets.forget_others(update)
        if packets.has(update):
            await self._answer_packet(packets, update)
            return True
        return False

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
        if self.masked is not None or self._context.config.clients.kind == "sites" or self._sum.buffers is not None:
            text = "this run takes masked updates, sums of sites, or updates with merged buffers, each in one piece"
            return UpdateRefusal("packets", text, True)
        if self._packets is None:
            self._packets = PacketCollector(self._sum.form.dim)
        under_way = [one.source for one in self._transfers.of(update.client_id) if not one.is_complete]
        others = [*under_way, *self._requests.of(update.client_id)]
        if self._packets.is_outdated(update) or not (fault := self._packets.fault(update, others)):
            return None
        return UpdateRefusal("packets", fault, True)

    def _announcement_refusal(self, update: RequestedUpload) -> UpdateRefusal | None:
        """The reason why nothing can be made of what an update announces, so that it has no part in what is typical of
        all; None: something can, or nothing is bounded."""
        if (bounds := self._sum.bounds) is None or not update.is_announced:
            return None
        try:
            bounds.check(facts_of(update.client_id, update.request, update.request.num_samples))
        except ValueError as error:
            return unusable(error)
        return None

    async def settle_masked(self, partial: PartialSum | None, refusal: str = "") -> None:
        """End an attempt with secure aggregation: with its sum all of its updates count; None: it has failed.

        Args:
            refusal: why no other attempt follows; empty: one may.

        Raises:
            ValueError: the sum cannot be used, and nothing counts; the text says why.
        """
        updates = list(self._masked_updates.values())
        if partial is None:
            self._masked_updates, self.totals = {}, RoundTotals()
            for held in updates if refusal else ():
                await self._answers.send_receipt(held.update, refusal)
            return
        await self._context.compute.run(self._sum.add_masked, partial, updates)
        self._answers.counted.update({held.client_id: held.update.key for held in updates})
        self._masked_updates = {}
        if self._keeps_counted:
            self._newly_counted += [facts_of(one.client_id, one.request, one.weight) for one in updates]
        for held in updates:
            await self._answers.send_receipt(held.update)

    async def _settle(self) -> None:
        """Let held updates be added, once the bounds of the round can be set."""
        round_, held = self._round, self._held
        if held is None or held.is_settled or round_ is None:
            return
        in_packets = 0 if self._packets is None else len(self._packets.announced)
        waiting, now_s = len(self._transfers) + len(self._requests) + in_packets, time.monotonic()
        if not waiting or not held.may_settle(round_, waiting, now_s):
            return
        announced = self._announced()
        match held.settle(round_, announced, now_s):
            case Settling.TOO_FEW:
                for facts in announced.values():
                    round_.fail(facts.client_id, UNCOMPARED)
                self._on_change()
            case Settling.SETTLED:
                await self._context.compute.run(self._sum.note_bounds, round_.round_id)
                self._work.set()
                await self._grant_more()

    def _announced(self) -> dict[FrameKey, Facts]:
        """What clients have announced of updates that do not count yet: one of each client, whatever it sends."""
        on_their_way = (transfer.source for transfer in self._transfers.values())
        in_packets = () if self._packets is None else self._packets.announced
        by_client = {
            update.client_id: update
            for update in (*on_their_way, *self._requests.values(), *in_packets)
            if update.is_announced
        }
        return {
            update.key: facts_of(update.client_id, update.request, update.request.num_samples)
            for update in by_client.values()
        }

    def _take_in(self, update: RequestedUpload) -> None:
        """Read the update in its client's memory, or let its request wait for a grant."""
        for other in self._requests.of(update.client_id):
            if not other.goes_with(update):
                del self._requests[other.key]
        unreadable = self._unreadable.get(update.client_id) == update.incarnation
        if self._context.bus.memory.here and is_here(update.request.memory) and not unreadable:
            self._requests.pop(update.key, None)
            self._complete.append(self._begin(update, in_memory=True))
            self._work.set()
        else:
            self._requests[update.key] = update

    def _begin(self, update: RequestedUpload, *, in_memory: bool = False) -> IncomingUpdate:
        transfer = self._transfers[update.key] = IncomingUpdate(update, time.monotonic(), in_memory)
        return transfer

    async def on_frame(self, message: ClientUpdate) -> None:
        """A frame of an update."""
        try:
            complete = self._uploads.feed(message)
        except FrameError as error:
            is_late = error.reason == UNEXPECTED and self._round is None
            self._dropped["late frame" if is_late else error.reason] += 1
            return
        if complete is not None:
            self.timing.note(complete.source.client_id, "received")
            if isinstance(complete.request, PacketRequest):
                await self._on_packet(complete)
                return
            self._complete.append(complete)
            self._work.set()

    async def _on_packet(self, transfer: IncomingUpdate) -> None:
        """A packet is here: its update is complete, or its client is told so."""
        update, payload = transfer.source, transfer.payload
        assert payload is not None
        self._transfers.pop(transfer.key, None)
        if (refusal := self._packet_refusal(update)) is not None:  # of packets that came meanwhile
            await self._reject(update, refusal)
            return
        assert self._packets is not None, "made with the refusal"
        whole = self._packets.add(update, payload, time.monotonic())
        if whole is not None:
            complete = self._begin(whole.source)
            complete.hold_packets(whole.packets, whole.last)
            self._complete.append(complete)
            self._work.set()
        if whole is None or not update.is_announced:
            await self._answer_packet(self._packets, update)
        await self._grant_more()

    async def _answer_packet(self, packets: PacketCollector, update: RequestedUpload) -> None:
        """Tell a client that a packet is here, and with the last one which others are not."""
        await self._answers.send(packets.missing(update) or update.receipt())

    def forget(self, client_id: int, incarnation: int) -> None:
        """Drop the incomplete update of a client that is gone."""
        if self._packets is not None and self._packets.forget(client_id, incarnation):
            self._dropped["cut short"] += 1
        for place in ((client_id, False), (client_id, True)):
            if place in self._waiting and self._waiting[place].incarnation == incarnation:
                del self._waiting[place]
        for offered in self._requests.of(client_id):
            if offered.incarnation == incarnation:
                del self._requests[offered.key]
        for transfer in self._transfers.of(client_id):
            if transfer.source.incarnation == incarnation and not transfer.is_complete:
                self._drop(transfer.key)
                self._dropped["cut short"] += 1

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
                    await self._context.compute.run(self._sum.begin, *beginning)
                while self._waiting and self._round is not None:
                    await self.on_request(*self._waiting.pop(next(iter(self._waiting))))
                await self._measure_held()
                while self._complete and self._takes_more:
                    async with self._folding:
                        await self._fold(self._complete.popleft(), receipts)
                    await self._grant_more()
                    await self._repair_if_due()
                await self._repair_if_due()

    async def _measure_held(self) -> None:
        """Measure complete updates where that says what is typical of the round."""
        held = self._held
        while held is not None and held.must_measure and self._round is not None and self._to_begin is None:
            transfer = next((one for one in self._complete if not one.is_measured), None)
            if transfer is None:
                return
            async with self._folding:
                await self._measure(transfer, self._round, held)
            await self._settle()
            await self._grant_more()

    async def _measure(self, transfer: IncomingUpdate, round_: Round | None, held: HeldUpdates) -> None:
        """Note the norms of an update, which stays where it is."""
        update = transfer.source
        if round_ is None or self._transfers.get(transfer.key) is not transfer:
            self._let_go(transfer)  # the round ended meanwhile
            return
        staleness = max(0, round_.staleness(update.request.round_id))
        transfer.begin_reading()
        try:
            norms = await self._context.compute.run(self._sum.norms_of, transfer, staleness)
        except SharedMemoryFault as error:
            if self._transfers.get(transfer.key) is transfer:
                self._unreadable_from_here(transfer, error)
            self._let_go(transfer)
        except ValueError as error:
            self._let_go(transfer)
            await self._reject(update, unusable(error))
        else:
            transfer.note_measured()
            held.note(transfer.key, norms)
        finally:
            transfer.end_reading()
            if transfer.in_memory:
                transfer.let_go()  # it is still there

    def _let_go(self, transfer: IncomingUpdate) -> None:
        """Hold an update no longer."""
        if transfer in self._complete:
            self._complete.remove(transfer)
        if self._transfers.get(transfer.key) is transfer:
            del self._transfers[transfer.key]

    @property
    def _takes_more(self) -> bool:
        """Whether complete updates are to be added now; those of asynchronous rounds may wait for the next one."""
        # The next round may have been opened while a grant was sent: its sum comes first.
        if self._to_begin is not None or (self._held is not None and not self._held.is_settled):
            return False
        return not self._is_asynchronous or (self._round is not None and not self._round.is_full)

    def _unreadable_from_here(self, transfer: IncomingUpdate, error: SharedMemoryFault) -> None:
        """The update is not in its client's memory: have it sent."""
        update = transfer.source
        facts = self._context.client_facts(update.client_id)
        log.warning("no shared memory", **facts, reason=str(error), effect="its updates go over DDS")
        self._unreadable[update.client_id] = update.incarnation
        self._drop(transfer.key)
        self._requests[update.key] = update

    async def _fold(self, transfer: IncomingUpdate, receipts: TaskGroup) -> None:
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
        self.timing.note(update.client_id, "adding")
        transfer.begin_reading()
        try:
            weight = self._weight_of(update)
            partial = await self._add(transfer, weight, staleness)
        except SharedMemoryFault as error:
            if self._transfers.get(transfer.key) is transfer:  # else it is no longer wanted, and may well be gone
                self._unreadable_from_here(transfer, error)
        except (ValueError, ArithmeticError) as error:  # such as a division by what a client has announced
            await self._reject(update, unusable(error))
        else:
            self.totals.add_aggregation(time.perf_counter() - started_s)
            self._count(round_, update, weight, from_memory=transfer.in_memory, partial=partial)
            if self.masked is not None:
                self._masked_updates[update.client_id] = MaskedUpdate(update, weight, transfer.crc32, transfer.buffers)
            else:
                self._answers.counted[update.client_id] = update.whole_key
                receipts.create_task(self._answers.send_receipt(update), name="receipt")
        finally:
            self._transfers.pop(transfer.key, None)
            if transfer.in_memory and transfer.payload is not None:
                self._context.bus.memory.read_bytes[CHANNELS[ClientUpdate].name] += len(transfer.payload)
            transfer.let_go()  # also where an error's traceback holds the transfer

    async def _add(self, transfer: IncomingUpdate, weight: int, staleness: int) -> SumSummary | None:
        """Add an update on the compute thread, as of :meth:`.UpdateSum.add`."""
        if self.masked is None:
            sums = self.totals.sums
            return await self._context.compute.run(self._sum.add, transfer, weight, staleness, sums)
        await self._context.compute.run(self._sum.add_to_attempt, transfer, self.masked)
        return None

    def _count(
        self, round_: Round, update: RequestedUpload, weight: int, *, from_memory: bool, partial: SumSummary | None
    ) -> None:
        client_id, request = update.client_id, update.request
        staleness = round_.staleness(request.round_id)
        self.totals.count(client_id, request, weight, from_memory=from_memory, partial=partial, staleness=staleness)
        if self._keeps_counted and self.masked is None:  # a masked one may still be lost with its attempt
            self._newly_counted.append(dataclasses.replace(facts_of(client_id, request, weight), staleness=staleness))
        self.timing.counted(client_id, request)
        round_.accept(client_id, time.monotonic())
        self._on_change()

    def _weight_of(self, update: RequestedUpload) -> int:
        """The samples that an update counts as. Raises ValueError: it cannot be used."""
        samples, bounds = update.request.num_samples, self._sum.bounds
        if bounds is None:
            return samples
        return bounds.believed(facts_of(update.client_id, update.request, samples)).num_samples

    async def _grant_more(self) -> None:
        """Grant requests in order of arrival while the budget lasts."""
        # Evaluated anew after each grant: while it is sent, requests come and go.
        while (update := self._next_request()) is not None:
            if not self._has_room(update):
                if self._give_up_one() or self._forget_packets_for(update):
                    continue
                if (update := self._oldest_in_packets()) is None:
                    return
            del self._requests[update.key]
            self.timing.note(update.client_id, "granted")
            await self._uploads.grant(self._begin(update))

    def _has_room(self, update: RequestedUpload) -> bool:
        """Whether an update may be granted beside what is on its way, and the packets that are here."""
        kept_bytes = 0 if self._packets is None else self._packets.num_bytes
        return self._admission.has_room(update.request, self._transfers.num_bytes + kept_bytes)

    def _forget_packets_for(self, update: RequestedUpload) -> bool:
        """Make room by forgetting packets that may wait for long; their client is asked for them later. Returns whether
        there were such."""
        if self._packets is None:
            return False
        stalled_at_s = time.monotonic() - self._uploads.stall_after_s
        forgotten = self._packets.make_room(update, stalled_at_s=stalled_at_s)
        if forgotten is not None:
            facts = self._context.client_facts(forgotten)
            log.info("packets forgotten", **facts, reason="there is no room for them beside updates that are announced")
        return forgotten is not None

    def _oldest_in_packets(self) -> RequestedUpload | None:
        """The request of the update that has begun first of those in packets, if none of its packets is on its way.
        There is always room for it: else those of several clients could wait for each other."""
        oldest = None if self._packets is None else self._packets.oldest
        if oldest is None or self._transfers.of(oldest):
            return None
        return next(iter(self._requests.of(oldest)), None)

    def _next_request(self) -> RequestedUpload | None:
        """The request to grant next, in order of arrival; while updates are measured, of those that have not been."""
        requests, held = iter(self._requests.values()), self._held
        if held is None or not held.must_measure:
            return next(requests, None)
        return next((update for update in requests if not held.is_measured(update.key)), None)

    def _give_up_one(self) -> bool:
        """Forget the bytes of an update that has been measured, to make room for another one: it is requested again."""
        if self._held is None or not self._held.must_measure:
            return False
        measured = (one for one in self._complete if one.is_measured and not (one.in_memory or one.adding))
        if (given_up := next(measured, None)) is None:
            return False
        self._drop(given_up.key)
        self._requests[given_up.key] = given_up.last_packet or given_up.source  # with it, all others are asked for
        return True

    async def _repair_if_due(self) -> None:
        """Request missing frames also where :meth:`run` never waits for long: with many updates in memory, or with ones
        that are complete one by one, each before a wait is over."""
        if time.monotonic() - self._repaired_s > 2 * self._uploads.repair_period_s:
            await self._repair()

    async def _repair(self) -> None:
        self._repaired_s = time.monotonic()
        for transfer in await self._uploads.repair():
            self._dropped["stalled"] += 1
            self._drop(transfer.key)
            await self._grant_more()
        if self._requests and self._packets is not None:  # packets that stand still make room
            await self._grant_more()

    def _drop(self, key: FrameKey) -> None:
        transfer = self._transfers.pop(key, None)
        if transfer is not None and transfer in self._complete:  # one whose bytes are still in its client's memory
            self._complete.remove(transfer)
        self._uploads.drop(key)

    async def _reject(self, update: RequestedUpload, refusal: UpdateRefusal) -> None:
        """Refuse an update whose client is not waited for in this round any more."""
        client_id, round_id = update.client_id, update.request.round_id
        facts = self._context.client_facts(client_id)
        log.warning("update dropped", **facts, round=round_id, reason=refusal.reason, detail=refusal.text)
        self._forget_uploads(client_id)
        if self._round is not None:
            self._round.fail(client_id, refusal.reason)
            self._on_change()
        await self._answers.refuse(update, refusal)
        if refusal.is_strike:
            strike = self._admission.quarantine.strike(client_id, round_id, refusal.reason, refusal.text)
            if strike is not None:
                await self._on_strike(strike)

    def _forget_uploads(self, client_id: int) -> None:
        """Forget what else has come of an update that is refused, such as its other packets: none of it counts."""
        for offered in self._requests.of(client_id):
            del self._requests[offered.key]
        for transfer in self._transfers.of(client_id):
            if not transfer.adding:
                self._drop(transfer.key)
        if self._packets is not None:
            self._packets.discard(client_id)

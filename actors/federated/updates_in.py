"""Updates on their way into the controller: offer, grant, frames, sum, receipt.

A client offers its update and sends it when it is told to. So the controller holds a bounded number of bytes however
many clients there are, and a client that dies in the middle leaves nothing but a buffer that is dropped. An update is
added to the sum only when all its bytes are there and checked: it counts in full or not at all.

The update of a client of this machine may lie in memory that nobody can write to any more. It needs no grant and no
copy: it is added from where it lies, one after the other, and waits in its client's memory until then. So it takes
nothing from the budget either. Where it cannot be read, it is granted and sent like all others.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gradbus import codecs
from gradbus.actors.aggregation.clipping import ENOUGH, SampleCap
from gradbus.actors.aggregation.strategies import NoRoom, Strategy
from gradbus.actors.federated.participation import Conduct, Strike
from gradbus.actors.federated.report import RoundTiming
from gradbus.actors.federated.rounds import Round, Tally
from gradbus.codecs import CodecError, NonFiniteError
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.dds.topics import TOPICS
from gradbus.runtime.errors import FrameError, WriteTimeout
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.segment import SharedMemoryFault, is_here
from gradbus.runtime.shm.shared_payload import read
from gradbus.runtime.testing.journal import History, update_name
from gradbus.runtime.wire.assembler import Assembler, Verdict
from gradbus.runtime.wire.control import Grant, NeedUpdate, Offer, Receipt
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate, Identity

REPAIR_AFTER_S = 0.3  # without a new frame, ask for those that are missing
STALL_AFTER_S = 10.0  # without a new frame, give the place to somebody else
ALONE = "no second update"  # why the only update of an attempt does not count
_NOTED = 100  # refusals of one kind in a round that a history tells one by one

log = get_logger("controller")


@dataclass(slots=True, eq=False)
class _Transfer:
    """An update that was granted, or that is to be read where its client has it."""

    client_id: int
    incarnation: int
    offer: Offer
    key: FrameKey
    progressed_s: float
    in_memory: bool = False
    frames: int = 0
    asked_s: float = 0.0
    payload: memoryview | None = None  # complete


class Intake:
    """The way in for the updates of one round at a time. All methods are called on the loop."""

    def __init__(
        self, bus: Bus, identity: Identity, strategy: Strategy, compute: ComputeThread, *, dim: int, run_id: int,
        max_bytes: int, budget_bytes: int, max_samples: int, conduct: Conduct,
        on_strike: Callable[[Strike], Awaitable[None]], on_change: Callable[[], None], history: History | None = None,
        cap: SampleCap | None = None,
    ) -> None:  # fmt: skip
        """An intake with no round open.

        Args:
            max_bytes: the longest an encoded update can be.
            budget_bytes: bytes on their way in at one time; one update is always let in.
            max_samples: the most samples a client may claim.
            conduct: where bad updates are noted. on_strike: called when one was.
            on_change: called when an update was counted or refused.
            history: notes them as well.
            cap: how much an update may weigh by its samples. While it is not settled, offers wait.
        """
        self._cap = cap or SampleCap(None)
        self._bus = bus
        self._identity = identity
        self._strategy = strategy
        self._compute = compute
        self._dim = dim
        self._run_id = run_id
        self._max_bytes = max_bytes
        self._budget_bytes = budget_bytes
        self._max_samples = max_samples
        self._conduct = conduct
        self._on_strike = on_strike
        self._on_change = on_change
        self._history = history or History(None, "controller")
        self._assembler = Assembler()
        self._round: Round | None = None
        self._offers: dict[int, tuple[int, Offer]] = {}  # client -> (incarnation, offer), in order of arrival
        self._transfers: dict[FrameKey, _Transfer] = {}
        self._complete: deque[_Transfer] = deque()
        self._counted: dict[int, FrameKey] = {}  # client -> its last update that counted
        self._unreadable: dict[int, int] = {}  # client -> which start of it has memory that cannot be read from here
        self._folding = asyncio.Lock()
        self._work = asyncio.Event()
        self._repaired_s = 0.0
        self.tally = Tally()
        self.timing = RoundTiming()
        self.dropped: Counter[str] = Counter()
        self.capped: dict[int, int] = {}  # client -> samples that it announced, of those that weigh less in this round
        self._rejected_before: Counter[str] = Counter()

    def open(self, round_: Round) -> None:
        """Take updates for this round. Another attempt at it goes on with what has counted in those before."""
        if not round_.accepted:
            self.tally = Tally()
            self.capped = {}
            self.timing.begin()
        self._round = round_
        self._offers.clear()

    def take_dropped(self) -> dict[str, int]:
        """What was not counted since this was asked last, by reason, between the rounds as well: updates, their frames,
        and samples that were no message at all."""
        rejected = self._bus.rejected
        dropped = self.dropped + (rejected - self._rejected_before)
        self._rejected_before = rejected
        self.dropped = Counter()
        return dict(dropped)

    async def close(self) -> None:
        """Take nothing more for the open round. Returns when no update is being added any more."""
        self._round = None
        self._offers.clear()
        for key in list(self._transfers):
            self._drop(key)
        async with self._folding:
            pass

    async def on_offer(self, client_id: int, incarnation: int, offer: Offer) -> None:
        """A client has an update."""
        round_ = self._round
        key = FrameKey(Kind.UPDATE, offer.run_id, offer.round_id, client_id, incarnation, offer.transfer)
        if self._counted.get(client_id) == key:  # it has not got the receipt
            await self._receipt(client_id, incarnation, offer, accepted=True)
        elif round_ is None or offer.run_id != self._run_id or offer.round_id != round_.round_id:
            await self._refuse(client_id, incarnation, offer, "stale", f"round {offer.round_id} is not open")
        elif (why := self._conduct.why_out(client_id, offer.round_id)) is not None:
            await self._refuse(client_id, incarnation, offer, "quarantine", why)
        elif (why := round_.may_send(client_id)) is not None:
            await self._refuse(
                client_id, incarnation, offer, "unexpected", f"client {client_id} is {why} in this round"
            )
        elif not 1 <= offer.num_samples <= self._max_samples:
            await self._reject(
                client_id, incarnation, offer, "samples", f"{offer.num_samples} samples are out of range"
            )
        elif not 0 < offer.total_bytes <= self._max_bytes:
            await self._reject(
                client_id, incarnation, offer, "oversized",
                f"{offer.total_bytes} bytes, at most {self._max_bytes} with this codec and model",
            )  # fmt: skip
        else:
            granted = next((t for t in self._transfers.values() if t.client_id == client_id), None)
            if granted is not None and granted.payload is not None:
                return  # all of it is here and will count or be refused in a moment: only then another one may come
            self.timing.offered(client_id, incarnation, offer)
            if granted is not None and (granted.incarnation, _said(granted.offer)) != (incarnation, _said(offer)):
                self._drop(granted.key)  # it started again, or trained again: only its newest update counts
                granted = None
            if granted is None and not self._cap.is_settled:
                self._offers[client_id] = (incarnation, offer)
                await self._settle()
                return
            if granted is None and self._may_read(client_id, incarnation, offer):
                self._read_where_it_lies(client_id, incarnation, offer)
            elif granted is None:
                self._offers[client_id] = (incarnation, offer)
            elif granted.frames == 0 and not granted.in_memory:
                await self._send_grant(granted)  # it may not have got it
            await self._grant_more()

    async def _settle(self) -> None:
        """Weigh the updates of a first round, once enough of them are offered, and take them in."""
        round_ = self._round
        if self._cap.is_settled or round_ is None or not self._offers:
            return
        if not round_.has_enough_offers(self._offers.keys(), time.monotonic()):
            return
        announced = {client_id: offer.num_samples for client_id, (_, offer) in self._offers.items()}
        if self._cap.clients(announced) < min(ENOUGH, round_.minimum):
            # The round needs a second update anyhow. Weighed by its own word alone, this one would decide that round.
            if round_.open <= announced.keys():  # and in this attempt there will be none
                for client_id in announced:
                    round_.fail(client_id, ALONE)
                self._on_change()
            return
        self._cap.settle(announced)
        for client_id, (incarnation, offer) in list(self._offers.items()):
            if self._may_read(client_id, incarnation, offer):
                self._read_where_it_lies(client_id, incarnation, offer)
        await self._grant_more()

    def _read_where_it_lies(self, client_id: int, incarnation: int, offer: Offer) -> None:
        self._offers.pop(client_id, None)
        self._complete.append(self._transfer(client_id, incarnation, offer, in_memory=True))
        self._work.set()

    def _may_read(self, client_id: int, incarnation: int, offer: Offer) -> bool:
        known = self._unreadable.get(client_id) == incarnation
        return bool(self._bus.memory.here) and is_here(offer.memory) and not known

    def _transfer(self, client_id: int, incarnation: int, offer: Offer, *, in_memory: bool = False) -> _Transfer:
        key = FrameKey(Kind.UPDATE, self._run_id, offer.round_id, client_id, incarnation, offer.transfer)
        transfer = self._transfers[key] = _Transfer(client_id, incarnation, offer, key, time.monotonic(), in_memory)
        return transfer

    async def on_frame(self, message: ClientUpdate) -> None:
        """A frame of an update."""
        transfer = self._transfers.get(message.frame.key)
        if transfer is None:
            self.dropped["late frame" if self._round is None else "unexpected frame"] += 1
            return
        if message.num_samples != transfer.offer.num_samples or message.frame.total_bytes != transfer.offer.total_bytes:
            self.dropped["mismatch"] += 1
            return
        try:
            verdict = self._assembler.feed(message.frame)
        except FrameError as error:
            self.dropped[error.reason] += 1
            return
        if verdict is Verdict.REPEATED:
            self.dropped["repeated frame"] += 1
            return
        transfer.progressed_s = time.monotonic()
        transfer.frames += 1
        if verdict is Verdict.COMPLETE:
            transfer.payload = self._assembler.take(transfer.key)
            self.timing.received(transfer.client_id)
            self._complete.append(transfer)
            self._work.set()

    def forget(self, client_id: int, incarnation: int) -> None:
        """The client is gone. What it had not finished sending is dropped."""
        offered = self._offers.get(client_id)
        if offered is not None and offered[0] == incarnation:
            del self._offers[client_id]
        for transfer in [t for t in self._transfers.values() if t.client_id == client_id]:
            if transfer.incarnation == incarnation and transfer.payload is None:
                self._drop(transfer.key)
                self.dropped["cut short"] += 1

    async def run(self) -> None:
        """Add complete updates, one after the other; ask for what is missing. Runs until cancelled."""
        while True:
            try:
                async with asyncio.timeout(REPAIR_AFTER_S / 2):
                    await self._work.wait()
            except TimeoutError:
                await self._settle()  # who was waited for may be lost, or the time be over
                await self._repair()
                continue
            self._work.clear()
            while self._complete:
                async with self._folding:
                    await self._fold(self._complete.popleft())
                await self._grant_more()
                if self._complete and time.monotonic() - self._repaired_s > REPAIR_AFTER_S:
                    await self._repair()  # what lies in memory may keep this busy for as long as it likes

    async def _read(self, transfer: _Transfer) -> None:
        """Find the update in its client's memory; where that fails, have it sent."""
        client_id, offer = transfer.client_id, transfer.offer
        try:
            payload = await self._compute.run(read, offer.memory, offer.total_bytes)
        except SharedMemoryFault as error:
            if self._transfers.get(transfer.key) is transfer:  # else it is no longer wanted, and may well be gone
                log.warning("no shared memory", client=client_id, reason=str(error), effect="its updates go over DDS")
                self._unreadable[client_id] = transfer.incarnation
                self._drop(transfer.key)
                self._offers[client_id] = (transfer.incarnation, offer)
        else:
            self._bus.memory.read_bytes[TOPICS[ClientUpdate].name] += len(payload)
            transfer.payload = payload

    async def _fold(self, transfer: _Transfer) -> None:
        if transfer.in_memory and self._transfers.get(transfer.key) is transfer:
            await self._read(transfer)
        payload, offer, round_ = transfer.payload, transfer.offer, self._round
        if round_ is None or self._transfers.get(transfer.key) is not transfer or payload is None:
            return  # the round ended meanwhile
        if transfer.client_id in round_.accepted:
            self._drop(transfer.key)  # whatever led here: nobody counts twice
            return
        started_s = time.perf_counter()
        weight = self._cap.weight(offer.num_samples)
        self.timing.adding(transfer.client_id)
        try:
            await self._compute.run(self._add, transfer.key, payload, offer, weight)
        except NonFiniteError as error:
            await self._reject(transfer.client_id, transfer.incarnation, offer, "non-finite", str(error))
        except CodecError as error:
            await self._reject(transfer.client_id, transfer.incarnation, offer, "malformed", str(error))
        except NoRoom as error:
            await self._reject(transfer.client_id, transfer.incarnation, offer, "no room", str(error), bad=False)
        except ValueError as error:
            await self._reject(transfer.client_id, transfer.incarnation, offer, "refused", str(error))
        else:
            tally = self.tally
            tally.aggregate_s += time.perf_counter() - started_s
            tally.bytes_up += offer.total_bytes
            tally.bytes_up_shared += offer.total_bytes * transfer.in_memory
            tally.num_samples += offer.num_samples
            tally.samples[transfer.client_id] = offer.num_samples
            tally.losses.append((weight, offer.loss))
            if weight < offer.num_samples:
                self._note_capped(transfer.client_id, offer, weight)
            tally.train_s = max(tally.train_s, offer.train_s)
            tally.encode_s = max(tally.encode_s, offer.encode_s)
            self.timing.counted(transfer.client_id, offer)
            self._counted[transfer.client_id] = transfer.key
            round_.accept(transfer.client_id, time.monotonic())
            self._on_change()
            await self._receipt(transfer.client_id, transfer.incarnation, offer, accepted=True)
        finally:
            self._transfers.pop(transfer.key, None)

    def _note_capped(self, client_id: int, offer: Offer, weight: int) -> None:
        log.warning(
            "samples capped", client=client_id, round=offer.round_id, announced=offer.num_samples, weight=weight
        )
        self.capped[client_id] = offer.num_samples

    def _add(self, key: FrameKey, payload: memoryview, offer: Offer, weight: int) -> None:
        """Off the loop. It is noted before its client hears of it, also by who is killed in between."""
        self._strategy.add(key.sender, codecs.parse(payload, expected_dim=self._dim), weight)
        self._history.keep(update_name(key.round_id, key.sender, key.incarnation, key.transfer), payload)
        self._history.note(
            "counted", round=key.round_id, client=key.sender, incarnation=key.incarnation, transfer=key.transfer,
            num_samples=offer.num_samples, bytes=offer.total_bytes, crc32=self._history.checksum(payload),
            weight=weight,
        )  # fmt: skip

    async def _grant_more(self) -> None:
        """Grant offers in order of arrival while the budget lasts."""
        while (
            self._offers and self._cap.is_settled
        ):  # looked at anew after each grant: while it is said, offers come, go and are granted
            client_id, (incarnation, offer) = next(iter(self._offers.items()))
            in_flight = sum(other.offer.total_bytes for other in self._transfers.values() if not other.in_memory)
            if in_flight and in_flight + offer.total_bytes > self._budget_bytes:
                return
            del self._offers[client_id]
            transfer = self._transfer(client_id, incarnation, offer)
            self._assembler.expect(transfer.key, max_bytes=offer.total_bytes)
            await self._send_grant(transfer)

    async def _send_grant(self, transfer: _Transfer) -> None:
        offer = transfer.offer
        self.timing.granted(transfer.client_id)
        await self._say(Grant(transfer.client_id, transfer.incarnation, offer.round_id, offer.transfer))

    async def _repair(self) -> None:
        now_s = self._repaired_s = time.monotonic()
        for transfer in list(self._transfers.values()):
            silent_s = now_s - max(transfer.progressed_s, transfer.asked_s)
            if transfer.payload is not None or transfer.in_memory or silent_s < REPAIR_AFTER_S:
                continue
            if now_s - transfer.progressed_s > STALL_AFTER_S and transfer.asked_s:
                self.dropped["stalled"] += 1
                self._drop(transfer.key)  # its client repeats the offer when it can
                await self._grant_more()
                continue
            transfer.asked_s = now_s
            missing = self._assembler.missing(transfer.key)
            if missing is None:
                await self._send_grant(transfer)
            else:
                offer = transfer.offer
                await self._say(
                    NeedUpdate(
                        transfer.client_id, transfer.incarnation, offer.round_id, offer.transfer, list(missing)
                    )
                )  # fmt: skip

    def _drop(self, key: FrameKey) -> None:
        transfer = self._transfers.pop(key, None)
        if transfer is not None and transfer in self._complete:  # one whose bytes are still in its client's memory
            self._complete.remove(transfer)
        self._assembler.forget(key)

    async def _reject(
        self, client_id: int, incarnation: int, offer: Offer, reason: str, text: str, *, bad: bool = True
    ) -> None:
        """The update does not count. The client need not be waited for in this round. ``bad``: it is to blame."""
        log.warning("update dropped", client=client_id, round=offer.round_id, reason=reason, detail=text)
        if self._round is not None:
            self._round.fail(client_id, reason)
            self._on_change()
        await self._refuse(client_id, incarnation, offer, reason, text)
        strike = self._conduct.strike(client_id, offer.round_id, reason, text) if bad else None
        if strike is not None:
            await self._on_strike(strike)

    async def _refuse(self, client_id: int, incarnation: int, offer: Offer, reason: str, text: str) -> None:
        self.dropped[reason] += 1
        if self.dropped[reason] <= _NOTED:  # who offers without end fills no disk; the count is noted with the round
            facts = {"client": client_id, "incarnation": incarnation, "reason": reason}
            self._history.note("refused", round=offer.round_id, **facts)
        await self._receipt(client_id, incarnation, offer, accepted=False, reason=text)

    async def _receipt(
        self, client_id: int, incarnation: int, offer: Offer, *, accepted: bool, reason: str = ""
    ) -> None:
        await self._say(
            Receipt(client_id, incarnation, offer.run_id, offer.round_id, offer.transfer, accepted, reason[:4096])
        )

    async def _say(self, body: Any) -> None:
        try:
            await self._bus.publish(self._identity, body)
        except WriteTimeout as error:  # it will be said again when asked again
            log.warning("not sent", message=type(body).__name__, reason=str(error))


def _said(offer: Offer) -> tuple[Any, ...]:
    """What makes it the same offer, said again. Without the figures of training, which may be no numbers: such are not
    even equal to themselves."""
    return (offer.run_id, offer.round_id, offer.transfer, offer.total_bytes, offer.num_samples, offer.memory)

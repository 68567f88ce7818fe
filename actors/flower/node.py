"""A node: takes instructions of a hub, has them answered, and sends the replies.

It outlives its hub: it waits for the next one, for a bounded time, and takes part in that one's run.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from gradbus.actors.federated.client.older_controllers import ask_older_controller
from gradbus.actors.federated.client.session import ControllerSession, check_waiting
from gradbus.actors.federated.client.updates_out import ANSWERS, EncodedUpdate, UpdateSender
from gradbus.actors.federated.request_patience import RequestPatience
from gradbus.actors.flower.protocol import (
    DEFAULT_MAX_BYTES,
    HEARTBEAT_S,
    MAX_OPEN,
    NodePlace,
    check_max_bytes,
    instruction_key,
    layout_of,
    make_payload,
    reply_key,
)
from gradbus.runtime.bus.bus import Bus, Subscription
from gradbus.runtime.compute import LET_GO_S, ComputeThread
from gradbus.runtime.errors import (
    BarrierTimeout,
    BusClosed,
    BusError,
    FrameError,
    JoinRefused,
    TrainingFailed,
)
from gradbus.runtime.logs import get_logger, process_name
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.shm.segment import SharedMemoryFault, is_here, read
from gradbus.runtime.tasks import TaskGroup, single_error
from gradbus.runtime.transport.channels import Inbox, ToClients, ToController
from gradbus.runtime.transport.wait_log import EVERY_S, WaitLog
from gradbus.runtime.wire.assembler import Assembler, Verdict
from gradbus.runtime.wire.control import (
    PROTOCOL,
    Hello,
    Leave,
    ModelAvailable,
    ModelRequest,
    Refused,
    RoundTerms,
    RunEnded,
    Status,
    UploadRequest,
    Welcome,
)
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey
from gradbus.runtime.wire.id_ranges import has_id, parse_ids
from gradbus.runtime.wire.messages import (
    ClientUpdate,
    Control,
    Identity,
    Message,
    ModelBlob,
    PeerGone,
    new_incarnation,
)

FIRST_PAUSE_S = HEARTBEAT_S / 4  # from the first Hello to the next
MATCHED_S = 0.25  # for which the writer of instructions is waited for, before one is requested
WITHDRAWN_S = 5.0  # an instruction that the hub has not named for so long is no longer wanted

log = get_logger("node")


class Answering(Protocol):
    """Carries out the instructions of a node. All methods are called on a thread of their own, one at a time."""

    def begin(self, run_id: int, options: Mapping[str, bool | int | float | str]) -> None:
        """A run begins, or another start of its hub goes on with it. ``options``: what its Welcome says."""
        ...

    def answer(self, payload: memoryview, number: int) -> list[bytes | memoryview]:
        """The reply's payload, in parts, to the instruction with this payload and number."""
        ...

    def release(self) -> None:
        """The reply is at the hub: memory that answering it took may go."""
        ...

    def refuse(self, reason: str) -> list[bytes | memoryview]:
        """The payload of a reply that says why an instruction is not answered."""
        ...


@dataclass(slots=True)
class _Instruction:
    """An instruction that this node has not answered yet. ``named_s``: when the hub has named this node last."""

    number: int
    named_s: float
    notice: ModelAvailable | None = None


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """Tells what a node did. ``answered``: instructions. ``bytes_up``, ``bytes_down``: of payloads. ``left_call``: its
    run has ended inside a call that did not return, and which goes on, on a thread that no code waits for."""

    answered: int
    bytes_up: int
    bytes_down: int
    left_call: bool = False


class MessageNode:
    """Answers the instructions of a hub, one after the other."""

    def __init__(
        self,
        bus: Bus,
        answering: Answering,
        *,
        place: NodePlace,
        controller_timeout_s: float = 120.0,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """A node that has not started.

        Args:
            place: another one for each node.
            controller_timeout_s: without a message of a hub for so long, this node gives up.
            max_bytes: the largest instruction that is accepted.

        Raises:
            ConfigError: a setting is out of range.
        """
        check_max_bytes(max_bytes)
        self.place = place
        self.number = place.number
        self._bus = bus
        self._answering = answering
        self._max_bytes = max_bytes
        self._identity = Identity(place.number, new_incarnation())
        self._session = ControllerSession(controller_timeout_s)
        self._sender = UpdateSender(bus, self._identity)
        self._patience = RequestPatience()
        self._compute = ComputeThread(f"node-{place.number}")
        self._waiting = WaitLog(log, bus.reach, node=place.number)
        self._open: dict[int, _Instruction] = {}
        self._done: OrderedDict[int, None] = OrderedDict()
        self._changed = asyncio.Event()
        self._run_over = asyncio.Event()
        self._left_call = False
        self._phase, self._phase_s, self._current = "idle", time.monotonic(), -1
        self._reads_memory = True
        self._answered = self._bytes_down = 0

    @property
    def summary(self) -> NodeSummary:
        """Return what it did so far."""
        return NodeSummary(self._answered, self._sender.bytes_up, self._bytes_down, self._left_call)

    async def run(self) -> NodeSummary:
        """Answer instructions until the run has ended.

        Raises:
            JoinRefused: the hub refuses this node. BarrierTimeout: there was no hub for ``controller_timeout_s``.
            TrainingFailed: the run has ended with an error of the ServerApp.
        """
        bus = self._bus
        bus.access_policy.check_client()
        self._session.begin()
        try:
            with bus.subscribe(ToClients, Inbox(self._identity.incarnation), only=self._concerns) as inbox:
                bus.open_writer(ClientUpdate)
                async with TaskGroup() as group:
                    helpers = [
                        group.create_task(self._listen(inbox, group), name=f"node-{self.number}-listen"),
                        group.create_task(self._heartbeat(), name=f"node-{self.number}-heartbeat"),
                        group.create_task(self._ask_older_hub(group), name=f"node-{self.number}-older-hub"),
                    ]
                    try:
                        await self._work()
                    finally:
                        with contextlib.suppress(BusError):
                            await bus.publish(self._identity, Leave("done" if self._session.ended else "stopped"))
                        for helper in helpers:
                            helper.cancel()
        except BaseExceptionGroup as errors:
            raise single_error(errors) from None
        finally:
            self._compute.close()
        return self.summary

    # Messages

    def _concerns(self, message: Message) -> bool:
        if isinstance(message, PeerGone):
            return message.sender == CONTROLLER
        return (
            isinstance(message, Control)
            and message.sender == CONTROLLER
            and getattr(message.body, "to", self.number) == self.number
        )

    async def _ask_older_hub(self, group: TaskGroup) -> None:
        def handle(message: Control) -> None:
            self._on_hub(message.incarnation, message.body, group)

        await ask_older_controller(self._bus, self._identity, self._make_hello, handle)

    async def _listen(self, inbox: Subscription, group: TaskGroup) -> None:
        while True:
            try:
                message = await inbox.get()
            except BusClosed:
                raise BusClosed(inbox.fault or "the bus was closed under a running node: stop the node first") from None
            if isinstance(message, PeerGone):
                if message.incarnation == self._session.incarnation:
                    self._session.await_welcome()  # its next start welcomes this node anew
            elif isinstance(message, Control) and self._session.accepts_session(message.incarnation, message.body):
                self._on_hub(message.incarnation, message.body, group)
            else:
                continue
            self._changed.set()

    def _on_hub(self, session: int, body: Any, group: TaskGroup) -> None:
        current, me = self._session, (self.number, self._identity.incarnation)
        match body:
            case Welcome() if (body.to, body.incarnation) == me:
                if current.welcome is None or session != current.incarnation:
                    self._start_session(session, body)
                    group.create_task(self._send_hello(), name=f"node-{self.number}-hello")
                current.accept(body)
            case Refused() if (body.to, body.incarnation) == me:
                raise JoinRefused(body.why)
            case Status() if session != current.incarnation and current.welcome is not None:
                current.await_welcome()
                group.create_task(self._send_hello(), name=f"node-{self.number}-hello")
            case _ if isinstance(body, ANSWERS) and (body.to, body.incarnation) == me:
                self._sender.on_answer(body, group)
            case RoundTerms() if body.run_id == current.run_id and session == current.incarnation:
                self._take_terms(body)
            case ModelAvailable() if body.run_id == current.run_id and session == current.incarnation:
                if (instruction := self._open.get(body.round_id)) is not None:
                    instruction.notice = body
            case RunEnded() if body.run_id == current.run_id and (body.ok or body.final):
                current.end(body)
                self._run_over.set()
                self._compute.stop_current()
                self._sender.interrupt()
            case _:
                pass

    def _start_session(self, session: int, welcome: Welcome) -> None:
        self._session.start_session(session, welcome)
        self._open.clear()
        self._done.clear()
        self._reads_memory = True
        self._compute.stop_current()
        self._sender.interrupt()
        log.info("welcomed", node=self.number, run=f"{welcome.run_id:016x}")

    def _instruction(self, number: int) -> _Instruction | None:
        """The open instruction of this number; None: it is answered, or one too many."""
        if number in self._done or number < 0:
            return None
        if number not in self._open and len(self._open) >= MAX_OPEN:
            return None
        return self._open.setdefault(number, _Instruction(number, time.monotonic()))

    def _take_terms(self, terms: RoundTerms) -> None:
        if not has_id(parse_ids(terms.participants), self.number):
            self._open.pop(terms.round_id, None)
        elif (instruction := self._instruction(terms.round_id)) is not None:
            instruction.named_s = time.monotonic()

    async def _heartbeat(self) -> None:
        """Send a Hello in each beat; until a Welcome, sooner at first, and at once when the hub is found.

        More often, with hundreds of nodes that start together, would keep the hub from the Welcomes.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            found = self._bus.matched_readers(ToController)
            await self._send_hello()
            self._session.note_turn(2 * HEARTBEAT_S)
            if self._session.welcome is not None:
                pause_s = FIRST_PAUSE_S
                await asyncio.sleep(HEARTBEAT_S)
                continue
            try:
                await self._bus.matched(partial(self._has_more_hubs_than, found), timeout_s=pause_s)
            except BarrierTimeout:
                pass
            except BusClosed:  # who listens says why
                return
            pause_s = min(2 * pause_s, HEARTBEAT_S)

    def _has_more_hubs_than(self, found: int) -> bool:
        return self._bus.matched_readers(ToController) > found

    def _make_hello(self) -> Hello:
        current = self._session
        return Hello(
            protocol=PROTOCOL,
            dim=0,
            layout=layout_of(self.place.num_partitions),
            ready=self._bus.matched_readers(ClientUpdate) > 0,
            session=current.incarnation if current.welcome is not None else 0,
            phase=self._phase if self._sender.phase == "idle" else self._sender.phase,
            round_id=self._current,
            model_round=-1,
            host=process_name(),
            next_round=-1,
            memory=self._bus.memory.here if self._reads_memory else "",
            phase_s=time.monotonic() - self._phase_s,
            name=self.place.name,
        )

    async def _send_hello(self) -> None:
        with contextlib.suppress(BusError):  # sent again with the next heartbeat
            await self._bus.publish(self._identity, self._make_hello())

    # Work

    async def _work(self) -> None:
        begun = (0, 0)
        while True:
            self._changed.clear()
            current = self._session
            if current.ended is not None:
                if not current.ended.ok:
                    raise TrainingFailed(f"the run has ended: {plain_line(current.ended.reason)}")
                return
            instruction = self._next()
            if current.welcome is None or instruction is None:
                await self._wait()
                continue
            session = current.incarnation
            if begun != (session, current.run_id):
                await self._compute.run(self._answering.begin, current.run_id, dict(current.welcome.options))
                begun = (session, current.run_id)
                continue  # the hub may be gone by now
            try:
                await self._answer(instruction, current.welcome, session)
            finally:
                self._set_phase("idle", -1)

    def _next(self) -> _Instruction | None:
        """The oldest instruction that is wanted. Those that are no longer named are forgotten."""
        now_s = time.monotonic()
        for number in [n for n, one in self._open.items() if now_s - one.named_s > WITHDRAWN_S]:
            del self._open[number]
        ready = [one for one in self._open.values() if one.notice is not None]
        return min(ready, key=lambda one: one.number, default=None)

    async def _wait(self) -> None:
        """Wait for a message. Raises BarrierTimeout: there was no hub for too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(EVERY_S, HEARTBEAT_S)):
                await self._changed.wait()
        check_waiting(self._bus, self._session, self._waiting)

    def _set_phase(self, phase: str, number: int) -> None:
        self._phase, self._phase_s, self._current = phase, time.monotonic(), number

    def _finish(self, number: int) -> None:
        self._open.pop(number, None)
        self._done[number] = None
        while len(self._done) > 4 * MAX_OPEN:
            self._done.popitem(last=False)

    async def _answer(self, instruction: _Instruction, welcome: Welcome, session: int) -> None:
        number, notice, run_id = instruction.number, instruction.notice, welcome.run_id
        assert notice is not None
        self._set_phase("fetching", number)
        started_s = time.perf_counter()
        try:
            payload = await self._fetch(notice, instruction, session)
        except FrameError as error:
            log.error("message refused", node=self.number, number=number, reason=str(error))
            parts: list[bytes | memoryview] | None = await self._compute.run(
                self._answering.refuse, f"node {self.number}: {error}"
            )
        else:
            if payload is None:  # no longer wanted
                self._open.pop(number, None)
                return
            self._bytes_down += len(payload)
            self._set_phase("training", number)
            await self._send_hello()  # a later one may come late, as the user's code may hold the interpreter
            started_s = time.perf_counter()
            parts = await self._call(payload, number)
            del payload
        train_s = time.perf_counter() - started_s
        if not self._is_current(session):
            return
        assert parts is not None
        outgoing = await self._compute.run(make_payload, self._bus.memory, parts)
        del parts
        request = UploadRequest(
            run_id=run_id,
            round_id=number,
            transfer=number,
            total_bytes=len(outgoing.data),
            num_samples=1,
            loss=0.0,
            train_s=train_s,
            encode_s=time.perf_counter() - started_s - train_s,
            memory=outgoing.place,
        )
        update = EncodedUpdate(
            reply_key(run_id, number, self.number, self._identity.incarnation),
            request,
            outgoing.data,
            sealed=outgoing.shared,
        )
        receipt = await self._sender.deliver(update, check=lambda: self._awaits_answers_of(session))
        await self._compute.run(self._answering.release)
        if receipt is None:
            return
        self._finish(number)
        if receipt.accepted:
            self._answered += 1
            log.info("message answered", node=self.number, number=number, seconds=round(train_s, 3))
        else:
            log.warning("reply refused", node=self.number, number=number, reason=receipt.reason)

    async def _call(self, payload: memoryview, number: int) -> list[bytes | memoryview] | None:
        """Answer an instruction on the thread. None: the run has ended meanwhile; what is called then has
        ``LET_GO_S`` to return, and is left to itself after that."""
        returned = threading.Event()

        def answer() -> list[bytes | memoryview]:
            try:
                return self._answering.answer(payload, number)
            finally:
                returned.set()

        started_s = time.monotonic()
        answering = asyncio.ensure_future(self._compute.run(answer))
        over = asyncio.ensure_future(self._run_over.wait())
        try:
            await asyncio.wait({answering, over}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            log.warning(
                "the run has ended while a message is answered",
                node=self.number,
                number=number,
                since_s=round(time.monotonic() - started_s, 1),
                effect=f"waits for at most {LET_GO_S:g} s, then leaves",
            )
        finally:
            over.cancel()
            answering.cancel()  # it waits for the thread for LET_GO_S
            await asyncio.wait({answering})
        self._left_call = not returned.is_set()
        return None

    def _is_current(self, session: int) -> bool:
        """Whether the hub is still this one, and its run goes on. Raises BarrierTimeout: there is none."""
        return self._awaits_answers_of(session) and self._session.ended is None

    def _awaits_answers_of(self, session: int) -> bool:
        """Whether receipts may come from this hub: the end of its run may overtake the last one. Raises
        BarrierTimeout: as :meth:`_is_current`."""
        bus, current = self._bus, self._session
        current.check_controller(lambda: bus.misconfiguration, partial(bus.reach.advice, one=True))
        return current.incarnation == session and current.is_open

    # Instructions

    async def _fetch(self, notice: ModelAvailable, instruction: _Instruction, session: int) -> memoryview | None:
        """The payload of an instruction: from the memory of this machine, or else over the bus. None: it is no longer
        wanted. Raises FrameError: it is too large, or not signed by the hub."""
        if not 0 < notice.total_bytes <= self._max_bytes:
            text = f"a message of {notice.total_bytes} bytes, at most {self._max_bytes} are accepted (flower.max_bytes)"
            raise FrameError("oversized", text)
        key = instruction_key(notice.run_id, notice.round_id, session, notice.signature)
        self._bus.access_policy.check_model_signature(key, int(Flags.NONE), notice.total_bytes)
        payload, fault = None, ""
        if notice.memory and is_here(notice.memory) and self._bus.memory.here and self._reads_memory:
            try:
                payload = await self._compute.run(read, notice.memory, notice.total_bytes)
            except SharedMemoryFault as error:
                fault = str(error)
        if payload is None:
            payload = await self._receive(key, instruction, notice, session)
            if fault and payload is not None:  # else it was no longer wanted: then it does not lie there any more
                await self._give_up_memory(fault)
        if payload is not None and key.name:  # models are signed
            from gradbus.runtime.security.identity.controller_signatures import check_payload

            await self._compute.run(check_payload, key, payload)
        return payload

    async def _give_up_memory(self, why: str) -> None:
        self._reads_memory = False
        log.warning("no shared memory", node=self.number, reason=why, effect="messages go over DDS")
        await self._send_hello()

    async def _receive(
        self, key: FrameKey, instruction: _Instruction, notice: ModelAvailable, session: int
    ) -> memoryview | None:
        """Collect the frames of an instruction, and request those that are missing."""
        assembler = Assembler()
        assembler.expect(key, max_bytes=notice.total_bytes)
        with self._bus.subscribe(ModelBlob, passing=True) as inbox:
            with contextlib.suppress(BarrierTimeout):  # then requests are repeated until it is
                await self._bus.matched(lambda: self._bus.matched_writers(ModelBlob) > 0, timeout_s=MATCHED_S)
            await self._request(key, ())
            patience = self._patience
            patience.begin(time.monotonic())
            while self._is_current(session) and self._is_named(instruction):
                try:
                    async with asyncio.timeout(max(0.0, patience.due_in_s(time.monotonic()))):
                        while True:
                            message = await inbox.get()
                            if not isinstance(message, ModelBlob) or message.frame.key != key:
                                continue
                            if message.frame.total_bytes != notice.total_bytes:
                                continue
                            verdict = assembler.feed(message.frame)
                            if verdict is Verdict.COMPLETE:
                                return assembler.take(key)
                            if verdict is Verdict.STORED:
                                patience.note_frame(time.monotonic())
                                break
                except TimeoutError:
                    patience.note_request(time.monotonic())
                    await self._request(key, assembler.missing(key) or ())
        return None

    async def _request(self, key: FrameKey, seqs: Sequence[int]) -> None:
        """Request these frames of an instruction; all, where none are named."""
        with contextlib.suppress(BusError):
            await self._bus.publish(self._identity, ModelRequest(key.job, key.round_id, key.transfer, list(seqs)))

    def _is_named(self, instruction: _Instruction) -> bool:
        is_open = self._open.get(instruction.number) is instruction
        return is_open and time.monotonic() - instruction.named_s <= WITHDRAWN_S

"""The hub: sends instructions to nodes, and collects their replies.

All methods are called on the loop of the bus. Which nodes there are is known from their Hellos, who is gone from the
bus; an instruction to a node that is gone is answered at once with a failure, so that nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gradbus.actors.federated.controller.clients import ClientRegistry, ExpectedModel, HelloAnswer
from gradbus.actors.federated.controller.liveness import BeatClock, DuplicateControllers, claim_job
from gradbus.actors.federated.controller.resending import RESEND_FRAMES, RESEND_TIMES, OnTheWay, ResendQueue
from gradbus.actors.federated.controller.uploads import REPEATED, UNEXPECTED, IncomingUpload, RequestedUpload, Uploads
from gradbus.actors.flower.protocol import (
    CODEC,
    DEFAULT_MAX_BYTES,
    HEARTBEAT_S,
    LAST_NAMED,
    MAX_NODES,
    MAX_OPEN,
    MAX_PARTITIONS,
    Payload,
    check_max_bytes,
    instruction_key,
    is_named,
    partitions_of,
    reply_key,
)
from gradbus.actors.flower.request_batch import RequestBatch
from gradbus.runtime.bus.bus import Bus, Subscription
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.errors import BarrierTimeout, BusClosed, BusError, ConfigError, FrameError
from gradbus.runtime.logs import get_logger, process_name
from gradbus.runtime.shm.segment import SharedMemoryFault, is_here, read
from gradbus.runtime.tasks import TaskGroup, single_error
from gradbus.runtime.transport.channels import CHANNELS, ToClients, ToController
from gradbus.runtime.wire.control import (
    LAST_ON_CONTROL,
    Body,
    Hello,
    Leave,
    ModelAvailable,
    ModelRequest,
    Receipt,
    Refused,
    RoundTerms,
    RunEnded,
    Status,
    UploadRequest,
    Welcome,
)
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey, chunk_count
from gradbus.runtime.wire.id_ranges import format_ids
from gradbus.runtime.wire.messages import (
    ClientUpdate,
    Control,
    Identity,
    ModelBlob,
    PeerDisconnected,
    PeerGone,
    TrainCmd,
    new_incarnation,
)

NAMED_AT_ONCE = 64  # open instructions that a heartbeat names at least
NAMED_WITHIN = 4  # heartbeats in which each is named once: a node drops one that is not named for WITHDRAWN_S
MATCHED_S = 0.25  # so long a reader that requests frames may take to be found
FAREWELL_S = 5.0  # how long the end of a run is announced to nodes that have not left
_KEPT_RECEIPTS = 16_384

log = get_logger("hub")

Address = tuple[int, int]  # number of an instruction, and the node


@dataclass(frozen=True, slots=True)
class Answer:
    """Tells what became of an instruction at one node.

    Attributes:
        payload: of the reply; None: there is none.
        failure: why not, for people.
        kind: ``gone``: the node is; ``expired``: its time was over; ``refused``: the reply is out of limits.
    """

    payload: memoryview | None = None
    failure: str = ""
    kind: Literal["reply", "gone", "expired", "refused"] = "reply"


@dataclass(slots=True, eq=False)
class _Open:
    """An instruction that some nodes have not answered. ``awaited``: these, with the incarnation it was sent to.
    ``given_up``: the reply of some other node is no longer awaited. ``fetching``: nodes that have requested it.
    ``requested``: set when one does."""

    number: int
    payload: Payload
    awaited: dict[int, int]
    expires_s: float
    on_the_way: OnTheWay
    signature: str = ""
    given_up: bool = False
    queue: ResendQueue = field(default_factory=ResendQueue)
    fetching: RequestBatch = field(default_factory=RequestBatch)
    requested: asyncio.Event = field(default_factory=asyncio.Event)


class MessageHub:
    """Instructions out, replies in.

    Attributes:
        started: set once this process holds the job. run_id: of the run. bytes_up, bytes_down: of payloads: of replies,
            and of instructions, once for each node.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        run_id: int,
        options: Mapping[str, bool | int | float | str] | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        dead_after_s: float = 30.0,
    ) -> None:
        """A hub that has not started.

        Args:
            options: for the nodes, in their Welcome; at most 32.
            max_bytes: the largest reply that is accepted; as many bytes of replies are under way at most, or one reply.
            dead_after_s: a node that is silent for so long while it has nothing to do gets no new instructions.
        """
        check_max_bytes(max_bytes)
        self.run_id = run_id
        self.started = asyncio.Event()
        self.bytes_up = self.bytes_down = 0
        self._bus = bus
        self._options = dict(options or {})
        self._max_bytes = max_bytes
        self._identity = Identity(CONTROLLER, new_incarnation())
        self._registry = ClientRegistry(
            ExpectedModel(0, 0),
            session=self._identity.incarnation,
            dead_after_s=dead_after_s,
            duplicate_after_s=3.0,
            memory=bus.memory.here,
        )
        self._others = DuplicateControllers(bus.job, self._identity)
        self._clock = BeatClock(HEARTBEAT_S)
        self._partitions: tuple[int, str] | None = None  # how many there are, and the node that said so first
        self._compute = ComputeThread("hub")
        self._uploads: Uploads[IncomingUpload] = Uploads(self._publish)
        self._numbers = 0
        self._open: dict[int, _Open] = {}
        self._next_named = 0
        self._over: list[int] = []  # ended without all their replies; the nodes are to be notified
        self._requests: OrderedDict[FrameKey, IncomingUpload] = OrderedDict()
        self._reading: set[FrameKey] = set()
        self._unreadable: set[Identity] = set()  # nodes whose memory cannot be read from here
        self._accepted: OrderedDict[FrameKey, None] = OrderedDict()
        self._answers: dict[Address, Answer] = {}
        self._concluding: set[Address] = set()  # replies that are complete, while their receipts are sent
        self._news = asyncio.Event()
        self._resending: asyncio.Task[None] | None = None

    # What the grid calls

    def nodes(self) -> list[int]:
        """Numbers of the nodes that can take an instruction now, ascending."""
        return self._registry.ready(0)

    async def push(self, nodes: Collection[int], payload: Payload, ttl_s: float) -> int:
        """Send an instruction to these nodes. Returns its number.

        Args:
            ttl_s: what is not answered after so long fails.

        Raises:
            ConfigError: too many instructions are open.
        """
        if len(self._open) >= MAX_OPEN:
            raise ConfigError(f"{MAX_OPEN} messages wait for replies: pull replies before more are pushed")
        self._numbers += 1
        number = self._numbers
        awaited = {node: self._registry.incarnation_of(node) for node in nodes}
        for node in [node for node, incarnation in awaited.items() if incarnation is None]:
            self._settle((number, node), Answer(failure=f"node {node} is not connected", kind="gone"))
        present = {node: incarnation for node, incarnation in awaited.items() if incarnation is not None}
        if present:
            instruction = _Open(number, payload, present, time.monotonic() + ttl_s, OnTheWay(self._bus))
            await self._sign(instruction)
            self._open[number] = instruction
            for node in [node for node in present if self._registry.get(node, present[node]) is None]:
                self._fail(instruction, node, "gone", f"node {node} is gone")  # while it was signed
            self.bytes_down += len(payload.data) * len(present)
            await self._name(instruction)
        return number

    async def collect(self, wanted: Collection[Address], timeout_s: float) -> dict[Address, Answer]:
        """Take the answers that are there, and wait for the first, at most so long. Each is taken once."""
        until_s = time.monotonic() + timeout_s
        while True:
            self._news.clear()
            found = {address: self._answers.pop(address) for address in wanted if address in self._answers}
            left_s = until_s - time.monotonic()
            if found or left_s <= 0:
                return found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._news.wait()

    async def withdraw(self, addresses: Iterable[Address]) -> None:
        """Nobody waits for these answers any more: nodes that have not begun need not."""
        for number, node in addresses:
            self._answers.pop((number, node), None)
            self._concluding.discard((number, node))
            instruction = self._open.get(number)
            if instruction is not None:
                incarnation = instruction.awaited.pop(node, None)
                if incarnation is not None:
                    instruction.given_up = True
                    self._forget(reply_key(self.run_id, number, node, incarnation))
                self._drop_if_done(instruction)
        await self._tell_over()

    # The run

    async def run(self) -> None:
        """Serve the nodes until cancelled.

        Raises:
            JobInUse: another controller has the job.
        """
        bus = self._bus
        try:
            await claim_job(bus, self._identity, HEARTBEAT_S)
            # ToClients: of another controller. Control: of peers of PROTOCOL 3 and older, which are refused there.
            with bus.subscribe(ToController, ToClients, Control, ClientUpdate) as inbox:
                bus.open_writer(Control)
                bus.open_writer(ModelBlob, retained_samples=0)  # a node that begins to listen requests what it lacks
                bus.open_writer(TrainCmd)  # nothing is sent there: by it, others see that the job has a controller
                async with TaskGroup() as group:
                    group.create_task(self._listen(inbox, group), name="hub-listen")
                    group.create_task(self._repair(), name="hub-repair")
                    self.started.set()
                    self._clock.start()
                    while True:
                        next_s = time.monotonic() + HEARTBEAT_S
                        await self._beat()  # with thousands of open instructions it takes a part of that time
                        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        except BaseExceptionGroup as errors:
            raise single_error(errors) from None
        finally:
            self._compute.close()

    async def end(self, *, ok: bool, reason: str) -> None:
        """Announce the end of the run until all nodes have left, for a bounded time. Instructions that are not answered
        yet are dropped: no process waits for their replies."""
        await self._drop_open()
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                while True:
                    await self._publish(RunEnded(self.run_id, ok, reason[:4096], final=True))
                    if not len(self._registry):
                        return
                    await asyncio.sleep(0.2)

    async def _drop_open(self) -> None:
        unanswered = [(one.number, node) for one in self._open.values() for node in one.awaited]
        if unanswered:
            nodes = format_ids({node for _, node in unanswered})
            log.info("messages without a reply at the end of the run", messages=len(unanswered), nodes=nodes)
            await self.withdraw(unanswered)

    async def _beat(self) -> None:
        now_s = time.monotonic()
        for instruction in [one for one in self._open.values() if one.expires_s <= now_s]:
            for node in list(instruction.awaited):
                self._fail(instruction, node, "expired", "no reply within the message's time to live")
        await self._tell_over()
        self._clock.note_beat(now_s, self._registry)
        for silent in self._registry.mark_silent(now_s):
            if silent.is_doubted:  # DDS was right
                self._lose(silent.client_id, silent.incarnation, "nothing came from it any more")
        newest = max(self._open, default=0)
        awaited = sum(len(one.awaited) for one in self._open.values())
        await self._publish(
            Status(
                self.run_id,
                newest,
                "training" if awaited else "waiting",
                0,
                awaited,
                process_name(),
                clients=len(self._registry),
            )
        )
        numbers = sorted(self._open)
        start = self._next_named % max(1, len(numbers))
        named = max(NAMED_AT_ONCE, -(-len(numbers) // NAMED_WITHIN))
        for number in (numbers[start:] + numbers[:start])[:named]:
            if number in self._open:
                await self._name(self._open[number])
        self._next_named = start + named

    async def _name(self, instruction: _Open) -> None:
        """Send which nodes an instruction is for, and where it lies."""
        await self._publish(RoundTerms(self.run_id, instruction.number, {}, format_ids(instruction.awaited)))
        await self._publish(
            ModelAvailable(
                self.run_id,
                instruction.number,
                instruction.number,
                False,
                len(instruction.payload.data),
                instruction.payload.place,
                instruction.signature,
            )
        )

    async def _tell_over(self) -> None:
        """Send that nobody waits for these instructions: where they lay in shared memory, they are no longer."""
        over, self._over = self._over, []
        for number in over:
            await self._publish(RoundTerms(self.run_id, number, {}, ""))

    async def _sign(self, instruction: _Open) -> None:
        policy = self._bus.access_policy
        if policy.signs_models:
            key = instruction_key(self.run_id, instruction.number, self._identity.incarnation)
            instruction.signature = await self._compute.run(
                policy.sign_model, key, int(Flags.NONE), instruction.payload.data
            )

    # Messages

    async def _listen(self, inbox: Subscription, group: TaskGroup) -> None:
        while True:
            try:
                message = await inbox.get()
            except BusClosed:
                raise BusClosed(inbox.fault or "the bus was closed under a running hub: stop the hub first") from None
            if (in_use := self._others.observe(message)) is not None:
                raise in_use
            match message:
                case ClientUpdate():
                    self._on_frame(message, group)
                case PeerGone(sender=node) if node != CONTROLLER:
                    self._on_gone(message)
                case PeerDisconnected(sender=node, incarnation=incarnation):  # perhaps for a moment only
                    self._registry.put_in_doubt(node, incarnation, time.monotonic())
                case Control(sender=node) if node != CONTROLLER:
                    await self._on_control(message, group)
                case _:
                    pass

    async def _on_control(self, message: Control, group: TaskGroup) -> None:
        node, incarnation, body = message.sender, message.incarnation, message.body
        match body:
            case Hello():
                await self._on_hello(message, body)
            case Leave():
                self._lose(node, incarnation, f"it has left: {body.reason}")
            case UploadRequest() if body.run_id == self.run_id:
                await self._on_request(Identity(node, incarnation), body, group)
            case ModelRequest() if body.run_id == self.run_id:
                self._on_model_request(node, body, group)
            case _:
                pass

    async def _on_hello(self, message: Control, hello: Hello) -> None:
        sender = Identity(message.sender, message.incarnation)
        if (why := self._mismatch(sender.sender, hello)) is not None:
            await self._refuse(sender, hello, why)
            return
        known = self._registry.incarnation_of(sender.sender)
        answer, why = self._registry.answer_hello(
            sender,
            dataclasses.replace(hello, layout=0),
            message.number,
            now_s=time.monotonic(),
            next_round=0,
            is_stalled=self._clock.is_stalled(),
        )
        if answer is HelloAnswer.REFUSE:
            await self._refuse(sender, hello, _of_nodes(why, sender.sender))
            return
        if known not in (None, sender.incarnation) and self._registry.get(*_of(sender)) is not None:
            self._fail_all(sender.sender, known, "it has started anew")
            if known is not None:
                self._bus.close_inbox(known)
        if answer is HelloAnswer.WELCOME:
            log.info("node welcomed", **self._facts(sender.sender), host=hello.host)
            await self._publish(
                Welcome(
                    *_of(sender),
                    self.run_id,
                    0,
                    CODEC,
                    "{}",
                    self._partitions[0] if self._partitions else 0,
                    HEARTBEAT_S,
                    memory=self._bus.memory.here,
                    options=self._options,
                    fetch_models=True,
                )
            )
            for instruction in list(self._open.values()):
                if sender.sender in instruction.awaited:  # to this start of it: it was out of reach for a while
                    await self._name(instruction)

    async def _refuse(self, sender: Identity, hello: Hello, why: str) -> None:
        refused = Refused(*_of(sender), why)
        if hello.protocol > LAST_ON_CONTROL:
            await self._publish(refused)
            return
        with contextlib.suppress(BusError):  # it says Hello again
            await self._bus.publish(self._identity, refused, on=Control)

    def _mismatch(self, node: int, hello: Hello) -> str | None:
        """Why this process is no node of the run; None: it is one. Notes how many partitions there are."""
        partitions = partitions_of(hello.layout)
        if partitions is None or hello.site:
            return "this job runs a Flower app: start 'gradbus flower node', or choose another job (bus.job)"
        if partitions == 0:
            if not MAX_PARTITIONS <= node <= LAST_NAMED:
                return f"node {node} has no partition: expected a number from {MAX_PARTITIONS} to {LAST_NAMED}"
            if (other := self._name_of(node)) and hello.name and other != hello.name:
                return (
                    f"its name {hello.name!r} has the number {node}, which is also that of {other!r}: give it another "
                    f"--name"
                )
        elif not node < partitions <= MAX_PARTITIONS:
            return f"partition {node} of {partitions}: expected 0 to {min(partitions, MAX_PARTITIONS) - 1}"
        if self._registry.incarnation_of(node) is None and len(self._registry) >= MAX_NODES:
            return f"this run has {MAX_NODES} nodes already"
        return self._note_partitions(node, partitions) if partitions else None

    def _name_of(self, node: int) -> str:
        """Return the name of a node that is here; empty: it has none, or is not here."""
        incarnation = self._registry.incarnation_of(node)
        member = None if incarnation is None else self._registry.get(node, incarnation)
        return "" if member is None else member.hello.name

    def _facts(self, node: int) -> dict[str, Any]:
        """Return number and name of a node for a log event."""
        name = self._name_of(node)
        return {"node": node, "name": name} if name else {"node": node}

    def _note_partitions(self, node: int, partitions: int) -> str | None:
        """Note how many partitions there are. Returns why a node that says another number is refused."""
        are_held = any(not is_named(member.client_id) for member in self._registry)
        if self._partitions is not None and self._partitions[0] != partitions and are_held:
            return (
                f"it says that there are {partitions} partitions, and node {self._partitions[1]} says "
                f"{self._partitions[0]}: give all nodes the same --of"
            )
        if self._partitions is None or self._partitions[0] != partitions:
            self._partitions = partitions, str(node)
        return None

    def _on_gone(self, gone: PeerGone) -> None:
        node = self._registry.get(gone.sender, gone.incarnation)
        waits = node is not None and not node.silent and not gone.why and not gone.certain
        if waits and self._clock.is_stalled():  # perhaps it was the hub that could not be reached
            self._registry.put_in_doubt(gone.sender, gone.incarnation, time.monotonic())
        else:
            self._lose(gone.sender, gone.incarnation, "its process has ended, or cannot be reached")

    def _lose(self, node: int, incarnation: int, why: str) -> None:
        facts = self._facts(node)
        if self._registry.remove(node, incarnation):
            self._bus.close_inbox(incarnation)
            log.info("node gone", **facts, reason=why)
        self._fail_all(node, incarnation, why)
        self._unreadable.discard(Identity(node, incarnation))

    def _fail_all(self, node: int, incarnation: int, why: str) -> None:
        for instruction in list(self._open.values()):
            if instruction.awaited.get(node) == incarnation:
                self._fail(instruction, node, "gone", f"node {node} is gone: {why}")
        for key in [key for key in [*self._uploads.keys, *self._requests] if key[3:5] == (node, incarnation)]:
            self._forget(key)

    # Answers

    def _settle(self, address: Address, answer: Answer) -> None:
        self._answers[address] = answer
        self._news.set()

    def _fail(self, instruction: _Open, node: int, kind: Literal["gone", "expired", "refused"], why: str) -> None:
        del instruction.awaited[node]
        instruction.given_up = True
        self._drop_if_done(instruction)
        log.warning("no reply", **self._facts(node), number=instruction.number, reason=why)
        self._settle((instruction.number, node), Answer(failure=why, kind=kind))

    def _drop_if_done(self, instruction: _Open) -> None:
        if not instruction.awaited:
            if self._open.pop(instruction.number, None) is not None and instruction.given_up:
                self._over.append(instruction.number)
            if instruction.payload.shared is not None:
                instruction.payload.shared.hide()

    def _awaiting(self, key: FrameKey) -> _Open | None:
        """The instruction that this reply is awaited for; None: nobody waits for it, or not any more."""
        instruction = self._open.get(key.round_id)
        return instruction if instruction and instruction.awaited.get(key.sender) == key.incarnation else None

    def _accept(self, key: FrameKey, payload: memoryview) -> bool:
        """Take a complete reply. False: it is no longer awaited."""
        instruction = self._awaiting(key)
        if instruction is None:
            return False
        del instruction.awaited[key.sender]
        self._drop_if_done(instruction)
        self.bytes_up += len(payload)
        self._accepted[key] = None
        while len(self._accepted) > _KEPT_RECEIPTS:
            self._accepted.popitem(last=False)
        return True

    async def _conclude(self, key: FrameKey, payload: memoryview) -> None:
        """Take a complete reply, and send its receipt: first, as the run may end with this reply."""
        address = key.round_id, key.sender
        if self._accept(key, payload):
            self._concluding.add(address)
            await self._receipt(key)
            if address in self._concluding:  # else nobody waits for it any more
                self._concluding.discard(address)
                self._settle(address, Answer(payload))
        else:
            await self._receipt(key, "nobody waits for this reply any more")

    # Replies in

    async def _on_request(self, sender: Identity, request: UploadRequest, group: TaskGroup) -> None:
        key = reply_key(self.run_id, request.round_id, *_of(sender))
        if request.transfer != key.transfer:
            return
        if key in self._accepted:
            await self._receipt(key)
            return
        instruction = self._awaiting(key)
        if instruction is None:
            await self._receipt(key, "nobody waits for this reply any more")
            return
        if not 0 < request.total_bytes <= self._max_bytes:
            why = f"a reply of {request.total_bytes} bytes, at most {self._max_bytes} are accepted (flower.max_bytes)"
            self._fail(instruction, sender.sender, "refused", f"node {sender.sender}: {why}")
            await self._receipt(key, why)
            return
        if key in self._uploads.keys or key in self._requests or key in self._reading:
            return
        upload = IncomingUpload(RequestedUpload(*_of(sender), request), time.monotonic())
        if self._bus.memory.here and is_here(request.memory) and sender not in self._unreadable:
            self._reading.add(key)
            group.create_task(self._read(upload), name="hub-read")
        else:
            self._requests[key] = upload
            await self._grant_more()

    async def _read(self, upload: IncomingUpload) -> None:
        """Take a reply where it lies in its node's memory."""
        request, key = upload.request, upload.key
        try:
            payload = await self._compute.run(read, request.memory, request.total_bytes)
        except SharedMemoryFault as error:
            if self._awaiting(key) is None:  # its node was told so, and has withdrawn it
                return
            log.warning("no shared memory", node=key.sender, reason=str(error), effect="its replies go over DDS")
            self._unreadable.add(Identity(key.sender, key.incarnation))
            self._requests[key] = upload
            await self._grant_more()
        else:
            self._bus.memory.read_bytes[CHANNELS[ClientUpdate].name] += len(payload)
            await self._conclude(key, payload)
        finally:
            self._reading.discard(key)

    async def _grant_more(self) -> None:
        while self._requests:
            key, upload = next(iter(self._requests.items()))
            in_flight = self._uploads.num_bytes
            if in_flight and in_flight + upload.request.total_bytes > self._max_bytes:
                return
            del self._requests[key]
            upload.progress_s = upload.asked_s = time.monotonic()
            await self._uploads.grant(upload)

    def _on_frame(self, message: ClientUpdate, group: TaskGroup) -> None:
        try:
            upload = self._uploads.feed(message)
        except FrameError as error:
            if error.reason not in (UNEXPECTED, REPEATED):  # which any network may bring
                log.warning("frame dropped", node=message.client_id, reason=str(error))
            return
        if upload is not None and upload.payload is not None:
            self._reading.add(upload.key)
            group.create_task(self._receive(upload.key, upload.payload), name="hub-receive")

    async def _receive(self, key: FrameKey, payload: memoryview) -> None:
        try:
            await self._conclude(key, payload)
        finally:
            self._reading.discard(key)
        await self._grant_more()

    async def _repair(self) -> None:
        """Request frames that are missing. Runs until cancelled."""
        while True:
            await asyncio.sleep(self._uploads.repair_period_s)
            await self._uploads.repair()  # nodes of those that stand still repeat their requests when they can
            await self._grant_more()

    def _forget(self, key: FrameKey) -> None:
        self._uploads.drop(key)
        self._requests.pop(key, None)

    async def _receipt(self, key: FrameKey, refusal: str = "") -> None:
        await self._publish(
            Receipt(key.sender, key.incarnation, self.run_id, key.round_id, key.transfer, not refusal, refusal)
        )

    # Instructions over DDS

    def _on_model_request(self, node: int, need: ModelRequest, group: TaskGroup) -> None:
        instruction = self._open.get(need.round_id)
        if instruction is None or node not in instruction.awaited:
            return
        incarnation = instruction.awaited[node]
        if instruction.on_the_way.is_on_the_way_to(node, incarnation):
            return
        instruction.fetching.note_request(node, incarnation, time.monotonic())
        instruction.requested.set()
        frames = chunk_count(len(instruction.payload.data))
        wanted = [seq for seq in need.seqs if seq < frames] if need.seqs else range(frames)
        quota = max(RESEND_TIMES * frames, RESEND_FRAMES)
        if not instruction.queue.request(node, instruction.number, wanted, quota):
            if instruction.queue.mark_exhausted(node, quota) is not None:
                log.warning("too many requests for frames", node=node, number=instruction.number, limit=quota)
            return
        if self._resending is None or self._resending.done():
            self._resending = group.create_task(self._resend(), name="hub-resend")

    async def _resend(self) -> None:
        while (instruction := next((one for one in self._open.values() if one.queue), None)) is not None:
            await self._gather_requests(instruction)
            _, seqs = instruction.queue.begin()
            instruction.fetching.note_sent()
            key = instruction_key(self.run_id, instruction.number, self._identity.incarnation, instruction.signature)
            with contextlib.suppress(BarrierTimeout):  # who asks has just opened its reader
                await self._bus.matched(lambda: self._bus.matched_readers(ModelBlob) > 0, timeout_s=MATCHED_S)
            try:
                with instruction.on_the_way.sending(instruction.fetching.nodes):
                    await self._bus.send_model(key, instruction.payload.data, only=sorted(seqs))
            except BusError as error:  # who misses it requests it again
                log.warning("message not sent", number=instruction.number, reason=str(error))
            finally:
                instruction.queue.done()

    async def _gather_requests(self, instruction: _Open) -> None:
        """Wait for further nodes that request an instruction, for :data:`.request_batch.MOST_S` at most."""
        while (due_in_s := instruction.fetching.due_in_s(instruction.awaited, time.monotonic())) > 0:
            instruction.requested.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_in_s):
                    await instruction.requested.wait()

    async def _publish(self, body: Body) -> None:
        with contextlib.suppress(BusError):  # everything is repeated, by this side or the other
            await self._bus.publish(self._identity, body)


def _of(identity: Identity) -> tuple[int, int]:
    return identity.sender, identity.incarnation


def _of_nodes(why: str, node: int) -> str:
    """Put the reason of a refusal, which names clients, into the terms of Flower's nodes."""
    if is_named(node):
        return why.replace(f"(client {node}): give each its own", f"(node {node}): give each node its own --name")
    return why.replace("client id", "partition").replace("give each its own id", "give each node its own")


__all__ = ["Address", "Answer", "MessageHub"]

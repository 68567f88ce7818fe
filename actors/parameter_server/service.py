"""A parameter server at work: it takes the requests of its workers, changes its part of the weights, and answers.

It answers each worker's requests one after the other. What is applied when, and who is answered, :mod:`.clocks`
decides; the tensor work of :mod:`.shard` is done on a thread of its own, in the order of the decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.parameter_server.agreement import Roles
from gradbus.actors.parameter_server.clocks import Clocks, Decision, Kind, ProtocolError
from gradbus.actors.parameter_server.messages import REPLY, REQUEST, Flag, Message, decode, encode, meta_of
from gradbus.actors.parameter_server.shard import Shard
from gradbus.actors.parameter_server.state import FROZEN, ServerState
from gradbus.runtime.collectives import CollectiveHandle, Group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CollectiveError, CollectiveTimeout, PeerLost, TrainingDiverged
from gradbus.runtime.logs import get_logger
from gradbus.runtime.tasks import TaskGroup

MAX_NAME_CHARS = 64  # of a meeting
_WHOLE_RUN_S = 1e9  # a deadline that never comes: the group tells of a worker that dies
HELD_GRACE_S = 5.0  # for another server to drop a worker, and for those that it held to make their next request
_LAST_WORD_S = 5.0  # at the end of the run, for workers that were dropped and are alive

log = get_logger("parameter-server")


@dataclass(slots=True, eq=False)
class ServedRun:
    """What a server keeps of a run beside its weights.

    Attributes:
        run_id: of the run. state: its checkpoints; None: it saves none.
        step: of the version that the run goes on from; None: it is new.
        own: of each worker what it has kept, plain data and tensors, of a resume: until the workers have it.
        frozen: parameters that are not trained, by name, at server 0.
        bytes_in, bytes_out: payload before a resume.
    """

    run_id: int
    state: ServerState | None
    step: int | None = None
    own: dict[int, tuple[Mapping[str, Any], Mapping[str, Tensor]]] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0

    def keep_state_of_first_worker(self, brought: Mapping[str, Tensor]) -> None:
        """Begin a new run with what worker 0 has beside its weights, by name."""
        self.frozen = {name: tensor for name, tensor in brought.items() if name.startswith(FROZEN)}
        self.own = {0: ({}, {name: tensor for name, tensor in brought.items() if name not in self.frozen})}

    def take_own(self) -> dict[int, tuple[Mapping[str, Any], Mapping[str, Tensor]]]:
        """Return ``own``, once: the workers keep it from now on."""
        own, self.own = self.own, {}
        return own


class Service:
    """Serves the workers of one run, with all that a server has once it fits together with the others.

    Attributes:
        shard: the part of the weights. clocks: of the workers. kept: what else there is of the run.
        index: of this server. lost: workers that were dropped.
    """

    def __init__(
        self,
        network: Group,
        roles: Roles,
        config: DataParallelConfig,
        compute: ComputeThread,
        shard: Shard,
        clocks: Clocks,
        kept: ServedRun,
    ) -> None:
        """``compute``: the thread of ``shard``."""
        self.shard = shard
        self.clocks = clocks
        self.kept = kept
        self.index = network.rank - roles.workers
        self.lost: list[int] = []
        self._network = network
        self._roles = roles
        self._config = config
        self._compute = compute
        self._has_saved = False
        self._answers: dict[int, asyncio.Future[Tensor | Message]] = {}
        self._asked_s: dict[int, float] = {}  # by worker, since when it waits for an answer, by the clock of the loop
        self._pushed: dict[int, Tensor] = {}  # by worker, what is not applied yet
        self._asked: dict[int, Message] = {}  # by worker, what it has sent to the meeting
        self._told: dict[int, CollectiveHandle[None]] = {}  # by worker, that it is dropped
        self._epoch = self._step_number = 0
        self._stepped_to = clocks.start  # schedules of a task are stepped once a clock

    @property
    def exchanged(self) -> tuple[int, int]:
        """Payload received and sent so far, with that of before a resume."""
        traffic = self._network.traffic
        return self.kept.bytes_in + traffic.received_bytes, self.kept.bytes_out + traffic.sent_bytes

    async def serve(self) -> None:
        """Serve until all workers have come to the end. Raises as :meth:`.server.ParameterServer.run`."""
        try:
            try:
                async with TaskGroup() as tasks:
                    for rank in range(self._roles.workers):
                        tasks.create_task(self._serve(rank), name=f"worker {rank}")
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            await self._end_telling()
        finally:
            for handle in self._told.values():
                handle.cancel()

    # The requests of one worker, one after the other

    async def _serve(self, rank: int) -> None:
        timeouts, checkpoint = self._config.timeouts, self._config.checkpoint
        kind: Kind = "start"
        # At the start it loads its data, and may still wait for one that died while all introduced themselves.
        limit_s = max(timeouts.join_s, timeouts.collective_s, checkpoint.timeout_s)
        try:
            while kind != "end":
                data = await self._next_request(rank, limit_s)
                request = await self._compute.run(decode, data)
                kind, meets = request.kind, request.kind != "push" or Flag.MEETS in request.flags
                # Between two epochs a worker evaluates, and waits for others that do.
                limit_s = max(timeouts.collective_s, checkpoint.timeout_s) if meets else timeouts.collective_s
                reply = await self._answer(rank, request)
                await self._network.send(REPLY, reply, to=rank, timeout_s=timeouts.collective_s)
        except (PeerLost, CollectiveTimeout) as error:
            if isinstance(error, PeerLost) and rank not in error.ranks and rank not in self._network.lost:
                raise
            await self._drop(rank, error)
            if isinstance(error, CollectiveTimeout):  # it may be alive, and come later with what nobody waits for then
                reply = encode(Message("push", self.clocks.slowest, Flag.DROPPED, meta={"why": str(error)[:400]}))
                self._told[rank] = self._network.send(REPLY, reply, to=rank, timeout_s=_WHOLE_RUN_S)

    async def _next_request(self, rank: int, limit_s: float) -> Any:
        """Return the next request of a worker as it came.

        A worker is silent for too long when others have waited for it here for ``limit_s``, and where there is no other
        server after that time in any case. While no worker waits here, another server may hold this one until it drops
        a third: so this server waits for longer, where there are others.

        Raises:
            CollectiveTimeout: it is silent for too long.
        """
        loop, is_silent = asyncio.get_running_loop(), False
        began_s = loop.time()
        timeouts, others = self._config.timeouts, self._roles.servers > 1
        held_s = max(timeouts.collective_s, self._config.checkpoint.timeout_s) + HELD_GRACE_S if others else 0.0
        handle = self._network.recv(
            REQUEST, source=rank, timeout_s=limit_s + held_s, max_bytes=self.shard.max_message_bytes
        )
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer, is_silent
            since_s = min(self._asked_s.values(), default=math.inf)
            left_s = min(max(began_s, since_s) + limit_s - loop.time(), limit_s)
            is_silent = left_s <= 0.0
            if is_silent:
                handle.cancel()
            else:
                timer = loop.call_later(left_s, look)

        try:
            timer = loop.call_later(limit_s, look)
            return await handle
        except asyncio.CancelledError:
            if is_silent:
                raise CollectiveTimeout(REQUEST, (rank,), limit_s) from None
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _end_telling(self) -> None:
        """Give workers that were dropped a moment more to come and learn it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                for handle in self._told.values():
                    with contextlib.suppress(CollectiveError):  # it has died meanwhile
                        await handle

    async def _drop(self, rank: int, error: PeerLost | CollectiveTimeout) -> None:
        """Go on without a worker, or raise the error."""
        self.lost.append(rank)
        self._pushed.pop(rank, None)
        self._asked.pop(rank, None)
        decision = self._decided(lambda: self.clocks.lose(rank))
        if not self.clocks.has_enough:
            raise error
        log.warning(
            "going on without a worker",
            worker=rank,
            reason=str(error),
            left=list(self.clocks.live),
            at_least=self.clocks.needed,
        )
        await self._carry_out(decision)

    async def _answer(self, rank: int, request: Message) -> Tensor:
        """The reply, when there is one. Raises CollectiveError: nobody may ask for that now."""
        loop = asyncio.get_running_loop()
        self._answers[rank] = answer = loop.create_future()
        self._asked_s[rank] = loop.time()
        state = self.kept.state
        if self._has_saved and state is not None:  # every server has answered this worker's last request, a save
            self._has_saved = False
            await self._compute.run(state.prune)
        if request.kind == "push":
            decision = await self._push(rank, request)
        else:
            if request.kind == "meet" and not 0 < len(meta_of(request, "name", str)) <= MAX_NAME_CHARS:
                raise CollectiveError(f"worker {rank} came to a meeting without a name")
            self._asked[rank] = request
            decision = self._decided(lambda: self.clocks.ask(rank, request.kind, request.clock))
        await self._carry_out(decision)
        found = await answer
        return found if isinstance(found, Tensor) else await self._compute.run(encode, found)

    async def _push(self, rank: int, request: Message) -> Decision:
        flags = request.flags
        if Flag.HAS_GRADIENT in flags:
            await self._compute.run(self.shard.check, rank, request.packed)
            self._pushed[rank] = request.packed
        self._epoch = max(self._epoch, request.epoch)
        return self._decided(
            lambda: self.clocks.push(
                rank,
                request.clock,
                has_gradient=Flag.HAS_GRADIENT in flags,
                is_refused=Flag.REFUSED in flags,
                meets=Flag.MEETS in flags,
                wants_end=Flag.WANTS_END in flags,
            )
        )

    def _decided(self, event: Callable[[], Decision]) -> Decision:
        self._step_number = self.clocks.slowest  # before the event: what is applied now belongs to that step
        try:
            return event()
        except ProtocolError as error:
            raise CollectiveError(f"server {self.index}: {error}") from None

    async def _carry_out(self, decision: Decision) -> None:
        """Apply, then answer. What follows a decision is brought to the thread before the next one is made."""
        gradients = [self._pushed.pop(rank) for rank in decision.apply]
        pushing = [rank for rank in decision.release if rank not in self._asked]
        if not gradients and not decision.release:
            return
        number, slowest, epoch = self._step_number, self.clocks.slowest, self._epoch
        self._network.at_step(slowest, epoch)
        if gradients or pushing:
            flags = Flag.WANTS_END if decision.wants_end else Flag.NONE
            updates = self.clocks.updates
            answer = Message("push", slowest, flags, epoch, updates) if pushing else None
            reply = await self._compute.run(self._step, gradients, decision.count, number, epoch, slowest, answer)
            for rank in pushing:
                self._resolve(rank, reply)
        asked = {rank: self._asked.pop(rank) for rank in decision.release if rank in self._asked}
        if asked:
            for rank, message in (await self._meet(asked)).items():
                self._resolve(rank, message)

    def _resolve(self, rank: int, reply: Tensor | Message) -> None:
        answer = self._answers.pop(rank, None)
        self._asked_s.pop(rank, None)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def _step(
        self, gradients: list[Tensor], count: int, number: int, epoch: int, slowest: int, answer: Message | None
    ) -> Tensor:
        """Change the weights by a step with this number, and make the answer with them."""
        optimizer = self.shard.optimizer
        if gradients:
            self.shard.apply(gradients, count, step=number, epoch=epoch)
        while self._stepped_to < slowest:
            self._stepped_to += 1
            optimizer.step_has_ended()
        if answer is None:
            return torch.empty(0, dtype=torch.uint8)
        return encode(replace(answer, lr=optimizer.lr), self.shard.weights())

    # Meetings

    async def _meet(self, asked: Mapping[int, Message]) -> dict[int, Message]:
        """Return what all get that have met."""
        kind, clock = next((message.kind, message.clock) for message in asked.values())
        match kind:
            case "start":
                return await self._compute.run(self._start, asked)
            case "save":
                await self._save(clock, asked)
                return {rank: Message(kind, clock) for rank in asked}
            case "meet":
                return self._exchange(asked)
        return {rank: Message(kind, clock, meta={"all": {str(r): m.meta for r, m in asked.items()}}) for rank in asked}

    def _start(self, asked: Mapping[int, Message]) -> dict[int, Message]:
        """The weights, and what each worker has kept; of a new run those of worker 0."""
        kept = self.kept
        if kept.step is None:
            if 0 not in asked:
                raise CollectiveError("worker 0 was lost, whose weights a new run begins with: start it again")
            self.shard.load(asked[0].packed)
            kept.keep_state_of_first_worker(asked[0].state)
        weights = encode(Message("start"), self.shard.weights())  # one copy for all
        packed = decode(weights).packed
        replies = {}
        of_workers = kept.take_own()
        first = min(of_workers, default=0)
        for rank in asked:
            meta, tensors = of_workers.get(rank) or of_workers.get(first, ({}, {}))
            more = {"is_own": rank in of_workers, "run_id": f"{kept.run_id:016x}", "kept": dict(meta)}
            replies[rank] = Message(
                "start",
                self.clocks.start,
                updates=self.clocks.updates,
                lr=self.shard.optimizer.lr,
                packed=packed,
                meta=more,
                state={**tensors, **kept.frozen},
            )
        return replies

    def _exchange(self, asked: Mapping[int, Message]) -> dict[int, Message]:
        """Return what each has brought, for all; of the named tensors those of the first one."""
        names = {meta_of(message, "name", str) for message in asked.values()}
        if len(names) > 1:
            raise CollectiveError(f"the workers have met for different things: {sorted(names)}")
        clocks, first = self.clocks, next(iter(asked.values()))
        brought = {str(rank): message.meta.get("value") for rank, message in asked.items()}
        staleness = {str(key): number for key, number in clocks.staleness_counts.items()}
        meta = {"all": brought, "refused": clocks.refused, "staleness": staleness, "lost": self.lost}
        return {rank: Message("meet", first.clock, meta=meta, state=first.state) for rank in asked}

    async def _save(self, clock: int, asked: Mapping[int, Message]) -> None:
        """All workers stand here, and every push before has been applied. Raises CheckpointError, TrainingDiverged."""
        if self.kept.state is None:
            return
        if not await self._compute.run(self.shard.is_finite):
            raise TrainingDiverged(
                clock,
                f"the weights of server {self.index} have NaN or infinity",
                f"Lower optimizer.lr ({self.shard.optimizer.lr:g}), or set optimizer.clip_norm; checkpoints from "
                f"before are as they were",
            )
        own = {rank: (m.meta or {}, m.state) for rank, m in asked.items()} if self.index == 0 else {}
        bytes_in, bytes_out = self.exchanged
        size = await self._compute.run(
            self.kept.state.save,
            clock,
            self.shard,
            own,
            self.kept.frozen,
            run_id=f"{self.kept.run_id:016x}",
            updates=self.clocks.updates,
            refused=self.clocks.refused,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            staleness={str(key): number for key, number in self.clocks.staleness_counts.items()},
        )
        self._has_saved = True
        log.info("checkpoint", server=self.index, step=clock, bytes=size)

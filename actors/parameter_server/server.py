"""A parameter server: holds a part of the weights, and changes it by the gradients that workers push.

    async with gradbus.join_group(bus, rank=workers + index, world=workers + servers, name=NETWORK) as network:
        await ParameterServer(network, task, config, settings).run()

It answers each worker's requests one after the other. What is applied when, and who is answered, :mod:`.clocks`
decides; the tensor work of :mod:`.shard` is done on a thread of its own, in the order of the decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.replicas import describe_layout
from gradbus.actors.data_parallel.task import DataParallelTask
from gradbus.actors.parameter_server.agreement import Agreement, Introduction, Roles, agree, find_version
from gradbus.actors.parameter_server.assignment import assign
from gradbus.actors.parameter_server.clocks import Clocks, Decision, Kind, ProtocolError
from gradbus.actors.parameter_server.messages import Flag, Message, decode, encode, largest, meta_of
from gradbus.actors.parameter_server.shard import Shard, check_config
from gradbus.actors.parameter_server.state import FROZEN, SavedServer, ServerState, own_tensors, state_bytes_of
from gradbus.runtime.built_model import build_model
from gradbus.runtime.checkpoint import Checkpoint
from gradbus.runtime.collectives import CollectiveHandle, Group, check_group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings
from gradbus.runtime.errors import CollectiveError, CollectiveTimeout, PeerLost, TrainingDiverged
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import check_instance, check_task
from gradbus.runtime.saved_state import StateNames
from gradbus.runtime.tasks import TaskGroup

REQUEST, REPLY = "parameter_server/request", "parameter_server/reply"
MAX_NAME_CHARS = 64  # of a meeting
_WHOLE_RUN_S = 1e9  # a deadline that never comes: the group tells of a worker that dies
HELD_GRACE_S = 5.0  # for another server to drop a worker, and for those that it held to make their next request
_LAST_WORD_S = 5.0  # at the end of the run, for workers that were dropped and are alive

log = get_logger("parameter-server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSummary:
    """A run as one server saw it.

    Attributes:
        steps: of the slowest worker that was left. updates: of the weights. refused: gradients that were not finite.
        lost: workers that were dropped. staleness_mean, staleness_max: of the gradients that were applied, in updates.
        held_bytes: of the weights. bytes_in, bytes_out: payload of all messages to and from it. Of earlier starts of
            the run what they had counted at the checkpoint that this one went on from: a server has no profile.
    """

    server: int
    servers: int
    workers: int
    steps: int
    updates: int
    refused: int
    lost: tuple[int, ...]
    staleness_mean: float
    staleness_max: int
    held_bytes: int
    bytes_in: int
    bytes_out: int


class ParameterServer:
    """One server of a run. It runs once; make another one to run again."""

    def __init__(
        self,
        network: Group,
        task: DataParallelTask,
        config: DataParallelConfig,
        settings: ParameterServerSettings,
        *,
        on_open: Callable[[], object] = lambda: None,
    ) -> None:
        """A server that has not started.

        Args:
            network: of all workers and servers.
            task: for the model, and for the optimizer if it makes one. No data are loaded.
            config, settings: the rules, equal on all workers and servers.
            on_open: called once all fit together and the weights are there.

        Raises:
            ConfigError: an argument is another kind of thing, or this server has left the group.
        """
        call, advice = "ParameterServer(network, task, config, settings)", "Keep the order of the arguments"
        check_group(call, "network", network)
        check_instance(call, "config", config, DataParallelConfig, advice)
        check_instance(call, "settings", settings, ParameterServerSettings, advice)
        check_task(call, task, ("build_model",), "gradbus.actors.DataParallelTask")
        self._network = network
        self._task = task
        self._config = config
        self._settings = settings
        self._on_open = on_open
        self._roles = roles = Roles.of(network, settings)
        self._index = network.rank - roles.workers
        self._compute = ComputeThread(f"server-{self._index}")
        self._state: ServerState | None = None
        self._run_id = 0
        self._has_saved = False
        self._answers: dict[int, asyncio.Future[Tensor | Message]] = {}
        self._asked_s: dict[int, float] = {}  # by worker, since when it waits for an answer, by the clock of the loop
        self._pushed: dict[int, Tensor] = {}  # by worker, what is not applied yet
        self._asked: dict[int, Message] = {}  # by worker, what it has sent to the meeting
        self._own: dict[int, tuple[Mapping[str, Any], Mapping[str, Tensor]]] = {}  # what workers keep, of a resume
        self._frozen: dict[str, Tensor] = {}  # parameters that are not trained, at server 0
        self._lost: list[int] = []
        self._told: dict[int, CollectiveHandle[None]] = {}  # by worker, that it is dropped
        self._is_new = True
        self._epoch = self._step_number = 0
        self._before = 0, 0  # bytes in and out before a resume
        self._stepped_to = 0  # schedules of a task are stepped once a clock
        self._max_bytes = 0
        # Made by _open:
        self._shard: Shard
        self._clocks: Clocks

    @property
    def summary(self) -> ServerSummary:
        """Return what was done so far."""
        clocks, (bytes_in, bytes_out) = self._clocks, self._exchanged
        counts = clocks.staleness_counts
        return ServerSummary(
            server=self._index,
            servers=self._roles.servers,
            workers=self._roles.workers,
            steps=clocks.slowest,
            updates=clocks.updates,
            refused=clocks.refused,
            lost=tuple(self._lost),
            staleness_mean=counts.total() and sum(k * n for k, n in counts.items()) / counts.total(),
            staleness_max=max(counts, default=0),
            held_bytes=self._shard.nbytes,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
        )

    @property
    def _exchanged(self) -> tuple[int, int]:
        """Payload received and sent so far, with that of before a resume."""
        traffic = self._network.traffic
        return self._before[0] + traffic.received_bytes, self._before[1] + traffic.sent_bytes

    async def run(self) -> ServerSummary:
        """Serve until all workers have come to the end.

        Raises:
            ConfigError: settings or models differ, or do not fit.
            CheckpointError: a checkpoint cannot be written, or does not fit.
            PeerLost: a server is lost, or so many workers that the run cannot go on.
            CollectiveTimeout: a worker is silent, and the run cannot go on without it.
            CollectiveError: a worker sends what no worker sends.
            TrainingDiverged: the weights have NaN or infinity.
        """
        try:
            await self._open()
            try:
                async with TaskGroup() as tasks:
                    for rank in range(self._roles.workers):
                        tasks.create_task(self._serve(rank), name=f"worker {rank}")
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            await self._end_telling()
            return self.summary
        except PeerLost as error:
            raise self._roles.named(self._network.name, error) from None
        finally:
            for handle in self._told.values():
                handle.cancel()
            self._compute.close()
            if self._state is not None:
                self._state.close()

    # The start

    async def _open(self) -> None:
        config, settings, roles = self._config, self._settings, self._roles
        layout, names, state_bytes = await self._compute.run(self._build)
        if config.checkpoint.dir is not None:
            self._state = await self._compute.run(ServerState, config, settings, self._index, roles, layout, names)
        hello = Introduction(
            optimizer=type(self._shard.optimizer.optimizer).__name__,
            layout=layout,
            steps=[] if self._state is None else self._state.steps(),
            has_completed=self._state is not None and self._state.has_completed,
        )
        agreement = await agree(self._network, roles, hello, config, settings)
        self._run_id = agreement.run_id
        await self._compute.run(self._shard.optimizer.start_schedule, _steps(agreement, config))
        is_asynchronous = settings.mode == "asynchronous"
        self._clocks = Clocks(
            roles.workers, settings.staleness if is_asynchronous else None, settings.workers_needed(roles.workers)
        )
        step = await find_version(self._network, agreement, config, self._load)
        if self._state is not None:
            await self._compute.run(self._state.delete_later, -1 if step is None else step)
        if step is not None:
            self._is_new = False
        self._max_bytes = largest(self._shard.nbytes, state_bytes)
        self._on_open()
        log.info(
            "serving",
            server=self._index,
            servers=roles.servers,
            workers=roles.workers,
            mode=settings.mode,
            step=step,
            tensors=len(self._shard.pieces),
            bytes=self._shard.nbytes,
        )

    def _build(self) -> tuple[list[str], Mapping[str, Any], int]:
        """Make the model and keep the part of this server. Returns the layout, the names in the model's state, and the
        bytes of what is not trained."""
        check_config(self._config)
        model = build_model(self._task)
        layout, names = describe_layout(model), StateNames.of_model(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
        pieces = assign(trained, self._roles.servers, self._settings.cut_bytes)[self._index]
        self._shard = Shard(self._config, self._task, model, pieces)
        return layout, names, state_bytes_of(model)

    async def _load(self, step: int) -> Mapping[str, Any]:
        """Take a version from the checkpoints. Raises CheckpointError."""
        assert self._state is not None
        checkpoint, saved = await self._compute.run(self._state.load, step)
        await self._compute.run(self._restore, checkpoint, saved)
        return {"run_id": saved.run_id}

    def _restore(self, checkpoint: Checkpoint, saved: SavedServer) -> None:
        self._shard.restore(checkpoint)
        self._run_id = int(saved.run_id, 16)
        self._before = saved.bytes_in, saved.bytes_out
        self._own = {int(rank): (meta, own_tensors(checkpoint, int(rank))) for rank, meta in saved.own.items()}
        self._frozen = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(FROZEN)}
        counts = Counter({int(staleness): number for staleness, number in saved.staleness.items()})
        self._stepped_to = checkpoint.round_id
        before = self._clocks
        self._clocks = Clocks(
            before.workers, before.staleness, before.needed, checkpoint.round_id, saved.updates, saved.refused, counts
        )

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
                reply = encode(Message("push", self._clocks.slowest, Flag.DROPPED, meta={"why": str(error)[:400]}))
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
        handle = self._network.recv(REQUEST, source=rank, timeout_s=limit_s + held_s, max_bytes=self._max_bytes)
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
        self._lost.append(rank)
        self._pushed.pop(rank, None)
        self._asked.pop(rank, None)
        decision = self._decided(lambda: self._clocks.lose(rank))
        if not self._clocks.has_enough:
            raise error
        log.warning(
            "going on without a worker",
            worker=rank,
            reason=str(error),
            left=list(self._clocks.live),
            at_least=self._clocks.needed,
        )
        await self._carry_out(decision)

    async def _answer(self, rank: int, request: Message) -> Tensor:
        """The reply, when there is one. Raises CollectiveError: nobody may ask for that now."""
        loop = asyncio.get_running_loop()
        self._answers[rank] = answer = loop.create_future()
        self._asked_s[rank] = loop.time()
        if self._has_saved and self._state is not None:  # every server has answered this worker's last request, a save
            self._has_saved = False
            await self._compute.run(self._state.prune)
        if request.kind == "push":
            decision = await self._push(rank, request)
        else:
            if request.kind == "meet" and not 0 < len(meta_of(request, "name", str)) <= MAX_NAME_CHARS:
                raise CollectiveError(f"worker {rank} came to a meeting without a name")
            self._asked[rank] = request
            decision = self._decided(lambda: self._clocks.ask(rank, request.kind, request.clock))
        await self._carry_out(decision)
        found = await answer
        return found if isinstance(found, Tensor) else await self._compute.run(encode, found)

    async def _push(self, rank: int, request: Message) -> Decision:
        flags = request.flags
        if Flag.HAS_GRADIENT in flags:
            await self._compute.run(self._shard.check, rank, request.packed)
            self._pushed[rank] = request.packed
        self._epoch = max(self._epoch, request.epoch)
        return self._decided(
            lambda: self._clocks.push(
                rank,
                request.clock,
                has_gradient=Flag.HAS_GRADIENT in flags,
                is_refused=Flag.REFUSED in flags,
                meets=Flag.MEETS in flags,
                wants_end=Flag.WANTS_END in flags,
            )
        )

    def _decided(self, event: Callable[[], Decision]) -> Decision:
        self._step_number = self._clocks.slowest  # before the event: what is applied now belongs to that step
        try:
            return event()
        except ProtocolError as error:
            raise CollectiveError(f"server {self._index}: {error}") from None

    async def _carry_out(self, decision: Decision) -> None:
        """Apply, then answer. What follows a decision is brought to the thread before the next one is made."""
        gradients = [self._pushed.pop(rank) for rank in decision.apply]
        pushing = [rank for rank in decision.release if rank not in self._asked]
        if not gradients and not decision.release:
            return
        number, slowest, epoch = self._step_number, self._clocks.slowest, self._epoch
        self._network.at_step(slowest, epoch)
        if gradients or pushing:
            flags = Flag.WANTS_END if decision.wants_end else Flag.NONE
            updates = self._clocks.updates
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
        optimizer = self._shard.optimizer
        if gradients:
            self._shard.apply(gradients, count, step=number, epoch=epoch)
        while self._stepped_to < slowest:
            self._stepped_to += 1
            optimizer.step_has_ended()
        if answer is None:
            return torch.empty(0, dtype=torch.uint8)
        return encode(replace(answer, lr=optimizer.lr), self._shard.weights())

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
        if self._is_new:
            if 0 not in asked:
                raise CollectiveError("worker 0 was lost, whose weights a new run begins with: start it again")
            self._shard.load(asked[0].packed)
            brought = asked[0].state
            self._frozen = {name: tensor for name, tensor in brought.items() if name.startswith(FROZEN)}
            self._own = {0: ({}, {name: tensor for name, tensor in brought.items() if name not in self._frozen})}
        weights = encode(Message("start"), self._shard.weights())  # one copy for all
        packed = decode(weights).packed
        replies = {}
        first = min(self._own, default=0)
        for rank in asked:
            meta, tensors = self._own.get(rank) or self._own.get(first, ({}, {}))
            more = {"is_own": rank in self._own, "run_id": f"{self._run_id:016x}", "kept": dict(meta)}
            replies[rank] = Message(
                "start",
                self._clocks.start,
                updates=self._clocks.updates,
                lr=self._shard.optimizer.lr,
                packed=packed,
                meta=more,
                state={**tensors, **self._frozen},
            )
        self._own = {}
        return replies

    def _exchange(self, asked: Mapping[int, Message]) -> dict[int, Message]:
        """Return what each has brought, for all; of the named tensors those of the first one."""
        names = {meta_of(message, "name", str) for message in asked.values()}
        if len(names) > 1:
            raise CollectiveError(f"the workers have met for different things: {sorted(names)}")
        clocks, first = self._clocks, next(iter(asked.values()))
        brought = {str(rank): message.meta.get("value") for rank, message in asked.items()}
        staleness = {str(key): number for key, number in clocks.staleness_counts.items()}
        meta = {"all": brought, "refused": clocks.refused, "staleness": staleness, "lost": self._lost}
        return {rank: Message("meet", first.clock, meta=meta, state=first.state) for rank in asked}

    async def _save(self, clock: int, asked: Mapping[int, Message]) -> None:
        """All workers stand here, and every push before has been applied. Raises CheckpointError, TrainingDiverged."""
        if self._state is None:
            return
        if not await self._compute.run(self._shard.is_finite):
            raise TrainingDiverged(
                clock,
                f"the weights of server {self._index} have NaN or infinity",
                f"Lower optimizer.lr ({self._shard.optimizer.lr:g}), or set optimizer.clip_norm; checkpoints from "
                f"before are as they were",
            )
        own = {rank: (m.meta or {}, m.state) for rank, m in asked.items()} if self._index == 0 else {}
        bytes_in, bytes_out = self._exchanged
        size = await self._compute.run(
            self._state.save,
            clock,
            self._shard,
            own,
            self._frozen,
            run_id=f"{self._run_id:016x}",
            updates=self._clocks.updates,
            refused=self._clocks.refused,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            staleness={str(key): number for key, number in self._clocks.staleness_counts.items()},
        )
        self._has_saved = True
        log.info("checkpoint", server=self._index, step=clock, bytes=size)


def _steps(agreement: Agreement, config: DataParallelConfig) -> int:
    """Steps of the run, as long as epochs are as long as the first one."""
    first = EpochPlan.of(agreement.batches, config.accumulation_steps).steps * config.epochs
    return min(first, config.max_steps or first)

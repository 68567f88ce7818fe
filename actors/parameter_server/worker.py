"""A worker of a run with parameter servers: computes gradients, pushes them, and goes on with the weights it gets.

    async with gradbus.join_group(bus, rank=0, world=2) as workers, gradbus.join_group(
        bus, rank=0, world=2 + servers, name=NETWORK
    ) as network:
        async for report in ParameterServerWorker(workers, network, task, config, settings).epochs(): ...

Data, callbacks, evaluation and reports are as those of a :class:`~gradbus.Worker`. It keeps no state: what a resume
needs of it is saved by server 0.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradbus.actors.data_parallel.metrics import combined, tally
from gradbus.actors.data_parallel.replicas import describe_layout
from gradbus.actors.data_parallel.report import EpochReport, WorkerSummary
from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.task import DataParallelTask
from gradbus.actors.data_parallel.training import EpochPlan, ShardTraining, TrainingStep
from gradbus.actors.parameter_server.agreement import Introduction, Roles, agree, find_version
from gradbus.actors.parameter_server.assignment import TensorPart, assign, put
from gradbus.actors.parameter_server.clocks import Kind
from gradbus.actors.parameter_server.messages import Flag, Message, decode, encode, largest, meta_of, split
from gradbus.actors.parameter_server.server import REPLY, REQUEST
from gradbus.actors.parameter_server.shard import check_config
from gradbus.actors.parameter_server.state import FROZEN, state_bytes_of
from gradbus.runtime.algorithms.replicas import fingerprint
from gradbus.runtime.callbacks import Callbacks
from gradbus.runtime.checkpoint import Checkpoint, copy_state, restore_random_numbers
from gradbus.runtime.collectives import CollectiveHandle, Group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings
from gradbus.runtime.errors import CheckpointError, CollectiveError, PeerLost, ReplicasDiverged, TrainingDiverged
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import awaited
from gradbus.runtime.profiling.profile import Profile, StepProfile
from gradbus.runtime.profiling.summary import ProfileSummary

_GRACE_S = 5.0  # for the servers to find out first which worker is silent


class _Before(NamedTuple):
    """Counts at the start of an epoch."""

    started_s: float
    step: int
    wait_s: float
    bytes_out: int
    staleness: Counter[int]
    refused: int


class ParameterServerWorker:
    """One worker of a run. It runs once; make another one to run again.

    Attributes:
        profile: where the time goes. profiles: those of all workers, once the run has ended.
    """

    def __init__(
        self, workers: Group, network: Group, task: DataParallelTask, config: DataParallelConfig,
        settings: ParameterServerSettings, *, on_open: Callable[[], object] = lambda: None,
        callbacks: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """A worker that has not started.

        Args:
            workers: of all workers. network: of all workers and servers.
            task: model, data and loss.
            config, settings: the rules, equal on all workers and servers.
            on_open: called once all fit together and the weights are there.
            callbacks: as of a :class:`~gradbus.Worker`.
        """
        self._network = network
        self._config = config
        self._settings = settings
        self._on_open = on_open
        self._roles = Roles.of(network, settings)
        self._rank = network.rank
        self._log = get_logger("worker", rank=self._rank)
        self._compute = ComputeThread(f"worker-{self._rank}")
        self._callbacks = Callbacks("parallel", callbacks, config.callbacks)
        self._votes = False  # some worker has callbacks
        self._wants_end = False  # a callback of this one, since the last push
        self._is_stopped = False  # callbacks want it
        self._met_at = 0  # the step at which all stood together last
        self._training = ShardTraining(config, workers, task, self._compute.should_stop)
        jsonl = None if config.profile.dir is None else config.profile.dir / f"profile-rank-{self._rank}.jsonl"
        self.profile = Profile(self._rank, window_steps=config.profile.window_steps, jsonl=jsonl)
        self.profiles: list[ProfileSummary] = []
        self._position = Position()
        self._report: EpochReport | None = None
        self._params_hash = 0
        self._skipped = 0
        self._wait_s = 0.0
        self._seconds = 0.0
        self._has_started = False
        self._pieces: list[tuple[TensorPart, ...]] = []  # by server
        self._max_bytes = 0
        self._staleness: Counter[int] = Counter()  # of gradients so far, at server 0
        self._refused = 0
        self._restored_batches: int | None = None  # of this worker in the epoch that a resume goes on with

    @property
    def model(self) -> nn.Module:
        """The live module, once the run has started."""
        return self._training.model

    async def state_dict(self) -> dict[str, Any]:
        """The model as this worker has it: tensors by name, copies on the CPU, for ``model.load_state_dict``."""
        return await self._compute.run_or_follow(lambda: copy_state(self.model))

    @property
    def progress(self) -> str:
        """Return where the run is, for people."""
        return f"step {self.step}"

    @property
    def step(self) -> int:
        """Steps done, those before a resume included."""
        return self._position.step

    @property
    def summary(self) -> WorkerSummary:
        """Return what was done so far."""
        stats, report = self._network.stats, self._report
        return WorkerSummary(
            rank=self._rank, world=self._roles.workers, epochs=self._position.epoch, steps=self._position.step,
            accuracy=None if report is None else report.accuracy, loss=None if report is None else report.loss,
            metrics={} if report is None else report.metrics, params_hash=self._params_hash,
            skipped_steps=self._skipped, bytes_out=stats.bytes_out, bytes_in=stats.bytes_in, seconds=self._seconds,
            profile=self.profile.summary(), algorithm=f"{self._settings.mode} parameter server",
        )  # fmt: skip

    @awaited("worker.run()")
    async def run(self) -> WorkerSummary:
        """All epochs that are left. Raises as :meth:`epochs`."""
        async for _ in self.epochs():
            pass
        return self.summary

    async def epochs(self) -> AsyncGenerator[EpochReport, None]:
        """Train, and give a report after each epoch.

        Raises:
            ConfigError: settings or models differ.
            CheckpointError: a server's state does not fit, or is damaged.
            PeerLost: a server is lost, which the text names, or a worker without which the run ends.
            ReplicasDiverged: workers that have met have different weights.
            TrainingDiverged: too many gradients of this worker in a row were not finite.
            CallbackFailed: a callback has raised an exception.
            And what the task raises.
        """
        if self._has_started:
            raise RuntimeError("a worker runs once: make another one")
        self._has_started, started_s = True, time.perf_counter()
        try:
            await self._open()
            self._on_open()
            while not self._is_done:
                report = await self._one_epoch()
                self._seconds = time.perf_counter() - started_s
                yield report
            self._params_hash = await self._compute.run(lambda: fingerprint(self.model.parameters()))
            await self._compute.run(self._callbacks.call, "on_end", self.summary)
            ends = await self._ask("end", meta=self.profile.summary().to_json())
            found = meta_of(ends[0], "all", dict)
            self.profiles = [ProfileSummary.from_json(found[key]) for key in sorted(found, key=int)]
        except PeerLost as error:
            raise self._roles.named(self._network.name, error) from None
        finally:
            self._seconds = time.perf_counter() - started_s
            self._compute.close()
            self._training.close()
            self.profile.close()

    # The start

    async def _open(self) -> None:
        config, settings, training = self._config, self._settings, self._training
        check_config(config)
        await self._compute.run(training.open)
        self._pieces = assign(training.trained, self._roles.servers, settings.cut_bytes)
        held = max(sum(piece.nbytes for piece in own) for own in self._pieces)
        self._max_bytes = largest(held, state_bytes_of(self.model))
        hello = Introduction(
            optimizer=type(training.optimizer.optimizer).__name__, layout=describe_layout(self.model),
            batches=await self._compute.run(training.num_batches, 0), callbacks=bool(self._callbacks),
            run_id=int.from_bytes(os.urandom(8), "little"),
        )  # fmt: skip
        agreement = await agree(self._network, self._roles, hello, config, settings)
        self._votes = agreement.votes
        step = await find_version(self._network, agreement, config)
        self._position.step = step or 0
        begins = step is None and self._rank == 0
        brought = {**self._buffers(), **self._frozen()} if begins else None
        replies = await self._ask("start", tensors=training.trained if begins else None, state=brought)
        await self._compute.run(self._take_weights, replies)
        await self._compute.run(self._take_kept, replies[0], step)
        self._log.info("started", workers=self._roles.workers, servers=self._roles.servers, step=self.step)

    def _take_kept(self, reply: Message, step: int | None) -> None:
        """Take what this worker had, or, if it was lost before, where the others stand. Raises CollectiveError."""
        self._take_named(reply.state, {**self._buffers(), **self._frozen()})
        if step is None:
            return
        kept, is_own = meta_of(reply, "kept", dict), meta_of(reply, "is_own", bool)
        try:
            own = Position(**{**kept["position"], "step": step})
            if not is_own:
                own = Position(step, own.epoch, own.epoch_step)
            self._position = own
            self._restored_batches = kept["num_batches"] if is_own else None
            self._report = None if kept["report"] is None else EpochReport.from_json(kept["report"])
        except (KeyError, TypeError) as error:
            raise CollectiveError(f"server 0 has kept no position of worker {self._rank}: {error}") from None
        if is_own:
            restore_random_numbers(Checkpoint(step, reply.state, {}))

    # Requests

    async def _ask(
        self, kind: Kind, *, meta: Any = None, state: Mapping[str, Tensor] | None = None,
        tensors: Mapping[str, Tensor] | None = None, flags: Flag = Flag.NONE,
    ) -> list[Message]:  # fmt: skip
        """Ask all servers, or server 0 for what is not about weights. Returns their replies, in order.

        Args:
            meta, state: for server 0 alone. tensors: weights or gradients, by name; each server gets its pieces.
        """
        network, roles, timeouts = self._network, self._roles, self._config.timeouts
        servers = range(1) if kind == "meet" else range(roles.servers)
        clock, epoch = self._position.step, self._position.epoch
        flat = {} if tensors is None else await self._compute.run(_flat, tensors)
        requests = [
            await self._compute.run(
                encode,
                Message(kind, clock, flags, epoch, meta=None if server else meta, state={} if server else state or {}),
                [] if tensors is None else [piece.of(flat[piece.tensor]) for piece in self._pieces[server]],
            )
            for server in servers
        ]
        is_meeting = kind != "push" or Flag.MEETS in flags
        limit_s = self._answer_limit_s(kind, is_meeting)
        handles: list[CollectiveHandle[Any]] = []
        started_s = time.perf_counter()
        try:
            for server, request in zip(servers, requests, strict=True):
                rank = roles.workers + server
                handles.append(network.send(REQUEST, request, to=rank, timeout_s=timeouts.collective_s))
                handles.append(network.recv(REPLY, source=rank, timeout_s=limit_s, max_bytes=self._max_bytes))
            # A server that has dropped this worker takes no request any more, but has answered.
            found = [await self._reply(server, handle) for server, handle in zip(servers, handles[1::2], strict=True)]
            for handle in handles[::2]:
                await handle
        finally:
            for handle in handles:
                if not handle.done():
                    handle.cancel()
        self._wait_s += time.perf_counter() - started_s
        self.profile.add_span("wait", started_s, time.perf_counter())
        for server, reply in zip(servers, found, strict=True):
            if reply.kind != kind:
                raise CollectiveError(f"server {server} answered {kind} with {reply.kind}")
        if is_meeting:
            self._met_at = clock + (kind == "push")
        return found

    def _answer_limit_s(self, kind: Kind, is_meeting: bool) -> float:
        """How long a server may take to answer: as long as it waits for what the slowest worker has to send before.

        A server waits ``collective_s`` for a request, after a meeting as long as a checkpoint may take, and again
        ``collective_s`` until its answer is taken. A worker that is silent for longer is dropped, and then the answer
        comes. So this deadline is for servers that are alive, but do not answer; of one that dies the group tells.
        """
        collective_s = self._config.timeouts.collective_s
        longest_s = max(collective_s, self._config.checkpoint.timeout_s)
        if kind != "push":
            return longest_s + _GRACE_S
        since = self._position.step - self._met_at
        behind = min(since, self._settings.staleness) if self._settings.mode == "asynchronous" else 0
        awaited = behind + 1 if is_meeting else 1  # before, it may go on as soon as the slowest one has pushed once
        has_begun = not is_meeting and since > behind  # each has pushed since the meeting
        return (collective_s if has_begun else longest_s) + 2 * collective_s * (awaited - 1) + _GRACE_S

    async def _reply(self, server: int, handle: CollectiveHandle[Any]) -> Message:
        """The reply of a server. Raises CollectiveError: it goes on without this worker."""
        reply = await self._compute.run(decode, await handle)
        if Flag.DROPPED in reply.flags:
            raise CollectiveError(
                f"server {server} has dropped this worker: {meta_of(reply, 'why', str)}. What it has learnt since is "
                f"lost, and the others go on without it. Is it too slow for parallel.timeouts.collective_s "
                f"({self._config.timeouts.collective_s:g}), or was it stopped? It can take part in the next start"
            )
        return reply

    async def _meet(
        self, name: str, value: Any, state: Mapping[str, Tensor] | None = None
    ) -> tuple[Message, list[Any]]:
        """Exchange values with all workers that are left. Returns the reply, and a value, or None, by rank."""
        (reply,) = await self._ask("meet", meta={"name": name, "value": value}, state=state)
        found = meta_of(reply, "all", dict)
        self._staleness = Counter(
            {int(key): int(count) for key, count in meta_of(reply, "staleness", dict).items()}
        )  # fmt: skip
        self._refused = meta_of(reply, "refused", int)
        return reply, [found.get(str(rank)) for rank in range(self._roles.workers)]

    @torch.no_grad()
    def _take_weights(self, replies: Sequence[Message]) -> None:
        came = zip(self._pieces, replies, strict=True)
        parts = [zip(own, split(reply.packed, own), strict=True) for own, reply in came]
        put(self._training.trained, itertools.chain.from_iterable(parts))
        for group in self._training.optimizer.optimizer.param_groups:
            group["lr"] = replies[0].lr  # of the server's, for callbacks and reports

    def _buffers(self) -> dict[str, Tensor]:
        return {f"buffer/{name}": buffer for name, buffer in self.model.named_buffers()}

    def _frozen(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {f"{FROZEN}{name}": parameter.detach() for name, parameter in named if not parameter.requires_grad}

    @torch.no_grad()
    def _take_named(self, state: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
        """Copy named tensors that came. Raises CollectiveError: one is missing, or of another shape or type."""
        for name, tensor in live.items():
            came = state.get(name)
            if came is None or (came.shape, came.dtype) != (tensor.shape, tensor.dtype):
                what = "nothing" if came is None else f"{came.dtype} {tuple(came.shape)}"
                raise CollectiveError(f"{name}: expected {tensor.dtype} {tuple(tensor.shape)}, got {what}")
            tensor.copy_(came)

    # An epoch

    @property
    def _at_max(self) -> bool:
        return self._config.max_steps is not None and self._position.step >= self._config.max_steps

    @property
    def _ends_early(self) -> bool:
        return self._at_max or self._is_stopped

    @property
    def _is_done(self) -> bool:
        return self._position.epoch >= self._config.epochs or self._ends_early

    async def _one_epoch(self) -> EpochReport:
        position, started_s = self._position, time.perf_counter()
        own = await self._compute.run(self._training.num_batches, position.epoch)
        restored, self._restored_batches = self._restored_batches, None
        if restored not in (None, own) and position.epoch_step:
            raise CheckpointError(
                f"the checkpoint lies in the middle of epoch {position.epoch}, of {restored} batches on worker "
                f"{self._rank}; now there are {own}. Go on with the same data and batch size, or choose another "
                f"checkpoint.dir"
            )
        _, counts = await self._meet("batches", own)
        before = _Before(
            started_s, position.step, self._wait_s, self._network.stats.bytes_out, self._staleness, self._refused
        )
        plan = EpochPlan.of([count or 0 for count in counts], self._config.accumulation_steps)
        await self._compute.run(self._training.start_epoch, plan, position)
        while position.epoch_step < plan.steps and not self._ends_early:
            await self._one_step(plan)
            if self._is_checkpoint_due and position.epoch_step < plan.steps and not self._ends_early:
                await self._save(own)
        finished = position.epoch_step >= plan.steps
        report = self._report = await self._report_epoch(finished, before)
        await self._after_epoch(report)
        due = self._is_checkpoint_due or not self._config.checkpoint.every_steps
        if finished:
            self._position = position.next_epoch()
        if due or self._is_done:
            await self._save(own)
        return report

    @property
    def _is_checkpoint_due(self) -> bool:
        return self._is_due_after(self._position.step)

    def _is_due_after(self, step: int) -> bool:
        every = self._config.checkpoint.every_steps
        return every > 0 and step % every == 0

    async def _one_step(self, plan: EpochPlan) -> None:
        position, training = self._position, self._training
        self._network.at_step(position.step, position.epoch)
        with self.profile.step(position.step) as measured:
            step = training.new_step(plan, position)
            gradients = await self._compute.run(self._compute_gradients, step, measured)
            after = position.step + 1
            ends = position.epoch_step + 1 >= plan.steps or after == self._config.max_steps
            flags = Flag.MEETS if ends or self._is_due_after(after) else Flag.NONE
            flags |= Flag.HAS_GRADIENT if gradients else Flag.NONE
            flags |= Flag.REFUSED if step.skipped_by is not None else Flag.NONE
            flags |= Flag.WANTS_END if self._wants_end else Flag.NONE
            sent = self._network.stats.bytes_out
            replies = await self._ask("push", tensors=gradients, flags=flags)
            measured.count("bytes_out", self._network.stats.bytes_out - sent)
            await self._compute.run(self._take_weights, replies)
            await self._compute.run(training.count, step)
        position.step += 1
        position.epoch_step += 1
        self._is_stopped |= Flag.WANTS_END in replies[0].flags
        self._wants_end = False
        self._count(step)
        every = self._config.report_every_steps
        if every and position.step % every == 0:
            loss_sum = await self._compute.run(training.loss_sum)
            self._log.info(
                "training", step=position.step, epoch=position.epoch, loss=loss_sum / max(1, position.batches)
            )  # fmt: skip
        if self._callbacks.follow("on_step"):
            report = await self._compute.run(training.report_of, step)
            self._wants_end = bool(await self._compute.run(self._callbacks.call, "on_step", report))

    def _compute_gradients(self, step: TrainingStep, profile: StepProfile) -> dict[str, Tensor] | None:
        """The gradients by name; None if there are none to push, as there are no data, or they are not finite."""
        training = self._training
        training.compute(step, profile, lambda bucket: None, overlaps=False)
        if not step.batches:
            return None
        if not training.gradients_are_finite(step):
            step.is_finite, step.skipped_by = False, (self._rank,)
            return None
        gradients = {name: tensor for bucket in step.gradients for name, tensor in bucket.tensors.items()}
        limit = training.optimizer.clip_norm
        if limit is not None:  # each worker's own: no server sees all of the mean
            norm = float(torch.stack([_norm(tensor) for tensor in gradients.values()]).norm())
            for tensor in gradients.values() if norm > limit else ():
                tensor.mul_(limit / norm)
        return gradients

    def _count(self, step: TrainingStep) -> None:
        """Raises TrainingDiverged: too many steps in a row were not finite."""
        position, config = self._position, self._config
        if step.skipped_by is None:
            position.batches += step.batches
            position.skipped_in_row = 0
            return
        position.skipped += 1
        position.skipped_in_row += 1
        self._skipped += 1
        self._log.warning(
            "gradient not pushed: NaN or infinity", step=step.number + 1, in_a_row=position.skipped_in_row,
            limit=config.max_nonfinite_steps or None,
        )  # fmt: skip
        if 0 < config.max_nonfinite_steps <= position.skipped_in_row:
            raise TrainingDiverged(
                position.step, f"the last {position.skipped_in_row} gradients of worker {self._rank} in a row had NaN "
                f"or infinity", f"Look at the data and the loss there, lower optimizer.lr "
                f"({self._training.optimizer.lr:g}), or set optimizer.clip_norm. max_nonfinite_steps "
                f"({config.max_nonfinite_steps}) says how many may be, 0: any number", (self._rank,),
            )  # fmt: skip

    async def _after_epoch(self, report: EpochReport) -> None:
        if not self._votes:
            return
        wants_end = self._wants_end
        for method in ("on_evaluation", "on_epoch") if report.test_samples else ("on_epoch",):
            wants_end |= bool(await self._compute.run(self._callbacks.call, method, report))
        self._wants_end = False
        _, votes = await self._meet("votes", wants_end)
        self._is_stopped |= any(votes)

    async def _report_epoch(self, finished: bool, before: _Before) -> EpochReport:
        """Return what the workers have learnt together. All stand at the same step, with the same weights."""
        config, position, training = self._config, self._position, self._training
        await self._compute.run(training.note_sums, position)
        if buffers := self._buffers():
            reply, _ = await self._meet("buffers", None, buffers)
            await self._compute.run(self._take_named, reply.state, buffers)
        every, is_last = config.eval_every_epochs, self._ends_early or position.epoch + 1 >= config.epochs
        counts = None
        if every and (is_last or (position.epoch + 1) % every == 0):
            evaluation_s = time.perf_counter()
            counts = await self._compute.run(training.evaluate)
            self.profile.add_span("eval", evaluation_s, time.perf_counter())
        self._params_hash = await self._compute.run(lambda: fingerprint(self.model.parameters()))
        own = [
            position.loss_sum, position.batches, position.metrics, *tally(counts), position.skipped,
            f"{self._params_hash:016x}",
        ]  # fmt: skip
        _, brought = await self._meet("epoch", own)
        tallies = [one for one in brought if one is not None]
        of_workers = list(zip(*tallies, strict=True))
        hashes = [int(text, 16) for text in of_workers[8]]
        if len(set(hashes)) > 1:
            raise ReplicasDiverged(position.step, hashes)
        loss_sum, batches, total, eval_loss = (sum(of_workers[column]) for column in (0, 1, 3, 4))
        correct = None if None in of_workers[5] else sum(of_workers[5])
        steps = max(1, position.step - before.step)
        seconds = time.perf_counter() - before.started_s
        served = {"refused_gradients": float(self._refused - before.refused)}
        if self._settings.mode == "asynchronous":
            counted = self._staleness - before.staleness
            total_staleness = sum(staleness * count for staleness, count in counted.items())
            served["staleness_mean"] = total_staleness / max(1, counted.total())
            served["staleness_max"] = float(max(counted, default=0))
        report = EpochReport(
            epoch=position.epoch, step=position.step, finished=finished,
            loss=loss_sum / batches if batches else math.nan,
            accuracy=correct / total if total and correct is not None else None,
            eval_loss=eval_loss / total if total else None, metrics=combined(of_workers[6]),
            train_metrics={**combined(of_workers[2]), **served}, test_samples=total, params_hash=self._params_hash,
            skipped_steps=max(of_workers[7]), step_s_mean=seconds / steps,
            wait_s_mean=(self._wait_s - before.wait_s) / steps,
            bytes_out_per_step=(self._network.stats.bytes_out - before.bytes_out) / steps, seconds=seconds,
        )  # fmt: skip
        self._log.info(
            "epoch done", **{name: value for name, value in report.to_json().items() if name != "params_hash"}
        )
        return report

    async def _save(self, num_batches: int) -> None:
        """Have all servers save this version. They answer when they have."""
        if self._config.checkpoint.dir is None:
            return
        position, started_s = self._position, time.perf_counter()
        if position.epoch_step:
            await self._compute.run(self._training.note_sums, position)
        kept = {
            "position": asdict(position), "report": None if self._report is None else self._report.to_json(),
            "num_batches": num_batches,
        }  # fmt: skip
        await self._ask("save", meta=kept, state={**self._buffers(), "torch_rng": torch.get_rng_state()})
        self.profile.add_span("checkpoint", started_s, time.perf_counter())
        self._log.info("checkpoint", step=position.step)


def _flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views, or of what is not contiguous one copy each, of which parts are views."""
    return {name: tensor.reshape(-1) for name, tensor in tensors.items()}


def _norm(tensor: Tensor) -> Tensor:
    """In float64, on the CPU."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.cpu()

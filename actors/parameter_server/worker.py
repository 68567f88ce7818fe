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
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradbus.actors.data_parallel.algorithm import place_in
from gradbus.actors.data_parallel.buckets import gradients_are_finite
from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.rank import Rank
from gradbus.actors.data_parallel.replicas import describe_layout
from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.actors.data_parallel.task import DataParallelTask
from gradbus.actors.parameter_server.agreement import Introduction, Roles, agree, find_version
from gradbus.actors.parameter_server.assignment import put
from gradbus.actors.parameter_server.messages import Flag, Message, meta_of, split
from gradbus.actors.parameter_server.requests import ServerRequests
from gradbus.actors.parameter_server.shard import check_config
from gradbus.actors.parameter_server.state import FROZEN
from gradbus.runtime.algorithms.replicas import fingerprint
from gradbus.runtime.checkpoint import Checkpoint, restore_random_numbers
from gradbus.runtime.collectives import Group, check_group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings
from gradbus.runtime.errors import CollectiveError, PeerLost, ReplicasDiverged, TrainingDiverged
from gradbus.runtime.misuse import check_instance
from gradbus.runtime.profiling.profile import StepProfile
from gradbus.runtime.profiling.summary import ProfileSummary


class _Served(NamedTuple):
    """Gradients so far at server 0: those that were applied, by their staleness, and how many were refused."""

    staleness: Counter[int]
    refused: int


class _Before(NamedTuple):
    """Counts at the start of an epoch."""

    started_s: float
    step: int
    wait_s: float
    sent_bytes: int
    served: _Served


class ParameterServerWorker(Rank):
    """One worker of a run. It runs once; make another one to run again.

    Attributes:
        profiles: those of all workers, once the run has ended; of the others without their last request.
    """

    _call = "ParameterServerWorker(workers, network, task, config, settings)"

    def __init__(
        self,
        workers: Group,
        network: Group,
        task: DataParallelTask,
        config: DataParallelConfig,
        settings: ParameterServerSettings,
        *,
        on_open: Callable[[], object] = lambda: None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        """A worker that has not started.

        Args:
            workers: of all workers. network: of all workers and servers.
            task: model, data and loss.
            config, settings: the rules, equal on all workers and servers.
            on_open: called once all fit together and the weights are there.
            callbacks: as of a :class:`~gradbus.Worker`.

        Raises:
            ConfigError: an argument is another kind of thing, or this rank has left a group.
        """
        check_group(self._call, "network", network)
        advice = "Keep the order of the arguments"
        check_instance(self._call, "settings", settings, ParameterServerSettings, advice)
        super().__init__(workers, task, config, callbacks)
        self._place = place_in(workers)
        self._network = network
        self._settings = settings
        self._on_open = on_open
        self._roles = Roles.of(network, settings)
        self._requests: ServerRequests | None = None
        self._votes = False  # some worker has callbacks
        self.profiles: list[ProfileSummary] = []
        self._sent_bytes = 0  # in steps
        self._served = _Served(Counter(), 0)
        self._before = _Before(0.0, 0, 0.0, 0, self._served)
        self._num_batches = 0  # of this worker in this epoch

    @property
    def algorithm(self) -> str:
        return f"{self._settings.mode} parameter server"

    @property
    def _group_and_world(self) -> tuple[Group, int]:
        return self._network, self._roles.workers

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
        self._start_once()
        try:
            await self._open()
            self._on_open()
            while not self._is_done:
                report = await self._one_epoch()
                assert report is not None
                yield report
            self._params_hash = await self._compute.run(lambda: fingerprint(self.model.parameters()))
            await self._call_at_end()
            ends = await self._servers.ask("end", self._position, meta=self.profile.summary().to_json())
            found = meta_of(ends[0], "all", dict)
            profiles = [ProfileSummary.from_json(found[key]) for key in sorted(found, key=int)]
            own = self.profile.summary()  # with the bytes of this last request
            self.profiles = [own if one.rank == own.rank else one for one in profiles]
        except PeerLost as error:
            raise self._roles.named(self._network.name, error) from None
        finally:
            self._seconds = time.perf_counter() - self._started_s
            self._compute.close()
            if self._loaded is not None:
                self._loaded.close()
            self.profile.close()

    # The start

    async def _open(self) -> None:
        config, settings = self._config, self._settings
        check_config(config)
        training = await self._load(self._place)
        self._requests = servers = ServerRequests(
            self._network, self._roles, config, settings, training, self._compute, self.profile
        )
        hello = Introduction(
            optimizer=type(training.optimizer.optimizer).__name__,
            layout=describe_layout(self.model),
            batches=await self._compute.run(training.num_batches, 0),
            callbacks=bool(self._callbacks),
            run_id=int.from_bytes(os.urandom(8), "little"),
        )
        agreement = await agree(self._network, self._roles, hello, config, settings)
        self._votes = agreement.votes
        step = await find_version(self._network, agreement, config)
        self._position.step = step or 0
        begins = step is None and self._network.rank == 0
        weights, beside = (training.trained, {**self._buffers(), **self._frozen()}) if begins else (None, None)
        replies = await servers.ask("start", self._position, tensors=weights, state=beside)
        await self._compute.run(self._take_weights, replies)
        await self._compute.run(self._take_kept, replies[0], step)
        await self._compute.run(self.profile.begin_run, meta_of(replies[0], "run_id", str))
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
            raise CollectiveError(f"server 0 has kept no position of worker {self._network.rank}: {error}") from None
        if is_own:
            restore_random_numbers(Checkpoint(step, reply.state, {}))

    # Requests

    @property
    def _servers(self) -> ServerRequests:
        """Return what asks the servers. Raises RuntimeError: this worker has not met them yet."""
        if self._requests is None:
            raise RuntimeError("this worker knows no server yet: it does when run() or epochs() has met them")
        return self._requests

    async def _meet(
        self, name: str, value: Any, state: Mapping[str, Tensor] | None = None
    ) -> tuple[Message, list[Any]]:
        """Exchange values with all workers that are left. Returns the reply, and a value, or None, by rank."""
        (reply,) = await self._servers.ask("meet", self._position, meta={"name": name, "value": value}, state=state)
        found = meta_of(reply, "all", dict)
        staleness = Counter({int(key): int(count) for key, count in meta_of(reply, "staleness", dict).items()})
        self._served = _Served(staleness, meta_of(reply, "refused", int))
        return reply, [found.get(str(rank)) for rank in range(self._roles.workers)]

    @torch.no_grad()
    def _take_weights(self, replies: Sequence[Message]) -> None:
        came = zip(self._servers.pieces, replies, strict=True)
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

    async def _begin_epoch(self) -> EpochPlan:
        started_s = time.perf_counter()
        self._num_batches = await self._own_batches()
        _, counts = await self._meet("batches", self._num_batches)
        self._before = _Before(started_s, self.step, self._servers.wait_s, self._sent_bytes, self._served)
        return EpochPlan.of([count or 0 for count in counts], self._config.accumulation_steps)

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
            replies = await self._servers.ask("push", position, tensors=gradients, flags=flags)
            await self._compute.run(self._take_weights, replies)
            await self._compute.run(training.count, step)
        self._sent_bytes += measured.sent_bytes
        position.step += 1
        position.epoch_step += 1
        self._is_stopped |= Flag.WANTS_END in replies[0].flags
        self._wants_end = False
        self._count(step)
        before = self._before
        await self._report_progress_if_due(
            steps=position.step - before.step,
            seconds=time.perf_counter() - before.started_s,
            wait_s=self._servers.wait_s - before.wait_s,
            bytes_out=self._sent_bytes - before.sent_bytes,
        )
        if self._callbacks.have("on_step"):
            report = await self._compute.run(training.report_of, step)
            self._wants_end = bool(await self._compute.run(self._callbacks.call, "on_step", report))

    def _compute_gradients(self, step: TrainingStep, profile: StepProfile) -> dict[str, Tensor] | None:
        """The gradients by name; None if there are none to push, as there are no data, or they are not finite."""
        training = self._training
        training.compute(step, profile)
        if not step.batches:
            return None
        if not gradients_are_finite(step.gradients):
            step.is_finite, step.skipped_by = False, (self._network.rank,)
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
        position, config, rank = self._position, self._config, self._network.rank
        if step.skipped_by is None:
            position.batches += step.batches
            position.skipped_in_row = 0
            return
        position.skipped += 1
        position.skipped_in_row += 1
        self.skipped_steps += 1
        self._log.warning(
            "gradient not pushed: NaN or infinity",
            step=step.number + 1,
            in_a_row=position.skipped_in_row,
            limit=config.max_nonfinite_steps or None,
        )
        if 0 < config.max_nonfinite_steps <= position.skipped_in_row:
            raise TrainingDiverged(
                position.step,
                f"the last {position.skipped_in_row} gradients of worker {rank} in a row had NaN or infinity",
                f"Look at the data and the loss there, lower optimizer.lr "
                f"({self._training.optimizer.lr:g}), or set optimizer.clip_norm. max_nonfinite_steps "
                f"({config.max_nonfinite_steps}) says how many may be, 0: any number",
                (rank,),
            )

    async def _after_epoch(self, report: EpochReport) -> None:
        if not self._votes:
            return
        await self._call_after_epoch(report)
        _, votes = await self._meet("votes", self._wants_end)
        self._wants_end = False
        self._is_stopped |= any(votes)

    async def _report_epoch(self, finished: bool) -> EpochReport:
        """Return what the workers have learnt together. All stand at the same step, with the same weights."""
        position, training, before = self._position, self._training, self._before
        await self._compute.run(training.note_sums, position)
        if buffers := self._buffers():
            reply, _ = await self._meet("buffers", None, buffers)
            await self._compute.run(self._take_named, reply.state, buffers)
        tally = await self._evaluate()
        self._params_hash = await self._compute.run(lambda: fingerprint(self.model.parameters()))
        _, brought = await self._meet("epoch", [*tally, f"{self._params_hash:016x}"])
        tallies = [one[:-1] for one in brought if one is not None]
        hashes = [int(one[-1], 16) for one in brought if one is not None]
        if len(set(hashes)) > 1:
            raise ReplicasDiverged(position.step, hashes)
        steps = max(1, position.step - before.step)
        seconds = time.perf_counter() - before.started_s
        served = {"refused_gradients": float(self._served.refused - before.served.refused)}
        if self._settings.mode == "asynchronous":
            counted = self._served.staleness - before.served.staleness
            total_staleness = sum(staleness * count for staleness, count in counted.items())
            served["staleness_mean"] = total_staleness / max(1, counted.total())
            served["staleness_max"] = float(max(counted, default=0))
        return self._reported(
            finished,
            tallies,
            served,
            step_s_mean=seconds / steps,
            wait_s_mean=(self._servers.wait_s - before.wait_s) / steps,
            bytes_out_per_step=(self._sent_bytes - before.sent_bytes) / steps,
            seconds=seconds,
        )

    async def _save(self) -> None:
        """Have all servers save this version. They answer when they have."""
        if self._config.checkpoint.dir is None:
            return
        position, started_s = self._position, time.perf_counter()
        if position.epoch_step:
            await self._compute.run(self._training.note_sums, position)
        kept = {
            "position": asdict(position), "report": None if self._report is None else self._report.to_json(),
            "num_batches": self._num_batches,
        }  # fmt: skip
        state = {**self._buffers(), "torch_rng": torch.get_rng_state()}
        await self._servers.ask("save", position, meta=kept, state=state)
        self.profile.add_span("checkpoint", started_s, time.perf_counter())
        self._log.info("checkpoint", step=position.step)


def _norm(tensor: Tensor) -> Tensor:
    """In float64, on the CPU."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.cpu()

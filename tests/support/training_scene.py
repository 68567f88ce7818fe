"""One rank's training without a network: what its programs ask for is kept, and its own gradient is the mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from settings import nested
from torch import Tensor, nn

from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.mean_loss import MeanLoss
from gradbus.actors.data_parallel.replicas import model_tensors
from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.data_parallel.state import Position, RunTensors, WorkerState
from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.actors.data_parallel.stepping import GradientExchange, GradientStepper, StepperParts
from gradbus.actors.data_parallel.training import ShardTraining
from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.base import Place, Step, algorithm_maker
from gradbus.runtime.collectives.programs import ProgramRuns
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.profiling.profile import Profile


@dataclass
class Calls:
    """Stands in for a group: keeps what is handed to it."""

    world: int = 1
    rank: int = 0
    members: tuple[()] = ()
    sent: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)

    def all_reduce(self, name: str, tensor: Tensor, **options: Any) -> str:
        self.sent.append((name, tensor, options))
        return name

    def all_gather(self, name: str, payload: Tensor, **options: Any) -> str:
        self.sent.append((name, payload, options))
        return name


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))


class Task:
    """Random batches."""

    def build_model(self) -> nn.Module:
        return network()

    def prepare_shard(self, rank: int, world: int) -> None:
        pass

    def num_batches(self, **where: int) -> int:
        return 100

    def batches(self, *, epoch: int, **where: int) -> Any:
        for number in range(100):
            yield torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * epoch + number))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()


class Scene:
    """One rank that steps alone."""

    def __init__(self, world: int = 1, **settings: Any) -> None:
        self.config = DataParallelConfig(**nested(settings))
        self.group = Calls(world)
        make = algorithm_maker(self.config.algorithm)
        self.training = ShardTraining(self.config, Place(0, world), Task(), make, should_stop=lambda: False)
        self.training.start_epoch(EpochPlan((100,)), Position())
        self.net = self.training.model
        self.done = 0

    def send(self, *, active: int | None = None) -> TrainingStep:
        """Compute a step's gradients, and start its programs."""
        parts = StepperParts(
            self.group,
            self.config.timeouts.collective_s,
            self.training,
            ComputeThread("scene"),
            Profile(0),  # type: ignore[arg-type]
        )
        stepper = GradientStepper(parts, Position(), overlap=self.config.overlap)
        step = self._next()
        step.active = self.group.world if active is None else active
        exchange = GradientExchange(
            step, self.exchange(step.number), self.training.algorithm, MeanLoss(None, is_needed=False)
        )
        stepper._compute_gradients(exchange, Profile(0))  # type: ignore[arg-type]  # noqa: SLF001 - a step that goes no further than this
        return step

    def exchange(self, number: int) -> ProgramRuns:
        """For programs of a step."""
        return ProgramRuns(self.group, round_id=number, timeout_s=self.config.timeouts.collective_s)  # type: ignore[arg-type]

    def step(self) -> None:
        """Make a step whose programs run alone."""
        step, algorithm = self._next(), self.training.algorithm
        self.training.compute(step, Profile(0))
        for bucket in step.gradients:
            Lockstep(1).run([algorithm.exchange(bucket, Step(step.number, step.epoch))])
        algorithm.commit()
        self.training.apply(step, Profile(0))

    def _next(self) -> TrainingStep:
        self.done += 1
        return self.training.new_step(EpochPlan((100,)), Position(step=self.done - 1, epoch_step=self.done - 1))

    def save(self, state: WorkerState, position: Position, *, num_batches: int, report: EpochReport | None) -> None:
        """What rank 0 saves."""
        training = self.training
        tensors = RunTensors(training.state.own(), training.state.shared(), model_tensors(self.net))
        state.save(9, position, self.net, tensors, num_batches=num_batches, report=report)

    @property
    def parameters(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.net.parameters()).detach().clone()

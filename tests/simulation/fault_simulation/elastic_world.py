"""Elastic workers, whose ranks come and go, and who starts them again.

A process that was lost, or has left, is started again and joins the others. Where nothing goes on any more, as too few
are left to decide on a generation, all are ended and the run is started again from its checkpoint, as the operator of
such a run does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fault_simulation.kernel import VirtualProcess, now_s
from fault_simulation.memory import connected
from fault_simulation.tasks import DIM, GradientTask
from fault_simulation.world import COMPUTE_S, World
from gradbus.actors.data_parallel.elastic import ElasticPlace, ElasticWorker
from gradbus.runtime.collectives.generations import LOST
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CollectiveError

STEPS_IN_EPOCH = 3  # while all take part
WAIT_S, COLLECTIVE_S = 20.0, 5.0
AGAIN_S = (0.2, 3.0)  # from the end of a process until it is started again
LR, MOMENTUM = 0.1, 0.9
NO_STATE = "has the state of the run: go on from a checkpoint"


class HasLeft(Exception):
    """A process was asked to leave, and has."""


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """A step that a process has applied.

    Attributes:
        job: number of the start of the whole run. first, last: batches of the epoch in it, without the last one.
        weights: after it, float32 (dim,).
    """

    process: VirtualProcess
    job: int
    generation: int
    step: int
    epoch: int
    first: int
    last: int
    weights: torch.Tensor


class ElasticWorld(World):
    """A run of elastic workers.

    Attributes:
        job: how often the whole run was started. applied: steps, in their order in time. finished: processes that have
            come to the end of the run.
    """

    round_limit_s = 130.0

    def __init__(self, *args: Any, **given: Any) -> None:
        self.job = 1
        self.jobs: dict[str, int] = {}  # by start of a process
        self.applied: list[AppliedStep] = []
        self.finished: list[VirtualProcess] = []
        self._workers: dict[str, ElasticWorker] = {}
        self._generation = 0  # the newest one of this job
        self._has_begun = False  # this job has had a generation
        self._progress_s = 0.0
        super().__init__(*args, **given)

    def _draw_roles(self, clients: int) -> list[str]:
        return [f"rank-{number}" for number in range(clients)]

    @property
    def founders(self) -> int:
        """Return the number of processes that begin the run. Where it is not all, one more waits as a spare."""
        return len(self.roles) - (self.circumstances.quorum < 1.0)

    @property
    def batches(self) -> int:
        """Return their number in an epoch, of all ranks together."""
        return STEPS_IN_EPOCH * len(self.roles)

    @property
    def epochs(self) -> int:
        """Return their number."""
        return self.rounds

    def compute_cost_s(self, function: Callable[..., Any]) -> float:
        names = [getattr(cell.cell_contents, "__name__", "") for cell in getattr(function, "__closure__", None) or ()]
        return self.rng.expovariate(1.0) * (self.circumstances.train_s if "_compute_gradients" in names else COMPUTE_S)

    # What is reported to it

    def on_decision(self, process: VirtualProcess, name: str, facts: dict[str, Any]) -> None:
        """Take a decision: a generation that a process knows now, or what it tells the others."""
        super().on_decision(process, name, facts)
        if name == "generation" and not process.dead and facts["generation"] > self._generation:
            self._has_begun, self._progress_s, self._generation = True, now_s(), facts["generation"]

    def at_decision(self, process: VirtualProcess, kind: str, name: str, when: str, number: int = 0) -> None:
        """Note a step that was applied, and inject the faults of this decision."""
        if kind == "place" and name == "after_step" and not process.dead:
            self._note_step(process)
        super().at_decision(process, kind, name, when, number)

    def _note_step(self, process: VirtualProcess) -> None:
        self._progress_s = now_s()
        worker = self._workers[process.name]
        position, plan, copies = worker._position, worker._plan, worker._copies  # noqa: SLF001 - at this place
        # One that has the state and gets no data yet applies steps, too, and may be the only one that lives after one.
        has_state = worker._group.rank not in copies.follows or copies.held is None  # noqa: SLF001 - at this place
        if plan is None or not has_state:
            return
        generation = copies.generation
        first, last = (plan.batches_done(position.epoch_step + more) for more in (0, 1))
        weights = torch.nn.utils.parameters_to_vector(worker.model.parameters()).detach().clone()
        step = AppliedStep(process, self.job, generation, position.step, position.epoch, first, last, weights)
        self.applied.append(step)
        self.trace.add(
            f"{process.name} has applied step {step.step} of generation {generation}, batches {first}:{last}"
        )

    # Who starts them again

    def _stop(self, process: VirtualProcess, again_s: float) -> None:
        worker = self._workers.get(process.name)
        if worker is None:
            super()._stop(process, again_s)
            return
        self._restart_s[process.name] = again_s
        process.context.run(worker.leave)

    def _again_after_s(self, process: VirtualProcess, error: Exception) -> float | None:
        if isinstance(error, HasLeft):
            return self._restart_s.pop(process.name)
        is_loss = isinstance(error, LOST) or (isinstance(error, CollectiveError) and NO_STATE in str(error))
        if not is_loss or self.finished:
            return None
        self.trace.add(f"{process.name} has failed: {type(error).__name__}: {str(error)[:200]}")
        if now_s() > self._progress_s + WAIT_S:
            self._begin_anew(process)
        return self.rng.uniform(*AGAIN_S)

    def _begin_anew(self, failed: VirtualProcess) -> None:
        """End all, and start all again from the checkpoint."""
        self.job += 1
        self._has_begun, self._progress_s, self._generation = False, now_s(), 0
        self.trace.add("all processes are ended, and the run is started again")
        for process in self._now.values():
            if process is not failed and not process.dead:
                self._kill(process, self.rng.uniform(*AGAIN_S))

    # Actors

    async def _act(self, process: VirtualProcess) -> object:
        number, founders = int(process.role.partition("-")[2]), self.founders
        self.jobs[process.name] = self.job
        config = DataParallelConfig.model_validate(
            {
                "epochs": self.epochs,
                "eval_every_epochs": 0,
                "hash_every": 1,
                "optimizer": {"name": "sgd", "lr": LR, "momentum": MOMENTUM},
                "checkpoint": {"dir": self.folder / "shared", "every_steps": 2, "timeout_s": COLLECTIVE_S},
                "timeouts": {"join_s": WAIT_S, "collective_s": COLLECTIVE_S},
                "elastic": {"min_world": min(2, self.circumstances.minimum), "max_world": founders, "wait_s": WAIT_S},
                "history": {"dir": self.folder / "history"},
            }
        )
        task = GradientTask(DIM, pulls=True, batches=self.batches)
        async with connected(process) as bus:
            begins = number < founders and not self._has_begun
            place = ElasticPlace(bus=bus, number=number, founders=founders if begins else 0)
            worker = self._workers[process.name] = ElasticWorker(place, task, config)
            async for report in worker.epochs():
                self.trace.add(f"{process.name} reports epoch {report.epoch}, step {report.step}")
            if worker.has_ended:
                self.finished.append(process)
            elif worker.has_left and not self.finished:
                raise HasLeft
            return worker.summary

    # What must hold

    def _judge(self) -> None:
        from fault_simulation import elastic_oracles  # which reads worlds

        elastic_oracles.judge(self)

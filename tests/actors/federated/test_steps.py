"""Rounds counted in optimizer steps, and optimizers that go on from round to round: DiLoCo by Controller and Client."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import succeeded, train
from dds_domains import new_domain
from torch import Tensor, nn

import gradbus
from gradbus import models
from gradbus.actors.federated.client.client_optimizer import steps_argument
from gradbus.actors.federated.client.rules.base import ClientRule, RoundStart
from gradbus.models import NoopTask, TrainResult
from gradbus.runtime.errors import ConfigError

STEPS = 4
_jobs = itertools.count()


class Lines:
    """Linear regression on batches that client and step alone decide. A liar sends nonsense."""

    def __init__(self, liars: Sequence[int] = ()) -> None:
        self._liars = liars

    def build_model(self) -> nn.Module:
        model = nn.Linear(6, 3)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view(parameter.shape) + 0.1 * number)
        return model

    def prepare(self, client_id: int, num_clients: int) -> None: ...

    def loss(self, model: nn.Module, client_id: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * client_id + step)
        x = torch.randn(8, 6, generator=generator)
        return (model(x) - x[:, :3].cumsum(1)).square().mean()

    def train(self, model: nn.Module, *, client_id: int, round_id: int, steps: int, **given: Any) -> TrainResult:
        make: Callable[..., torch.optim.Optimizer] = given["make_optimizer"]
        optimizer = make(model.parameters())
        for step in range((round_id - 1) * steps, round_id * steps):
            optimizer.zero_grad()
            self.loss(model, client_id, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if client_id in self._liars:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1000.0)
        return TrainResult(8 * steps, 0.0)

    def evaluate(self, model: nn.Module) -> None: ...


class LinesOfRanks:
    """The same model and batches for workers: a step is a batch, and rank k has the data of client k."""

    def __init__(self, steps: int) -> None:
        self._lines, self._steps = Lines(), steps

    def build_model(self) -> nn.Module:
        return self._lines.build_model()

    def prepare_shard(self, rank: int, world: int) -> None: ...

    def num_batches(self, **where: int) -> int:
        return self._steps

    def batches(self, *, rank: int, **where: int) -> Iterator[tuple[int, int]]:
        return ((rank, step) for step in range(self._steps))

    def loss(self, model: nn.Module, batch: tuple[int, int]) -> Tensor:
        return self._lines.loss(model, *batch)

    def evaluate_shard(self, model: nn.Module, **where: int) -> None: ...


def run(
    rounds: int,
    clients: int,
    strategy: Any,
    *,
    task: Lines | None = None,
    folder: Path | None = None,
    least: int | None = None,
    **settings: Any,
) -> Tensor:
    """The weights after a run of a Controller and so many clients over DDS. ``least``: updates in a round."""
    job, domain, task = f"steps-{os.getpid()}-{next(_jobs)}", new_domain(), task or Lines()
    config = gradbus.FederatedConfig(
        rounds=rounds,
        strategy=strategy,
        eval_every=0,
        clients={"num": clients, "min": least or clients, "dead_after_s": 30.0},
        training={"steps": STEPS, "optimizer": {"name": "adamw", "lr": 0.01}, "keep_optimizer": True},
        **settings,
        **({} if folder is None else {"checkpoint": {"dir": folder / "controller"}}),
    )

    async def one(client_id: int) -> None:
        own = gradbus.ClientConfig(state_dir=None if folder is None else folder / "clients")
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, task, client_id=client_id, config=own).run()

    async def main() -> Tensor:
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            controller = gradbus.Controller(bus, task, config)
            for client_id in range(clients):
                group.create_task(one(client_id))
            await controller.run()
            return controller.weights.clone()

    return asyncio.run(main())


def diloco(rounds: int, clients: int, *, lr: float = 0.7, momentum: float = 0.9) -> Tensor:
    """Algorithm 1 of DiLoCo (arXiv:2311.08105), written down plainly: AdamW inside, Nesterov outside."""
    task = Lines()
    replicas = [task.build_model() for _ in range(clients)]
    inner = [torch.optim.AdamW(replica.parameters(), lr=0.01) for replica in replicas]
    theta = nn.utils.parameters_to_vector(replicas[0].parameters()).detach().double()
    m = torch.zeros_like(theta)
    for t in range(rounds):
        changes = []
        for client_id, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            nn.utils.vector_to_parameters(theta.float(), replica.parameters())
            for step in range(t * STEPS, (t + 1) * STEPS):
                optimizer.zero_grad()
                task.loss(replica, client_id, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            changes.append(theta - nn.utils.parameters_to_vector(replica.parameters()).detach().double())
        change = torch.stack(changes).mean(0)
        m = momentum * m + change
        theta = theta - lr * (change + momentum * m)
    return theta


NESTEROV = {"name": "fedavgm", "lr": 0.7, "momentum": 0.9, "nesterov": True}


def test_rounds_of_steps_with_kept_optimizers_and_nesterov_momentum_are_diloco_also_over_a_resume(
    tmp_path: Path,
) -> None:
    whole = run(5, 2, NESTEROV)
    assert float((whole.double() - diloco(5, 2)).abs().max()) < 2e-6
    run(2, 2, NESTEROV, folder=tmp_path)
    assert torch.equal(run(5, 2, NESTEROV, folder=tmp_path), whole)


def test_a_controller_and_its_clients_and_workers_without_one_train_the_same_model_by_diloco() -> None:
    """But for roundings of float32, and of the controller's sums to multiples of 2^-30."""
    rounds = 5
    outcomes = succeeded(
        train(
            LinesOfRanks(rounds * STEPS),
            epochs=1,
            eval_every_epochs=0,
            optimizer={"name": "adamw", "lr": 0.01},
            algorithm={"name": "diloco", "steps": STEPS, "codec": "fp32", "outer_lr": 0.7, "outer_momentum": 0.9},
        )
    )
    federated = run(rounds, 2, NESTEROV)
    for outcome in outcomes:
        assert float((outcome.parameters - federated).abs().max()) < 1e-6  # of changes by 0.1


def test_one_liar_in_eight_does_not_move_the_median_of_rounds_of_steps() -> None:
    honest = run(3, 8, "fedavg")
    found = run(3, 8, {"name": "median", "byzantine": 1}, task=Lines(liars=[5]), limits={"max_strikes": 0})
    assert float((found - honest).abs().max()) < 0.02  # of a change by 0.12; the mean would be beyond 100


def test_one_liar_in_eight_does_not_move_the_median_where_learners_do_not_wait_for_each_other() -> None:
    honest = run(3, 8, "fedavg")
    found = run(
        3,
        8,
        {"name": "median", "byzantine": 1},
        task=Lines(liars=[5]),
        limits={"max_strikes": 0},
        least=6,
        mode="asynchronous",
        asynchronous={"buffer": 6, "repeats": False},
    )
    assert float((found - honest).abs().max()) < 0.1  # late steps count in later rounds; the mean would be beyond 100


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_task_of_ours_makes_so_many_steps_over_passes_of_its_data(steps: int) -> None:
    task = models.ClassificationTask(models.mnist_mlp, models.load("glyphs"), batch_size=32)
    model, made = task.build_model(), 0

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def count(*_: Any) -> None:
            nonlocal made
            made += 1

        optimizer.register_step_post_hook(count)
        return optimizer

    found = task.train(
        model,
        client_id=0,
        round_id=1,
        epochs=1,
        lr=0.1,
        seed=0,
        subset_size=80,
        should_stop=lambda: False,
        make_optimizer=make,
        steps=steps,
    )
    assert made == steps
    assert found.num_samples == (32 if steps == 1 else 80)


def test_settings_and_tasks_that_do_not_fit_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        gradbus.FederatedConfig(training={"steps": 3, "epochs": 2})
    with pytest.raises(ValueError, match="Name one, as adamw"):
        gradbus.FederatedConfig(training={"keep_optimizer": True})
    with pytest.raises(ConfigError, match=r"train of NoopTask counts epochs"):
        steps_argument(NoopTask(3), 5)


def test_a_training_may_begin_and_end_in_the_midst_of_a_step_of_another() -> None:
    def begin(model: nn.Module) -> RoundStart:
        return RoundStart(round_id=1, lr=0.1, model=model, base=torch.zeros(0), parameters=[], local_loss=lambda: 0.0)

    class Meanwhile(ClientRule):
        def before_step(self, model: nn.Module) -> None:
            with ClientRule().attached(begin(nn.Linear(1, 1))):
                pass

    model, rule = nn.Linear(2, 2), Meanwhile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rule.attached(begin(model)):
        optimizer.step()
    assert rule.steps == 1

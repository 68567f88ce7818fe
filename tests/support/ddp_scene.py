"""Data-parallel ranks for tests: several in one process, each on a bus of its own, over DDS; and what they must equal.

In one process, because that takes a fraction of a second. What only real processes show (a rank that is killed) is in
``ddp_node``.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dds_domains import new_domain
from settings import nested
from torch import Tensor, nn

import gradbus
from gradbus import codecs
from gradbus.actors import EpochReport, Worker, WorkerSummary
from gradbus.actors.data_parallel.training import ShardTraining
from gradbus.models import ClassificationTask, DataSplit, glyphs, mnist_mlp
from gradbus.runtime.choices import OPTIMIZERS
from gradbus.runtime.collectives import Group, join_group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.tasks import single_error

_numbers = itertools.count()

small_mlp = functools.partial(mnist_mlp, hidden=24)


@functools.cache
def data(train: int = 200, test: int = 101) -> DataSplit:
    """A few glyphs."""
    return glyphs(train=train, test=test)


def make_task(model: Callable[..., nn.Module] = small_mlp, *, batch_size: int = 16, **options: Any) -> Any:
    """A task over :func:`data`."""
    return ClassificationTask(model, data(), batch_size=batch_size, **options)


@dataclass
class Outcome:
    """What a rank came to: a summary and reports, or an error."""

    worker: Worker
    summary: WorkerSummary | None = None
    reports: list[EpochReport] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def parameters(self) -> Tensor:
        """All of them, one vector."""
        return vector(self.worker.model)


def vector(model: nn.Module) -> Tensor:
    """All parameters, float32, shape (D,)."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def training_of(worker: Worker) -> ShardTraining:
    """The algorithm and the optimizer of a rank, and what it would save of them."""
    return worker._training  # noqa: SLF001 - a worker shows its users the model alone


Play = Callable[[Group, Worker], Awaitable[None]]


def new_place() -> dict[str, Any]:
    """Job and domain of a run."""
    return {"job": f"ddp-{os.getpid()}-{next(_numbers)}", "domain": new_domain()}


def train(
    *tasks: Any,
    world: int = 2,
    configs: Sequence[DataParallelConfig] = (),
    algorithms: Sequence[Any] = (),
    callbacks: Sequence[Sequence[Any]] = (),
    play: Play | None = None,
    place: dict[str, Any] | None = None,
    timeout_s: float = 60.0,
    **settings: Any,
) -> list[Outcome]:
    """Run all ranks to their ends. One task for all, or one for each; ``settings`` or one of ``configs`` for each.

    ``algorithms``, ``callbacks``: of each rank, where one has any.
    ``play``: called for each rank in place of ``Worker.run()``. An error of a rank is in its outcome.
    ``place``: job and domain; by default those of no other run.
    """
    torch.set_num_threads(1)
    tasks = tasks if len(tasks) > 1 else tasks * world
    configs = configs or [DataParallelConfig(**nested(settings))] * len(tasks)
    place = place or new_place()

    async def one(rank: int) -> Outcome:
        outcome: Outcome | None = None
        try:
            async with (
                gradbus.connect(**place) as bus,
                join_group(bus, rank=rank, world=len(tasks), timeout_s=20.0, collective_timeout_s=20.0) as group,
            ):
                make_algorithm = algorithms[rank] if algorithms else None
                called = callbacks[rank] if callbacks else ()
                outcome = Outcome(
                    Worker(group, tasks[rank], configs[rank], make_algorithm=make_algorithm, callbacks=called)
                )
                if play is not None:
                    await play(group, outcome.worker)
                else:
                    async for report in outcome.worker.epochs():
                        outcome.reports.append(report)
                outcome.summary = outcome.worker.summary
        except Exception as error:
            if outcome is None:
                raise
            outcome.error = single_error(error) if isinstance(error, BaseExceptionGroup) else error
        return outcome

    async def everybody() -> list[Outcome]:
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*(one(rank) for rank in range(len(tasks))))

    return asyncio.run(everybody())


def succeeded(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same; fails with the first error there is."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return list(outcomes)


def assert_all_equal(outcomes: list[Outcome], reference: nn.Module) -> None:
    """All ranks have ended well, with these parameters."""
    for outcome in succeeded(outcomes):
        assert torch.equal(outcome.parameters, vector(reference))


class NotFinite(ClassificationTask):
    """The loss of some batches is NaN: by default of the third one."""

    number = -1
    at: tuple[int, ...] = (2,)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.number += 1
        return super().loss(model, batch) * (float("nan") if self.number in self.at else 1.0)


def single_process(
    task: Any, world: int, *, epochs: int = 1, accumulation: int = 1, max_steps: int | None = None, **settings: Any
) -> nn.Module:
    """The same training in one process: the gradients of ``world`` shards, averaged in rank order; with ``delay_steps``
    applied so many steps late, and the last ones at the end of the epoch."""
    torch.set_num_threads(1)
    config = DataParallelConfig(**nested(settings))
    task.prepare_shard(0, world)
    model = task.build_model()
    model.train()
    step = _dense_step(model, config) if config.algorithm.name == "dense" else _dgc_step(model, config, world)
    steps, late = 0, config.delay_steps or 0
    for epoch in range(epochs):
        waiting: list[list[list[Tensor] | None]] = []
        shards = [task.batches(rank=rank, world=world, epoch=epoch, seed=config.seed) for rank in range(world)]
        while any(batches := [list(itertools.islice(shard, accumulation)) for shard in shards]):
            if max_steps is not None and steps >= max_steps:
                break
            waiting.append([_gradients(task, model, own) for own in batches])
            if len(waiting) > late:
                step(epoch, waiting.pop(0))
            steps += 1
        for gradients in waiting:
            step(epoch, gradients)
    return model


def _gradients(task: Any, model: nn.Module, batches: Sequence[Any]) -> list[Tensor] | None:
    """Of the mean loss over the batches; None without any."""
    model.zero_grad()
    for batch in batches:
        loss = task.loss(model, batch)
        torch.autograd.backward(loss if len(batches) == 1 else loss / len(batches))
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in _trained(model)] if batches else None


def _trained(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _options(config: DataParallelConfig) -> Any:
    return OPTIMIZERS.checked(config.optimizer)


def _dense_step(model: nn.Module, config: DataParallelConfig) -> Callable[[int, list[list[Tensor] | None]], None]:
    parameters, sgd = _trained(model), _options(config)
    optimizer = torch.optim.SGD(
        parameters, lr=sgd.lr, momentum=sgd.momentum, nesterov=sgd.nesterov, weight_decay=sgd.weight_decay
    )

    def step(epoch: int, shards: list[list[Tensor] | None]) -> None:
        active = [gradients for gradients in shards if gradients is not None]
        for parameter, of_ranks in zip(parameters, zip(*active, strict=True), strict=True):
            parameter.grad = functools.reduce(torch.add, of_ranks) * (1.0 / len(active))
        optimizer.step()

    return step


def _dgc_step(model: nn.Module, config: DataParallelConfig, world: int) -> Any:
    parameters, sgd = _trained(model), _options(config)
    density_at_last = config.algorithm.options.get("density", 0.001)
    layout = codecs.DgcLayout.of([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    dgc = codecs.DgcConfig(density=density_at_last, momentum=sgd.momentum, world=world, clip_norm=sgd.clip_norm)
    states = [codecs.DgcState.zeros(layout, seed=config.seed) for _ in range(world)]
    dense = codecs.DenseMomentum.zeros(layout)
    optimizer = codecs.DgcSgd(parameters, lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)

    def step(epoch: int, shards: list[list[Tensor] | None]) -> None:
        nonlocal dense
        density = codecs.warmup_density(epoch, density=density_at_last, schedule=codecs.PAPER_WARMUP)
        scale = world / sum(gradients is not None for gradients in shards)
        payloads = []
        for rank, gradients in enumerate(shards):
            mine = (
                [None] * len(parameters) if gradients is None else [g * scale if scale != 1 else g for g in gradients]
            )
            payload, states[rank] = codecs.dgc_step(mine, states[rank], dgc, density=density)
            payloads.append(payload)
        mean = codecs.combine_dgc(payloads, layout)
        dense = codecs.dense_momentum_step(mean, dense, dgc)
        mean.write_to(parameters)
        optimizer.step()

    return step

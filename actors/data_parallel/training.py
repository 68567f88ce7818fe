"""What a data-parallel worker does off the event loop: forward, backward, encode, decode, apply, evaluate."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradbus.actors.data_parallel.exchanges.base import Exchange, ExchangeLabel
from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.task import DataParallelTask, ShardCounts
from gradbus.codecs.base import are_finite
from gradbus.runtime.choices import EXCHANGES
from gradbus.runtime.collectives import CollectiveHandle, Group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.profiling.profile import StepProfile


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Steps of an epoch on ranks that need not have equally many batches.

    A rank that has run out of data goes on exchanging, with gradients of zero, until the last one has (a join). The
    mean is then over those that have data.

    Attributes:
        batches: of each rank. accumulation_steps: batches that make a step; a rank's last one may have fewer.
    """

    batches: tuple[int, ...]
    accumulation_steps: int = 1

    @classmethod
    def of(cls, batches: Sequence[int], accumulation_steps: int) -> EpochPlan:
        """Raises ValueError: no rank has data, or a number of batches is negative."""
        if any(count < 0 for count in batches) or not any(batches):
            raise ValueError(f"an epoch needs at least one batch on some rank, got {list(batches)} on ranks 0..")
        return cls(tuple(batches), accumulation_steps)

    @property
    def steps(self) -> int:
        """Steps of the epoch, for all ranks."""
        return max(map(self._steps_of, range(len(self.batches))))

    def active(self, step: int) -> int:
        """Ranks that have data in this step, >= 1. ``step`` counts from 0 within the epoch."""
        return sum(self._steps_of(rank) > step for rank in range(len(self.batches)))

    def batches_in(self, rank: int, step: int) -> int:
        """Batches of a rank in this step, 0 if it has run out."""
        return min(self.accumulation_steps, max(0, self.batches[rank] - step * self.accumulation_steps))

    def _steps_of(self, rank: int) -> int:
        return -(-self.batches[rank] // self.accumulation_steps)


class _Buffers:
    """A model's buffers as they were before a step: running means of batch norm, for example, which a forward pass
    with NaN in it spoils. They are put back when the step is skipped.

    Which modules have buffers is looked up once. A copy of all costs less than finding out which have changed: code
    that writes through ``.data`` leaves no trace in a tensor's version.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
        ]
        self._kept: list[Tensor | None] = [None] * len(self._places)

    @torch.no_grad()
    def keep(self) -> None:
        """Remember what they are now."""
        for index, (module, name) in enumerate(self._places):
            live, kept = module._buffers.get(name), self._kept[index]
            if live is not None and kept is not None and _alike(live, kept):
                kept.copy_(live)
            else:
                self._kept[index] = None if live is None else live.clone()

    @torch.no_grad()
    def put_back(self) -> None:
        """Make them what they were."""
        for (module, name), kept in zip(self._places, self._kept, strict=True):
            live = module._buffers.get(name)
            if live is not None and kept is not None and _alike(live, kept):
                live.copy_(kept)
            else:
                module._buffers[name] = None if kept is None else kept.clone()


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


MakeExchange = Callable[[DataParallelConfig, Group, Mapping[str, Tensor]], Exchange]
"""Takes the parameters that are trained, by name, in the order of the model."""

_NO_MORE: Any = object()  # batches() ended; None may be a batch


class StepCancelled(Exception):
    """The worker was cancelled, so the step gives up."""


@dataclass(frozen=True, slots=True, eq=False)
class SentGradients:
    """What a step has sent, and what is to come of it.

    Attributes:
        handles: to await. sent_s: ``time.perf_counter`` when the last one was started and nothing was left to compute.
    """

    handles: Sequence[CollectiveHandle[Any]]
    sent_s: float

    @property
    def wait_s(self) -> float:
        """Seconds from then until the last one ended: what the overlap did not hide. All handles have ended."""
        ended_s = [handle.finished_s for handle in self.handles]
        return max(0.0, max(self.sent_s if at_s is None else at_s for at_s in ended_s) - self.sent_s)

    @property
    def bytes_out(self) -> int:
        """Payload handed to DDS."""
        return sum(handle.sent_bytes for handle in self.handles)

    @property
    def bytes_in(self) -> int:
        """Payload of the others."""
        return sum(handle.received_bytes for handle in self.handles)


class ShardTraining:
    """One rank's model, data and exchange. Every method is for the compute thread.

    Attributes:
        model: the live module. exchange: what makes steps of its gradients. label: its name and options.
        options: all that the configuration gives the exchange, with their defaults.
    """

    model: nn.Module
    exchange: Exchange
    label: ExchangeLabel

    def __init__(
        self, config: DataParallelConfig, group: Group, task: DataParallelTask, should_stop: Callable[[], bool], *,
        make_exchange: MakeExchange | None = None,
    ) -> None:  # fmt: skip
        """``make_exchange``: in place of the one that ``config.exchange`` names."""
        self._make_exchange = make_exchange
        self.options = EXCHANGES.options(config.exchange)  # what is wrong in them is found before anything is loaded
        self._config = config
        self._group = group
        self._task = task
        self._should_stop = should_stop
        self._batches: Iterator[Any] = iter(())
        self._loss_sum = torch.zeros((), dtype=torch.float64)  # stays on the device: reading it would wait for the step
        self._step_loss = torch.zeros_like(self._loss_sum)

    def open(self) -> None:
        """Load the data, build the model.

        Raises:
            ValueError: nothing in the model is trained.
            ConfigError: the exchange has no name or options that can be compared. And as the task does.
        """
        self._task.prepare_shard(self._group.rank, self._group.world)
        self.model = self._task.build_model()
        trained: dict[str, Tensor] = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
        if self._make_exchange is not None:
            self.exchange = self._make_exchange(self._config, self._group, trained)
        else:
            self.exchange = EXCHANGES.make(self._config.exchange, self._config, self._group, trained)
        is_own = ":" in self._config.exchange.name
        self.label = ExchangeLabel.of(self.exchange, self.options if is_own else None)
        self._buffers = _Buffers(self.model)
        device = next(iter(trained.values())).device
        self._loss_sum, self._step_loss = self._loss_sum.to(device), self._step_loss.to(device)

    def num_batches(self, epoch: int) -> int:
        """Of this rank."""
        return self._task.num_batches(rank=self._group.rank, world=self._group.world, epoch=epoch)

    def start_epoch(self, position: Position) -> None:
        """From its beginning, or from where the run stood when it was saved."""
        rank, world, epoch = self._group.rank, self._group.world, position.epoch
        done = position.epoch_step * self._config.accumulation_steps
        batches = self._task.batches(rank=rank, world=world, epoch=epoch, seed=self._config.seed)
        self._batches = itertools.islice(batches, done, None)
        self._loss_sum.fill_(position.loss_sum)
        self.exchange.start_epoch(epoch)
        self.model.train()

    def compute_and_send(self, plan: EpochPlan, position: Position, profile: StepProfile) -> SentGradients:
        """Forward and backward over this step's batches; what comes of it is on its way when this returns.

        Raises:
            StepCancelled: the worker was cancelled.
            ValueError: the task gave fewer batches than it had announced.
        """
        count = plan.batches_in(self._group.rank, position.epoch_step)
        with profile.span("compute"):
            self.exchange.begin(position.step, plan.active(position.epoch_step))
            self._step_loss.zero_()
            self._buffers.keep()
            for number in range(count):
                if self._should_stop():
                    raise StepCancelled
                batch = next(self._batches, _NO_MORE)
                if batch is _NO_MORE:
                    raise ValueError(
                        f"epoch {position.epoch}: num_batches said {plan.batches[self._group.rank]} batches for rank "
                        f"{self._group.rank}, but batches() ended earlier"
                    )
                loss = self._task.loss(self.model, batch)
                self._step_loss += loss.detach()
                if number == count - 1:
                    self.exchange.enable_overlap(self._step_loss.isfinite())
                torch.autograd.backward(loss if count == 1 else loss / count)
        with profile.span("encode"):
            handles = self.exchange.send(has_data=count > 0)
        return SentGradients(handles, time.perf_counter())

    def finish(self, results: Sequence[Any], profile: StepProfile) -> tuple[int, ...] | None:
        """Make the step, and return None. Or, as all ranks do, take it back: as :meth:`Exchange.decode` tells."""
        with profile.span("decode"):
            skipped_by = self.exchange.decode(results)
        if skipped_by is not None:
            self._buffers.put_back()
        else:
            self._loss_sum += self._step_loss
            with profile.span("apply"):
                self.exchange.apply()
        return skipped_by

    def own_is_finite(self) -> bool:
        """Whether this rank's losses and gradients of the last step were finite, as far as is known."""
        return bool(self._step_loss.isfinite()) and self.exchange.own_is_finite

    def model_is_finite(self) -> bool:
        """Whether all that is trained is finite: equal on all ranks, as it is. What is frozen may be a mask."""
        return are_finite([p.detach() for p in self.model.parameters() if p.requires_grad])

    def loss_sum(self) -> float:
        """Of this rank's batches of this epoch, without those of steps that were skipped."""
        return self._loss_sum.item()

    def evaluate(self) -> ShardCounts | None:
        """On this rank's part of the test set."""
        return self._task.evaluate_shard(self.model, rank=self._group.rank, world=self._group.world)

    def close(self) -> None:
        """Let go of the model."""
        if hasattr(self, "exchange"):
            self.exchange.close()

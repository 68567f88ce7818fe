"""Results that are applied some steps late: the same on all ranks, as one process would compute it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddp_scene import (
    assert_all_equal,
    data,
    make_task,
    single_process,
    small_mlp,
    succeeded,
    train,
    training_of,
    vector,
)
from torch import Tensor, nn

from gradbus.actors import Worker
from gradbus.actors.data_parallel.state import SavedRank
from gradbus.models import ClassificationTask
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket
from gradbus.runtime.algorithms.dense import Dense
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.collectives import Group
from gradbus.runtime.errors import CollectiveError, PeerLost


@pytest.mark.parametrize("delay", [1, 2, 8])  # an epoch has seven steps
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_of_former_steps_change_the_model_as_in_one_process(delay: int, world: int) -> None:
    settings: dict[str, Any] = {"epochs": 2, "delay_steps": delay, "optimizer__weight_decay": 1e-3}
    outcomes = train(make_task(), world=world, hash_every=1, bucket_bytes=8192, **settings)
    assert_all_equal(outcomes, single_process(make_task(), world, **settings))
    assert outcomes[0].worker.step == outcomes[0].reports[-1].step


def test_a_delay_changes_the_run_and_none_does_not() -> None:
    now, late = (single_process(make_task(), 2, delay_steps=delay) for delay in (0, 1))
    assert not torch.equal(vector(now), vector(late))


@pytest.mark.parametrize("algorithm", ["dense", "dgc", "powersgd", "async-averaging"])
def test_a_run_goes_on_from_a_checkpoint_in_the_midst_of_an_epoch_with_the_same_bits(
    algorithm: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm, "delay_steps": 2, "epochs": 2, "checkpoint__every_steps": 4}
    whole = succeeded(train(make_task(), checkpoint__dir=tmp_path / "whole", **settings))
    succeeded(train(make_task(), checkpoint__dir=tmp_path / "parts", max_steps=4, **settings))
    again = succeeded(train(make_task(), checkpoint__dir=tmp_path / "parts", **settings))
    for mine, other in zip(whole, again, strict=True):
        assert torch.equal(mine.parameters, other.parameters)
        assert (mine.reports[-1].loss, mine.reports[-1].accuracy) == (
            other.reports[-1].loss,
            other.reports[-1].accuracy,
        )


class Late(ClassificationTask):
    """The last of three batches takes long."""

    number = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.number += 1
        if self.number == 3:
            time.sleep(0.3)
        return super().loss(model, batch)


@pytest.mark.parametrize(
    "settings",
    [{"delay_steps": 1}, {"algorithm": "diloco", "algorithm__steps": 3, "algorithm__delay": 1}],
    ids=["delay_steps", "diloco"],
)
def test_waiting_for_what_is_on_its_way_when_an_epoch_ends_is_a_part_of_the_time_of_its_steps(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    late = Late(small_mlp, data(), batch_size=16)
    saves = {"checkpoint__dir": tmp_path, "checkpoint__every_steps": 3}
    outcomes = train(make_task(), late, max_steps=4, eval_every_epochs=0, **saves, **settings)
    for outcome in succeeded(outcomes):
        (report,) = outcome.reports
        assert 0 <= report.wait_s_mean <= report.step_s_mean
    assert 4 * outcomes[0].reports[0].wait_s_mean > 0.1  # it has waited for the late one


class Spoils(ClassificationTask):
    """The loss of some batches is NaN."""

    def __init__(self, *at: int) -> None:
        super().__init__(small_mlp, data(), batch_size=16)
        self._at, self._number = at, -1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._number += 1
        return super().loss(model, batch) * (float("nan") if self._number in self._at else 1.0)


class Without(ClassificationTask):
    """The same without some batches of an epoch."""

    def __init__(self, *at: int) -> None:
        super().__init__(small_mlp, data(), batch_size=16)
        self._at = at

    def batches(self, **where: Any) -> Iterator[Any]:
        for number, batch in enumerate(super().batches(**where)):
            if number not in self._at:
                yield batch


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("at", [2, 6])  # the last one is found when the epoch ends
def test_a_step_that_is_not_finite_is_skipped_by_all_when_its_turn_comes(at: int, predicts: bool) -> None:
    outcomes = train(make_task(), Spoils(at), delay_steps=1, epochs=1, hash_every=1, predicts_weights=predicts)
    for outcome in succeeded(outcomes):
        assert [report.skipped_steps for report in outcome.reports] == [1]
        assert outcome.parameters.isfinite().all()
    if at == 6 and not predicts:
        assert_all_equal(outcomes, single_process(Without(6), 2, delay_steps=1))


class SpoilsInputs(ClassificationTask):
    """The inputs of some batches are NaN, for a model with running means."""

    def __init__(self, *at: int) -> None:
        super().__init__(self._make, data(), batch_size=16)
        self._at, self._number = at, -1

    @staticmethod
    def _make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._number += 1
        if self._number in self._at:
            model(torch.full((16, 784), math.nan))
        loss = super().loss(model, batch)
        return loss * (math.nan if self._number in self._at else 1.0)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_steps_in_a_row_that_are_not_finite_leave_the_running_means_finite(delay: int) -> None:
    for outcome in succeeded(train(SpoilsInputs(2, 3), SpoilsInputs(), delay_steps=delay, epochs=1)):
        assert outcome.reports[0].skipped_steps == 2
        assert all(buffer.isfinite().all() for buffer in outcome.worker.model.buffers())
        assert outcome.reports[0].eval_loss is not None
        assert math.isfinite(outcome.reports[0].eval_loss)


class Waits(Dense):
    """The mean, in an exchange that lets a test look on: it starts its second phase when the next step is computed."""

    choice = "waits"
    computing = threading.Event()
    seen: list[bool]

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        yield AllReduce("first", torch.zeros(1))
        type(self).seen.append(type(self).computing.wait(5.0))
        yield AllReduce("mean", bucket.flat, "mean", out=bucket.flat, divisor=step.active)


def test_the_programs_of_a_step_go_from_phase_to_phase_while_the_next_one_is_computed() -> None:
    class Watches(ClassificationTask):
        def __init__(self) -> None:
            super().__init__(small_mlp, data(), batch_size=16)
            self._number = -1

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            self._number += 1
            if self._number:
                Waits.computing.set()
            return super().loss(model, batch)

    Waits.seen = []
    Waits.computing.clear()
    algorithms = [lambda place: Waits(place, Waits.Options())] * 2
    outcomes = train(Watches(), Watches(), algorithms=algorithms, delay_steps=1, max_steps=4, eval_every_epochs=0)
    assert_all_equal(outcomes, single_process(make_task(), 2, delay_steps=1, max_steps=4))
    assert len(Waits.seen) == 2 * 4 * 1
    assert all(Waits.seen)


class Listens(Algorithm):
    """The mean of gradients, or of weights; keeps the losses that it is given."""

    choice = "listens"
    needs_loss = True

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        self.losses: list[float] = []

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        if bucket.index == 0:
            self.losses.append(step.loss)
        yield AllReduce("mean", bucket.flat, "mean", out=bucket.flat, divisor=step.active)


class ListensToWeights(Listens):
    """The same, of weights, after the optimizer's step."""

    choice = "listens-to-weights"
    scope = "weights"
    equal_replicas = False


class Overlapping(ListensToWeights):
    """The same, while gradients are computed."""

    choice = "overlapping"
    overlaps = True


class Told(ClassificationTask):
    """Keeps the losses of its batches, of which some are NaN."""

    def __init__(self, *at: int) -> None:
        super().__init__(small_mlp, data(), batch_size=16)
        self.losses: list[float] = []
        self._at = at

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch) * (math.nan if len(self.losses) in self._at else 1.0)
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize("kind", [Listens, ListensToWeights, Overlapping])
@pytest.mark.parametrize("delay", [0, 1])
def test_an_algorithm_is_given_the_mean_loss_of_the_last_step_with_equal_bits(kind: type[Listens], delay: int) -> None:
    tasks = Told(), Told()
    algorithms = [lambda place: kind(place, kind.Options())] * 2
    outcomes = succeeded(train(*tasks, algorithms=algorithms, epochs=1, delay_steps=delay))
    told = [training_of(outcome.worker).algorithm.losses for outcome in outcomes]  # type: ignore[attr-defined]
    assert np.array_equal(told[0], told[1], equal_nan=True)
    means = [sum(pair) / 2 for pair in zip(tasks[0].losses, tasks[1].losses, strict=True)]
    # Weights after the step: its own loss is there already. Those that overlap with it are late as well with a delay.
    late = 0 if kind is ListensToWeights or (kind is Overlapping and delay) else 1
    assert all(map(math.isnan, told[0][:late]))
    assert told[0][late:] == pytest.approx([*means[: 7 - late]])


class DueByLoss(ListensToWeights):
    """Keeps the losses by which it could say whether there is an exchange, and those of late results."""

    choice = "due-by-loss"

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        self.due: list[float] = []
        self.late: list[float] = []

    def is_due(self, step: Step) -> bool:
        self.due.append(step.loss)
        return True

    def applied_late(self, step: Step, live: Tensor, before: Tensor, result: Tensor) -> Tensor:
        self.late.append(step.loss)
        return super().applied_late(step, live, before, result)


def test_a_rank_that_skips_its_own_step_does_not_count_in_the_loss_and_all_are_given_the_same() -> None:
    tasks = Told(2), Told()
    algorithms = [lambda place: DueByLoss(place, DueByLoss.Options())] * 2
    outcomes = succeeded(train(*tasks, algorithms=algorithms, epochs=1, delay_steps=1))
    mine, other = (training_of(outcome.worker).algorithm for outcome in outcomes)
    assert isinstance(mine, DueByLoss)
    assert isinstance(other, DueByLoss)
    assert np.array_equal(mine.losses, other.losses, equal_nan=True)
    assert mine.losses[2] == tasks[1].losses[2]  # of the rank that made the step
    assert mine.late == other.late == mine.losses  # the same when the result is applied, whenever that is
    assert all(map(math.isnan, mine.due + other.due))  # it is not known, where the exchange before may go on


@pytest.mark.parametrize("delay", [0, 1])
def test_where_no_rank_has_made_the_step_its_loss_is_nan_also_for_who_goes_on_from_a_checkpoint(
    delay: int, tmp_path: Path
) -> None:
    tasks = Told(2), Told(2)
    algorithms = [lambda place: DueByLoss(place, DueByLoss.Options())] * 2
    outcomes = succeeded(
        train(*tasks, algorithms=algorithms, epochs=1, delay_steps=delay, max_steps=3, checkpoint__dir=tmp_path)
    )
    for rank, outcome in enumerate(outcomes):
        algorithm = training_of(outcome.worker).algorithm
        assert isinstance(algorithm, DueByLoss)
        means = [sum(pair) / 2 for pair in zip(tasks[0].losses, tasks[1].losses, strict=True)]
        assert algorithm.losses == pytest.approx(means, nan_ok=True)
        assert list(map(math.isnan, algorithm.losses)) == [False, False, True]
        assert SavedRank.of(CheckpointStore.to_read(tmp_path / f"rank-{rank}").load(3)).mean_loss is None


class Fails(Algorithm):
    """Its second phase fails in the third step of a rank."""

    choice = "fails"

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        yield AllReduce("mean", bucket.flat, "mean", out=bucket.flat, divisor=step.active)
        if step.number == 2 and self.place.rank == 1:
            raise CollectiveError("the second phase of step 2")
        yield AllReduce("again", bucket.flat, "mean", out=bucket.flat)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_rank_that_fails_between_two_phases_ends_the_others_at_once_and_leaves_nothing(delay: int) -> None:
    pending: list[int] = []

    async def play(group: Group, worker: Worker) -> None:
        try:
            await worker.run()
        finally:
            pending.append(group.stats.pending)

    algorithms = [lambda place: Fails(place, Fails.Options())] * 3
    outcomes = train(make_task(), world=3, algorithms=algorithms, delay_steps=delay, epochs=50, play=play)
    assert isinstance(outcomes[1].error, CollectiveError)
    assert "the second phase of step 2" in str(outcomes[1].error)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, PeerLost)
        assert "rank 1" in str(outcomes[rank].error)
    assert pending == [0, 0, 0]

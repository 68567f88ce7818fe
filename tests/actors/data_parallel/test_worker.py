"""Workers over DDS: the same bits as one process, on all ranks, whatever the way."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from ddp_scene import assert_all_equal, data, make_task, single_process, small_mlp, succeeded, train
from structlog.testing import capture_logs
from torch import Tensor, nn

from gradbus.actors import Worker
from gradbus.models import ClassificationTask, DataSplit, SeededDropout, mnist_cnn
from gradbus.runtime.collectives import Group
from gradbus.runtime.config.data_parallel import DataParallelConfig


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": False},
        {"bucket_bytes": 1},
        {"algorithm__route": "shards"},
        {"optimizer__nesterov": True, "optimizer__weight_decay": 1e-3},
        {"optimizer__momentum": 0.0},
        {"algorithm": "dgc"},
        {"algorithm": "dgc", "algorithm__density": 0.3, "optimizer__weight_decay": 1e-3, "optimizer__clip_norm": 1.0},
    ],
    ids=str,
)
def test_two_ranks_give_the_bits_of_one_process(settings: dict[str, Any]) -> None:
    # 200 samples in batches of 16: the last step has only four on each rank.
    outcomes = train(make_task(), epochs=2, hash_every=1, **settings)
    assert_all_equal(outcomes, single_process(make_task(), 2, epochs=2, **settings))
    first, second = (outcome.summary for outcome in outcomes)
    assert first is not None
    assert second is not None
    assert first.params_hash == second.params_hash != 0
    assert (first.epochs, first.steps, first.world) == (2, 14, 2)


@pytest.mark.parametrize("algorithm", ["dense", "dgc"])
@pytest.mark.parametrize("route", ["direct", "shards"])
def test_three_ranks_are_equal_after_every_step(algorithm: str, route: str) -> None:
    more = {"algorithm__route": route, "bucket_bytes": 8192} if algorithm == "dense" else {}
    settings: dict[str, Any] = {"algorithm": algorithm, **more}
    outcomes = train(make_task(), world=3, epochs=1, hash_every=1, **settings)
    assert_all_equal(outcomes, single_process(make_task(), 3, algorithm=algorithm))


def test_density_one_is_the_dense_way_but_for_rounding() -> None:
    settings: dict[str, Any] = {"epochs": 2, "optimizer__weight_decay": 1e-3, "optimizer__nesterov": True}
    dense, dgc = (
        succeeded(train(make_task(), **settings, **more))[0]
        for more in ({}, {"algorithm": "dgc", "algorithm__density": 1.0, "algorithm__warmup": "none"})
    )
    assert torch.allclose(dense.parameters, dgc.parameters, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["dense", "dgc"])
def test_the_ranks_become_copies_of_rank_0_whatever_they_start_from(algorithm: str) -> None:
    outcomes = train(make_task(seed=0), make_task(seed=7), algorithm=algorithm, hash_every=1)
    assert_all_equal(outcomes, single_process(make_task(seed=0), 2, algorithm=algorithm))


def test_accumulated_batches_are_one_larger_batch() -> None:
    # 200 samples: in batches of 2 x 8, accumulated two by two, as in batches of 2 x 16.
    accumulated = train(make_task(batch_size=8), accumulation_steps=2, epochs=2)
    assert_all_equal(accumulated, single_process(make_task(batch_size=8), 2, epochs=2, accumulation=2))
    order = {"batch_size": 16}
    whole = succeeded(train(_Regrouped(**order), epochs=2))
    assert torch.allclose(accumulated[0].parameters, whole[0].parameters, atol=1e-5)
    summary = accumulated[0].summary
    assert summary is not None
    assert summary.steps == 14


class _Regrouped(ClassificationTask):
    """Batches of double size, of the samples that two batches in a row have."""

    def __init__(self, batch_size: int) -> None:
        inner = make_task(batch_size=batch_size // 2)
        super().__init__(small_mlp, data(), batch_size=batch_size)
        self._inner = inner

    def batches(self, **where: Any) -> Any:
        pair = []
        for batch in self._inner.batches(**where):
            pair.append(batch)
            if len(pair) == 2:
                yield _joined(pair)
                pair = []
        if pair:
            yield pair[0]


def _joined(pair: list[Any]) -> Any:
    images, labels = (torch.cat([getattr(batch, name) for batch in pair]) for name in ("images", "labels"))
    return type(pair[0])(images, labels, pair[0].seed)


class Uneven(ClassificationTask):
    """Rank 0 has fewer batches than the others: at least ``drop`` of its last ones are missing."""

    def __init__(self, drop: int, **options: Any) -> None:
        super().__init__(small_mlp, data(), batch_size=16, **options)
        self._drop = drop

    def num_batches(self, *, rank: int, **where: Any) -> int:
        return max(0, super().num_batches(rank=rank, **where) - (self._drop if rank == 0 else 0))

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Any:
        count = self.num_batches(rank=rank, world=world, epoch=epoch)
        for _, batch in zip(
            range(count), super().batches(rank=rank, world=world, epoch=epoch, seed=seed), strict=False
        ):
            yield batch


@pytest.mark.parametrize("algorithm", ["dense", "dgc"])
@pytest.mark.parametrize(("drop", "accumulation"), [(1, 1), (3, 2), (99, 1)])
def test_ranks_without_data_go_along_until_the_last_one_has_none(algorithm: str, drop: int, accumulation: int) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm, "epochs": 2}
    outcomes = train(Uneven(drop), world=3, hash_every=1, accumulation_steps=accumulation, **settings)
    assert_all_equal(outcomes, single_process(Uneven(drop), 3, accumulation=accumulation, **settings))


def test_one_rank_alone_is_plain_training() -> None:
    outcomes = train(make_task(), world=1, epochs=2)
    assert_all_equal(outcomes, single_process(make_task(), 1, epochs=2))


class Partly(nn.Module):
    """One layer frozen, one that is never used, one that only a part of the batches goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.unused = nn.Linear(784, 12), nn.Linear(3, 3)
        self.first, self.sometimes, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 10)
        self.frozen.requires_grad_(False)
        self.seen: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        goes_through = bool(x[0].mean() > x.mean())
        if self.training:
            self.seen.add(goes_through)
        x = self.first(self.frozen(x.flatten(1)).relu()).relu()
        return self.last(self.sometimes(x).relu() if goes_through else x)


@pytest.mark.parametrize("algorithm", ["dense", "dgc"])
def test_frozen_and_unused_parameters(algorithm: str) -> None:
    before = make_task(Partly).build_model()
    more = {"bucket_bytes": 600} if algorithm == "dense" else {}
    outcomes = succeeded(train(make_task(Partly), algorithm=algorithm, epochs=2, hash_every=1, **more))
    model = outcomes[0].worker.model
    assert isinstance(model, Partly)
    assert model.seen == {True, False}
    assert torch.equal(model.frozen.weight, before.frozen.weight)
    assert torch.equal(model.unused.weight, before.unused.weight)
    assert not torch.equal(model.first.weight, before.first.weight)
    assert_all_equal(outcomes, single_process(make_task(Partly), 2, epochs=2, algorithm=algorithm))


def test_masks_of_dropout_are_those_of_one_process() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), SeededDropout(0.3), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 10))

    assert_all_equal(train(make_task(model)), single_process(make_task(model), 2))


def test_the_report_counts_what_all_ranks_saw() -> None:
    outcomes = succeeded(train(make_task(), world=3, epochs=3, eval_every_epochs=2, optimizer__lr=0.1))
    first, second, last = outcomes[0].reports
    assert first.accuracy is None
    for report in (second, last):  # the last epoch is evaluated in any case
        assert report.test_samples == 101
        assert report.finished
    task = make_task()
    with torch.no_grad():
        result = task.evaluate(outcomes[1].worker.model)
    assert (last.accuracy, last.eval_loss) == (result.accuracy, pytest.approx(result.loss, rel=1e-5))
    assert last.loss < second.loss < first.loss
    for other in outcomes[1:]:
        for mine, theirs in zip(outcomes[0].reports, other.reports, strict=True):
            assert (mine.loss, mine.accuracy, mine.params_hash) == (theirs.loss, theirs.accuracy, theirs.params_hash)
    # In each step a rank hands its gradient to DDS once.
    assert first.bytes_out_per_step == 4 * outcomes[0].parameters.numel()
    assert 0 <= first.wait_s_mean < first.step_s_mean


def test_the_log_tells_of_every_so_many_steps_with_the_bytes_of_a_step() -> None:
    with capture_logs() as lines:
        outcomes = succeeded(train(make_task(), report_every_steps=3, epochs=2, max_steps=12))
    told = [line for line in lines if line["event"] == "training" and line["rank"] == 1]
    assert [line["step"] for line in told] == [3, 6, 9, 12]
    assert all(0 < line["loss"] < 3 and 0 <= line["wait_s"] <= line["step_s"] for line in told)
    assert [line["bytes_out_per_step"] for line in told] == [4 * outcomes[0].parameters.numel()] * 4


def test_an_evaluation_that_is_not_finite_is_a_warning_that_names_epoch_and_metrics() -> None:
    class Diverging(ClassificationTask):
        def evaluate_shard(self, model: nn.Module, *, rank: int, world: int) -> Any:
            found = super().evaluate_shard(model, rank=rank, world=world)
            return dataclasses.replace(found, loss_sum=math.nan if rank == 1 else found.loss_sum)

    with capture_logs() as lines:
        succeeded(train(Diverging(small_mlp, data(), batch_size=16), epochs=1))
    told = [line for line in lines if line["event"] == "evaluation is not finite"]
    assert [(line["rank"], line["epoch"], str(line["metrics"])) for line in told] == [(0, 0, "{'eval_loss': nan}")]
    assert {line["log_level"] for line in told} == {"warning"}


def test_a_task_without_a_test_set_is_not_evaluated() -> None:
    task = ClassificationTask(small_mlp, DataSplit(data().train), batch_size=16)
    outcomes = succeeded(train(task))
    assert outcomes[0].reports[0].accuracy is None
    assert outcomes[0].reports[0].test_samples == 0


def test_the_run_ends_after_max_steps_with_a_report_and_an_evaluation() -> None:
    outcomes = succeeded(train(make_task(), epochs=5, max_steps=9))
    reports = outcomes[0].reports
    assert [(report.epoch, report.step, report.finished) for report in reports] == [(0, 7, True), (1, 9, False)]
    assert reports[-1].accuracy is not None
    assert_all_equal(outcomes, single_process(make_task(), 2, epochs=5, max_steps=9))


class BatchNorm(nn.Module):
    """With buffers that every rank updates from its own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.last = nn.Linear(784, 12), nn.BatchNorm1d(12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.hidden(x.flatten(1))).relu())


def test_buffers_are_those_of_rank_0_when_it_counts() -> None:
    first, second = succeeded(train(make_task(BatchNorm), epochs=2))
    for mine, theirs in zip(first.worker.model.buffers(), second.worker.model.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    assert int(first.worker.model.norm.num_batches_tracked) == 14  # type: ignore[union-attr, arg-type]
    assert first.reports[-1].accuracy == second.reports[-1].accuracy


def test_the_reference_network_trains_on_two_ranks() -> None:
    outcomes = train(make_task(mnist_cnn), max_steps=3, optimizer__lr=0.01, hash_every=1)
    assert_all_equal(outcomes, single_process(make_task(mnist_cnn), 2, optimizer__lr=0.01, max_steps=3))


def test_training_goes_on_when_the_next_report_is_asked_for() -> None:
    async def play(group: Group, worker: Worker) -> None:
        async for report in worker.epochs():
            assert worker.step == report.step == 7 * (report.epoch + 1)
            state = await worker.state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in worker.model.state_dict().items())
            if report.epoch == 1:
                break

    outcomes = succeeded(train(make_task(), epochs=5, play=play))
    assert all(outcome.worker.step == 14 for outcome in outcomes)


def test_a_worker_runs_once() -> None:
    async def play(group: Group, worker: Worker) -> None:
        await worker.run()
        with pytest.raises(RuntimeError, match="runs once"):
            await worker.run()
        again = await Worker(group, make_task(), DataParallelConfig()).run()
        assert again.params_hash == worker.summary.params_hash

    succeeded(train(make_task(), play=play))

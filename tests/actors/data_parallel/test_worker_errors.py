"""What goes wrong in a data-parallel run, and what each rank is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import data, make_task, new_place, single_process, small_mlp, succeeded, train, vector
from structlog.testing import capture_logs
from torch import Tensor, nn

import gradbus
from gradbus.actors import Worker
from gradbus.models import ClassificationTask
from gradbus.runtime.algorithms.base import Place, Step, TensorBucket
from gradbus.runtime.algorithms.dense import Dense
from gradbus.runtime.algorithms.requests import Program
from gradbus.runtime.collectives import Group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import ConfigError, PeerLost, ReplicasDiverged, TrainingDiverged


class Watched(ClassificationTask):
    """``spoil(model, batch, number)`` is called before the loss of each batch of this rank, counted from 0."""

    def __init__(
        self, spoil: Callable[[nn.Module, Any, int], Any], *, model: Callable[[], nn.Module] = small_mlp, **options: Any
    ) -> None:
        super().__init__(model, data(), batch_size=16, **options)
        self._spoil = spoil
        self._number = -1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._number += 1
        factor = self._spoil(model, batch, self._number)
        loss = super().loss(model, batch)
        return loss if factor is None else loss * factor


def test_other_settings_on_a_rank_are_named_on_all() -> None:
    configs = [
        DataParallelConfig(optimizer={"lr": 0.1}),
        DataParallelConfig(optimizer={"lr": 0.1}),
        DataParallelConfig(optimizer={"lr": 0.2}, report_every_steps=9),
    ]
    for outcome in train(make_task(), configs=configs, world=3):
        assert isinstance(outcome.error, ConfigError)
        assert "lr is 0.1, but rank 2 has 0.2" in str(outcome.error)


class Halved(Dense):
    """An algorithm of one's own, by inheritance, and without a name."""


class Named(Dense):
    """The same, with a name and an option."""

    choice = "mine"

    class Options(Dense.Options):
        bits: int = 8


def halved(place: Place) -> Halved:
    return Halved(place, Halved.Options())


def named(place: Place, bits: int = 8) -> Named:
    return Named(place, Named.Options(bits=bits))


@pytest.mark.parametrize(
    ("algorithms", "told"),
    [
        ((named, None), "algorithm.name is 'mine', but rank 1 has 'dense'"),
        ((None, halved), "algorithm.name is 'dense', but rank 1 has 'tests.actors.data_parallel.test_worker_errors:H"),
        ((named, partial(named, bits=4)), "algorithm.bits is 8, but rank 1 has 4"),
    ],
)
def test_another_algorithm_on_a_rank_is_named_on_all_at_once(algorithms: Any, told: str) -> None:
    started_s = time.monotonic()
    for outcome in train(make_task(), algorithms=algorithms):
        assert isinstance(outcome.error, ConfigError)
        assert told in str(outcome.error)
    assert time.monotonic() - started_s < 20  # a collective waits for 60


def test_an_algorithm_of_ones_own_is_called_by_its_name_in_log_and_summary() -> None:
    with capture_logs() as lines:
        outcomes = succeeded(train(make_task(), algorithms=[partial(named, bits=4)] * 2))
    assert {line["algorithm"] for line in lines if line["event"] == "started"} == {'mine {"bits": 4}'}
    for outcome in outcomes:
        assert outcome.summary is not None
        assert outcome.summary.algorithm == outcome.worker.algorithm == "mine"


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 257])
def test_an_algorithm_must_have_a_name_that_can_be_compared(name: str) -> None:
    class Odd(Named):
        choice = name

    for outcome in train(make_task(), world=1, algorithms=[lambda place: Odd(place, Odd.Options())]):
        with pytest.raises(ConfigError, match=r"choice must be text of 1 to 256 printable characters, got '"):
            succeeded([outcome])


def test_an_algorithm_that_keeps_an_inherited_name_is_called_by_its_place_however_deep_that_is() -> None:
    class Mine(Dense):
        pass

    for name, is_too_long in (("deep." * 40 + "Mine", False), ("deep." * 60 + "Mine", True)):
        Mine.__qualname__ = name
        (outcome,) = train(make_task(), world=1, algorithms=[lambda place: Mine(place, Mine.Options())])
        if is_too_long:
            with pytest.raises(ConfigError, match="Give the class a short name of its own, as choice"):
                succeeded([outcome])
        else:
            (done,) = succeeded([outcome])
            assert done.worker.algorithm == f"{__name__}:{name}"


def test_options_too_long_to_be_compared_are_refused() -> None:
    class Long(Named):
        class Options(Named.Options):
            notes: str = "x" * 20_000

    for outcome in train(make_task(), world=1, algorithms=[lambda place: Long(place, Long.Options())]):
        with pytest.raises(ConfigError, match=r"options are 20\d\d\d characters of JSON, at most 10000"):
            succeeded([outcome])


def test_another_model_on_a_rank_is_named_on_all() -> None:
    odd = ClassificationTask(lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 24)), data(), batch_size=16)
    for outcome in train(make_task(), make_task(), odd):
        assert isinstance(outcome.error, ConfigError)
        assert "the model of rank 2 differs" in str(outcome.error)
        assert "'1.weight torch.float32 (24, 784) trained' where they have 'fc1.weight" in str(outcome.error)


@pytest.mark.parametrize("algorithm", ["dense", "dgc"])
def test_a_replica_that_went_astray_is_found_at_the_next_check_and_named(algorithm: str) -> None:
    def nudge(model: nn.Module, batch: Any, number: int) -> None:
        if number == 3:
            with torch.no_grad():
                next(model.parameters())[0, 0] += 1e-6

    outcomes = train(make_task(), Watched(nudge), make_task(), algorithm=algorithm, hash_every=2, epochs=2)
    for outcome in outcomes:
        assert isinstance(outcome.error, ReplicasDiverged)
        assert (outcome.error.step, outcome.error.ranks) == (4, (1,))


@pytest.mark.parametrize("algorithm", ["dense", "dgc"])
def test_a_training_function_that_fails_ends_all_ranks_and_is_raised_where_it_failed(algorithm: str) -> None:
    failed_s: list[float] = []

    def fail(model: nn.Module, batch: Any, number: int) -> None:
        if number == 4:
            failed_s.append(time.monotonic())
            raise ZeroDivisionError("the user's own mistake")

    outcomes = train(make_task(), Watched(fail), make_task(), algorithm=algorithm, epochs=50)
    assert isinstance(outcomes[1].error, ZeroDivisionError)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, PeerLost)
        assert 1 in error.ranks  # and perhaps the third one, which has left for the same reason
        assert "ZeroDivisionError" in str(error)
    assert time.monotonic() - failed_s[0] < 10  # what ends an exchange in any case is 60 s


class FailsBackward(torch.autograd.Function):
    """A mistake in the midst of the backward pass, when some buckets are on their way already."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise ZeroDivisionError("the user's own mistake")


def test_a_failure_within_the_backward_pass_calls_off_what_is_on_its_way() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.fails = nn.Linear(784, 8), nn.Linear(8, 10), False

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.flatten(1))
            return self.last(FailsBackward.apply(x) if self.fails else x)

    class Task(ClassificationTask):
        def __init__(self, fails: bool) -> None:
            super().__init__(Model, data(), batch_size=16)
            self._fails = fails

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            model.fails = self._fails  # type: ignore[assignment]
            return super().loss(model, batch)

    pending: list[int] = []
    started: list[int] = []

    class Noted(Dense):
        choice = "noted"

        def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
            if self.place.rank == 1:
                started.append(bucket.index)
            yield from super().exchange(bucket, step)

    async def play(group: Group, worker: Worker) -> None:
        try:
            await worker.run()
        finally:
            if group.rank == 1:
                pending.append(group.stats.pending)

    algorithms = [lambda place: Noted(place, Noted.Options())] * 2
    outcomes = train(Task(False), Task(True), algorithms=algorithms, bucket_bytes=1, play=play)
    assert started == [0, 1]  # of four buckets
    assert isinstance(outcomes[1].error, ZeroDivisionError)
    assert isinstance(outcomes[0].error, PeerLost)
    assert pending == [0]


def spoils(*numbers: int, value: float = float("nan")) -> Callable[[nn.Module, Any, int], float | None]:
    """The loss of these batches, and so every gradient, is not finite."""
    return lambda model, batch, number: value if number in numbers else None


def test_a_frozen_parameter_may_be_infinite_as_masks_are() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_mlp()
            self.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.inner(images)
            return logits

    task = ClassificationTask(Masked, data(), batch_size=16)
    outcome = succeeded(train(task, world=1))[0]
    assert outcome.worker.skipped_steps == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": False},
        {"bucket_bytes": 1},
        {"optimizer__clip_norm": 1.0},
        {"algorithm": "dgc"},
    ],
    ids=str,
)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(value: float, settings: dict[str, Any]) -> None:
    with capture_logs() as lines:
        tasks = make_task(), Watched(spoils(2, value=value))
        outcomes = succeeded(train(*tasks, hash_every=1, epochs=2, **settings))
    for outcome in outcomes:
        assert [report.skipped_steps for report in outcome.reports] == [1, 0]
        assert outcome.worker.skipped_steps == 1
        assert outcome.worker.step == 14
        assert outcome.parameters.isfinite().all()
    told = [line for line in lines if line["event"].startswith("step skipped")]
    assert [(line["step"], line["by_ranks"], line["in_a_row"]) for line in told] == [(3, [1], 1)] * 2
    clean = single_process(make_task(), 2, epochs=2, algorithm=settings.get("algorithm", "dense"))
    assert not torch.equal(outcomes[0].parameters, vector(clean))
    assert torch.allclose(outcomes[0].parameters, vector(clean), atol=0.2)
    assert outcomes[0].reports[0].loss == pytest.approx(2.2, abs=0.2)  # of the steps that were made


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_skipped_step_leaves_parameters_and_momentum_as_they_were(accumulation: int) -> None:
    class Without(ClassificationTask):
        """The same without the batches of the step that is skipped."""

        def batches(self, **where: Any) -> Iterator[Any]:
            for number, batch in enumerate(super().batches(**where)):
                if number // accumulation != 1:
                    yield batch

    settings: dict[str, Any] = {"epochs": 1, "optimizer__weight_decay": 1e-3}
    outcomes = train(
        make_task(), Watched(spoils(accumulation)), make_task(), accumulation_steps=accumulation, **settings
    )
    task = Without(small_mlp, data(), batch_size=16)
    reference = single_process(task, 3, accumulation=accumulation, **settings)
    for outcome in succeeded(outcomes):
        assert torch.equal(outcome.parameters, vector(reference))


class OddLoss(ClassificationTask):
    """The loss is NaN in some steps, although its gradient is zero; or the gradient is although the loss is not."""

    def __init__(self, rank: int, at: tuple[int, ...], *, of_gradient: bool) -> None:
        super().__init__(small_mlp, data(), batch_size=16)
        self._own_rank, self._at, self._of_gradient, self._number = rank, at, of_gradient, -1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._number += 1
        loss = super().loss(model, batch)
        if self._number not in self._at:
            return loss
        if self._of_gradient:
            return loss + 0.0 * (loss * 0.0).sqrt()  # the slope of a root at 0 is infinite, and 0 times that is NaN
        return torch.where(torch.tensor(True), torch.tensor(float("nan")), loss)


@pytest.mark.parametrize("algorithm", ["dense", "dgc"])
def test_a_loss_that_is_not_finite_is_enough(algorithm: str) -> None:
    outcomes = succeeded(train(make_task(), OddLoss(1, (3,), of_gradient=False), algorithm=algorithm, hash_every=1))
    assert [outcome.reports[0].skipped_steps for outcome in outcomes] == [1, 1]
    assert outcomes[0].parameters.isfinite().all()
    assert outcomes[0].reports[0].loss == pytest.approx(2.2, abs=0.2)


def test_a_gradient_that_is_not_finite_is_blamed_on_its_rank_from_the_second_time_on() -> None:
    outcomes = train(make_task(), OddLoss(1, (2, 3), of_gradient=True), hash_every=1, max_nonfinite_steps=2)
    for outcome in outcomes:
        assert isinstance(outcome.error, TrainingDiverged)
        assert (outcome.error.step, outcome.error.ranks) == (4, (1,))


@pytest.mark.parametrize("algorithm", ["dense", "dgc"])
def test_too_many_skipped_steps_in_a_row_end_the_run_on_all_ranks(algorithm: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm, "epochs": 3, "checkpoint__dir": tmp_path}
    outcomes = train(make_task(), Watched(spoils(1, 2, *range(4, 99))), max_nonfinite_steps=5, **settings)
    for outcome in outcomes:
        assert isinstance(outcome.error, TrainingDiverged)
        assert (outcome.error.step, outcome.error.ranks) == (9, (1,))
        assert "the last 5 steps in a row were skipped" in str(outcome.error)
        assert "of rank 1" in str(outcome.error)
        assert outcome.parameters.isfinite().all()
    # Three of them are in the checkpoint of step 7: a run that goes on does not count anew.
    again = train(make_task(), Watched(spoils(*range(99))), max_nonfinite_steps=5, **settings)
    assert [outcome.error.step for outcome in again if isinstance(outcome.error, TrainingDiverged)] == [9, 9]


def test_a_run_that_learnt_nothing_does_not_end_well() -> None:
    for outcome in train(make_task(), Watched(spoils(*range(99)))):  # seven steps: fewer than the limit
        assert isinstance(outcome.error, TrainingDiverged)
        assert "all steps of the last epoch were skipped" in str(outcome.error)
    forgiving = succeeded(train(make_task(), Watched(spoils(*range(99))), max_nonfinite_steps=0))
    assert [outcome.worker.skipped_steps for outcome in forgiving] == [7, 7]


def test_parameters_that_are_not_finite_are_neither_reported_nor_saved(tmp_path: Path) -> None:
    tasks = (Watched(spoils(0, value=1e20)) for _ in range(2))  # finite, but for what SGD makes of it
    outcomes = train(*tasks, max_steps=1, optimizer__lr=1e30, checkpoint__dir=tmp_path)
    for outcome in outcomes:
        assert isinstance(outcome.error, TrainingDiverged)
        assert "the parameters or buffers have NaN or infinity" in str(outcome.error)
        assert outcome.reports == []
    assert not list(tmp_path.rglob("*.safetensors"))


def test_means_of_batch_norm_are_put_back_with_the_step() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(784), nn.Linear(784, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(x.flatten(1)))

    class Task(ClassificationTask):
        """Batch 2 holds a pixel that is NaN."""

        def batches(self, **where: Any) -> Iterator[Any]:
            for number, batch in enumerate(super().batches(**where)):
                if number == 2:
                    batch.images.view(-1)[0] = float("nan")
                yield batch

    outcomes = succeeded(train(*(kind(Model, data(), batch_size=16) for kind in (Task, ClassificationTask))))
    for outcome in outcomes:
        assert outcome.reports[0].skipped_steps == 1
        assert all(buffer.isfinite().all() for buffer in outcome.worker.model.buffers())
        assert int(outcome.worker.model.norm.num_batches_tracked) == 6  # type: ignore[union-attr, arg-type]
        assert outcome.reports[0].eval_loss is not None
        assert outcome.reports[0].eval_loss < 5


def test_fewer_batches_than_announced_are_an_error() -> None:
    class Short(ClassificationTask):
        def batches(self, **where: Any) -> Iterator[Any]:
            yield next(iter(super().batches(**where)))

    outcomes = train(make_task(), Short(small_mlp, data(), batch_size=16))
    assert isinstance(outcomes[1].error, ValueError)
    assert "num_batches said 7" in str(outcomes[1].error)


def test_a_rank_that_unfreezes_a_parameter_ends_the_run_and_all_ranks_name_the_parameter() -> None:
    def half_frozen() -> nn.Module:
        model = small_mlp()
        model[1].requires_grad_(False)
        return model

    def unfreeze(model: nn.Module, batch: Any, number: int) -> None:
        model[1].requires_grad_(number >= 2)

    outcomes = train(make_task(half_frozen), Watched(unfreeze, model=half_frozen))
    text = "rank 1, step 3: parameter 'fc1.weight' was frozen (requires_grad=False) in build_model and is not any more"
    assert isinstance(outcomes[1].error, ConfigError)
    assert text in str(outcomes[1].error)
    assert isinstance(outcomes[0].error, PeerLost)
    assert text in str(outcomes[0].error)


def test_a_model_with_nothing_to_train_and_a_set_without_batches_are_refused() -> None:
    def frozen() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).requires_grad_(False)

    class Empty(ClassificationTask):
        def num_batches(self, **where: Any) -> int:
            return 0

    for outcome in train(make_task(frozen)):
        assert isinstance(outcome.error, ValueError | PeerLost)
    for outcome in train(Empty(small_mlp, data(), batch_size=16)):
        assert "at least one batch on some rank, got [0, 0]" in str(outcome.error)


def test_a_worker_that_is_cancelled_stops_between_two_batches_and_the_others_are_told() -> None:
    reached, seen = threading.Event(), []

    def hold(model: nn.Module, batch: Any, number: int) -> None:
        seen.append(number)
        if number == 2:
            reached.set()
            assert cancelled.wait(20)

    cancelled = threading.Event()

    async def play(group: Group, worker: Worker) -> None:
        if group.rank == 0:
            await worker.run()
            return
        running = asyncio.create_task(worker.run())
        await asyncio.to_thread(reached.wait, 20)
        running.cancel()
        await asyncio.sleep(0)  # the flag is up when the task has seen it
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert seen == [0, 1, 2]
        assert group.stats.pending == 0

    outcomes = train(make_task(), Watched(hold), play=play, accumulation_steps=7)
    assert outcomes[1].error is None
    assert isinstance(outcomes[0].error, PeerLost)


def test_a_batch_may_be_none() -> None:
    class Same(ClassificationTask):
        def batches(self, **where: Any) -> Iterator[Any]:
            self.batch = next(iter(super().batches(**where)))
            return iter([None] * 7)

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            assert batch is None
            return super().loss(model, self.batch)

    outcomes = train(*(Same(small_mlp, data(), batch_size=16) for _ in range(2)))
    assert [outcome.worker.step for outcome in succeeded(outcomes)] == [7, 7]


def test_a_worker_that_has_not_started_has_no_model_and_says_when_it_has() -> None:
    async def ask() -> None:
        async with (
            gradbus.connect(**new_place(), load_actors=False) as bus,
            gradbus.join_group(bus, rank=0, world=1) as group,
        ):
            worker = Worker(group, make_task())
            assert not hasattr(worker, "model")
            with pytest.raises(AttributeError, match=r"no model yet: it is built when run\(\) or epochs\(\) begins"):
                _ = worker.model
            assert worker.algorithm == "dense"

    asyncio.run(ask())

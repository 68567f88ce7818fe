"""Ranks whose models differ: each keeps its own; evaluated, exported and left at the end is the mean."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import NotFinite, make_task, small_mlp, succeeded, train, training_of
from structlog.testing import capture_logs
from torch import Tensor, nn

from gradbus import Worker
from gradbus.models import ClassificationTask
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.collectives import Group
from gradbus.runtime.errors import CollectiveError, TrainingDiverged

SETTINGS: dict[str, Any] = {"algorithm": "decentralized", "epochs": 2, "hash_every": 1}


def saved(folder: Path, rank: int, step: int) -> dict[str, Tensor]:
    with CheckpointStore(folder / f"rank-{rank}") as store:
        return store.load(step).tensors


def of_model(tensors: dict[str, Tensor], prefix: str) -> Tensor:
    """All parameters below the prefix, one vector."""
    return torch.cat([t.reshape(-1) for name, t in sorted(tensors.items()) if name.startswith(f"{prefix}parameter/")])


def test_the_model_of_a_run_is_the_mean_and_each_rank_saves_its_own(tmp_path: Path) -> None:
    outcomes = succeeded(train(make_task(), world=3, checkpoint__dir=tmp_path, **SETTINGS))
    ranks = [saved(tmp_path, rank, outcomes[0].worker.step) for rank in range(3)]
    own = torch.stack([of_model(tensors, "own/") for tensors in ranks])
    assert not torch.equal(own[0], own[1])
    mean = own.double().mean(dim=0)
    assert torch.allclose(of_model(ranks[0], "").double(), mean, atol=1e-6)  # what gradbus export writes
    for outcome in outcomes:
        live = dict(outcome.worker.model.named_parameters())
        left = torch.cat([live[name].detach().reshape(-1) for name in sorted(live)])
        assert torch.equal(left, of_model(ranks[0], ""))
        report = outcome.reports[-1]
        assert report.model == "mean"
        assert report.params_hash == outcomes[0].reports[-1].params_hash
        expected = math.sqrt(float((own.double() - mean).square().sum(dim=1).mean())) / float(mean.norm())
        assert report.consensus_distance == pytest.approx(expected, rel=1e-3)
        assert report.test_samples == 101


class Notes(ClassificationTask):
    """Keeps the parameters that it is evaluated with."""

    evaluated: list[Tensor]

    def evaluate_shard(self, model: nn.Module, **where: Any) -> Any:
        self.evaluated.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        return super().evaluate_shard(model, **where)


def test_all_ranks_evaluate_the_mean_and_go_on_with_their_own() -> None:
    tasks = []
    for _ in range(2):
        inner = make_task()
        task = Notes(small_mlp, inner.data, batch_size=16)
        task.evaluated = []
        tasks.append(task)
    watched = succeeded(train(*tasks, **SETTINGS))
    assert len(tasks[0].evaluated) == 2
    for mine, other in zip(tasks[0].evaluated, tasks[1].evaluated, strict=True):
        assert torch.equal(mine, other)
    blind = succeeded(train(make_task(), eval_every_epochs=0, **SETTINGS))
    assert torch.equal(watched[0].parameters, blind[0].parameters)


def test_a_run_that_is_done_is_the_mean_again(tmp_path: Path) -> None:
    first = succeeded(train(make_task(), checkpoint__dir=tmp_path, **SETTINGS))
    again = succeeded(train(make_task(), checkpoint__dir=tmp_path, **SETTINGS))
    longer = succeeded(train(make_task(), checkpoint__dir=tmp_path, **{**SETTINGS, "epochs": 3}))
    whole = succeeded(train(make_task(), **{**SETTINGS, "epochs": 3}))
    for rank in (0, 1):
        assert torch.equal(first[rank].parameters, again[rank].parameters)
        assert torch.equal(longer[rank].parameters, whole[rank].parameters)


@pytest.mark.parametrize(
    "settings",
    [{}, {"algorithm__interval_steps": 2}, {"algorithm": "async-averaging"}],
    ids=["exchange", "no exchange", "late"],
)
def test_a_step_that_is_not_finite_is_skipped_by_that_rank_alone(settings: dict[str, Any]) -> None:
    inner = make_task()
    odd = NotFinite(small_mlp, inner.data, batch_size=16)
    odd.at = (3,)
    outcomes = succeeded(train(make_task(), odd, **{**SETTINGS, "epochs": 1, **settings}))
    assert [outcome.worker.skipped_steps for outcome in outcomes] == [0, 1]
    assert [outcome.reports[0].skipped_steps for outcome in outcomes] == [1, 1]  # of the rank with most, on all
    for outcome in outcomes:
        assert outcome.parameters.isfinite().all()
        assert outcome.reports[0].consensus_distance is not None


@pytest.mark.parametrize(
    ("settings", "step", "text"),
    [
        ({"algorithm__interval_steps": 4, "max_nonfinite_steps": 3}, 5, "the last 5 steps in a row"),
        ({"algorithm": "async-averaging", "max_nonfinite_steps": 3}, 5, "the last 5 steps in a row"),
        ({"algorithm": "async-averaging", "epochs": 1}, 5, "all steps of the last epoch"),
    ],
    ids=["found in an exchange", "found at the end of an epoch", "last epoch"],
)
def test_a_rank_that_skips_all_of_its_own_steps_ends_the_run_with_one_error_on_all_ranks(
    settings: dict[str, Any], step: int, text: str
) -> None:
    inner = make_task()
    odd = NotFinite(small_mlp, inner.data, batch_size=16)
    odd.at = tuple(range(99))
    errors = [outcome.error for outcome in train(make_task(), odd, make_task(), **{**SETTINGS, **settings})]
    for error in errors:
        assert isinstance(error, TrainingDiverged)
        assert (error.step, error.ranks) == (step, (1,))
        assert text in str(error)
    assert len({str(error) for error in errors}) == 1


class NotFiniteAtOne(Algorithm):
    """The mean of all weights, but for one exchange that leaves NaN on one rank alone, as messages of pairs may."""

    choice = "not-finite-at-one"
    scope = "weights"
    equal_replicas = False
    delay_steps = 1

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        self.counted: list[bool] = []

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        yield AllReduce("mean", bucket.flat, "mean", out=bucket.flat)
        if (step.number, self.place.rank) == (2, 1):
            bucket.flat[0] = math.nan

    def commit(self) -> None:
        self.counted.append(True)

    def roll_back(self) -> None:
        self.counted.append(False)


class AtOnce(NotFiniteAtOne):
    """The same, in the step itself."""

    choice = "not-finite-at-once"
    delay_steps = 0


class Meanwhile(AtOnce):
    """The same, while gradients are computed."""

    choice = "not-finite-meanwhile"
    overlaps = True


@pytest.mark.parametrize("kind", [NotFiniteAtOne, AtOnce, Meanwhile])
def test_an_exchange_that_is_not_finite_on_one_rank_is_taken_back_by_all_and_told(kind: type[NotFiniteAtOne]) -> None:
    algorithms = [lambda place: kind(place, kind.Options())] * 3
    with capture_logs() as lines:
        outcomes = succeeded(train(make_task(), world=3, algorithms=algorithms, epochs=1))
    for outcome in outcomes:
        algorithm = training_of(outcome.worker).algorithm
        assert isinstance(algorithm, NotFiniteAtOne)
        assert algorithm.counted == [number != 2 for number in range(5)]
        assert (outcome.reports[0].skipped_exchanges, outcome.reports[0].skipped_steps) == (1, 0)
        assert outcome.parameters.isfinite().all()
    told = [line for line in lines if line["event"] == "exchange skipped: NaN or infinity"]
    assert sorted((line["rank"], line["step"]) for line in told) == [(0, 3), (1, 3), (2, 3)]


class AtTheEnd(AtOnce):
    """The only exchange is that of the third step."""

    choice = "not-finite-at-the-end"

    def is_due(self, step: Step) -> bool:
        return step.number == 2


class Never(AtTheEnd):
    """No exchange at all."""

    choice = "never"

    def is_due(self, step: Step) -> bool:
        return False


def test_ranks_that_have_gone_on_with_a_result_that_another_one_lacks_have_their_own_weights_again() -> None:
    ends = []
    for kind in (AtTheEnd, Never):
        algorithms = [lambda place, kind=kind: kind(place, kind.Options())] * 2
        outcomes = succeeded(train(make_task(), algorithms=algorithms, epochs=1, max_steps=3, eval_every_epochs=0))
        ends.append([outcome.parameters for outcome in outcomes])
    assert torch.allclose(ends[0][0], ends[1][0], atol=1e-6)
    assert torch.equal(ends[0][0], ends[0][1])


class Raises(AtTheEnd):
    """What all ranks have agreed on is lost on one of them."""

    choice = "raises"
    has_raised: threading.Event

    def roll_back(self) -> None:
        super().roll_back()
        self.has_raised.set()
        if self.place.rank == 1:
            raise CollectiveError("the network was away")


class Waits(ClassificationTask):
    """The batch after the exchange takes until it has come to its end."""

    number = -1

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.event = threading.Event()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.number += 1
        assert self.number != 3 or self.event.wait(20)
        return super().loss(model, batch)


def test_an_exchange_that_fails_when_its_result_is_there_ends_the_run_before_the_next_one_is_due() -> None:
    tasks = [Waits(small_mlp, make_task().data, batch_size=16) for _ in range(2)]

    def algorithm(rank: int) -> Any:
        def make(place: Place) -> Raises:
            made = Raises(place, Raises.Options())
            made.has_raised = tasks[rank].event
            return made

        return make

    first, second = train(*tasks, algorithms=[algorithm(0), algorithm(1)], epochs=1, eval_every_epochs=0)
    assert isinstance(second.error, CollectiveError)
    assert "the network was away" in str(second.error)
    assert second.worker.step < 7  # all of the epoch, at whose end all is settled
    assert first.error is not None


def test_local_steps_send_nothing() -> None:
    settings = {**SETTINGS, "algorithm__interval_steps": 1000, "epochs": 1, "eval_every_epochs": 0}
    outcomes = succeeded(train(make_task(), **settings))
    every = succeeded(train(make_task(), **{**settings, "algorithm__interval_steps": 1}))
    one_model = 4 * outcomes[0].parameters.numel()
    assert outcomes[0].reports[0].bytes_out_per_step * 7 == pytest.approx(one_model, rel=0.01)  # the first step only
    assert every[0].reports[0].bytes_out_per_step == pytest.approx(one_model, rel=0.01)


def test_exchanges_that_were_taken_back_before_a_resume_are_counted_in_the_report_of_the_epoch(tmp_path: Path) -> None:
    algorithms = [lambda place: NotFiniteAtOne(place, NotFiniteAtOne.Options())] * 3
    for more in ({"max_steps": 4}, {}):
        outcomes = succeeded(
            train(make_task(), world=3, algorithms=algorithms, epochs=1, checkpoint__dir=tmp_path, **more)
        )
    for outcome in outcomes:
        assert outcome.reports[0].finished
        assert outcome.reports[0].skipped_exchanges == 1


class Asks(ClassificationTask):
    """Asks the worker of rank 0 for its state while it evaluates."""

    worker: Worker
    loop: asyncio.AbstractEventLoop
    asked: Future[dict[str, Any]] | None = None

    def evaluate_shard(self, model: nn.Module, *, rank: int, world: int) -> Any:
        if rank == 0 and self.asked is None:
            self.asked = asyncio.run_coroutine_threadsafe(self.worker.state_dict(), self.loop)
            is_queued = threading.Event()
            later = self.loop.call_soon  # the task of the question starts one turn of the loop after it was made
            self.loop.call_soon_threadsafe(lambda: later(lambda: later(is_queued.set)))
            assert is_queued.wait(20)
        return super().evaluate_shard(model, rank=rank, world=world)


def test_the_state_of_a_rank_is_its_own_also_while_the_mean_is_evaluated() -> None:
    inner = make_task()
    task = Asks(small_mlp, inner.data, batch_size=16)

    async def play(group: Group, worker: Worker) -> None:
        if group.rank == 0:
            task.worker, task.loop = worker, asyncio.get_running_loop()
        async for report in worker.epochs():
            if group.rank == 0 and report.epoch == 0:
                assert task.asked is not None
                found = await asyncio.wrap_future(task.asked)
                own = await worker.state_dict()
                assert all(torch.equal(found[name], own[name]) for name in own)
                assert report.consensus_distance is not None
                assert report.consensus_distance > 0

    succeeded(train(task, play=play, **SETTINGS))

"""Checkpoints of a data-parallel run: going on from one gives the bits of a run that was never broken off."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import Outcome, make_task, small_mlp, succeeded, train, training_of
from torch import nn

from gradbus.actors import Worker
from gradbus.actors.data_parallel.state import SavedRank, WorkerState, newest_common
from gradbus.models import ClassificationTask
from gradbus.runtime.algorithms.base import Place
from gradbus.runtime.algorithms.dense import Dense
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.collectives import Group
from gradbus.runtime.errors import BarrierTimeout, CheckpointError, ConfigError, PeerLost


class Breaks(ClassificationTask):
    """Rank ``who`` fails when it wants its ``at``-th batch."""

    def __init__(self, at: int, *, who: int = 1, model: Any = None, **options: Any) -> None:
        super().__init__(model or small_mlp, make_task().data, batch_size=16, **options)
        self._left, self._who = at, who

    def batches(self, *, rank: int, **where: Any) -> Iterator[Any]:
        for batch in super().batches(rank=rank, **where):
            if rank == self._who:
                self._left -= 1
                if self._left < 0:
                    raise OSError("the disk with the data is gone")
            yield batch


def same(ours: list[Outcome], theirs: list[Outcome]) -> None:
    """Parameters, what each rank owes, and the reports of the last epoch."""
    for mine, other in zip(succeeded(ours), succeeded(theirs), strict=True):
        assert torch.equal(mine.parameters, other.parameters)
        owed = [training_of(outcome.worker).state.own() for outcome in (mine, other)]
        assert owed[0].keys() == owed[1].keys()
        assert all(torch.equal(owed[0][name], owed[1][name]) for name in owed[0])
        facts = [
            (o.reports[-1].epoch, o.reports[-1].step, o.reports[-1].loss, o.reports[-1].params_hash)
            for o in (mine, other)
        ]
        assert facts[0] == facts[1]


@pytest.mark.parametrize("algorithm", ["dense", "dgc"])
@pytest.mark.parametrize(("every", "lost_from"), [(0, 14), (4, 12)])  # at the end of epoch 1, and in its midst
def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(
    tmp_path: Path, algorithm: str, every: int, lost_from: int
) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm, "epochs": 3, "optimizer__weight_decay": 1e-3, "hash_every": 1}
    whole = train(make_task(), **settings)
    settings |= {"checkpoint__dir": tmp_path, "checkpoint__every_steps": every}
    broken = train(make_task(), Breaks(15), **settings)
    assert isinstance(broken[1].error, OSError)
    assert isinstance(broken[0].error, PeerLost)
    again = train(make_task(), **settings)
    assert again[0].reports[0].epoch == (2 if every == 0 else 1)
    assert lost_from <= broken[0].worker.step <= 15
    same(again, whole)


def test_in_the_midst_of_an_epoch_accumulated_batches_are_skipped_right(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm": "dgc", "epochs": 2, "accumulation_steps": 2}
    whole = train(make_task(batch_size=8), world=3, **settings)
    settings["checkpoint__dir"] = tmp_path
    succeeded(train(make_task(batch_size=8), world=3, **settings, max_steps=3))
    same(train(make_task(batch_size=8), world=3, **settings), whole)


def test_masks_of_stock_dropout_go_on_where_they_were(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10))

    settings: dict[str, Any] = {"world": 1, "epochs": 2}
    torch.manual_seed(1)
    whole = train(make_task(model), **settings)
    torch.manual_seed(1)
    succeeded(train(make_task(model), **settings, checkpoint__dir=tmp_path, max_steps=5))
    torch.manual_seed(2)
    same(train(make_task(model), **settings, checkpoint__dir=tmp_path), whole)


def test_a_run_that_is_done_has_nothing_left_to_do(tmp_path: Path) -> None:
    first = succeeded(train(make_task(), epochs=2, checkpoint__dir=tmp_path))
    again = succeeded(train(make_task(), epochs=2, checkpoint__dir=tmp_path))
    for mine, other in zip(first, again, strict=True):
        assert other.reports == []
        assert mine.summary is not None
        assert other.summary is not None
        assert (other.summary.epochs, other.summary.steps) == (2, 14)
        assert other.summary.accuracy == mine.summary.accuracy is not None
        assert other.summary.params_hash == mine.summary.params_hash
    more = succeeded(train(make_task(), epochs=3, checkpoint__dir=tmp_path))  # but it can be made longer
    same(more, train(make_task(), epochs=3))


def steps(state_dir: Path, rank: int) -> list[int]:
    with CheckpointStore(state_dir / f"rank-{rank}") as store:
        return store.rounds()


def test_only_the_newest_are_kept_and_the_last_step_is_one_of_them(tmp_path: Path) -> None:
    succeeded(train(make_task(), epochs=2, checkpoint__dir=tmp_path, checkpoint__every_steps=3, checkpoint__keep=2))
    assert [steps(tmp_path, rank) for rank in (0, 1)] == [[12, 14], [12, 14]]


def saved_run(state_dir: Path, **settings: Any) -> None:
    succeeded(train(make_task(), epochs=1, checkpoint__dir=state_dir, checkpoint__every_steps=2, **settings))


def errors(outcomes: list[Outcome]) -> list[str]:
    """Texts; of each rank one, and none of them because another was faster to go."""
    assert all(isinstance(outcome.error, CheckpointError | ConfigError) for outcome in outcomes), outcomes
    return [str(outcome.error) for outcome in outcomes]


def test_the_newest_step_that_all_ranks_have_whole_is_taken(tmp_path: Path) -> None:
    whole = train(make_task(), epochs=2)
    saved_run(tmp_path)
    assert steps(tmp_path, 0) == [4, 6, 7]
    with CheckpointStore(tmp_path / "rank-1") as store:
        store.remove(7)  # as after a crash between the ranks' saving
        damaged = next(store.directory.glob("*6.safetensors"))
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    again = train(make_task(), epochs=2, checkpoint__dir=tmp_path, checkpoint__every_steps=50)
    assert again[0].reports[0].step == 7
    same(again, whole)
    assert steps(tmp_path, 0) == steps(tmp_path, 1) == [4, 14]


def test_ranks_without_a_common_step_are_named(tmp_path: Path) -> None:
    saved_run(tmp_path)
    shutil.rmtree(tmp_path / "rank-1")
    for text in errors(train(make_task(), epochs=2, checkpoint__dir=tmp_path)):
        assert "rank 0: [4, 6, 7]; rank 1: none" in text


def test_newest_common() -> None:
    assert newest_common([[], []]) == []
    assert newest_common([[4, 6, 7], [2, 4, 6]]) == [6, 4]
    with pytest.raises(CheckpointError, match="no step that all ranks have"):
        newest_common([[4], [2]])


def test_a_rank_that_reads_its_checkpoint_for_long_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"checkpoint__dir": tmp_path, "timeouts__collective_s": 1.0}
    succeeded(train(make_task(), epochs=1, **settings))
    load, lock = WorkerState.load, threading.Lock()

    def slow(self: WorkerState, step: int) -> Any:
        if lock.acquire(blocking=False):  # one of the two
            time.sleep(1.5)
        return load(self, step)

    monkeypatch.setattr(WorkerState, "load", slow)
    again = succeeded(train(make_task(), epochs=2, **settings))
    assert [[report.epoch for report in outcome.reports] for outcome in again] == [[1], [1]]


def test_checkpoints_of_two_runs_do_not_mix(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved_run(tmp_path / name)
    shutil.rmtree(tmp_path / "a" / "rank-1")
    shutil.move(tmp_path / "b" / "rank-1", tmp_path / "a" / "rank-1")
    for text in errors(train(make_task(), epochs=2, checkpoint__dir=tmp_path / "a")):
        assert "are of different runs" in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"world": 1}, "of rank 0 of 2, this is rank 0 of 1"),
        ({"seed": 3}, "made with seed=0, now it is 3"),
        ({"algorithm": "dgc"}, "made with algorithm='dense', now it is 'dgc'"),
        ({"checkpoint__resume": False}, "resume is off"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    saved_run(tmp_path)
    for error in errors(train(make_task(), epochs=2, checkpoint__dir=tmp_path, **change)):
        assert text in error


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (
            {"name": "decentralized", "peers": "ring"},
            {"name": "decentralized", "peers": "choco"},
            "made with algorithm.peers='ring', now it is 'choco'",
        ),
        (
            {"name": "topk", "min_numel": 0},
            {"name": "topk", "min_numel": 1000},
            "made with algorithm.min_numel=0, now it is 1000",
        ),
        ({"name": "powersgd", "rank": 4}, {"name": "powersgd", "rank": 2}, "made with algorithm.rank=4, now it is 2"),
        ({"name": "dgc", "warmup": [0.5, 0.1]}, "dgc", "made with algorithm.warmup=[0.5, 0.1], now it is 'paper'"),
    ],
)
def test_other_options_of_the_algorithm_are_refused(tmp_path: Path, before: Any, now: Any, text: str) -> None:
    saved_run(tmp_path, algorithm=before)
    for error in errors(train(make_task(), epochs=2, checkpoint__dir=tmp_path, algorithm=now)):
        assert text in error


@pytest.mark.parametrize("name", ["epoch", "skipped_in_row", "skipped_exchanges", "ended_exchanges"])
def test_a_checkpoint_that_counts_more_than_its_steps_is_refused(tmp_path: Path, name: str) -> None:
    train(make_task(), world=1, epochs=1, max_steps=3, checkpoint={"dir": tmp_path})
    saved = CheckpointStore.to_read(tmp_path / "rank-0").load(3)
    assert SavedRank.of(saved).epoch_step == 3
    with pytest.raises(CheckpointError, match=f"meta.{name}: expected 0 to 3 at step 3, got 4"):
        SavedRank.of(replace(saved, meta={**saved.meta, name: 4}))


def test_what_only_says_how_a_sum_is_made_may_change(tmp_path: Path) -> None:
    saved_run(tmp_path, algorithm={"name": "dense", "route": "shards"})
    succeeded(train(make_task(), epochs=2, checkpoint__dir=tmp_path, algorithm={"name": "dense", "route": "ring"}))


class Own(Dense):
    """An algorithm that no configuration names."""

    choice = "own"


def own(place: Place) -> Own:
    return Own(place, Own.Options())


def test_a_run_with_an_algorithm_of_ones_own_goes_on_with_it_alone(tmp_path: Path) -> None:
    saved_run(tmp_path, algorithms=(own, own))
    for error in errors(train(make_task(), epochs=2, checkpoint__dir=tmp_path)):
        assert "made with algorithm='own', now it is 'dense'" in error
    succeeded(train(make_task(), epochs=2, checkpoint__dir=tmp_path, algorithms=(own, own)))


def test_another_model_or_other_data_are_refused(tmp_path: Path) -> None:
    succeeded(train(make_task(), epochs=2, checkpoint__dir=tmp_path, max_steps=3))
    other = ClassificationTask(lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), make_task().data, batch_size=16)
    outcomes = train(other, epochs=2, checkpoint__dir=tmp_path)
    assert "is of a model with other names" in str(outcomes[0].error)
    for text in errors(train(make_task(batch_size=32), epochs=2, checkpoint__dir=tmp_path)):
        assert "now there are 4" in text


def test_state_is_kept_by_all_ranks_or_by_none(tmp_path: Path) -> None:
    from gradbus.runtime.config.data_parallel import DataParallelConfig

    configs = [DataParallelConfig(checkpoint={"dir": tmp_path}), DataParallelConfig()]
    for text in errors(train(make_task(), configs=configs)):
        assert "checkpoint.dir" in text
        assert "rank 1 has 'none'" in text


class Sharing(nn.Module):
    """A parameter that is a view of another one, and a buffer that is a row of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(784, 10), nn.Linear(784, 10)
        self.b.bias = nn.Parameter(self.a.bias.data)
        self.register_buffer("rows", torch.arange(40.0).view(4, 10))
        self.register_buffer("row", self.rows[0])  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.a(x) + self.b(x)


def test_tensors_that_share_their_storage_are_saved_each_by_its_name(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 1, "hash_every": 1}
    succeeded(train(make_task(Sharing), checkpoint__dir=tmp_path, max_steps=2, **settings))
    with CheckpointStore(tmp_path / "rank-0") as store:
        saved = store.load(2).tensors
    assert torch.equal(saved["parameter/a.bias"], saved["parameter/b.bias"])
    assert saved["buffer/rows"].shape == (4, 10)
    assert torch.equal(saved["buffer/row"], torch.arange(10.0))
    same(train(make_task(Sharing), checkpoint__dir=tmp_path, **settings), train(make_task(Sharing), **settings))


def orphan(state_dir: Path) -> None:
    """As after a crash of rank 1 while the first checkpoint was being made."""
    succeeded(train(make_task(), epochs=1, checkpoint__dir=state_dir, max_steps=2))
    shutil.rmtree(state_dir / "rank-1")


def test_a_first_checkpoint_that_was_never_complete_does_not_bar_the_way(tmp_path: Path) -> None:
    orphan(tmp_path)
    (tmp_path / "rank-0" / "saved-by-all").unlink()
    same(train(make_task(), epochs=1, checkpoint__dir=tmp_path), train(make_task(), epochs=1))
    assert steps(tmp_path, 0) == steps(tmp_path, 1) == [7]


def test_one_that_was_complete_is_not_given_up_for_a_rank_that_has_lost_it(tmp_path: Path) -> None:
    orphan(tmp_path)
    for text in errors(train(make_task(), epochs=1, checkpoint__dir=tmp_path)):
        assert "rank 0: [2]; rank 1: none" in text


def test_ranks_wait_for_each_others_saving_by_a_deadline_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, given_up = WorkerState.save, threading.Event()

    def slow(self: WorkerState, *arguments: Any, **options: Any) -> int:
        if self._rank == 1:
            given_up.wait(5.5)
        return save(self, *arguments, **options)

    async def play(group: Group, worker: Worker) -> None:
        try:
            await worker.run()
        finally:
            given_up.set()

    monkeypatch.setattr(WorkerState, "save", slow)
    settings: dict[str, Any] = {"epochs": 1, "max_steps": 1, "eval_every_epochs": 0}
    # No exchange takes so long, not even on a machine that stands still for a while; the saving does.
    succeeded(train(make_task(), checkpoint__dir=tmp_path / "a", timeouts__collective_s=4.0, **settings))
    outcomes = train(make_task(), checkpoint__dir=tmp_path / "b", checkpoint__timeout_s=0.5, play=play, **settings)
    assert isinstance(outcomes[0].error, BarrierTimeout)

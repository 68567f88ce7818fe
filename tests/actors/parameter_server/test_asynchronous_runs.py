"""Asynchronous runs over DDS: how far a worker may be ahead, what is measured, and what a lost worker changes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import make_task, small_mlp
from server_scene import serve
from torch import nn

from gradbus.actors.parameter_server import requests
from gradbus.models import ClassificationTask
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.errors import CollectiveError, PeerLost


class Slowed(ClassificationTask):
    """Worker 1 begins a batch only when another one is as far ahead as it may be. All write down when they begin."""

    def __init__(self, ahead: int = 0, fails_at: int | None = None) -> None:
        super().__init__(small_mlp, make_task().data, batch_size=16)
        self._ahead, self._fails_at = ahead, fails_at
        self._changed = threading.Condition()
        self.begun: list[tuple[int, int]] = []  # worker and step, in order

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Iterator[Any]:
        all_of_them = list(super().batches(rank=rank, world=world, epoch=epoch, seed=seed))
        for number, batch in enumerate(all_of_them):
            with self._changed:
                if rank == 1 and number == self._fails_at:
                    raise OSError("no data")
                if rank == 1 and self._ahead:
                    wanted = min(number + self._ahead, len(all_of_them) - 1)
                    assert self._changed.wait_for(lambda: self._furthest >= wanted, timeout=10)  # noqa: B023 - it is called at once
                self.begun.append((rank, number))
                self._changed.notify_all()
            yield batch

    @property
    def _furthest(self) -> int:
        return max((number for rank, number in self.begun if rank != 1), default=-1)


@pytest.mark.parametrize("staleness", [0, 2])
def test_workers_are_as_far_ahead_as_the_staleness_and_no_further(staleness: int) -> None:
    task = Slowed(staleness)
    ends = serve(task, workers=3, servers=2, mode="asynchronous", staleness=staleness).succeeded()
    step = [-1, -1, -1]  # that each has begun: it has pushed those before it
    ahead = 0
    for rank, number in task.begun:
        step[rank] = number
        ahead = max(ahead, max(step) - min(step))
    assert ahead <= staleness + 1, "the slowest one is about to begin its next"
    if staleness:
        assert ahead == staleness + 1
    report = ends.workers[0].reports[-1]
    assert report.train_metrics["staleness_max"] <= 2 * (2 * staleness + 1)
    assert report.train_metrics["staleness_mean"] > 0
    assert [end.summary.updates for end in ends.servers if end.summary] == [len(task.begun)] * 2
    assert all(torch.equal(end.parameters, ends.workers[0].parameters) for end in ends.workers)


def test_one_worker_alone_has_the_bits_of_a_synchronous_run() -> None:
    synchronous, asynchronous = (
        serve(make_task(), workers=1, servers=2, mode=mode, parallel={"epochs": 2, "schedule": "cosine"})
        .succeeded()
        .workers[0]
        .parameters
        for mode in ("synchronous", "asynchronous")
    )
    assert torch.equal(synchronous, asynchronous)


def test_a_worker_that_dies_is_left_out_and_the_rest_goes_on() -> None:
    slow = {"epochs": 3, "optimizer__lr": 0.01}
    ends = serve(Slowed(fails_at=2), workers=3, servers=2, mode="asynchronous", parallel=slow)
    assert isinstance(ends.workers[1].error, OSError)
    assert [end.error for end in (*ends.servers, ends.workers[0], ends.workers[2])] == [None] * 4
    assert {end.summary.lost for end in ends.servers if end.summary} == {(1,)}
    first, last = ends.workers[0].reports[0], ends.workers[0].reports[-1]
    assert last.finished
    assert last.loss < first.loss
    assert 0 < last.test_samples < 101, "its part of the test set is not counted"


class Sleeper(Slowed):
    """Worker 1 is silent for long before its batch 2."""

    def batches(self, *, rank: int, **where: Any) -> Iterator[Any]:
        for number, batch in enumerate(super().batches(rank=rank, **where)):
            if (rank, number) == (1, 2):
                time.sleep(2.0)
            yield batch


def test_a_worker_that_was_silent_and_is_alive_is_told_that_it_is_dropped() -> None:
    ends = serve(Sleeper(), servers=1, mode="asynchronous", parallel={"timeouts__collective_s": 0.8})
    assert {end.summary.lost for end in ends.servers if end.summary} == {(1,)}
    assert ends.workers[0].error is None
    assert type(ends.workers[1].error) is CollectiveError
    assert "server 0 has dropped this worker: " in str(ends.workers[1].error)


class SilentAtMeeting(ClassificationTask):
    """Worker 1 comes to the meeting at the start of the first epoch when worker 0 has made a step."""

    def __init__(self) -> None:
        super().__init__(small_mlp, make_task().data, batch_size=16)
        self._asked = itertools.count()
        self._has_stepped = threading.Event()

    def num_batches(self, *, rank: int, **where: Any) -> int:
        if rank == 1 and next(self._asked) == 1:  # the first time is before all have found each other
            assert self._has_stepped.wait(30)
        return super().num_batches(rank=rank, **where)

    def batches(self, *, rank: int, **where: Any) -> Iterator[Any]:
        for number, batch in enumerate(super().batches(rank=rank, **where)):
            if (rank, number) == (0, 1):
                self._has_stepped.set()
            yield batch


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_a_server_does_not_drop_workers_that_another_server_holds_until_it_drops_a_silent_one(mode: str) -> None:
    limits = {"timeouts__collective_s": 2.0, "checkpoint__timeout_s": 2.0, "epochs": 1}
    ends = serve(SilentAtMeeting(), workers=3, servers=2, mode=mode, on_lost_worker="continue", parallel=limits)
    assert {end.summary.lost for end in ends.servers if end.summary} == {(1,)}
    assert [end.error for end in (ends.workers[0], ends.workers[2], *ends.servers)] == [None] * 4
    assert "has dropped this worker: " in str(ends.workers[1].error)


class Slow(ClassificationTask):
    """Worker 1 takes its time for each batch, or for the first one."""

    def __init__(self, *, first_s: float = 0.0, each_s: float = 0.0) -> None:
        super().__init__(small_mlp, make_task().data, batch_size=16)
        self._first_s, self._each_s = first_s, each_s

    def batches(self, *, rank: int, **where: Any) -> Iterator[Any]:
        for number, batch in enumerate(super().batches(rank=rank, **where)):
            if rank == 1:
                time.sleep(self._each_s if number else self._first_s)
            yield batch


def test_a_fast_worker_waits_at_a_meeting_for_all_the_steps_that_a_slow_one_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "GRACE_S", 0.1)
    limits = {"timeouts__collective_s": 0.9, "checkpoint__timeout_s": 0.9}
    task = Slow(first_s=0.4, each_s=0.4)  # each within the limit, all of them not
    serve(task, workers=2, mode="asynchronous", staleness=1000, parallel=limits).succeeded()


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_worker_that_loads_its_data_for_long_is_waited_for_by_servers_and_workers(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "GRACE_S", 0.1)
    limits = {"timeouts__collective_s": 0.5, "checkpoint__timeout_s": 9.0}
    serve(Slow(first_s=1.2), workers=2, mode=mode, staleness=0, parallel=limits).succeeded()


def test_with_fewer_workers_than_are_needed_the_run_ends_and_names_who_is_lost() -> None:
    ends = serve(Slowed(fails_at=2), servers=1, mode="asynchronous", min_workers=2)
    assert isinstance(ends.servers[0].error, PeerLost)
    assert isinstance(ends.workers[0].error, PeerLost)
    assert "worker 1: failed with OSError: no data" in str(ends.workers[0].error)


def test_checkpoints_of_all_servers_hold_the_same_gradients_and_a_resume_goes_on(tmp_path: Path) -> None:
    settings = {"epochs": 2, "checkpoint__dir": tmp_path, "checkpoint__every_steps": 3, "checkpoint__keep": 9}
    task = Slowed()
    ends = serve(task, workers=3, servers=2, mode="asynchronous", staleness=4, parallel=settings).succeeded()
    stores = [CheckpointStore.to_read(tmp_path / f"server-{index}") for index in (0, 1)]
    assert stores[0].rounds() == stores[1].rounds() == [3, 6, 9, 10]
    for step in stores[0].rounds():
        assert len({store.load(step).meta["updates"] for store in stores}) == 1
    for path in (*tmp_path.glob("*/round-000009.*"), *tmp_path.glob("*/round-000010.*")):
        path.unlink()
    again = serve(Slowed(), workers=3, servers=2, mode="asynchronous", staleness=4, parallel=settings).succeeded()
    assert again.workers[0].reports[-1].step == ends.workers[0].reports[-1].step
    assert [end.summary.updates for end in again.servers if end.summary] == [
        end.summary.updates for end in ends.servers if end.summary
    ]


def test_models_with_buffers_are_evaluated_with_the_same_ones() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    ends = serve(make_task(model), workers=2, servers=1, mode="asynchronous", parallel={"epochs": 2}).succeeded()
    states = [dict(end.worker.model.named_buffers()) for end in ends.workers if end.worker]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

"""Synchronous runs over DDS: the bits of one process, also after a resume; what is sent; what ends a run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import make_task, single_process, succeeded, train, vector
from server_scene import Ends, serve
from torch import Tensor, nn

from gradbus.actors.parameter_server.service import Service
from gradbus.actors.parameter_server.state import ServerState, newest_version, restore_model
from gradbus.models import ClassificationTask
from gradbus.runtime.errors import CheckpointError, ConfigError, PeerLost, TrainingDiverged


def parameters(ends: Ends) -> list[Tensor]:
    return [end.parameters for end in ends.succeeded().workers]


@pytest.mark.parametrize(
    ("workers", "servers", "settings"),
    [(2, 1, {}), (3, 2, {}), (4, 2, {"cut_bytes": 4096})],
    ids=["2 workers", "3 workers, 2 servers", "4 workers, 2 servers, cut tensors"],
)
def test_a_run_has_the_bits_of_one_process(workers: int, servers: int, settings: dict[str, Any]) -> None:
    optimizer = {"optimizer__nesterov": True, "optimizer__weight_decay": 1e-3}
    ends = serve(make_task(), workers=workers, servers=servers, parallel={"epochs": 2, **optimizer}, **settings)
    reference = vector(single_process(make_task(), workers, epochs=2, **optimizer))
    assert all(torch.equal(own, reference) for own in parameters(ends))
    assert all([report.finished for report in end.reports] == [True, True] for end in ends.workers)
    assert {end.summary.updates for end in ends.servers if end.summary} == {ends.workers[0].reports[-1].step}


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw", "schedule": "cosine"},
        {"optimizer": "adafactor"},  # it has other sums for matrices than for vectors
        {"schedule": "one-cycle", "accumulation_steps": 2},
    ],
)
def test_optimizers_and_schedules_do_what_they_do_without_a_server(settings: dict[str, Any]) -> None:
    plain = succeeded(train(make_task(), epochs=2, **settings))[0]
    ends = serve(make_task(), servers=2, parallel={"epochs": 2, **settings})
    assert all(torch.equal(own, plain.parameters) for own in parameters(ends))
    ours, theirs = ends.workers[0].reports[-1], plain.reports[-1]
    assert (ours.accuracy, ours.loss, ours.test_samples) == (theirs.accuracy, theirs.loss, theirs.test_samples)


def _normed() -> nn.Module:
    """It has buffers that training changes, and draws random numbers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10)
    )


class OwnOptimizer(ClassificationTask):
    """It makes an optimizer of two groups, and its schedule."""

    def __init__(self) -> None:
        super().__init__(_plain, make_task().data, batch_size=16)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        biases, rest = ([p for p in model.parameters() if (p.ndim < 2) == is_bias] for is_bias in (True, False))
        return torch.optim.SGD([{"params": biases, "lr": 0.1}, {"params": rest}], lr=0.05, momentum=0.9)

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def _plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


def test_the_tasks_own_optimizer_and_schedule_are_the_servers() -> None:
    plain = succeeded(train(OwnOptimizer(), epochs=2))[0]
    assert all(
        torch.equal(own, plain.parameters)
        for own in parameters(serve(OwnOptimizer(), servers=3, parallel={"epochs": 2}))
    )
    ends = serve(OwnOptimizer(), servers=2, cut_bytes=1024)
    assert {type(end.error) for end in ends.servers} == {ConfigError}
    assert "is cut: leave parameter_server.cut_bytes out" in str(ends.servers[0].error)


class Breaks(ClassificationTask):
    """Worker 1 fails when it wants its batch ``at``."""

    def __init__(self, at: int, model: Any = _normed) -> None:
        super().__init__(model, make_task().data, batch_size=16)
        self._left = at

    def batches(self, *, rank: int, **where: Any) -> Iterator[Any]:
        for batch in super().batches(rank=rank, **where):
            if rank == 1:
                self._left -= 1
                if self._left < 0:
                    raise OSError("the disk with the data is gone")
            yield batch


def _dry() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


@pytest.mark.parametrize("every_steps", [0, 2])
def test_a_run_that_is_started_again_has_the_bits_of_one_that_never_stopped(every_steps: int, tmp_path: Path) -> None:
    parallel = {"epochs": 3, "schedule": "cosine", "optimizer": "adamw", "checkpoint__every_steps": every_steps}
    whole = serve(Breaks(1000, _dry), servers=2, parallel=parallel)
    kept = {**parallel, "checkpoint__dir": tmp_path, "checkpoint__keep": 2}
    broken = serve(Breaks(12, _dry), servers=2, parallel=kept)
    assert isinstance(broken.workers[1].error, OSError)
    for end in (broken.workers[0], *broken.servers):
        assert isinstance(end.error, PeerLost)
        assert "worker 1" in str(end.error)
        assert "the disk with the data is gone" in str(end.error)
    versions = [sorted(path.name for path in (tmp_path / f"server-{s}").glob("round-*.json")) for s in (0, 1)]
    assert versions[0][-2:] == versions[1][-2:] != []
    assert all(len(names) <= 3 for names in versions), "one more until its workers have asked again"
    resumed = serve(Breaks(1000, _dry), servers=2, parallel=kept)
    for own, reference in zip(parameters(resumed), parameters(whole), strict=True):
        assert torch.equal(own, reference)
    ours, theirs = resumed.workers[0].reports[-1], whole.workers[0].reports[-1]
    assert (ours.step, ours.loss, ours.accuracy) == (theirs.step, theirs.loss, theirs.accuracy)
    assert resumed.workers[0].reports[0].epoch == 1
    assert len(list((tmp_path / "server-1").glob("round-*.json"))) == 2


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    class Ends(ClassificationTask):
        def __init__(self) -> None:
            super().__init__(_normed, make_task().data, batch_size=16)

    def run(**more: Any) -> Tensor:
        torch.manual_seed(3)
        return parameters(serve(Ends(), workers=1, parallel={"epochs": 2, **more}))[0]

    whole = run()
    run(checkpoint__dir=tmp_path, max_steps=16)
    assert torch.equal(run(checkpoint__dir=tmp_path), whole)


def test_servers_that_read_their_checkpoints_for_long_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"checkpoint__dir": tmp_path, "timeouts__join_s": 1.0}
    serve(make_task(), workers=1, parallel={"epochs": 1, **settings}).succeeded()
    load = ServerState.load

    def slow(self: ServerState, step: int) -> Any:
        time.sleep(1.5)  # longer than all may take to come
        return load(self, step)

    monkeypatch.setattr(ServerState, "load", slow)
    resumed = serve(make_task(), workers=1, parallel={"epochs": 2, **settings}).succeeded()
    assert [report.epoch for report in resumed.workers[0].reports] == [1]


def test_the_first_request_of_a_worker_may_come_as_late_as_all_may_join_and_later_ones_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits_s: dict[int, list[float]] = {0: [], 1: []}
    next_request = Service._next_request  # noqa: SLF001 - how long it would wait, no run shows in two seconds

    async def note_limit(self: Service, rank: int, limit_s: float) -> Any:
        limits_s[rank].append(limit_s)
        return await next_request(self, rank, limit_s)

    monkeypatch.setattr(Service, "_next_request", note_limit)
    timeouts = {"timeouts__join_s": 50.0, "timeouts__collective_s": 20.0, "checkpoint__timeout_s": 30.0}
    serve(make_task(), parallel={"max_steps": 2, **timeouts}).succeeded()
    for first, *later in limits_s.values():
        assert first == 50.0
        assert {20.0} <= set(later) <= {20.0, 30.0}


def test_a_version_that_one_server_lacks_is_not_gone_on_from(tmp_path: Path) -> None:
    settings = {"epochs": 2, "checkpoint__dir": tmp_path, "checkpoint__every_steps": 2}
    whole = parameters(serve(make_task(), servers=2, parallel=settings))
    newest = sorted((tmp_path / "server-1").glob("round-*.safetensors"))
    newest[-1].write_bytes(b"damaged")
    (tmp_path / "server-0" / newest[-2].name).unlink()
    again = serve(make_task(), servers=2, parallel=settings)
    assert all(torch.equal(own, whole[0]) for own in parameters(again))
    assert again.workers[0].reports[-1].step == 14
    for path in tmp_path.glob("server-1/round-*.safetensors"):
        path.write_bytes(b"damaged")
    broken = serve(make_task(), servers=2, parallel=settings)
    assert all(isinstance(end.error, CheckpointError) for end in (*broken.servers, *broken.workers))
    assert "server 1" in str(broken.workers[0].error)


class Frozen(ClassificationTask):
    """A model with a layer that is not trained, and that each process draws for itself."""

    def __init__(self) -> None:
        super().__init__(_plain, make_task().data, batch_size=16)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        layer: Any = list(model.children())[1]
        layer.weight = nn.Parameter(torch.rand_like(layer.weight) - 0.5, requires_grad=False)
        return model


def test_parameters_that_are_not_trained_are_those_of_worker_0_also_after_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint__dir": tmp_path}
    first = parameters(serve(Frozen(), servers=2, parallel={**settings, "epochs": 1}))
    assert torch.equal(*first)
    again = serve(Frozen(), servers=2, parallel={**settings, "epochs": 2}).succeeded()
    frozen = [end.worker.model.get_parameter("1.weight") for end in again.workers if end.worker]
    assert torch.equal(frozen[0], frozen[1])
    assert torch.equal(frozen[0].reshape(-1), first[0][: frozen[0].numel()])
    model = Frozen().build_model()
    restore_model(model, newest_version(tmp_path))
    assert torch.equal(vector(model), again.workers[0].parameters)


class Poisoned(ClassificationTask):
    """The loss of worker 1 is NaN in these steps of an epoch."""

    def __init__(self, *steps: int) -> None:
        super().__init__(_plain, make_task().data, batch_size=16)
        self._steps = steps
        self._number: dict[int, int] = {}

    def batches(self, *, rank: int, **where: Any) -> Iterator[Any]:
        for number, batch in enumerate(super().batches(rank=rank, **where)):
            yield rank == 1 and number in self._steps, batch

    def loss(self, model: nn.Module, batch: Any) -> Any:
        is_poisoned, inner = batch
        loss = super().loss(model, inner)
        return loss * math.nan if is_poisoned else loss


def test_a_gradient_that_is_not_finite_is_left_out_and_counted() -> None:
    ends = serve(Poisoned(1, 3), servers=2).succeeded()
    report = ends.workers[0].reports[-1]
    assert (report.train_metrics["refused_gradients"], report.skipped_steps) == (2, 2)
    assert [end.summary.refused for end in ends.servers if end.summary] == [2, 2]
    assert math.isfinite(report.loss)
    assert torch.equal(*parameters(ends))


def test_a_worker_that_has_none_but_such_gradients_ends_the_run() -> None:
    ends = serve(Poisoned(*range(20)), parallel={"max_nonfinite_steps": 3})
    assert isinstance(ends.workers[1].error, TrainingDiverged)
    assert "3 gradients of worker 1 in a row had NaN" in str(ends.workers[1].error)
    assert "worker 1" in str(ends.servers[0].error)


def test_the_run_goes_on_with_the_workers_that_are_left_where_it_is_told_to() -> None:
    ends = serve(
        Breaks(3, _dry), workers=3, servers=2, on_lost_worker="continue", min_workers=2, parallel={"epochs": 2}
    )
    assert isinstance(ends.workers[1].error, OSError)
    assert [end.error for end in (*ends.servers, ends.workers[0], ends.workers[2])] == [None] * 4
    assert torch.equal(ends.workers[0].parameters, ends.workers[2].parameters)
    assert {end.summary.lost for end in ends.servers if end.summary} == {(1,)}


class Watcher:
    """A callback of one worker that wants the end after some step."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.rates: list[float] = []

    def on_step(self, report: Any) -> bool:
        self.rates.append(report.lr)
        return bool(report.step == self._at)


def test_a_callback_of_one_worker_ends_the_run_of_all_at_the_same_step() -> None:
    watcher = Watcher(3)
    ends = serve(make_task(), servers=2, parallel={"schedule": "cosine"}, callbacks=[(), (watcher,)]).succeeded()
    assert {end.reports[-1].step for end in ends.workers} == {4}
    assert not ends.workers[0].reports[-1].finished
    assert watcher.rates == sorted(watcher.rates, reverse=True)
    assert len(set(watcher.rates)) > 1


class Halts(OwnOptimizer):
    """From its third step on the learning rate is 0."""

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: float(steps < 2))


def test_a_learning_rate_of_zero_is_reported_as_such() -> None:
    watcher = Watcher(3)
    serve(Halts(), parallel={"max_steps": 4}, callbacks=[(watcher,), ()]).succeeded()
    assert watcher.rates == [0.1, 0.0, 0.0, 0.0]


def test_one_server_gets_a_gradient_of_each_worker_a_step_and_more_servers_share_it() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 16, bias=False), nn.ReLU(), nn.Linear(16, 10, bias=False))

    gradient = 4 * (784 * 16 + 16 * 10)
    for workers, servers in ((2, 1), (3, 1), (3, 2)):
        few, many = (
            [
                end.summary.bytes_in
                for end in serve(
                    make_task(model),
                    workers=workers,
                    servers=servers,
                    cut_bytes=512,
                    parallel={"max_steps": steps, "eval_every_epochs": 0},
                )
                .succeeded()
                .servers
                if end.summary
            ]
            for steps in (2, 4)
        )
        for before, after in zip(few, many, strict=True):
            a_step = (after - before) / 2
            assert a_step == pytest.approx(workers * gradient / servers, rel=0.01)

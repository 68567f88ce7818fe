"""Evaluation by clients over real DDS: what the controller reports is what each client finds, whoever dies or hangs."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dds_domains import new_domain
from identities import Identities
from patience import eventually
from structlog.testing import capture_logs
from torch import nn

import gradbus
from gradbus.actors import Client, Controller
from gradbus.actors.federated.client.local_evaluation import DECLINED, HOSTED, NO_DATA, NO_METHOD, NO_MODEL, NOT_SHARED
from gradbus.actors.federated.controller.combinations import check_combination
from gradbus.actors.federated.controller.evaluation import LATE, LOST, CrossSite
from gradbus.actors.virtual.client_trainer import PoolSettings
from gradbus.actors.virtual.host import ClientHost
from gradbus.actors.virtual.local_pool import LocalPool
from gradbus.models import NoopTask
from gradbus.models.task import EvalResult, TrainResult
from gradbus.runtime.errors import ConfigError, TrainingFailed
from gradbus.runtime.security import Security
from gradbus.runtime.tasks import single_error
from gradbus.runtime.transport.channels import ToController
from gradbus.runtime.wire.control import EvaluationResult
from gradbus.runtime.wire.messages import Control, Identity

DIM = 20_000

_jobs = itertools.count()


def local_loss(vector: torch.Tensor, client_id: int) -> float:
    """Of a model on the data of a client."""
    return float((vector[:100] - 0.1 * client_id).square().mean())


class Measured(NoopTask):
    """Clients move the model, each in its own way, and each finds another loss of it. ``hold(client_id)`` is called as
    an evaluation begins, on its thread."""

    def __init__(self, hold: Callable[[int], None] = lambda client_id: None) -> None:
        super().__init__(DIM, delta="seeded", scale=0.1)
        self._hold = hold

    def evaluate(self, model: nn.Module) -> EvalResult | None:
        return EvalResult(None, float(next(model.parameters()).detach()[:100].square().mean()), 1)

    def evaluate_local(self, model: nn.Module, *, client_id: int) -> EvalResult:
        self._hold(client_id)
        loss = local_loss(next(model.parameters()).detach(), client_id)
        return EvalResult(None, loss, 10 * (client_id + 1), {"rmse": loss**0.5})


class WithoutMethod(NoopTask):
    """A task of a user who knows of no evaluation."""

    def __init__(self) -> None:
        super().__init__(DIM, delta="seeded")


class Job:
    """Actors of one job, each with a bus of its own, and the weights after each round."""

    def __init__(
        self,
        tasks: Sequence[Any],
        *,
        share: Sequence[int] = (),
        decline: Sequence[int] = (),
        known: Identities | None = None,
        place: dict[str, Any] | None = None,
        controller: Any = None,
        **rules: Any,
    ) -> None:
        """``share``: clients that show their models. ``decline``: that do not evaluate. ``known``: each process has a
        key of its own."""
        self.tasks = tasks
        self.share = share
        self.decline = decline
        self._known = known
        self._task = controller or Measured()
        self.place: dict[str, Any] = {
            "job": f"evaluation-{os.getpid()}-{next(_jobs)}",
            "domain": new_domain(),
            **(place or {}),
        }
        clients = {"num": len(tasks), "dead_after_s": 30.0, "heartbeat_s": 0.2, **rules.pop("clients", {})}
        self.config = gradbus.FederatedConfig(**{"rounds": 2, "eval_every": 0, "clients": clients, **rules})
        self.weights: list[torch.Tensor] = []
        self.controller: Controller
        self.running: list[asyncio.Task[None]] = []

    def bus(self, name: str) -> AbstractAsyncContextManager[gradbus.Bus]:
        """A bus for the process with this name."""
        if self._known is None:
            return gradbus.connect(**self.place)
        return gradbus.connect(**self.place, security=Security(**self._known.security(name)))

    async def client(self, client_id: int) -> None:
        async with self.bus(f"robot-{client_id}") as bus:
            config = gradbus.ClientConfig(share_model=client_id in self.share, evaluates=client_id not in self.decline)
            await Client(bus, self.tasks[client_id], client_id=client_id, config=config).run()

    async def serve(self, at_end: Callable[[], object] = lambda: None) -> list[gradbus.RoundReport]:
        """``at_end`` is called when the controller is done, and clients may not be."""
        async with asyncio.timeout(60), self.bus("server") as bus, asyncio.TaskGroup() as group:
            self.controller = Controller(bus, self._task, self.config)
            self.running = [group.create_task(self.client(number)) for number in range(len(self.tasks))]
            reports = []
            async for report in self.controller.rounds():
                reports.append(report)
                self.weights.append(self.controller.weights.clone())
            at_end()
            return reports

    def run(self) -> list[gradbus.RoundReport]:
        return asyncio.run(self.serve())

    @property
    def cross_site(self) -> CrossSite:
        assert self.controller.progress.cross_site is not None
        return self.controller.progress.cross_site


class Diverged(Measured):
    """Finds numbers of the second model that are none."""

    def evaluate(self, model: nn.Module) -> Any:
        self.times = getattr(self, "times", 0) + 1
        loss = math.nan if self.times == 2 else 0.25
        return SimpleNamespace(loss=loss, accuracy=0.5, metrics={"f1": 2 * loss, "auc": 0.5})


def test_an_evaluation_that_is_not_finite_is_a_warning_that_names_round_and_metrics() -> None:
    with capture_logs() as lines:
        reports = Job([Measured()], controller=Diverged(), eval_every=1, rounds=3).run()
    assert [report.eval_loss == report.eval_loss for report in reports] == [True, False, True]
    (told,) = [line for line in lines if line["event"] == "evaluation is not finite"]
    assert (told["log_level"], told["round"], str(told["metrics"])) == ("warning", 2, "{'eval_loss': nan, 'f1': nan}")
    assert "may have diverged" in told["hint"]


class Scalars(Measured):
    """Gives what NumPy and torch compute, and no metrics."""

    def evaluate(self, model: nn.Module) -> Any:
        return SimpleNamespace(loss=torch.tensor(0.25), accuracy=np.float32(0.5), metrics=None)


def test_a_controller_whose_evaluation_gives_scalars_of_numpy_and_torch_keeps_them_as_numbers(tmp_path: Path) -> None:
    reports = Job([Measured()], controller=Scalars(), eval_every=1, checkpoint={"dir": tmp_path}).run()
    assert json.loads(json.dumps([report.to_json() for report in reports]))[-1]["eval_loss"] == 0.25
    assert [(report.accuracy, dict(report.metrics)) for report in reports] == [(0.5, {})] * 2


def test_a_controller_names_its_evaluation_if_that_gives_no_numbers() -> None:
    class Texts(Measured):
        def evaluate(self, model: nn.Module) -> Any:
            return SimpleNamespace(loss="low", accuracy=None)

    with pytest.raises(BaseExceptionGroup) as errors:
        Job([Measured()], controller=Texts(), eval_every=1).run()
    assert "evaluate has returned SimpleNamespace that cannot be read" in str(single_error(errors.value))


def test_the_report_has_what_each_client_finds_of_the_new_model() -> None:
    job = Job([Measured()] * 3, evaluation={"every": 2}, rounds=3)
    reports = job.run()
    assert [report.by_clients.asked for report in reports] == [0, 3, 3], "every second round, and the last one"
    for report, weights in zip(reports[1:], job.weights[1:], strict=True):
        losses = [local_loss(weights, client_id) for client_id in range(3)]
        found = report.by_clients
        assert found.metrics["loss"].mean == pytest.approx(np.average(losses, weights=[10, 20, 30]), rel=1e-6)
        assert found.metrics["loss"].max == pytest.approx(max(losses), rel=1e-6)
        assert found.metrics["rmse"].worst[0] == (int(np.argmax(losses)), pytest.approx(max(losses) ** 0.5, rel=1e-6))
        assert (found.answered, found.num_samples, dict(found.missing)) == (3, 60, {})


def test_those_who_evaluate_are_drawn_by_the_seed_also_where_others_train() -> None:
    def asked(seed: int) -> list[tuple[int, ...]]:
        job = Job(
            [Measured()] * 5, evaluation={"every": 1, "count": 2}, selection={"name": "uniform", "count": 2}, seed=seed
        )
        reports = job.run()
        assert all(report.by_clients.answered == 2 for report in reports)
        return [tuple(sorted(client for client, _ in r.by_clients.metrics["loss"].worst)) for r in reports]

    first, other = asked(1), asked(2)
    assert first == asked(1)
    assert len({*first, *other}) > 1


def test_clients_that_die_or_hang_end_no_run_and_the_report_says_of_how_many_it_is() -> None:
    gate = threading.Event()
    job: Job

    def hang(client_id: int) -> None:
        assert gate.wait(30.0)

    def die(client_id: int) -> None:
        loop.call_soon_threadsafe(job.running[1].cancel)
        threading.Event().wait(0.2)  # an evaluation that is cancelled ends before its client leaves

    async def main() -> list[gradbus.RoundReport]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        return await job.serve(at_end=gate.set)

    loop: asyncio.AbstractEventLoop
    tasks = [Measured(), Measured(die), Measured(hang), WithoutMethod()]
    job = Job(tasks, evaluation={"every": 1, "timeout_s": 1.5}, rounds=1)
    (report,) = asyncio.run(main())
    found = report.by_clients
    assert (found.asked, found.answered) == (4, 1)
    assert dict(found.missing) == {LOST: 1, LATE: 1, NO_METHOD: 1}
    assert 1.4 < found.seconds < 10.0
    assert found.metrics["loss"].mean == pytest.approx(local_loss(job.weights[0], 0), rel=1e-6)


def test_an_evaluation_that_is_of_no_more_use_gives_way_to_the_next_round() -> None:
    begun: list[int] = []

    class Endless(Measured):
        """Its evaluations end only where they are stopped, which their forward passes tell."""

        def evaluate_local(self, model: nn.Module, *, client_id: int) -> EvalResult:
            begun.append(client_id)
            while True:
                model(torch.zeros(1))

        def build_model(self) -> Any:
            model = super().build_model()
            model.forward = lambda x: x
            return model

    job = Job([Measured(), Endless()], evaluation={"every": 1, "timeout_s": 0.5}, rounds=2, clients={"min": 2})
    reports = job.run()
    assert [report.updates for report in reports] == [2, 2], "it has trained in the second round"
    assert [report.by_clients.answered for report in reports] == [1, 1]
    assert begun == [1, 1]


@pytest.mark.parametrize("metric", ["client.loss", "client.rmse.max"])
def test_a_run_ends_early_by_what_clients_find(metric: str) -> None:
    job = Job(
        [Measured()] * 2,
        evaluation={"every": 1},
        rounds=9,
        early_stop={"patience": 1, "metric": metric, "min_delta": 10.0},
    )
    assert len(job.run()) == 2
    assert job.controller.progress.ended_early.startswith(f"{metric} is no better than in round 1")


class Finders(Measured):
    """Of four clients some find no rmse, and some fail to evaluate."""

    def __init__(self, find: Sequence[int], fail: Sequence[int] = ()) -> None:
        super().__init__()
        self._find, self._fail = find, fail

    def evaluate_local(self, model: nn.Module, *, client_id: int) -> EvalResult:
        if client_id in self._fail:
            raise ArithmeticError("no data today")
        found = super().evaluate_local(model, client_id=client_id)
        return found if client_id in self._find else dataclasses.replace(found, metrics={"f1": 0.5})

    def train(self, model: nn.Module, **arguments: Any) -> TrainResult:
        raise ArithmeticError("a client trains")


def first_error(task: Finders, **rules: Any) -> str:
    """How a run ends, in which nobody gets as far as the end of its training."""
    config = gradbus.FederatedConfig(
        **{
            "rounds": 1,
            "eval_every": 0,
            "evaluation": {"every": 1},
            "clients": {"dead_after_s": 30.0},
            "round": {"max_attempts": 1},
            **rules,
        }
    )
    options = gradbus.SimulationOptions(domain=new_domain(), processes=1)
    with pytest.raises((ConfigError, TrainingFailed)) as ended:
        gradbus.simulate(task, 4, config=config, options=options)
    return str(ended.value)


def test_a_metric_that_no_client_finds_of_the_initial_model_is_refused_before_they_train() -> None:
    told = first_error(Finders([0, 1, 2, 3]), early_stop={"patience": 1, "metric": "client.loss.medain"})
    assert "federated.early_stop.metric: none of the 4 clients that have evaluated the model" in told
    assert "has found a finite 'client.loss.medain'; they have found " in told
    assert told.endswith(". Did you mean client.loss?")


@pytest.mark.parametrize(
    "task", [Finders([3]), Finders([], fail=[0, 1, 2])], ids=["one of them finds it", "most have failed to evaluate"]
)
def test_no_few_clients_refuse_a_metric(task: Finders) -> None:
    assert "a client trains" in first_error(task, early_stop={"patience": 1, "metric": "client.rmse.max"})


@pytest.mark.parametrize("finder", [0, 3])
def test_the_one_client_that_is_drawn_to_evaluate_refuses_no_metric_that_another_finds(finder: int) -> None:
    task, stop = Finders([finder]), {"patience": 1, "metric": "client.rmse"}
    assert "a client trains" in first_error(task, early_stop=stop, evaluation={"every": 1, "count": 1})


def test_one_answer_refuses_no_metric_unless_a_job_has_one_client_alone() -> None:
    def job(num: int) -> Job:
        return Job(
            [Measured()],
            rounds=1,
            evaluation={"every": 1, "least_answered": 0.0},
            clients={"num": num, "start_grace_s": 0.1},
            early_stop={"patience": 1, "metric": "client.auc"},
        )

    with capture_logs() as logs:
        assert len(job(2).run()) == 1
    (line,) = [one for one in logs if one["event"] == "metric not found by clients"]
    assert (line["asked"], line["answered"], line["found"]) == (1, 1, ["client.loss", "client.rmse"])
    with pytest.raises(BaseExceptionGroup) as errors:
        job(1).run()
    assert "none of the 1 clients" in str(single_error(errors.value))


def test_a_run_that_goes_on_has_its_last_model_evaluated_and_its_best_one_kept(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"evaluation": {"every": 1}, "checkpoint": {"dir": tmp_path, "keep_best": "client.loss"}}
    first = Job([Measured()] * 2, rounds=2, **rules)
    before = first.run()
    meta = {path: path.read_bytes() for path in (tmp_path / "best").iterdir()}
    again = Job([Measured()] * 2, rounds=3, **rules)
    reports = again.run()
    resumed = again.controller.progress.reports[1]
    assert resumed.by_clients.metrics == before[1].by_clients.metrics, (
        "it was not in the checkpoint, and was made again"
    )
    assert len(reports) == 1
    losses = [report.by_clients.metrics["loss"].mean for report in (*before, *reports)]
    best = 1 + int(np.argmin(losses))
    assert [path.name for path in sorted((tmp_path / "best").glob("*.json"))] == [f"round-{best:06d}.json"]
    assert best == 1, "so the seeds say"
    assert {path: path.read_bytes() for path in (tmp_path / "best").iterdir()} == meta


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"early_stop": {"patience": 5, "metric": "client.rsme"}}, "Did you mean client.rmse?"),
        ({"eval_every": 2, "early_stop": {"patience": 5, "metric": "rsme"}}, "the evaluation has no 'rsme'"),
    ],
)
def test_a_metric_that_is_named_at_a_resume_and_is_not_there_is_refused_before_clients_train(
    rules: dict[str, Any], told: str, tmp_path: Path
) -> None:
    kept: dict[str, Any] = {"checkpoint": {"dir": tmp_path}, "evaluation": {"every": 1}}
    Job([Measured()] * 2, rounds=1, **kept).run()
    again = Job([Measured()] * 2, rounds=4, **kept, **rules)
    with pytest.raises(BaseExceptionGroup) as errors:
        again.run()
    assert told in str(single_error(errors.value))
    assert not again.weights


def test_a_metric_that_no_client_finds_of_a_trained_model_ends_no_resume_before_the_first_evaluation(
    tmp_path: Path,
) -> None:
    kept: dict[str, Any] = {"checkpoint": {"dir": tmp_path}}
    Job([Measured()] * 2, rounds=1, **kept).run()
    named: dict[str, Any] = {"evaluation": {"every": 4}, "early_stop": {"patience": 5, "metric": "client.rsme"}}
    reports = Job([Measured()] * 2, rounds=2, **kept, **named).run()
    assert [report.round_id for report in reports] == [2]


def test_a_metric_that_a_report_before_the_resume_has_is_not_looked_for_again(tmp_path: Path) -> None:
    begun: list[int] = []
    rules: dict[str, Any] = {"evaluation": {"every": 1}, "early_stop": {"patience": 9, "metric": "client.rmse"}}
    Job([Measured()], rounds=2, checkpoint={"dir": tmp_path}, **rules).run()
    Job([Measured(begun.append)], rounds=3, checkpoint={"dir": tmp_path}, **rules).run()
    assert begun == [0, 0], "the last model before the resume, and the one after it"


def test_virtual_clients_find_what_clients_with_a_process_of_their_own_find() -> None:
    rules: dict[str, Any] = {"evaluation": {"every": 1}, "rounds": 2}
    deployed = Job([Measured()] * 4, **rules).run()
    config = gradbus.FederatedConfig(eval_every=0, clients={"dead_after_s": 30.0}, **rules)
    options = gradbus.SimulationOptions(domain=new_domain(), processes=2)
    virtual = gradbus.simulate(Measured(), 4, config=config, options=options)
    assert [r.by_clients.metrics for r in virtual.rounds] == [r.by_clients.metrics for r in deployed]


def test_a_process_that_dies_while_it_evaluates_virtual_clients_is_replaced(tmp_path: Path) -> None:
    def die_once(client_id: int) -> None:
        if client_id == 2 and not (mark := tmp_path / "died").exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    config = gradbus.FederatedConfig(rounds=1, eval_every=0, evaluation={"every": 1}, clients={"dead_after_s": 30.0})
    options = gradbus.SimulationOptions(domain=new_domain(), processes=2)
    result = gradbus.simulate(Measured(die_once), 4, config=config, options=options)
    assert (result.rounds[0].by_clients.answered, result.replaced) == (4, 1)
    with pytest.raises(ConfigError, match="keep no model"):
        gradbus.simulate(Measured(), 4, config=config.replaced("evaluation.cross_site", True), options=options)


def test_virtual_clients_of_a_deployed_run_evaluate_models_of_others_and_show_none(tmp_path: Path) -> None:
    pool = LocalPool(Measured(), PoolSettings(state_dir=tmp_path), size=2)
    job = Job([Measured()], share=[0], evaluation={"cross_site": True}, rounds=1, clients={"num": 4, "min": 4})

    async def main() -> None:
        async with gradbus.connect(**job.place) as bus, asyncio.TaskGroup() as group:
            host = ClientHost(bus, Measured(), ids=range(1, 4), pool=pool, state_dir=tmp_path)
            group.create_task(host.run())
            await job.serve()

    try:
        asyncio.run(main())
    finally:
        asyncio.run(pool.close())
    rows = job.cross_site.rows
    assert [(row.model, row.failure) for row in rows] == [(None, ""), (0, ""), *((one, HOSTED) for one in (1, 2, 3))]
    assert [sorted(row.results) for row in rows[:2]] == [[0, 1, 2, 3]] * 2


# Cross-site


LOSSES = (
    "drop update p=0.3; drop model p=0.3; drop evaluation_request p=0.5; drop evaluation_result p=0.5; "
    "drop local_model_request p=0.5; drop grant p=0.3; drop receipt p=0.3; duplicate update p=0.3; seed=5"
)


@pytest.mark.parametrize(
    ("place", "has_keys"),
    [({}, False), ({"shared_memory": False}, True), ({"shared_memory": False, "faults": LOSSES}, False)],
    ids=["in memory", "over DDS, with keys of their own", "with losses"],
)
def test_each_local_model_is_evaluated_on_the_data_of_each_client(
    place: dict[str, Any], has_keys: bool, tmp_path: Path
) -> None:
    known = Identities(tmp_path, clients=3) if has_keys else None
    job = Job([Measured()] * 3, share=[0, 1, 2], evaluation={"cross_site": True}, place=place, known=known)
    job.run()
    command: dict[str, Any] = {"round_id": 2, "epochs": 1, "lr": 0.01, "seed": 0, "subset_size": 0}
    for row in job.cross_site.rows:
        vector = job.weights[-1]
        if row.model is not None:  # what its client has made of the model of round 1
            task, model = Measured(), Measured().build_model()
            with torch.no_grad():
                next(model.parameters()).copy_(job.weights[0])
            task.train(model, client_id=row.model, should_stop=lambda: False, **command)
            vector = next(model.parameters()).detach()
        losses = {client_id: metrics["loss"] for client_id, metrics in row.results.items()}
        assert losses == pytest.approx({one: local_loss(vector, one) for one in range(3)}, rel=1e-6)
        assert row.num_samples == {0: 10, 1: 20, 2: 30}
    assert [row.model for row in job.cross_site.rows] == [None, 0, 1, 2]


def test_a_client_that_has_not_agreed_shows_its_model_to_nobody() -> None:
    job = Job(
        [Measured()] * 3,
        share=[1, 2],
        evaluation={"cross_site": True},
        rounds=1,
        selection={"name": "round_robin", "count": 2},
    )
    (report,) = job.run()
    (idle,) = {0, 1, 2} - set(report.clients)
    why = {row.model: row.failure for row in job.cross_site.rows}
    assert why[0] == NOT_SHARED
    assert idle == 0 or why[idle] == NO_MODEL
    assert [row.model for row in job.cross_site.rows if not row.failure] == [None, *sorted({1, 2} - {idle})]


def test_a_client_that_dies_leaves_empty_cells_and_the_run_ends() -> None:
    seen = itertools.count()
    job: Job

    def die(client_id: int) -> None:
        if next(seen) == 1:  # in its second evaluation, of the model of client 0
            loop.call_soon_threadsafe(job.running[1].cancel)
            threading.Event().wait(0.5)

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        await job.serve()

    loop: asyncio.AbstractEventLoop
    job = Job([Measured(), Measured(die), Measured()], share=[0, 1, 2], evaluation={"cross_site": True}, rounds=1)
    asyncio.run(main())
    rows = job.cross_site.rows
    assert [sorted(row.results) for row in rows] == [[0, 1, 2], [0, 2], [], [0, 2]]
    assert rows[1].missing == {1: LOST}
    assert (rows[2].model, rows[2].failure) == (1, LOST)


def test_clients_that_hang_cost_two_deadlines_however_many_they_are() -> None:
    gate = threading.Event()
    tasks = [Measured(), *(Measured(lambda _: gate.wait(30.0)) for _ in range(3))]
    job = Job(tasks, share=range(4), evaluation={"cross_site": True, "timeout_s": 0.5}, rounds=1)
    began_s = time.monotonic()
    asyncio.run(job.serve(at_end=gate.set))
    assert time.monotonic() - began_s < 20.0
    rows = job.cross_site.rows
    assert [sorted(row.results) for row in rows] == [[0], [0], [], [], []]
    assert rows[0].missing == rows[1].missing == dict.fromkeys((1, 2, 3), LATE)
    assert [row.failure for row in rows[2:]] == [LATE] * 3


@pytest.mark.parametrize("exchange", ["all", "trained"])
def test_clients_that_have_not_trained_yet_evaluate_models_with_frozen_parts(exchange: str) -> None:
    class PartlyFrozen(Measured):
        def build_model(self) -> Any:
            model = super().build_model()
            model.frozen = nn.Parameter(torch.full((5,), 2.0), requires_grad=False)
            return model

        def train(self, model: Any, **command: Any) -> TrainResult:
            with torch.no_grad():
                model.vector += 0.1
            return TrainResult(1, 0.0)

    job = Job(
        [PartlyFrozen()] * 3,
        share=[0, 1, 2],
        evaluation={"every": 1, "cross_site": True},
        rounds=1,
        selection={"name": "uniform", "count": 1},
        exchange=exchange,
        controller=PartlyFrozen(),
    )
    (report,) = job.run()
    assert report.by_clients.answered == 3
    (trained,) = report.clients
    assert [row.model for row in job.cross_site.rows if not row.failure] == [None, trained]
    assert [sorted(row.results) for row in job.cross_site.rows if not row.failure] == [[0, 1, 2]] * 2


def test_no_more_local_models_are_moved_than_the_settings_say() -> None:
    job = Job([Measured()] * 3, share=[0, 1, 2], evaluation={"cross_site": True, "cross_site_models": 1}, rounds=1)
    job.run()
    assert [row.model for row in job.cross_site.rows] == [None, 0]


# Refusals and strangers


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"clients": {"kind": "sites"}}, "reaches no client"),
        ({"mode": "asynchronous"}, "without a pause"),
        ({"privacy": {"name": "local", "epsilon": 100.0}}, "metrics and models of single clients get no noise"),
        ({"privacy": {"name": "central", "epsilon": 100.0}}, "metrics and models of single clients get no noise"),
    ],
)
@pytest.mark.parametrize("what", [{"every": 1}, {"cross_site": True}])
def test_what_cannot_be_evaluated_is_refused_before_the_run(
    changed: dict[str, Any], text: str, what: dict[str, Any]
) -> None:
    config = gradbus.FederatedConfig(evaluation=what, **{"clients": {"num": 20, "min": 10}, **changed})
    with pytest.raises(ConfigError, match=text):
        check_combination(config)


def test_a_result_of_a_client_that_was_not_asked_or_of_another_run_counts_for_nothing() -> None:
    gate = threading.Event()
    job = Job([Measured(lambda _: gate.wait(20.0))], evaluation={"every": 1, "timeout_s": 15.0}, rounds=1)

    async def main() -> list[gradbus.RoundReport]:
        serving = asyncio.create_task(job.serve())
        async with gradbus.connect(**job.place) as bus:
            await eventually(lambda: hasattr(job, "controller") and job.controller.progress.phase == "evaluating")
            run_id, stranger = job.controller.run_id, Identity(7, 1)
            with bus.subscribe(ToController) as inbox:
                async for message in inbox:
                    if isinstance(message, Control) and message.sender == 0:
                        theirs = message.incarnation
                        break
            for run, sender in ((run_id, stranger), (run_id + 1, Identity(0, theirs))):
                await bus.publish(sender, EvaluationResult(run, 1, 5, {"loss": 99.0}, "", 0.0))
            gate.set()
            return await serving

    (report,) = asyncio.run(main())
    assert report.by_clients.answered == 1
    assert report.by_clients.metrics["loss"].mean < 1.0


def test_a_client_without_held_out_data_says_so() -> None:
    class Empty(Measured):
        def evaluate_local(self, model: nn.Module, *, client_id: int) -> Any:
            return None

    job = Job([Measured(), Empty()], evaluation={"every": 1}, rounds=1)
    (report,) = job.run()
    assert dict(report.by_clients.missing) == {NO_DATA: 1}


def test_a_client_whose_task_returns_what_is_no_result_says_so_and_goes_on() -> None:
    class Odd(Measured):
        def evaluate_local(self, model: nn.Module, *, client_id: int) -> Any:
            return {"loss": 0.5}

    job = Job([Measured(), Odd()], evaluation={"every": 1}, rounds=2, clients={"min": 2})
    for report in job.run():
        assert report.updates == 2
        ((why, count),) = report.by_clients.missing.items()
        assert (why.startswith("WrongResult: evaluate_local has returned dict"), count) == (True, 1)


def test_a_client_that_declines_is_not_evaluated_on_and_trains_all_the_same() -> None:
    asked: list[int] = []
    job = Job([Measured(asked.append)] * 2, decline=[1], evaluation={"every": 1}, rounds=2, clients={"min": 2})
    reports = job.run()
    assert [(report.updates, dict(report.by_clients.missing)) for report in reports] == [(2, {DECLINED: 1})] * 2
    assert asked == [0, 0]


def test_a_client_that_still_trains_for_a_round_that_is_over_evaluates_its_model() -> None:
    class Straggler(Measured):
        """Trains until it is asked to stop."""

        def train(self, model: Any, *, should_stop: Callable[[], bool], **given: Any) -> Any:
            ended = threading.Event()
            while not should_stop():
                ended.wait(0.01)
            return super().train(model, should_stop=should_stop, **given)

    job = Job(
        [Measured(), Measured(), Straggler()],
        evaluation={"every": 1, "timeout_s": 20.0},
        rounds=1,
        clients={"min": 2},
        round={"quorum": 0.5, "grace_s": 0.1},
    )
    (report,) = job.run()
    assert report.clients == (0, 1)
    assert (report.by_clients.answered, dict(report.by_clients.missing)) == (3, {})
    assert report.by_clients.seconds < 10.0


def test_an_evaluation_ends_at_its_deadline_also_where_no_round_follows() -> None:
    begun = threading.Event()
    ended: list[bool] = []

    class Endless(Measured):
        def evaluate_local(self, model: nn.Module, *, client_id: int) -> EvalResult:
            begun.set()
            try:
                while True:
                    model(torch.zeros(1))
            finally:
                ended.append(True)

        def build_model(self) -> Any:
            model = super().build_model()
            model.forward = lambda x: x
            return model

    job = Job(
        [Measured(), Endless()],
        share=[0],
        evaluation={"cross_site": True, "timeout_s": 1.0},
        rounds=1,
        clients={"min": 2},
    )
    job.run()
    assert [row.missing for row in job.cross_site.rows[:2]] == [{1: LATE}] * 2
    assert len(ended) == 2, "each evaluation ended at its own deadline, and the next one began"

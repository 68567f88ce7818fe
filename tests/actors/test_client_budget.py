"""A client within a budget: the update of what there was time for, a share of a core, and cores of its own."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from patience import PATIENT_S, run, until
from script_scene import build_model
from structlog.testing import capture_logs
from torch import nn

import gradbus
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.protocol import SAT_OUT
from gradbus.models import TrainResult
from gradbus.models.local_sgd import local_sgd
from gradbus.runtime.errors import ConfigError, TrainingFailed

SAMPLES, BATCH = 4000, 10
_jobs = itertools.count()


class Slow:
    """Trains as the ready tasks do, on batches that take ``batch_s`` each. ``seen``: how many there were."""

    def __init__(self, batch_s: float = 0.01) -> None:
        self.batch_s = batch_s
        self.seen = 0

    def build_model(self) -> nn.Module:
        return build_model()

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        self.seen = 0

        def loss_of(batch: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            self.work()
            return model(torch.randn(len(batch), 4, generator=torch.Generator().manual_seed(self.seen))).square().mean()

        return local_sgd(model, torch.arange(SAMPLES), loss_of, batch_size=BATCH, **arguments)

    def work(self) -> None:
        """Take the time of a batch."""
        threading.Event().wait(self.batch_s)

    def evaluate(self, model: Any) -> None:
        return None


def played(task: Any, budget: dict[str, Any], make: Callable[..., Any] = Client, **settings: Any) -> Any:
    """A run with one client: the reports, the client, and the warnings."""
    job, domain = f"budget-{os.getpid()}-{next(_jobs)}", new_domain()
    clients = {"num": 1, "dead_after_s": PATIENT_S}
    config = gradbus.FederatedConfig(**{"rounds": 1, "eval_every": 0, "clients": clients, **settings})
    made: list[Any] = []

    async def take_part() -> None:
        async with gradbus.connect(job, domain=domain) as bus:
            client = make(bus, task, client_id=0, config=gradbus.ClientConfig(budget=budget))
            made.append(client)
            await client.run()

    async def main() -> list[gradbus.RoundReport]:
        async with gradbus.connect(job, domain=domain) as bus, asyncio.TaskGroup() as group:
            group.create_task(take_part())
            return await gradbus.Controller(bus, Slow(), config).run()

    with capture_logs() as logs:
        reports = run(main())
    return reports, made[0], [one for one in logs if one["log_level"] in ("warning", "error")]


@pytest.mark.parametrize("rule", ["plain", {"name": "fedprox", "mu": 0.1}, {"name": "ditto"}], ids=str)
def test_when_the_time_of_a_round_is_over_the_update_of_the_batches_done_counts_with_their_samples(rule: Any) -> None:
    task = Slow()
    reports, _, warnings = played(task, {"seconds_per_round": 0.5}, training={"rule": rule})
    assert [report.clients for report in reports] == [(0,)]
    assert 0 < task.seen < SAMPLES // BATCH
    assert reports[0].num_samples == BATCH * task.seen
    assert reports[0].timeline[0].train_s >= 0.5
    assert not [one for one in warnings if "budget" in one["event"]]


class Returning(Slow):
    """Trains by a loop of its own, which returns what it has done when it is asked to stop."""

    def train(self, model: Any, *, should_stop: Callable[[], bool], **_: Any) -> TrainResult:
        self.seen = 0
        while not should_stop():
            self.work()
            self.seen += 1
        return TrainResult(self.seen, 0.5)


def test_a_function_that_returns_what_it_has_done_when_it_is_to_stop_has_its_update_sent() -> None:
    task = Returning()
    reports, _, warnings = played(task, {"seconds_per_round": 0.3})
    assert reports[0].num_samples == task.seen > 0
    assert warnings == []


class Raising(Slow):
    """Gives up what it has done when it is asked to stop."""

    def train(self, model: Any, *, should_stop: Callable[[], bool], **_: Any) -> TrainResult:
        while not should_stop():
            self.work()
        raise RuntimeError("stopped")


def test_a_function_that_gives_up_when_it_is_to_stop_sits_the_round_out_with_a_warning() -> None:
    reports, _, warnings = played(Raising(), {"seconds_per_round": 0.2})
    assert (reports[0].clients, dict(reports[0].dropped)) == ((), {SAT_OUT: 1})
    (warning,) = [one for one in warnings if one["event"] == "nothing was trained within the budget"]
    assert warning["error"] == "RuntimeError: stopped"


class Failing(Slow):
    """Has a mistake."""

    def train(self, model: Any, *, should_stop: Callable[[], bool], **_: Any) -> TrainResult:
        should_stop()
        raise KeyError("age")


def test_a_mistake_in_training_is_a_failure_also_within_a_budget() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        played(Failing(), {"seconds_per_round": 60.0}, round={"max_attempts": 1})
    assert caught.group_contains(TrainingFailed, match="KeyError: 'age'")


def test_a_round_that_counts_steps_is_sat_out_where_there_is_no_time_for_them() -> None:
    reports, _, warnings = played(Slow(), {"seconds_per_round": 0.2}, training={"steps": 300})
    assert (reports[0].clients, dict(reports[0].dropped)) == ((), {SAT_OUT: 1})
    (warning,) = [one for one in warnings if one["event"] == "too few steps within the budget"]
    assert warning["asked"] == 300 > warning["steps"] > 0


class Deaf(Slow):
    """Never asks whether to stop."""

    def train(self, model: Any, *, should_stop: Callable[[], bool], **arguments: Any) -> TrainResult:
        return super().train(model, should_stop=lambda: False, **arguments)


def test_a_function_that_never_asks_is_paced_by_its_optimizer_and_trains_to_its_end_with_a_warning() -> None:
    task = Deaf(batch_s=0.004)
    reports, _, warnings = played(task, {"seconds_per_round": 0.05})
    assert reports[0].num_samples == SAMPLES
    (warning,) = [one for one in warnings if one["event"] == "training took longer than its budget"]
    assert "should_stop()" in warning["remedy"]


class Busy(Slow):
    """Keeps a core busy while it trains, and notes where it runs. ``deaf``: it never asks whether to stop."""

    def __init__(self, *, deaf_for_s: float = 0.0) -> None:
        super().__init__()
        self.cores: set[int] = set()
        self.deaf_for_s = deaf_for_s

    def work(self) -> None:
        until_s = time.thread_time() + 0.005
        while time.thread_time() < until_s:
            pass
        self.cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        if self.deaf_for_s:
            until_s = time.monotonic() + self.deaf_for_s

            def should_stop() -> bool:
                return time.monotonic() >= until_s

            return super().train(model, **{**arguments, "should_stop": should_stop})
        return super().train(model, **arguments)


def test_a_training_takes_its_share_of_a_core() -> None:
    budget = {"core_share": 0.2, "seconds_per_round": 4.0}
    reports, client, warnings = played(Busy(), budget)
    used_s, train_s = client._budget.cpu_s(), reports[0].timeline[0].train_s  # noqa: SLF001 - of the training alone
    assert 4.0 <= train_s < 4.0 + PATIENT_S
    # A credit of half a second, building the model, and one batch more; less on a machine that is busy.
    assert 0.25 * 0.2 * train_s < used_s < 0.2 * (train_s + 0.5) + 0.5
    assert warnings == []


class PausedAndDeaf(Slow):
    """Has its client paused in the first attempt, and makes its steps all the same. ``took_s``: for these."""

    client: Client
    took_s = 0.0

    def train(self, model: Any, *, should_stop: Callable[[], bool], **_: Any) -> TrainResult:
        if not self.took_s:
            self.client.pause()
            until(should_stop)
            optimizer, began_s = torch.optim.SGD(model.parameters()), time.monotonic()
            for _ in range(20):
                until_s = time.thread_time() + 0.02
                while time.thread_time() < until_s:
                    pass
                optimizer.step()
            self.took_s = time.monotonic() - began_s
            self.client.resume()
        return TrainResult(1, 0.5)


def test_a_training_that_does_not_stop_when_its_client_is_paused_keeps_its_share() -> None:
    task = PausedAndDeaf()

    def make(*arguments: Any, **settings: Any) -> Client:
        task.client = Client(*arguments, **settings)
        return task.client

    played(task, {"core_share": 0.2}, make)
    assert task.took_s >= 20 * 0.02 / 0.2 - 0.5 - 0.1, "less the credit, and the last pause"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no sched_setaffinity")
def test_training_runs_on_its_cores_and_the_loop_where_it_was() -> None:
    before, core = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        task = Busy()
        _, _, warnings = played(task, {"cores": {core}, "seconds_per_round": 0.1})
    finally:
        torch.set_num_threads(threads)
    assert task.cores == {core}
    assert os.sched_getaffinity(0) == before
    assert warnings == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no sched_setaffinity")
def test_more_threads_of_torch_than_cores_are_warned_of() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        budget = {"cores": [max(os.sched_getaffinity(0))], "seconds_per_round": 0.1}
        _, _, warnings = played(Slow(), budget)
    finally:
        torch.set_num_threads(threads)
    assert {one["event"] for one in warnings} == {"more threads than cores"}
    assert "torch.set_num_threads(1)" in warnings[0]["remedy"]


def test_cores_that_there_are_not_end_the_client_before_it_joins() -> None:
    async def main() -> None:
        async with gradbus.connect(f"budget-{os.getpid()}-{next(_jobs)}", domain=new_domain()) as bus:
            config = gradbus.ClientConfig(budget={"cores": [4095]})
            await Client(bus, Slow(), client_id=0, config=config).run()

    with pytest.raises(ConfigError, match="this process may not run on"):
        run(main())


def test_a_script_is_held_to_its_time_and_its_share_and_has_no_cores() -> None:
    model = build_model()
    seen: list[int] = []

    def script(job: str, domain: int) -> None:
        config = gradbus.ClientConfig(budget={"seconds_per_round": 0.3, "core_share": 0.5})
        with gradbus.client(job, client_id=0, domain=domain, config=config) as fed:
            while fed.receive(model):
                batches = 0
                while not fed.should_stop:
                    threading.Event().wait(0.005)
                    batches += 1
                seen.append(batches)
                assert fed.send(model, samples=batches)

    async def main() -> list[gradbus.RoundReport]:
        job, domain = f"budget-{os.getpid()}-{next(_jobs)}", new_domain()
        config = gradbus.FederatedConfig(rounds=2, eval_every=0, clients={"num": 1, "dead_after_s": PATIENT_S})
        async with gradbus.connect(job, domain=domain) as bus, asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(script, job, domain))
            return await gradbus.Controller(bus, Slow(), config).run()

    reports = run(main())
    assert [report.num_samples for report in reports] == seen
    assert all(report.timeline[0].train_s >= 0.3 for report in reports)
    with pytest.raises(ConfigError, match=r"call os\.sched_setaffinity"):
        gradbus.client("job", name="site", config=gradbus.ClientConfig(budget={"cores": [0]}))


@pytest.mark.parametrize("wrong", [{"budget": {"core_share": 0.5}}, {"callbacks": ["x:Y"]}], ids=str)
def test_virtual_clients_have_neither_a_budget_nor_callbacks(wrong: dict[str, Any]) -> None:
    options = gradbus.SimulationOptions(domain=new_domain(), processes=1, client=gradbus.ClientConfig(**wrong))
    with pytest.raises(ConfigError, match=f"client.{next(iter(wrong))} is of a client that is a process"):
        gradbus.simulate(Slow(), 2, config=gradbus.FederatedConfig(rounds=1), options=options)

"""A controller inside a web service: a real HTTP client on one side, real DDS on the other."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from federation import DIM, Federation
from patience import PATIENT_S, soonest, until
from prometheus_client.parser import text_string_to_metric_families
from settings import nested

import gradbus
from gradbus.actors.federated.client import updates_out as update_sender
from gradbus.actors.federated.controller import uploads
from gradbus.experiments.examples.embed_aiohttp import FederatedService, make_app
from gradbus.models import NoopTask

_numbers = itertools.count()


@pytest.fixture
def job() -> str:
    return new_job()


def new_job() -> str:
    return f"embedded-{os.getpid()}-{next(_numbers)}-{random.randrange(1 << 30):x}"


class HeldTask(NoopTask):
    """Trains in the rounds of a set; in another one it waits until that is put there, or until it is called off."""

    def __init__(self, dim: int, rounds: Set[int]) -> None:
        super().__init__(dim, delta="seeded")
        self._rounds = rounds

    def train(self, model: Any, **arguments: Any) -> Any:
        while arguments["round_id"] not in self._rounds and not arguments["should_stop"]():
            time.sleep(0.005)
        return super().train(model, **arguments)


@dataclass(frozen=True, slots=True)
class Web:
    """What a browser sees of a service."""

    session: ClientSession
    runner: web.AppRunner
    address: str

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.address + path) as answer:
            return answer.status, await (answer.json() if "json" in answer.content_type else answer.text())

    async def job(self, name: str) -> dict[str, Any]:
        status, answer = await self.get("/status")
        assert status == 200
        found: dict[str, Any] = answer["jobs"][name]
        return found

    async def until(self, name: str, *phases: str) -> dict[str, Any]:
        """The job's status once it is in one of these phases."""
        while True:
            status = await self.job(name)
            if status["phase"] in phases:
                return status
            await asyncio.sleep(0.02)

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """Each sample by its name, its job and the values of its other labels."""
        status, text = await self.get("/metrics")
        assert status == 200
        return {
            (sample.name, sample.labels.pop("job"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@asynccontextmanager
async def serving(service: FederatedService) -> AsyncIterator[Web]:
    """The service on a free port, and a browser."""
    runner = web.AppRunner(make_app(service), shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with ClientSession() as session:
            yield Web(session, runner, f"http://{host}:{port}")
    finally:
        await runner.cleanup()


@asynccontextmanager
async def clients(job: str, domain: int, tasks: Sequence[Any]) -> AsyncIterator[None]:
    """Clients on this loop, each with a bus of its own; those that still run at the end are cancelled."""

    async def one(client_id: int, task: Any) -> None:
        async with gradbus.connect(job, domain=domain) as bus:
            await gradbus.Client(bus, task, client_id=client_id).run()

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(client_id, task)) for client_id, task in enumerate(tasks)]
        yield
        for task in running:
            task.cancel()


def rules(rounds: int, num_clients: int, **more: Any) -> gradbus.FederatedConfig:
    settings = {"eval_every": 0, "clients__dead_after_s": PATIENT_S, **more}
    return gradbus.FederatedConfig(rounds=rounds, **nested({"clients__num": num_clients, **settings}))


def assert_no_thread_is_left(before: Set[threading.Thread]) -> None:
    """Each that was started since has a moment to end."""
    until(lambda: not [t for t in threading.enumerate() if "gradbus" in t.name and t not in before])


def test_status_answers_at_once_and_shows_progress_while_rounds_run(job: str, domain: int) -> None:
    async def scenario() -> tuple[list[float], list[dict[str, Any]]]:
        service = FederatedService()
        service.add_job(job, NoopTask(DIM), rules(6, 2), gradbus.connect(job, domain=domain))
        delays, seen, shown = [], [], set[int]()
        # No round ends before an answer has shown it: one that waited for the training would wait for itself.
        async with asyncio.timeout(30), serving(service) as web, clients(job, domain, [HeldTask(DIM, shown)] * 2):
            while not seen or seen[-1]["phase"] != "done":
                started_s = time.perf_counter()
                seen.append(await web.job(job))
                delays.append(time.perf_counter() - started_s)
                if seen[-1]["phase"] == "training":
                    shown.add(seen[-1]["round"])
                await asyncio.sleep(0.01)
        return delays, seen

    delays, seen = asyncio.run(scenario())
    assert statistics.median(delays) < 1.0  # the machine that runs the tests may be busy
    rounds = [status["round"] for status in seen]
    assert rounds == sorted(rounds)
    training = {s["round"]: (s["expected"], s["min"], s["clients"]) for s in seen if s["phase"] == "training"}
    assert training == {round_id: (2, 1, [0, 1]) for round_id in range(1, 7)}
    assert seen[-1]["last_report"]["round_id"] == seen[-1]["rounds"] == 6
    assert seen[-1]["error"] is None


def test_metrics_agree_with_the_reports(job: str, domain: int) -> None:
    async def scenario() -> tuple[FederatedService, dict[tuple[str, ...], float]]:
        service = FederatedService()
        service.add_job(job, NoopTask(5000), rules(3, 2), gradbus.connect(job, domain=domain))
        async with asyncio.timeout(30), serving(service) as web:
            await web.until(job, "waiting")
            assert (await web.metrics())["gradbus_controller_up", job] == 1
            async with clients(job, domain, [NoopTask(5000)] * 2):
                await web.until(job, "done")
            return service, await web.metrics()

    service, metrics = asyncio.run(scenario())
    reports = service.jobs[job].progress.reports
    assert metrics["gradbus_rounds_total", job] == len(reports) == 3
    assert metrics["gradbus_bytes_total", job, "up"] == sum(report.bytes_up for report in reports) > 0
    assert metrics["gradbus_bytes_total", job, "down"] == sum(report.bytes_down for report in reports) == 3 * 2 * 20_000
    for way in ("up", "down"):
        assert metrics["gradbus_bytes_shared_total", job, way] == metrics["gradbus_bytes_total", job, way]
    for phase in ("train", "encode", "wire", "aggregate", "checkpoint", "publish", "eval"):
        seconds = sum(getattr(report, f"{phase}_s") for report in reports)
        assert metrics["gradbus_phase_seconds_total", job, phase] == pytest.approx(seconds)
    assert metrics["gradbus_round_seconds_total", job] == pytest.approx(sum(report.seconds for report in reports))
    assert metrics["gradbus_train_loss", job] == reports[-1].loss
    assert ("gradbus_accuracy", job) not in metrics, "nothing was evaluated"
    assert metrics["gradbus_controller_up", job] == metrics["gradbus_controller_failed", job] == 0


def test_accuracy_and_drops_are_in_status_and_metrics() -> None:
    service = FederatedService()
    progress = service.add_job("job", NoopTask(1), rules(3, 1)).progress
    progress.reports = [
        gradbus.RoundReport(round_id=1, accuracy=0.5, eval_loss=1.5, dropped={"stale": 2}),
        gradbus.RoundReport(round_id=2, loss=float("nan"), dropped={"stale": 1, "not finite": 4}),
    ]

    async def scenario() -> tuple[dict[str, Any], str]:
        async with asyncio.timeout(30), serving(service) as web:
            return await web.job("job"), (await web.get("/metrics"))[1]

    service.jobs["job"].outcome = "done"  # only what is known of it is looked at
    status, text = asyncio.run(scenario())
    assert status["dropped"] == {"stale": 3, "not finite": 4}
    assert status["last_report"]["loss"] is None, "JSON has no NaN"
    for line in (
        'gradbus_updates_dropped_total{job="job",reason="not finite"} 4.0',
        'gradbus_accuracy{job="job"} 0.5',
        'gradbus_eval_loss{job="job"} 1.5',
    ):
        assert line in text.splitlines()


def test_two_jobs_of_one_process_end_as_each_does_alone(domain: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is offered or asked for again, because an answer is late, may come twice, and one of the two is dropped.
    monkeypatch.setattr(update_sender, "REPEAT_AFTER_S", 60.0)
    monkeypatch.setattr(uploads, "REPAIR_AFTER_S", 60.0)
    sizes = {"left": (1000, 2), "right": (2000, 1)}  # name: dim, clients

    async def scenario(*names: str) -> dict[str, list[gradbus.RoundReport]]:
        jobs = {name: f"{name}-{new_job()}" for name in names}
        service = FederatedService()
        async with asyncio.timeout(30), serving(service) as web, asyncio.TaskGroup() as group:
            for name, job in jobs.items():
                dim, number = sizes[name]
                service.add_job(job, NoopTask(dim), rules(3, number), gradbus.connect(job, domain=domain))
                group.create_task(take_part(job, [NoopTask(dim, delta="seeded")] * number, web))
        return {name: service.jobs[job].progress.reports for name, job in jobs.items()}

    async def take_part(job: str, tasks: Sequence[Any], web: Web) -> None:
        async with clients(job, domain, tasks):
            await web.until(job, "done")

    alone = asyncio.run(scenario("left")) | asyncio.run(scenario("right"))
    together = asyncio.run(scenario("left", "right"))
    for name, (dim, number) in sizes.items():
        assert [r.weights_crc32 for r in together[name]] == [r.weights_crc32 for r in alone[name]]
        assert [r.clients for r in together[name]] == [tuple(range(number))] * 3
        assert [r.bytes_down for r in together[name]] == [4 * dim * number] * 3
        assert [r.dropped for r in together[name]] == [{}] * 3
    assert len({report.weights_crc32 for reports in together.values() for report in reports}) == 6


def test_shutting_down_in_mid_round_is_quick_and_leaves_nothing(domain: int) -> None:
    switch_interval_s, before = sys.getswitchinterval(), set(threading.enumerate())

    async def scenario(job: str) -> tuple[float, str, set[str]]:
        service = FederatedService()
        service.add_job(job, NoopTask(DIM), rules(3, 1), gradbus.connect(job, domain=domain))
        async with asyncio.timeout(30), serving(service) as web, clients(job, domain, [HeldTask(DIM, set())]):
            await web.until(job, "training")
            started_s = time.perf_counter()
            await web.runner.cleanup()
            took_s = time.perf_counter() - started_s
        left = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        return took_s, service.jobs[job].outcome, left

    def takes_s() -> float:
        took_s, outcome, left = asyncio.run(scenario(new_job()))
        assert outcome == "stopped"
        assert left == set()
        assert_no_thread_is_left(before)
        assert sys.getswitchinterval() == switch_interval_s
        return took_s

    assert soonest(takes_s, 3.0) < 3.0


def test_a_controller_that_fails_is_told_of_and_the_service_and_its_other_jobs_go_on(job: str, domain: int) -> None:
    other = new_job()

    async def scenario() -> None:
        service = FederatedService()
        service.add_job(
            job,
            NoopTask(8),
            rules(1, 2, clients__min=2, clients__start_timeout_s=0.3),
            gradbus.connect(job, domain=domain),
        )
        async with asyncio.timeout(30), serving(service) as web:
            assert await web.get("/healthz") == (200, {"ok": True, "failed": {}})
            failed = await web.until(job, "failed")
            assert "BarrierTimeout" in failed["error"]
            assert "0 of 2 ready" in failed["error"]
            assert await web.get("/healthz") == (503, {"ok": False, "failed": {job: failed["error"]}})
            assert (await web.metrics())["gradbus_controller_failed", job] == 1

            service.add_job(other, NoopTask(8), rules(2, 1), gradbus.connect(other, domain=domain))
            async with clients(other, domain, [NoopTask(8)]):
                assert (await web.until(other, "done"))["last_report"]["round_id"] == 2

            service.add_job(job, NoopTask(8), rules(1, 1), gradbus.connect(job, domain=domain))
            async with clients(job, domain, [NoopTask(8)]):
                await web.until(job, "done")
            assert (await web.get("/healthz"))[0] == 200

    asyncio.run(scenario())


def test_a_controller_that_cannot_even_start_is_told_of(job: str, domain: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    service = FederatedService()
    service.add_job(
        job, NoopTask(8), rules(1, 1, checkpoint__dir=tmp_path / "file"), gradbus.connect(job, domain=domain)
    )
    name = "not a job's name"
    service.add_job(name, NoopTask(8), rules(1, 1), gradbus.connect(name, domain=domain))

    async def scenario() -> tuple[int, Any]:
        async with asyncio.timeout(30), serving(service) as web:
            for name in service.jobs:
                await web.until(name, "failed")
            return await web.get("/healthz")

    status, answer = asyncio.run(scenario())
    assert status == 503
    assert set(answer["failed"]) == {job, name}


def test_one_job_has_an_address_of_its_own_and_an_unknown_one_is_not_found(job: str, domain: int) -> None:
    service = FederatedService()
    service.add_job(job, NoopTask(8), rules(1, 1), gradbus.connect(job, domain=domain))

    async def scenario() -> None:
        async with asyncio.timeout(30), serving(service) as web:
            status, answer = await web.get(f"/status/{job}")
            assert (status, answer["rounds"]) == (200, 1)
            assert await web.get("/status/other") == (404, {"error": "no job 'other'", "jobs": [job]})

    asyncio.run(scenario())
    with pytest.raises(ValueError, match="is there already"):
        add_twice(FederatedService(), job)


def add_twice(service: FederatedService, job: str) -> None:
    for _ in range(2):
        service.add_job(job, NoopTask(8), rules(1, 1))


@pytest.mark.slow
def test_clients_in_processes_of_their_own_train_for_an_embedded_controller(job: str, domain: int) -> None:
    async def scenario(federation: Federation) -> dict[str, Any]:
        service = FederatedService()
        service.add_job(job, NoopTask(DIM), rules(4, 2), gradbus.connect(job, domain=domain))
        async with asyncio.timeout(60), serving(service) as web:
            nodes = [await asyncio.to_thread(federation.client, client_id) for client_id in (0, 1)]
            status = await web.until(job, "done", "failed")
            done = [await asyncio.to_thread(node.wait_for, "done") for node in nodes]
        assert [event["rounds"] for event in done] == [4, 4]
        return status

    with Federation(domain=domain, job=job, network={"lease_s": PATIENT_S}) as federation:
        status = asyncio.run(scenario(federation))
    assert (status["phase"], status["last_report"]["clients"]) == ("done", [0, 1])

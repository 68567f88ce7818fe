"""A client's own exception: on the controller's side at once, once with its traceback, and no escape codes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
from collections import Counter
from typing import Any

import pytest
from dds_domains import new_domain

import gradbus
from gradbus.actors.federated.controller import round_losses as failures
from gradbus.actors.federated.controller.round_losses import MAX_DISTINCT, MAX_TEXT, RoundLosses, TrainingFailureLog
from gradbus.actors.federated.controller.rounds import Round, RoundRules
from gradbus.actors.federated.protocol import PAUSED, TRAINING_FAILED
from gradbus.commands.run.console import LogFile
from gradbus.models import NoopTask
from gradbus.runtime.errors import GradbusError, RoundTimeout, TrainingFailed
from gradbus.runtime.wire.control import TrainingFailure


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.shown = threading.Semaphore(0)

    def error(self, event: str, **facts: Any) -> None:
        self.note("error", event, facts)

    def info(self, event: str, **facts: Any) -> None:
        self.note("info", event, facts)

    def note(self, level: str, event: str, facts: dict[str, Any]) -> None:
        if event.startswith("training failed"):
            self.lines.append({"event": event, "level": level, **facts})
            self.shown.release()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(failures, "log", log)
    return log


def test_each_distinct_error_is_shown_once_and_then_counted(log: Log) -> None:
    seen = TrainingFailureLog()
    for round_id, address in ((1, "0x7f00aa"), (2, "0x7f00bb"), (3, "0x7f00cc")):
        for client_id in (0, 1):
            seen.note(client_id, round_id, f"Traceback ...\nValueError: <Net object at {address}> is odd\n")
    seen.note(1, 4, "Traceback ...\nKeyError: 'x'")
    assert [("traceback" in line, line["times"]) for line in log.lines] == [
        (True, 1),
        (False, 2),
        (False, 3),
        (False, 4),
        (False, 5),
        (False, 6),
        (True, 1),
    ]
    again = "training failed again on a client"  # not worth a second warning
    assert [line["event"] == again for line in log.lines] == [False, False, True, True, True, True, False]
    assert log.lines[0]["error"] == "ValueError: <Net object at 0x7f00aa> is odd"
    assert log.lines[-1]["traceback"] == "Traceback ...\nKeyError: 'x'"


def test_a_client_that_makes_up_errors_fills_neither_memory_nor_screen(log: Log) -> None:
    seen = TrainingFailureLog()
    for number in range(500):
        seen.note(0, number, f"{'x' * 100_000}\nError: {number}")
    shown = [line for line in log.lines if "traceback" in line]
    assert len(shown) == MAX_DISTINCT
    assert all(len(line["traceback"]) <= MAX_TEXT for line in shown)
    assert log.lines[-1]["times"] == 500 - MAX_DISTINCT  # all others are counted together


def test_a_traceback_comes_to_the_terminal_without_its_escape_codes() -> None:
    lines: list[str] = []
    tracebacks: list[str] = []
    log = LogFile(io.StringIO(), lines.append, tracebacks.append)
    entry = {
        "event": "training failed on a client",
        "level": "error",
        "client": 1,
        "error": "E: \x1b[2J",
        "traceback": "Traceback:\n  line\nE: \x1b[2J\x07",
    }
    log.write(json.dumps(entry) + "\n")
    log.write('{"event": "client silent", "level": "warning", "client": 1}\n')
    assert lines == [
        "training failed on a client client=1 error=E: \N{REPLACEMENT CHARACTER}[2J",
        "client silent client=1",
    ]
    assert tracebacks == ["  Traceback:\n    line\n  E: \N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}"]


def test_the_controller_shows_it_at_once_and_the_round_goes_on(log: Log) -> None:
    class Wrong(NoopTask):
        def train(self, model: Any, **arguments: Any) -> Any:
            raise ZeroDivisionError("the user's own mistake")

    class Patient(NoopTask):
        """Works until the other one's error is shown: the end of the round is not what brings it."""

        def train(self, model: Any, **arguments: Any) -> Any:
            assert log.shown.acquire(timeout=20.0)
            return super().train(model, **arguments)

    async def client(job: str, domain: int, client_id: int) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, (Wrong if client_id else Patient)(100), client_id=client_id).run()

    async def main() -> list[gradbus.RoundReport]:
        job, domain = f"failing-{os.getpid()}", new_domain()
        config = gradbus.FederatedConfig(rounds=3, clients={"num": 2, "dead_after_s": 30.0}, eval_every=0)
        async with asyncio.timeout(30), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            for client_id in (0, 1):
                group.create_task(client(job, domain, client_id))
            return await gradbus.Controller(bus, NoopTask(100), config).run()

    reports = asyncio.run(main())
    assert [report.clients for report in reports] == [(0,)] * 3
    assert [report.dropped["training failed"] for report in reports] == [1, 1, 1]
    assert [(line["times"], line["level"]) for line in log.lines] == [(1, "error"), (2, "info"), (3, "info")]
    first = log.lines[0]
    assert "in train" in first["traceback"]
    assert "ZeroDivisionError: the user's own mistake, at " in first["traceback"].splitlines()[-1]
    assert first["error"].endswith(" in train")
    assert [line["client"] for line in log.lines] == [1, 1, 1]


def test_when_all_clients_fail_the_run_and_the_clients_end_with_the_error_of_their_code() -> None:
    class Wrong(NoopTask):
        def train(self, model: Any, **arguments: Any) -> Any:
            raise ZeroDivisionError("the user's own mistake")

    async def client(job: str, domain: int, client_id: int) -> BaseException | None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            with pytest.raises(TrainingFailed) as caught:
                await gradbus.Client(bus, Wrong(100), client_id=client_id).run()
        return caught.value

    async def main() -> tuple[TrainingFailed, list[BaseException | None]]:
        job, domain = f"all-fail-{os.getpid()}", new_domain()
        config = gradbus.FederatedConfig(
            rounds=3, clients={"num": 2, "dead_after_s": 30.0}, eval_every=0, round={"max_attempts": 2}
        )
        async with asyncio.timeout(30), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            clients = [group.create_task(client(job, domain, client_id)) for client_id in (0, 1)]
            with pytest.raises(TrainingFailed) as caught:
                await gradbus.Controller(bus, NoopTask(100), config).run()
            return caught.value, [await client for client in clients]

    error, ends = asyncio.run(main())
    assert error.clients == (0, 1)
    here = "ZeroDivisionError: the user's own mistake, at "
    assert f"training failed on clients 0, 1: {here}" in str(error)
    assert "test_dispatch_failures.py:" in str(error)
    assert "Mend it there" in str(error)
    assert [f"training failed here: {here}" in str(end) for end in ends] == [True, True]


def test_a_round_that_is_short_of_clients_that_are_gone_does_not_end_the_others_for_one_failure() -> None:
    def error_of(minimum: int) -> GradbusError:
        round_ = Round(1, range(3), RoundRules(minimum=minimum, quorum=1.0, deadline_s=9.0, grace_s=0.0), now_s=0.0)
        round_.fail(0, TRAINING_FAILED)
        round_.lose(1)
        round_.lose(2)
        return RoundLosses(Counter()).error(round_, attempts=1)

    assert isinstance(error_of(1), TrainingFailed)
    assert isinstance(error_of(3), RoundTimeout)  # clients wait for the controller to come back


def test_a_late_report_of_a_pause_counts_in_no_later_attempt() -> None:
    def paused(attempt: int) -> TrainingFailure:
        return TrainingFailure(1, 2, PAUSED, PAUSED, attempt=attempt)

    losses = RoundLosses(Counter())
    round_ = Round(2, range(3), RoundRules(minimum=1, quorum=1.0, deadline_s=9.0, grace_s=0.0), now_s=0.0)
    assert not losses.note_failure(round_, 0, paused(1), attempt=2)
    assert round_.failed == {}
    assert losses.note_failure(round_, 0, paused(2), attempt=2)
    assert losses.note_failure(round_, 1, paused(0), attempt=2)  # of a client that does not say
    failed = TrainingFailure(1, 2, "ValueError: no rows", attempt=1)
    assert losses.note_failure(round_, 2, failed, attempt=2)  # a failure counts whenever it comes
    assert round_.failed == {0: PAUSED, 1: PAUSED, 2: TRAINING_FAILED}

"""The web service as a program of its own: its options, its configuration, its end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import web

import gradbus
from gradbus.experiments.examples.embed_aiohttp import SERVICE, main

GLYPHS = ["task.data=glyphs", 'task.data_options={"train":200,"test":100}']


@pytest.fixture
def job() -> str:
    return f"program-{os.getpid()}-{random.randrange(1 << 30):x}"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()  # else it goes on writing into a captured stream that is closed by then


def given(*settings: str) -> list[str]:
    return [word for item in settings for word in ("--set", item)]


@pytest.mark.slow
def test_the_program_serves_until_it_is_told_to_stop(job: str, domain: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-P",
        "-m",
        "gradbus.experiments.examples.embed_aiohttp",
        "--job",
        job,
        "--port",
        str(port),
    ]
    command += given(*GLYPHS, f"bus.domain={domain}")
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while f"127.0.0.1:{port}" not in (line := process.stderr.readline()):
                assert line, "it ended before it served"
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status/{job}", timeout=30) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(20.0) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            with suppress(ProcessLookupError):
                process.kill()


def test_all_that_a_configuration_says_of_the_bus_reaches_it(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    asked: dict[str, Any] = {}

    @asynccontextmanager
    async def connect(job: str, **arguments: Any) -> AsyncIterator[gradbus.Bus]:
        asked.update(arguments, job=job)
        raise gradbus.GradbusError("nothing more is looked at")
        yield

    def run_app(app: web.Application, **_: Any) -> None:
        asyncio.run(app[SERVICE].jobs[job].run())

    monkeypatch.setattr(gradbus, "connect", connect)
    monkeypatch.setattr("gradbus.runtime.bus.bus.connect", connect)
    monkeypatch.setattr(web, "run_app", run_app)
    said = {"shared_memory": "false", "lease_s": "4", "stall_timeout_s": "7", "faults": "delay hello"}
    assert main(["--job", job, *given(*GLYPHS, *(f"bus.{key}={value}" for key, value in said.items()))]) == 0
    assert (asked["job"], asked["stall_timeout_s"], asked["faults"]) == (job, 7.0, "delay hello")
    assert (asked["network"].shared_memory, asked["network"].lease_s) == (False, 4.0)


def test_a_port_that_is_taken_ends_the_program_with_what_to_do(
    job: str, domain: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradbus.commands.configured_task.ConfiguredTask.load", lambda self: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--job", job, *given(f"bus.domain={domain}"), "--port", port]) == 2
    assert "address already in use; choose another place with --port or --host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--set", "bus.faults=spoil"], "fault 'spoil'"),
        (["--set", "federated.rouds=3"], "did you mean 'rounds'"),
        (["--config", "missing.json"], "missing.json cannot be read"),
        (["--config", "a.json", "--config", "b.json", "--job", "x"], "--job names one job"),
    ],
)
def test_a_wrong_option_ends_the_program_with_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1

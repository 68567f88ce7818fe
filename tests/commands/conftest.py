"""Running the command line: in this process where it only has to fail, in processes of its own where it works."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import typer.testing
from command_fixtures import begin_at_once, configs, plain_environment
from dds_domains import new_domain
from forked_commands import Forked
from patience import PATIENT
from typer.testing import CliRunner

from gradbus.commands import lifecycle
from gradbus.commands.cli.main import app

__all__ = ["begin_at_once", "configs", "plain_environment"]

# Commands are made from their annotations, all of them anew at each call, which takes 0.1 s of a core.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]  # noqa: SLF001 - CliRunner looks it up nowhere else


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command left."""

    code: int
    out: str
    err: str


Invoke = Callable[..., Ended]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a federated run of ten rounds; not to be changed."""
    from report_runs import federated_run

    path = tmp_path_factory.mktemp("runs") / "federated"
    return federated_run(path, domain=new_domain(), rounds=10, clients=3, codec="sq8", downlink_codec="q8")


@pytest.fixture(scope="session")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a data-parallel run of three epochs on two ranks; not to be changed."""
    from report_runs import parallel_run

    return parallel_run(tmp_path_factory.mktemp("runs") / "parallel", domain=new_domain(), algorithm="dgc")


ANY_INTERFACE = (
    '<CycloneDDS><Domain><General><Interfaces><NetworkInterface autodetermine="true"/></Interfaces></General></Domain>'
    "</CycloneDDS>"
)


@pytest.fixture
def network_by_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any interface of this machine, of which there may be none but ``lo``, for settings that are not opened."""
    monkeypatch.setenv("CYCLONEDDS_URI", ANY_INTERFACE)


@pytest.fixture
def in_one_theme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have their figures drawn once, for tests of what these show: to draw takes most of the time of a report,
    and the other theme changes colours alone."""
    monkeypatch.setattr("gradbus.commands.report.page.THEMES", ("light",))


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Iterator[Invoke]:
    """Run a command in this process; for those that end by themselves, and soon."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    threads = torch.get_num_threads()

    def call(*arguments: Any) -> Ended:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        return Ended(result.exit_code, result.stdout, result.stderr)

    yield call
    torch.set_num_threads(threads)
    structlog.reset_defaults()
    lifecycle.stopping.clear()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command in a process of its own, in the test's folder; it is ended with the test. Unless the test's own
    environment says otherwise, it takes nobody for dead who stands still for seconds."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gradbus", *map(str, arguments)],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=PATIENT | os.environ,
        )
        started.append(process)
        return process

    yield begin
    end(started)


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[..., Forked]]:
    """The same, but for loading torch, which takes a process 3 s: for what does not begin at the very beginning."""
    started: list[Forked] = []

    def begin(*arguments: Any) -> Forked:
        started.append(Forked([str(argument) for argument in arguments], tmp_path, PATIENT | os.environ))
        return started[-1]

    yield begin
    end(started)


def end(started: Sequence[subprocess.Popen[str] | Forked]) -> None:
    """End those that still run, and read what they have said."""
    for process in started:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

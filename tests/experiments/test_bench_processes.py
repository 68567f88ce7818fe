"""Processes of a benchmark: results come in order, a failure is reported at once, and none outlives the benchmark."""

from __future__ import annotations

import asyncio
import operator
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from gradbus.experiments.bench.processes import Processes, ProcessFailed

pytestmark = pytest.mark.slow


def beside_a_sleeper(pids: list[int], timeout_s: float, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    with Processes() as processes:
        pids.append(processes.start("sleeper", time.sleep, 600.0))
        processes.start("other", work, *arguments)
        return processes.results(timeout_s)


def test_functions_and_coroutine_functions_report_in_the_order_in_which_they_were_started() -> None:
    with Processes() as processes:
        pid = processes.start("number", os.getpid)
        processes.start("word", asyncio.sleep, 0.0, "word")
        assert processes.results(60.0) == [pid, "word"]


@pytest.mark.parametrize(
    ("timeout_s", "work", "arguments", "why"),
    [
        (60.0, operator.truediv, (1, 0), r"^other failed: (.|\n)*ZeroDivisionError"),
        (60.0, os._exit, (0,), "^other failed: it died$"),
        (0.1, time.sleep, (600.0,), r"^sleeper, other: not ended after 0.1 s$"),
    ],
)
def test_a_failure_or_death_is_reported_at_once_and_all_are_ended(
    timeout_s: float, work: Callable[..., Any], arguments: tuple[Any, ...], why: str
) -> None:
    pids: list[int] = []
    with pytest.raises(ProcessFailed, match=why):
        beside_a_sleeper(pids, timeout_s, work, *arguments)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


_BENCHMARK = """
import sys, time
from gradbus.experiments.bench.processes import Processes
with Processes() as processes:
    print(*(processes.start(f"sleeper {number}", time.sleep, 600.0) for number in range(2)), flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone sends SIGKILL as a pipe is closed")
def test_processes_end_with_a_benchmark_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _BENCHMARK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as benchmark:
        assert benchmark.stdout is not None
        files = [os.pidfd_open(int(pid)) for pid in benchmark.stdout.readline().split()]
        benchmark.kill()
    assert len(files) == 2
    for file in files:
        with os.fdopen(file):  # readable when its process has ended
            assert select.select([file], [], [], 30.0)[0], "a process of the benchmark goes on"

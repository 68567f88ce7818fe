"""Processes of a benchmark: results come in order, a failure is reported at once, and no process is left."""

from __future__ import annotations

import asyncio
import operator
import os
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

"""Identities and the small helpers around messages."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import time

import pytest
import structlog

from gradbus.runtime import logs
from gradbus.runtime.errors import BarrierTimeout, BusClosed, ConfigError, FrameError, GradbusError, WriteTimeout
from gradbus.runtime.tasks import single_error
from gradbus.runtime.wire.messages import new_incarnation


def test_a_later_start_has_a_higher_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    first = [new_incarnation() for _ in range(50)]
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 1000)  # one microsecond
    assert max(first) < new_incarnation() < 1 << 64
    assert len(set(first)) > 1  # two starts at the same moment differ, as a rule


def test_the_only_error_in_nested_groups_is_found_and_of_several_none_is_hidden() -> None:
    lonely, other = ValueError("a"), KeyError("b")
    assert single_error(BaseExceptionGroup("", [ExceptionGroup("", [lonely])])) is lonely
    several = ExceptionGroup("", [lonely, other])
    assert single_error(BaseExceptionGroup("", [several])) is several
    apart = ExceptionGroup("", [ExceptionGroup("", [lonely]), ExceptionGroup("", [other])])
    assert single_error(apart) is apart
    twice = ExceptionGroup("", [ExceptionGroup("", [lonely]), ExceptionGroup("", [ValueError("a")])])
    assert single_error(twice) is lonely
    stop = asyncio.CancelledError()
    assert single_error(BaseExceptionGroup("", [stop])) is stop


def test_errors_can_be_caught_as_what_they_are_in_the_standard_library() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(FrameError, ValueError)
    assert issubclass(WriteTimeout, TimeoutError)
    assert issubclass(BarrierTimeout, TimeoutError)
    assert all(issubclass(kind, GradbusError) for kind in (ConfigError, FrameError, WriteTimeout, BusClosed))


def test_a_barrier_that_fails_names_who_is_missing() -> None:
    error = BarrierTimeout("clients", missing=[2, 5], ready=1, needed=3, timeout_s=1.5)
    assert (error.missing, error.ready, error.needed) == ((2, 5), 1, 3)
    assert "1 of 3 ready after 1.5 s, missing [2, 5]" in str(error)


def test_logs_are_one_json_object_a_line_when_redirected(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        logs.configure(level="warning")
        log = logs.get_logger("bus", job="x")
        log.info("not shown")
        log.warning("shown", count=3)
    finally:
        structlog.configure(**before)
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    entry = json.loads(line)
    assert out == ""
    assert (entry["event"], entry["level"], entry["source"], entry["job"], entry["count"]) == (
        "shown",
        "warning",
        "bus",
        "x",
        3,
    )
    assert logging.getLogger().level == logging.WARNING  # the standard library's logging is left as it was


class LostStream(io.StringIO):
    """As when nobody reads the pipe any more, or the disk is full."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("closed", [False, True])
def test_a_log_that_cannot_be_written_any_more_ends_nothing(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    before, stream = structlog.get_config(), io.StringIO() if closed else LostStream()
    monkeypatch.setattr(sys, "stderr", stream)
    try:
        logs.configure()
        if closed:
            stream.close()
        logs.get_logger("group").warning("rank lost")
    finally:
        structlog.configure(**before)

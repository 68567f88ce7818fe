"""Where the events of this package go in a program that embeds it: nowhere but for warnings, unless it says so."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

import gradbus
from gradbus.runtime import logs

log = logs.get_logger("client", client=3)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A program that has configured nothing, and again afterwards."""
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    yield
    gradbus.log_to(None)
    if before is not None:
        structlog.configure(**before)


def test_without_a_word_warnings_alone_are_shown_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    log.info("round done", round=1)
    log.warning("update refused", reason="late")
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert "update refused" in line
    assert "client=3" in line
    assert "reason=" in line


def test_an_exception_is_shown_with_its_traceback_and_without_a_warning_of_structlog(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        raise ValueError("a broken file")
    except ValueError:
        log.exception("training failed")
    err = capsys.readouterr().err
    assert "training failed" in err
    assert err.rstrip().endswith("ValueError: a broken file")


def test_a_program_with_a_structlog_configuration_of_its_own_gets_all() -> None:
    seen: list[object] = []

    def keep(_: object, method: str, event: object) -> object:
        seen.append((method, event))
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    log.info("round done", round=1)
    assert seen == [("info", {"source": "client", "client": 3, "round": 1, "event": "round done"})]
    with capture_logs() as captured:
        log.debug("fine")
    assert captured[0]["log_level"] == "debug"


def test_events_go_to_a_stream_of_a_level_and_the_program_s_own_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    gradbus.log_to(stream, level="info")
    log.debug("fine")
    log.info("round done", round=1)
    structlog.get_logger().info("of the program")
    entry = json.loads(stream.getvalue())
    assert (entry["event"], entry["source"], entry["client"], entry["round"]) == ("round done", "client", 3, 1)
    assert "of the program" in capsys.readouterr().out


def test_events_are_added_to_a_file_until_the_next_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("{}\n")
    gradbus.log_to(path)
    log.info("first")
    gradbus.log_to(None)
    log.info("second")
    assert [json.loads(line).get("event") for line in path.read_text().splitlines()] == [None, "first"]
    assert capsys.readouterr() == ("", "")


def test_events_go_to_a_logger_of_the_standard_library(caplog: pytest.LogCaptureFixture) -> None:
    gradbus.log_to(logging.getLogger("robot.training"))
    with caplog.at_level(logging.INFO):
        log.bind(round=2).info("round done", text="a\nb")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("robot.training", logging.INFO)
    assert record.getMessage().startswith("event=round done")
    assert "round=2" in record.getMessage()
    assert "\n" not in record.getMessage(), "no line of a peer's looks like one of the program's"


def test_a_wrong_level_is_told_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"debug, info, warning, error.*got 'loud'"):
        gradbus.log_to(sys.stderr, level="loud")  # type: ignore[arg-type]


def test_a_stream_that_is_closed_ends_nothing() -> None:
    stream = io.StringIO()
    gradbus.log_to(stream)
    stream.close()
    log.warning("rank lost")


def test_a_program_without_stderr_ends_not() -> None:
    code = (
        "import sys; sys.stderr = None\n"
        "from gradbus.runtime.logs import get_logger\nget_logger('bus').warning('lost'); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")

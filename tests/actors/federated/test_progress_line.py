"""One line about a run: in a terminal, in what is no terminal, and in a cell of a notebook."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from dds_domains import new_domain

import gradbus
from gradbus.models import NoopTask


@pytest.fixture(autouse=True)
def configured_by_nobody() -> Iterator[None]:
    """A program that has not configured structlog: tests before this one may have, by ``capture_logs``."""
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    yield
    if before is not None:
        structlog.configure(**before)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def simulate(rounds: int = 3) -> gradbus.SimulationResult:
    options = gradbus.SimulationOptions(domain=new_domain(), processes=1, progress=True)
    rules = gradbus.FederatedConfig(rounds=rounds, eval_every=0)
    return gradbus.simulate(NoopTask(50, delta="seeded"), 3, config=rules, options=options)


def test_what_is_no_terminal_gets_the_last_line_alone(capsys: pytest.CaptureFixture[str]) -> None:
    simulate()
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert line.startswith("round 3/3 [━━━━━━━━━━━━━━━━━━━━]  clients 3/3")


def test_a_terminal_has_one_line_that_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    simulate()
    text = terminal.getvalue()
    assert all(f"round {number}/3" in text for number in range(4))
    assert text.count("\n") == 1


def test_a_notebook_has_one_output_that_is_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    outputs: list[list[str]] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            assert raw
            shown.append(data["text/plain"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        outputs.append([data["text/plain"]])
        return Handle()

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    simulate()
    assert capsys.readouterr() == ("", "")
    assert len(outputs) == 1
    assert [line.split()[1] for line in shown] == ["1/3", "2/3", "3/3"]


def test_numbers_that_are_not_finite_and_names_that_colour_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(rounds=1)
    capsys.readouterr()
    report: Any = replace(result.rounds[0], loss=float("nan"), metrics={"a\x1b[31m": 2.0})
    line = gradbus.ProgressLine()
    line.on_report(report)
    line.on_end([])
    line.close()
    err = capsys.readouterr().err
    assert "round 1  clients 3/3" in err
    assert "nan" not in err
    assert "\x1b" not in err

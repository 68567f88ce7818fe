"""The live tables on screens of 80 and 120 columns, with two and with two hundred clients."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from gradbus.actors import EpochReport, Progress, RoundReport
from gradbus.experiments.amounts import ranges
from gradbus.experiments.run.console import LogFile
from gradbus.experiments.run.live import RoundTable, epochs_table, rounds_table

REPORTS = [
    RoundReport(
        round_id=number, clients=tuple(range(200)), expected=200, loss=12.3456, accuracy=1.0, bytes_up=959_900_000,
        bytes_down=959_900_000, train_s=123.45, wire_s=12.34, aggregate_s=1.234, seconds=137.02,
    )
    for number in range(1, 101)
]  # fmt: skip


def shown(thing: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=24, force_terminal=True, color_system=None)
    console.print(thing)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in lines]


def screen(progress: Progress, width: int, *, title: str = "job mnist", warning: str = "") -> list[str]:
    log = LogFile(io.StringIO())
    if warning:
        log.show(warning)
    console = Console(file=io.StringIO(), width=width, height=24)
    return shown(RoundTable(console, log, title, progress, 200).render(), width)


def test_no_number_is_cut_off_at_80_columns() -> None:
    lines = shown(rounds_table(REPORTS, 80), 80)
    assert "…" not in "".join(lines)
    assert lines[0].split() == ["round", "clients", "loss", "accuracy", "up", "down", "train", "s", "total", "s"]
    assert lines[-1].split() == [
        "100", "200/200", "12.3456", "100.00", "%", "959.90", "MB", "959.90", "MB", "123.45", "137.02",
    ]  # fmt: skip


def test_every_column_is_there_where_there_is_room() -> None:
    assert shown(rounds_table(REPORTS, 120), 120)[0].split()[-6:] == ["wire", "s", "aggregate", "s", "total", "s"]
    assert shown(rounds_table(REPORTS), 200) == shown(rounds_table(REPORTS, 200), 200)


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_epochs_fit_as_well(width: int) -> None:
    report = EpochReport(
        epoch=99, step=123_456, loss=0.0123, accuracy=0.9876, step_s_mean=0.1234, wait_s_mean=0.0123,
        bytes_out_per_step=1_628_200, density=0.001, seconds=123.45,
    )  # fmt: skip
    lines = shown(epochs_table([report], width), width)
    assert len(lines) == 2
    assert "…" not in "".join(lines)
    assert ("density" in lines[0]) == (width == 100)


@pytest.mark.parametrize("width", [80, 120])
def test_two_hundred_clients_take_one_line(width: int) -> None:
    progress = Progress(
        phase="training", round_id=7, rounds=100, ready=133, expected=200, clients=tuple(range(200)), reports=REPORTS
    )
    lines = screen(progress, width)
    assert len(lines) < 24
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "training round 7: updates 133/200 (min 1)" in text
    assert "200 clients here: 0-199" in text


def test_scattered_clients_and_long_lines_are_cut_at_the_edge() -> None:
    progress = Progress(phase="waiting", rounds=3, clients=tuple(range(0, 200, 2)), dropped={"stale": 2})
    lines = screen(progress, 80, title="job " + "x" * 64, warning="client silent " * 20)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("job xxx")
    assert re.fullmatch(r"job x+… +0/3 rounds", lines[0])
    assert lines[2] == "waiting for clients: 100/200 (min 1)"
    assert lines[3].startswith("100 clients here: 0, 2, 4, ")
    assert lines[3].endswith("…")
    assert lines[4:] == ["not counted: stale 2", lines[-1]]
    assert lines[-1].endswith("…")


def test_numbers_in_short() -> None:
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([0, 1, 3, 4, 5, 9]) == "0, 1, 3-5, 9"

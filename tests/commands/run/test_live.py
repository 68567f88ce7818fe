"""What the console shows: live tables on screens of 80 and 120 columns, plain lines, amounts."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from gradbus.actors import EpochReport, Progress, RoundReport
from gradbus.actors.data_parallel.report import StepProgress
from gradbus.commands.amounts import ranges, size
from gradbus.commands.run.console import LogFile
from gradbus.commands.run.live import (
    Lines,
    RoundTable,
    epoch_line,
    epochs_table,
    progress_line,
    round_line,
    rounds_table,
)

REPORTS = [
    RoundReport(
        round_id=number,
        clients=tuple(range(200)),
        expected=200,
        loss=12.3456,
        accuracy=1.0,
        bytes_up=959_900_000,
        bytes_down=959_900_000,
        train_s=123.45,
        wire_s=12.34,
        aggregate_s=1.234,
        seconds=137.02,
    )
    for number in range(1, 101)
]


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
        "100",
        "200/200",
        "12.3456",
        "100.00",
        "%",
        "959.90",
        "MB",
        "959.90",
        "MB",
        "123.45",
        "137.02",
    ]


def test_every_column_is_there_where_there_is_room() -> None:
    assert shown(rounds_table(REPORTS, 120), 120)[0].split()[-6:] == ["wire", "s", "aggregate", "s", "total", "s"]
    assert shown(rounds_table(REPORTS), 200) == shown(rounds_table(REPORTS, 200), 200)


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_epochs_fit_as_well(width: int) -> None:
    report = EpochReport(
        epoch=99,
        step=123_456,
        loss=0.0123,
        accuracy=0.9876,
        step_s_mean=0.1234,
        wait_s_mean=0.0123,
        bytes_out_per_step=1_628_200,
        density=0.001,
        seconds=123.45,
    )
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


ROUND = RoundReport(
    round_id=2, clients=(0, 1), expected=2, loss=0.5, accuracy=0.9, bytes_up=9_599_056, bytes_down=1000, train_s=1.5
)


SHARED = replace(ROUND, bytes_up_shared=9_599_056, bytes_down_shared=1000)


def test_the_table_shows_rounds_clients_bytes_times_and_warnings() -> None:
    progress = Progress(
        phase="training",
        round_id=3,
        rounds=10,
        ready=1,
        expected=2,
        clients=(0, 1),
        reports=[ROUND],
        dropped={"stale": 2},
    )
    log = LogFile(io.StringIO())
    log.write('{"client": 1, "event": "client silent", "level": "warning"}\n')
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(RoundTable(console, log, "job mnist", progress, 2).render())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (
        "job mnist",
        "1/10 rounds",
        "2/2",
        "0.5000",
        "90.00 %",
        "9.60 MB",
        "1.00 kB",
        "1.50",
        "training round 3: updates 1/2 (min 1)",
        "clients here: 0, 1",
        "not counted: stale 2",
        "client silent client=1",
    ):
        assert text in shown


def test_the_table_says_how_many_clients_it_waits_for() -> None:
    progress = Progress(phase="waiting", rounds=10, clients=(1,))
    console = Console(file=io.StringIO(), width=120)
    console.print(RoundTable(console, LogFile(io.StringIO()), "job mnist", progress, 2).render())
    assert "waiting for clients: 1/2 (min 1) | clients here: 1" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_table_keeps_to_the_screen_however_many_rounds_there_are() -> None:
    progress = Progress(phase="done", rounds=500, reports=[ROUND] * 500)
    console = Console(file=io.StringIO(), width=120, height=24)
    console.print(RoundTable(console, LogFile(io.StringIO()), "job mnist", progress, 2).render())
    assert len(console.file.getvalue().splitlines()) < 24  # type: ignore[attr-defined]


def test_a_plain_line_holds_what_a_row_holds() -> None:
    console = Console(file=io.StringIO(), width=40)
    Lines(console, lambda report: round_line(report, 10)).done(ROUND)
    (line,) = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert line.startswith("round 2/10: clients 2/2, loss 0.5000, accuracy 90.00 %, up 9.60 MB, down 1.00 kB, train")


def test_what_passed_through_memory_is_shown_where_something_did() -> None:
    for report, shown in ((SHARED, True), (ROUND, False)):
        plain, table = (Console(file=io.StringIO(), width=120) for _ in range(2))
        plain.print(round_line(report, 10), soft_wrap=True)
        table.print(rounds_table([report]))
        assert ("down 1.00 kB (9.60 MB of it in memory), train" in plain.file.getvalue()) is shown  # type: ignore[attr-defined]
        assert ("in memory" in table.file.getvalue()) is shown  # type: ignore[attr-defined]


def test_sizes_are_decimal() -> None:
    assert [size(n) for n in (0, 999, 1000, 4_799_528, 2 * 10**9, 10**12)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "4.80 MB",
        "2.00 GB",
        "1.00 TB",
    ]


EPOCH = EpochReport(
    epoch=1,
    step=20,
    loss=0.5,
    accuracy=0.9,
    step_s_mean=0.0123,
    wait_s_mean=0.004,
    bytes_out_per_step=1_628_200,
    density=0.001,
    seconds=2.5,
)


def test_an_epoch_of_a_rank_other_than_0_is_one_short_line() -> None:
    assert epoch_line(EPOCH, 3, of_all=False) == (
        "epoch 2/3: loss 0.5000, step 12.3 ms, wait 4.0 ms, sent 1.63 MB per step"
    )


def test_an_epoch_is_one_plain_line() -> None:
    console = Console(file=io.StringIO(), width=40)
    Lines(console, lambda report: epoch_line(report, 3)).done(EPOCH)
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "epoch 2/3: step 20, loss 0.5000, accuracy 90.00 %, step 12.3 ms, wait 4.0 ms, sent 1.63 MB per step, "
        "density 0.1 %, epoch 2.50 s\n"
    )


def test_the_progress_of_steps_is_a_line_with_loss_times_and_bytes() -> None:
    console = Console(file=io.StringIO(), width=80)
    lines = Lines(console, lambda report: epoch_line(report, 3), lambda report: progress_line(report, 3))
    lines.progressed(
        StepProgress(
            step=300, epoch=1, loss=0.25, step_s_mean=0.0125, wait_s_mean=0.001, bytes_out_per_step=1_628_200.0
        )
    )
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "epoch 2/3, step 300: loss 0.2500, step 12.5 ms, wait 1.0 ms, sent 1.63 MB per step\n"
    )


def test_the_table_shows_the_same() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(epochs_table([EPOCH]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("epoch", "20", "0.5000", "90.00 %", "12.3", "4.0", "1.63 MB", "0.1 %", "2.50"):
        assert text in shown


def test_the_metrics_of_a_task_stand_beside_or_in_place_of_the_accuracy() -> None:
    metrics = {"rmse": 0.25, "mae": 0.125, "worst": 1.5, "fourth": 4.0}
    regression = EpochReport(epoch=0, step=10, loss=0.5, metrics=metrics)
    assert "loss 0.5000, rmse 0.2500, mae 0.1250, worst 1.5000, step" in epoch_line(regression, 3)
    heads = shown(epochs_table([regression], 120), 120)[0].split()
    assert "rmse" in heads
    assert "accuracy" not in heads
    both = replace(regression, accuracy=0.5)
    assert "accuracy 50.00 %, rmse 0.2500" in epoch_line(both, 3)
    assert all(len(line) <= 60 for line in shown(epochs_table([both], 60), 60))

"""The pieces of the command line, one by one."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gradbus.actors import Progress, RoundReport
from gradbus.actors.federated.participation import Strike
from gradbus.actors.federated.report import ClientTimeline
from gradbus.experiments.amounts import size
from gradbus.experiments.bench import results
from gradbus.experiments.cli import import_object
from gradbus.experiments.cli.exit_codes import ExitCode, exit_code_of
from gradbus.experiments.doctor.local_bus import LocalMeasurement
from gradbus.experiments.doctor.machine import Severity
from gradbus.experiments.doctor.report import judge
from gradbus.experiments.run.console import LogFile
from gradbus.experiments.run.demo import DemoOptions, plan
from gradbus.experiments.run.live import Lines, RoundTable, round_line, rounds_table
from gradbus.experiments.rundir import versions
from gradbus.experiments.rundir.directory import ControllerDirectory
from gradbus.runtime import errors
from gradbus.runtime.config.federated import BusSettings
from gradbus.runtime.dds.missing_peers import port_range

REPORT = RoundReport(
    round_id=2, clients=(0, 1), expected=2, loss=0.5, accuracy=0.9, bytes_up=9_599_056, bytes_down=1000, train_s=1.5
)

SHARED = replace(REPORT, bytes_up_shared=9_599_056, bytes_down_shared=1000)


@pytest.mark.parametrize("cores", [{3}, {0, 2, 5}])
def test_cores_are_those_that_this_process_may_use(cores: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert versions.machine()["cores"] == results.machine()["cores"] == len(cores)
    assert plan(DemoOptions(data="glyphs")).controller.task.threads == len(cores)


def test_every_error_of_a_run_has_its_own_exit_code() -> None:
    codes = {
        errors.ConfigError("x"): 2,
        errors.BarrierTimeout("x", missing=(), ready=0, needed=1, timeout_s=1.0): 4,
        errors.RoundTimeout(1, 0, 1, 3): 5,
        errors.CheckpointError("x"): 6,
        errors.JoinRefused("x"): 7,
        errors.BusClosed("x"): 8,
        errors.WriteTimeout("x", 1.0): 8,
        errors.TrainingFailed("x"): 13,
        errors.GradbusError("x"): 1,
    }
    assert {error: exit_code_of(error) for error in codes} == codes
    assert ExitCode.NO_DATA == 3


def test_the_table_shows_rounds_clients_bytes_times_and_warnings() -> None:
    progress = Progress(
        phase="training",
        round_id=3,
        rounds=10,
        ready=1,
        expected=2,
        clients=(0, 1),
        reports=[REPORT],
        dropped={"stale": 2},
    )
    log = LogFile(io.StringIO())
    log.write('{"client": 1, "event": "client silent", "level": "warning"}\n')
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(RoundTable(console, log, "job mnist", progress, 2).render())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (
        "job mnist", "1/10 rounds", "2/2", "0.5000", "90.00 %", "9.60 MB", "1.00 kB", "1.50",
        "training round 3: updates 1/2 (min 1)", "clients here: 0, 1", "not counted: stale 2", "client silent client=1",
    ):  # fmt: skip
        assert text in shown


def test_the_table_says_how_many_clients_it_waits_for() -> None:
    progress = Progress(phase="waiting", rounds=10, clients=(1,))
    console = Console(file=io.StringIO(), width=120)
    console.print(RoundTable(console, LogFile(io.StringIO()), "job mnist", progress, 2).render())
    assert "waiting for clients: 1/2 (min 1) | clients here: 1" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_table_keeps_to_the_screen_however_many_rounds_there_are() -> None:
    progress = Progress(phase="done", rounds=500, reports=[REPORT] * 500)
    console = Console(file=io.StringIO(), width=120, height=24)
    console.print(RoundTable(console, LogFile(io.StringIO()), "job mnist", progress, 2).render())
    assert len(console.file.getvalue().splitlines()) < 24  # type: ignore[attr-defined]


def test_a_plain_line_holds_what_a_row_holds() -> None:
    console = Console(file=io.StringIO(), width=40)
    Lines(console, lambda report: round_line(report, 10)).done(REPORT)
    (line,) = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert line.startswith("round 2/10: clients 2/2, loss 0.5000, accuracy 90.00 %, up 9.60 MB, down 1.00 kB, train")


def test_what_passed_through_memory_is_shown_where_something_did() -> None:
    for report, shown in ((SHARED, True), (REPORT, False)):
        plain, table = (Console(file=io.StringIO(), width=120) for _ in range(2))
        plain.print(round_line(report, 10), soft_wrap=True)
        table.print(rounds_table([report]))
        assert ("down 1.00 kB (9.60 MB of it in memory), train" in plain.file.getvalue()) is shown  # type: ignore[attr-defined]
        assert ("in memory" in table.file.getvalue()) is shown  # type: ignore[attr-defined]


def test_sizes_are_decimal() -> None:
    assert [size(n) for n in (0, 999, 1000, 4_799_528, 2 * 10**9, 10**12)] == [
        "0 B", "999 B", "1.00 kB", "4.80 MB", "2.00 GB", "1.00 TB",
    ]  # fmt: skip


def test_a_run_directory_is_written_anew_after_a_resume_and_then_appended_to(tmp_path: Path) -> None:
    reports = [RoundReport(round_id=i) for i in range(1, 5)]
    (tmp_path / "rounds.jsonl").write_text('{"round_id": 1}\n{"round_id": 2}\n{"round_id": 3, "cut off')
    with ControllerDirectory(tmp_path) as run:
        run.add(reports[:3])
        run.add(reports)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round_id"] for line in lines] == [1, 2, 3, 4]


def test_a_resume_keeps_the_timelines_of_rounds_that_stand(tmp_path: Path) -> None:
    """The controller that goes on does not know them: they are in no checkpoint."""
    timeline = (ClientTimeline(client_id=3, counted_s=1.5),)
    reports = [RoundReport(round_id=i, weights_crc32=10 + i, timeline=timeline) for i in (1, 2, 3)]
    with ControllerDirectory(tmp_path) as run:
        run.add(reports)
    again = [reports[0].without_timeline(), replace(reports[1], weights_crc32=99, timeline=())]
    with ControllerDirectory(tmp_path) as run:
        run.add(again)  # round 2 was done again, and round 3 is still to come
        run.add([*again, replace(reports[2], loss=math.nan)])
    entries = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [[client["counted_s"] for client in entry["timeline"]] for entry in entries] == [[1.5], [], [1.5]]
    assert entries[2]["loss"] is None


def test_a_resume_keeps_who_took_part_and_the_rounds_that_no_checkpoint_has_any_more(tmp_path: Path) -> None:
    marks = {"clipped": (3,)}
    strike = Strike(3, 2, "non-finite", "nan", 1)
    reports = [
        RoundReport(round_id=i, weights_crc32=10 + i, clients=(1, 3), expected=3, marks=marks, strikes=(strike,))
        for i in (1, 2, 3, 4)
    ]
    with ControllerDirectory(tmp_path) as run:
        run.add(reports)
    before = (tmp_path / "rounds.jsonl").read_text().splitlines()
    with ControllerDirectory(tmp_path) as run:  # the checkpoint has forgotten round 1, and round 3 was done again
        run.add([reports[1].figures(), replace(reports[2], weights_crc32=99).figures(), reports[3]])
    after = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [after[0], after[1], after[3]] == [before[0], before[1], before[3]]
    again = json.loads(after[2])
    assert (again["clients"], again["updates"], again["strikes"], again["marks"]) == ([], 2, [], {})


def test_the_current_directory_is_imported_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    import_object.add_current_directory_to_path()
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1
    assert "" not in sys.path


def test_help_loads_neither_torch_nor_dds() -> None:
    code = (
        "import sys; from gradbus.experiments.cli.main import app; import typer.main; typer.main.get_command(app);"
        "print([name for name in ('torch', 'cyclonedds', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "[]\n"


STUBBORN = """
import asyncio
from gradbus.experiments.run.lifecycle import before_abort, guard, run_loop
async def main():
    print("ready", flush=True)
    while True:
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            print("asked", flush=True)
before_abort.append(lambda: print("last words", flush=True))
guard("stubborn", lambda: run_loop(main))
"""


def test_the_second_ctrl_c_ends_what_does_not_heed_the_first() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    try:
        assert process.communicate(timeout=30)[0] == "last words\n"
    finally:
        process.kill()
    assert process.returncode == 130


def test_the_doctor_names_the_ports_when_nobody_is_found() -> None:
    findings = judge(LocalMeasurement(fast_path=True), BusSettings(domain=3))
    assert findings[-1].severity is Severity.BAD
    assert "let UDP ports 8160-8399 through the firewall" in findings[-1].cure
    assert port_range(0) == "7410-7649"
    assert port_range(232) == "65410-65535"

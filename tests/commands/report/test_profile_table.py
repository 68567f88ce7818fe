"""The profiles of several ranks in one table and one trace."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from rich.console import Console
from rich.table import Table

from gradbus.commands.report.profile_table import load_summaries, show_profile, summary_table
from gradbus.commands.rundir import reading as run_files
from gradbus.commands.rundir import traces
from gradbus.commands.rundir.reading import read_run
from gradbus.commands.rundir.traces import merge_traces, trace_of
from gradbus.runtime.profiling.profile import Profile, ProfileSummary


def profiled(rank: int, folder: Path | None = None, *, wait_ms: float = 3.0, steps: int = 4) -> ProfileSummary:
    """Steps that wait 0 ms and twice ``wait_ms`` in turn, and send 1000 B each."""
    profile = Profile(rank, jsonl=None if folder is None else folder / f"profile-rank-{rank}.jsonl")
    for number in range(steps):
        with profile.step(number) as step:
            step.add_span("compute", 1.0, 1.010)
            step.add_span("wait", 1.0, 1.0 + 2 * wait_ms / 1000 * (number % 2))
            step.count("bytes_out", 1000)
    profile.add_span("eval", 1.0, 3.5)
    profile.close()
    if folder is not None:
        assert profile.write_trace(folder / f"trace-rank-{rank}.json")
    return profile.summary()


def cells(table: Table) -> dict[str, list[str]]:
    """The cells by the heading of their line; that of the headings is empty."""
    columns = [[str(column.header), *(str(cell) for cell in column.cells)] for column in table.columns]
    return {line[0]: list(line[1:]) for line in zip(*columns, strict=True)}


def test_the_table_has_mean_and_maximum_of_each_part_for_each_rank_and_all() -> None:
    found = cells(summary_table([profiled(1, wait_ms=5.0, steps=12), profiled(0)]))
    assert found[""] == ["all", "rank 0", "rank 1"]
    assert found["steps"] == ["16", "4", "12"]
    assert found["wait (network), ms"] == ["4.50 (10.00)", "3.00 (6.00)", "5.00 (10.00)"]  # all: over all 16 steps
    assert found["compute, ms"] == ["10.00"] * 3
    assert found["bytes out"] == ["1.00 kB"] * 3  # each step the same
    assert found["eval, s in all"] == ["5.00", "2.50", "2.50"]
    assert list(found)[2:5] == ["step, ms", "compute, ms", "wait (network), ms"]
    assert "encode, ms" not in found  # nobody did


def test_one_rank_needs_no_column_for_all() -> None:
    assert cells(summary_table([profiled(3)]))[""] == ["rank 3"]


def test_no_rank_is_an_empty_table() -> None:
    assert cells(summary_table([]))[""] == []


def test_of_many_ranks_those_are_shown_that_the_others_wait_for() -> None:
    table = summary_table([profiled(rank, wait_ms=abs(rank - 6)) for rank in range(10)], max_ranks=3)
    assert cells(table)[""] == ["all", "rank 5", "rank 6", "rank 7"]
    assert str(table.caption).startswith("3 of 10 ranks")


def test_spans_counters_and_failures_of_only_some_ranks_are_shown_too() -> None:
    profile = Profile(0)
    with profile.step(0) as step:
        step.count("values", 1234.5)
        step.add_span("clip[s]", 1.0, 1.002)
    with pytest.raises(ValueError, match="bad"), profile.step(1):
        raise ValueError("bad")
    table = summary_table([profile.summary(), profiled(1, steps=1)])
    text = io.StringIO()
    Console(file=text, width=100).print(table)
    assert "clip[s], ms" in text.getvalue()  # no markup, which would hide it
    found = cells(table)
    assert found["steps"] == ["2, 1 failed", "1, 1 failed", "1"]
    assert found["values"] == ["617.25 (1234.5)", "1234.5", "-"]
    assert found[r"clip\[s], ms"] == ["1.00 (2.00)", "2.00", "-"]


def test_four_ranks_fit_a_terminal_of_100_columns() -> None:
    text = io.StringIO()
    Console(file=text, width=100).print(summary_table([profiled(rank) for rank in range(4)]))
    assert "3.00 (6.00)" in text.getvalue()
    assert "wait (network), ms" in text.getvalue()


def test_summaries_and_traces_of_a_folder_come_together(tmp_path: Path) -> None:
    expected = [profiled(rank, tmp_path) for rank in range(2)]
    found = load_summaries(tmp_path)
    assert [(summary.rank, summary.steps, summary.outside) for summary in found] == [
        (summary.rank, summary.steps, summary.outside) for summary in expected
    ]
    path = merge_traces(tmp_path)
    assert path == tmp_path / "trace.json"
    assert path is not None
    trace = json.loads(path.read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert merge_traces(tmp_path) == path  # again: the merged one is not merged with itself
    assert json.loads(path.read_text()) == trace


def test_files_that_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    profiled(1, tmp_path)
    (tmp_path / "trace-rank-0.json").write_text('{"traceEvents": [')
    (tmp_path / "trace-rank-2.json").write_text("[]")
    (tmp_path / "trace-rank-3.json").write_text('{"traceEvents": [{}], "otherData": {"origin_unix_ns": 0}}')
    (tmp_path / "profile-rank-0.jsonl").mkdir()
    (tmp_path / "profile-rank-2.jsonl").touch()
    with structlog.testing.capture_logs() as logs:
        assert [summary.rank for summary in load_summaries(tmp_path)] == [1]
        path = merge_traces(tmp_path)
    assert path is not None
    assert {event["pid"] for event in json.loads(path.read_text())["traceEvents"]} == {1}
    named = sorted(Path(entry["path"]).name for entry in logs)
    assert named == ["profile-rank-0.jsonl", "trace-rank-0.json", "trace-rank-2.json", "trace-rank-3.json"]


def test_a_trace_that_is_too_large_or_a_pipe_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled(1, tmp_path)
    size = trace_of(tmp_path, 1).stat().st_size
    for module in (traces, run_files):
        monkeypatch.setattr(module, "MAX_TRACE_BYTES", size)
    trace_of(tmp_path, 0).write_text(" " * size + "[]")
    os.mkfifo(trace_of(tmp_path, 2))
    with structlog.testing.capture_logs() as logs:
        merge_traces(tmp_path)
    by_merging = [entry["error"] for entry in logs]
    by_a_report = [text for text in read_run(tmp_path).missing if "trace-rank" in text]
    for large, pipe in (by_merging, by_a_report):
        assert f"has {size + 2:,} bytes, at most {size:,} are read" in large
        assert "is a pipe, expected a regular file" in pipe


def test_of_a_smaller_run_in_the_same_folder_only_its_own_ranks_are_merged(tmp_path: Path) -> None:
    for rank in range(3):
        profiled(rank, tmp_path)
    trace_of(tmp_path, 1).write_text('{"traceEvents": [{}], "otherData": {"origin_unix_ns": 0}}')
    path = merge_traces(tmp_path, world=2)
    assert path is not None
    assert {event["pid"] for event in json.loads(path.read_text())["traceEvents"]} == {0}


def test_a_folder_without_a_profile_shows_nothing(tmp_path: Path) -> None:
    text = io.StringIO()
    assert not show_profile(tmp_path, Console(file=text))
    assert text.getvalue() == ""


def test_the_table_of_a_folder_is_a_command(tmp_path: Path) -> None:
    def call(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gradbus.commands.report.profile_table", str(folder)]
        environment = {**os.environ, "COLUMNS": "120"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)

    profiled(0, tmp_path)
    shown = call(tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "wait (network), ms" in shown.stdout
    assert str(tmp_path / "trace.json") in shown.stdout
    missing = call(tmp_path / "elsewhere")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "no profile there" in missing.stderr

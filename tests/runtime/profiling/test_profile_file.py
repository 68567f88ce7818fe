"""The JSONL file of a profile: what is in it, and that nothing which befalls it stops the training."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from gradbus.runtime.profiling import summary as summary_module
from gradbus.runtime.profiling.profile import Profile, StepProfile
from gradbus.runtime.profiling.summary import LineFile, ProfileSummary, read_summary
from gradbus.runtime.traffic import Traffic


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(profile: Profile, steps: range, each: Callable[[StepProfile], object] = lambda step: None) -> None:
    for number in steps:
        with profile.step(number) as step:
            each(step)


def waited(seconds: float) -> Callable[[StepProfile], object]:
    return lambda step: step.add_span("wait", 1.0, 1.0 + seconds)


def fail(step: StepProfile) -> None:
    raise ValueError(f"bad step {step.number}")


def test_windows_and_the_summary_are_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rank-3.jsonl"
    profile = Profile(3, window_steps=2, jsonl=path)
    assert not path.parent.exists()
    run(profile, range(5), lambda step: (step.count("bytes_out", 1000), step.add_span("wait", 0.0, 0.25)))
    assert [line["kind"] for line in lines(path)] == ["start", "window", "window"]
    profile.close()
    profile.close()
    start, first, _, rest, end = lines(path)
    assert (start["rank"], start["format"], start["window_steps"]) == (3, 1, 2)
    assert start["unix_s"] <= first["unix_s"] <= end["unix_s"]
    assert (first["rank"], first["first_step"], first["last_step"], first["steps"]) == (3, 0, 1, 2)
    assert (first["mean"]["bytes_out"], first["max"]["wait_s"]) == (1000, 0.25)
    assert (rest["first_step"], rest["last_step"], rest["steps"]) == (4, 4, 1)
    assert (end["kind"], end["steps"], end["total"]["bytes_out"]) == ("summary", 5, 5000)
    assert {type(first["mean"]["bytes_out"]), type(end["total"]["bytes_out"])} == {int}


def test_steps_are_lines_only_when_asked_for(tmp_path: Path) -> None:
    profile = Profile(0, window_steps=2, jsonl=tmp_path / "rank-0.jsonl", jsonl_steps=True)
    run(profile, range(7, 9), waited(0.5))
    with pytest.raises(ValueError, match="bad step 9"):
        run(profile, range(9, 10), fail)
    profile.close()
    found = [line for line in lines(tmp_path / "rank-0.jsonl") if line["kind"] == "step"]
    assert [(line["step"], line.get("wait_s"), line.get("error")) for line in found] == [
        (7, 0.5, None),
        (8, 0.5, None),
        (9, None, "ValueError"),
    ]
    assert found[0]["step_s"] >= 0


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    profile = Profile(0, window_steps=1, jsonl=path)
    run(profile, range(1), lambda step: (step.count("norm", math.nan), step.count("ratio", 0.12345)))
    profile.close()
    assert (lines(path)[1]["mean"]["norm"], lines(path)[1]["mean"]["ratio"]) == (None, 0.123)
    summary = read_summary(path)
    assert summary is not None
    assert math.isnan(summary.mean["norm"])


def test_a_file_that_cannot_be_written_is_reported_once_and_stops_nothing(tmp_path: Path) -> None:
    blocker = tmp_path / "profile"
    blocker.write_text("a file where the folder should be")
    with structlog.testing.capture_logs() as logs:
        profile = Profile(0, window_steps=1, jsonl=blocker / "rank-0.jsonl")
        run(profile, range(3))
        blocker.unlink()
        run(profile, range(3, 4))
        profile.close()
    assert [(entry["event"], entry["log_level"]) for entry in logs if entry["event"] == "profile not written"] == [
        ("profile not written", "warning")
    ]
    assert profile.summary().steps == 4
    assert [line["kind"] for line in lines(blocker / "rank-0.jsonl")] == ["window", "summary"]  # once it could be


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_reported_once_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary_module, "open_to_append", lambda path: os.open("/dev/full", os.O_RDWR))
    with structlog.testing.capture_logs() as logs:
        profile = Profile(0, window_steps=1, jsonl=tmp_path / "rank-0.jsonl")
        run(profile, range(3))
        profile.close()
    assert [entry["error"] for entry in logs if entry["event"] == "profile not written"] == ["No space left on device"]
    assert profile.summary().steps == 3


def test_a_line_cut_off_by_a_crash_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"kind": "window", "ra')
    LineFile(path).append([{"kind": "start"}])
    LineFile(path).append([{"kind": "window"}])
    assert path.read_text() == '{"kind": "window", "ra\n{"kind": "start"}\n{"kind": "window"}\n'


def test_the_summary_comes_back_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.jsonl"
    for steps in (range(2), range(2, 7)):  # the second run goes on in the same file
        profile = Profile(1, window_steps=2, jsonl=path)
        run(profile, steps, waited(0.5))
        profile.add_span("eval", 1.0, 2.0)
        profile.close()
    summary = read_summary(path)
    assert summary is not None
    assert (summary.rank, summary.first_step, summary.last_step, summary.steps) == (1, 2, 6, 5)
    assert (summary.mean["wait_s"], summary.total["wait_s"], summary.outside) == (0.5, 2.5, {"eval_s": 1.0})
    assert summary == ProfileSummary.from_json(json.loads(json.dumps(summary.to_json())))


def test_of_a_run_that_was_killed_the_windows_are_added_up(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.jsonl"
    profile = Profile(1, window_steps=2, jsonl=path)
    for number in range(5):
        run(profile, range(number, number + 1), waited(float(number)))
    with path.open("a") as file:
        file.write('[1]\n{"kind": "window", "steps": 3}\n{"kind": "win')
    summary = read_summary(path)
    assert summary is not None
    assert (summary.rank, summary.first_step, summary.last_step, summary.steps) == (1, 0, 3, 4)
    assert (summary.mean["wait_s"], summary.max["wait_s"]) == (1.5, 3.0)


def test_a_file_without_a_run_has_no_summary(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text("not JSON\n")
    assert read_summary(path) is None


# -- bytes of earlier starts -------------------------------------------------------------------------------------------


def exchange(traffic: Traffic, sent: int, received: int = 0) -> None:
    traffic.count_sent(sent)
    traffic.count_received(received)


def started(path: Path, run_id: str, traffic: Traffic | None = None) -> Profile:
    profile = Profile(0, window_steps=2, jsonl=path, traffic=traffic or Traffic())
    profile.begin_run(run_id)
    return profile


def test_bytes_are_those_of_the_traffic_in_steps_and_outside_of_them_and_of_steps_that_fail(tmp_path: Path) -> None:
    traffic = Traffic()
    exchange(traffic, 1_000_000)  # before there was a profile
    profile = started(tmp_path / "rank-0.jsonl", "a", traffic)
    exchange(traffic, 1, 2)
    run(profile, range(2), lambda step: exchange(traffic, 10, 20))
    with pytest.raises(ValueError, match="bad step 2"):
        run(profile, range(2, 3), lambda step: (exchange(traffic, 100, 200), fail(step)))
    with profile.step(3) as step:
        exchange(traffic, 1000)
    assert step.sent_bytes == 1000
    exchange(traffic, 10_000)
    profile.close()
    exchange(traffic, 1_000_000)  # after it was closed
    summary = profile.summary()
    assert profile.exchanged == (11_121, 242)
    assert (summary.total["bytes_out"], summary.outside["bytes_out"]) == (1020, 10_101)
    assert (summary.total["bytes_in"], summary.outside["bytes_in"], summary.earlier) == (40, 202, {})


def test_a_later_start_of_a_run_has_the_bytes_of_those_before_up_to_the_last_window_of_one_that_was_killed(
    tmp_path: Path,
) -> None:
    path, traffic = tmp_path / "rank-0.jsonl", Traffic()
    killed = started(path, "a", traffic)
    exchange(traffic, 1)
    run(killed, range(3), lambda step: exchange(traffic, 10, 20))  # the third is in no window
    other = Traffic()
    of_another_run = started(path, "b", other)
    exchange(other, 5_000_000)
    of_another_run.close()
    traffic = Traffic()
    second = started(path, "a", traffic)
    assert second.exchanged == (21, 40)
    exchange(traffic, 100, 300)
    second.close()
    third = started(path, "a")
    third.begin_run("b")  # a second call changes nothing
    assert third.exchanged == (121, 340)
    third.close()
    summary = read_summary(path)
    assert summary is not None
    assert summary.earlier == {"bytes_out": 121, "bytes_in": 340}
    assert started(path, "a").exchanged == (121, 340), "what is earlier counts once"


def test_of_files_of_an_earlier_version_and_damaged_ones_what_can_be_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    window = {"kind": "window", "rank": 0, "first_step": 1, "last_step": 2, "steps": 2, "max": {}}
    old = [{"kind": "start", "rank": 0}, {**window, "mean": {"bytes_out": 50.5, "bytes_in": -3}}]
    forged = [{"kind": "start", "rank": 0, "run": "a"}, {**window, "mean": {"bytes_out": 1e300}}, {"kind": "window"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in (*old, *forged)) + "no line of a profile\n")
    assert started(path, "a").exchanged == (101, 0)
    assert started(tmp_path / "none.jsonl", "a").exchanged == (0, 0)

"""The trace follows the format that viewers read, and ranks share one time line."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import structlog

from gradbus.runtime.profiling.chrome_trace import Clock, Event, chrome_trace, merge_chrome_traces
from gradbus.runtime.profiling.profile import Profile

Trace = dict[str, Any]
CLOCK = Clock(unix_ns=1_800_000_000_000_000_000, perf_ns=5_000_000_000)
STEP: list[Event] = [
    ("compute", "compute", 5.0, 5.010, None),
    ("collectives", "bucket-0", 5.004, 5.013, None),
    ("collectives", "bucket-1", 5.008, 5.012, None),
    ("network", "wait", 5.010, 5.013, None),
    ("compute", "decode", 5.013, 5.014, None),
    ("step", "step 7", 5.0, 5.015, {"step": 7, "bytes_out": 4000, "bytes_in": 8000}),
]


def of_kind(trace: Trace, kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def rows(trace: Trace) -> dict[str, list[str]]:
    """Names of the spans by row, in the order of the trace; a row is called ``rank 0/compute``."""
    named = {event["pid"]: event["args"]["name"] for event in of_kind(trace, "M") if event["name"] == "process_name"}
    found = {
        (event["pid"], event["tid"]): f"{named[event['pid']]}/{event['args']['name']}"
        for event in of_kind(trace, "M")
        if event["name"] == "thread_name"
    }
    spans: dict[str, list[str]] = {name: [] for name in found.values()}
    for event in of_kind(trace, "X"):
        spans[found[event["pid"], event["tid"]]].append(event["name"])
    return spans


def check_schema(trace: Trace) -> None:
    """What viewers need; and slices of a row that lie in each other or apart, for others are shown wrongly."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert {"traceEvents", "displayTimeUnit", "otherData"} == trace.keys()
    open_until: dict[tuple[int, int], list[int]] = {}
    for event in trace["traceEvents"]:
        assert {"ph", "pid", "tid", "ts", "name"} <= event.keys()
        assert event["ph"] in ("X", "C", "M")
        assert [type(event[key]) for key in ("pid", "tid", "name")] == [int, int, str]
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            start_ns, end_ns = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            ends = open_until.setdefault((event["pid"], event["tid"]), [])
            while ends and ends[-1] <= start_ns:
                ends.pop()
            assert not ends or end_ns <= ends[-1], event
            ends.append(end_ns)
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    named = {(event["pid"], event["tid"]) for event in of_kind(trace, "M") if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in of_kind(trace, "X")} <= named
    names = [(event["pid"], event["tid"], event["name"]) for event in of_kind(trace, "M")]
    assert len(names) == len(set(names))


def test_a_trace_has_a_process_per_rank_with_rows_for_step_compute_and_network() -> None:
    trace = chrome_trace(3, STEP, CLOCK)
    check_schema(trace)
    assert rows(trace) == {
        "rank 3/step": ["step 7"],
        "rank 3/compute": ["compute", "decode"],
        "rank 3/network": ["wait"],
        "rank 3/collectives": ["bucket-0"],
        "rank 3/collectives 2": ["bucket-1"],
    }
    assert {event["pid"] for event in trace["traceEvents"]} == {3}
    sort = [event["args"]["sort_index"] for event in of_kind(trace, "M") if event["name"] == "process_sort_index"]
    assert sort == [3]


def test_times_are_in_microseconds_from_the_first_event_on() -> None:
    trace = chrome_trace(0, STEP, CLOCK)
    spans = {event["name"]: (event["ts"], event["dur"]) for event in of_kind(trace, "X")}
    assert (spans["compute"], spans["wait"]) == ((0.0, 10_000.0), (10_000.0, 3_000.0))
    assert trace["otherData"]["origin_unix_ns"] == CLOCK.unix_ns


def test_bytes_of_each_step_are_counter_tracks() -> None:
    trace = chrome_trace(0, STEP, CLOCK)
    assert [(event["name"], event["ts"], event["args"]) for event in of_kind(trace, "C")] == [
        ("bytes out per step", 0.0, {"bytes_out": 4000}),
        ("bytes in per step", 0.0, {"bytes_in": 8000}),
    ]


def test_spans_inside_others_share_their_row_and_those_that_merely_overlap_do_not() -> None:
    inside: list[Event] = [("compute", "outer", 1.0, 2.0, None), ("compute", "inner", 1.2, 1.5, None)]
    across: list[Event] = [*inside, ("compute", "across", 1.4, 2.5, None), ("compute", "after", 2.0, 2.1, None)]
    trace = chrome_trace(0, across, CLOCK)
    check_schema(trace)
    assert rows(trace)["rank 0/compute"] == ["outer", "inner", "after"]
    assert rows(trace)["rank 0/compute 2"] == ["across"]


def test_spans_without_length_or_order_and_strange_arguments_do_no_harm() -> None:
    events: list[Event] = [
        ("compute", "late", 3.0, 3.0, {"shape": (1, 2), "nan": float("nan"), "fine": [1]}),
        ("compute", "backwards", 2.0, 1.0, None),
        ("compute", "early", 2.0, 3.0, {"ok": True, "text": "a", "none": None}),
    ]
    trace = chrome_trace(0, events, CLOCK)
    check_schema(trace)
    args = {event["name"]: event.get("args") for event in of_kind(trace, "X")}
    assert args["late"] == {"shape": "(1, 2)", "nan": "nan", "fine": "[1]"}
    assert args["early"] == {"ok": True, "text": "a", "none": None}


def test_a_trace_without_events_is_one_too() -> None:
    trace = chrome_trace(0, [], CLOCK)
    check_schema(trace)
    assert of_kind(trace, "X") == []
    check_schema(merge_chrome_traces([trace, chrome_trace(1, STEP, CLOCK)]))
    check_schema(merge_chrome_traces([]))


def test_ranks_are_put_on_one_time_line_by_their_wall_clocks() -> None:
    # Rank 1 was booted at another time: its own clock says 905 s where rank 0's says 5 s. It starts 2 ms later.
    elsewhere: list[Event] = [(row, name, a + 900.002, b + 900.002, args) for row, name, a, b, args in STEP]
    second = chrome_trace(1, elsewhere, Clock(CLOCK.unix_ns, CLOCK.perf_ns + 900_000_000_000))
    first = chrome_trace(0, STEP, CLOCK)
    before = copy.deepcopy([first, second])
    merged = merge_chrome_traces([second, first])
    assert [first, second] == before
    check_schema(merged)
    starts = {event["pid"]: event["ts"] for event in of_kind(merged, "X") if event["name"] == "step 7"}
    assert starts == {0: 0.0, 1: 2000.0}
    assert rows(merged) == rows(first) | rows(second)
    times = [event["ts"] for event in merged["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)


def test_merging_step_by_step_gives_the_same_as_merging_at_once() -> None:
    traces = [
        chrome_trace(rank, STEP, CLOCK._replace(unix_ns=CLOCK.unix_ns + rank * 1_234_567), dropped_events=rank)
        for rank in range(3)
    ]
    at_once = merge_chrome_traces(traces)
    assert merge_chrome_traces([merge_chrome_traces(traces[:2]), traces[2]]) == at_once
    assert at_once["otherData"]["dropped_events"] == {"0": 0, "1": 1, "2": 2}


def test_a_rank_that_was_started_again_keeps_its_rows() -> None:
    again = chrome_trace(0, STEP[:1], CLOCK._replace(unix_ns=CLOCK.unix_ns + 10**9))
    merged = merge_chrome_traces([chrome_trace(0, STEP, CLOCK), again])
    check_schema(merged)
    assert rows(merged)["rank 0/compute"] == ["compute", "decode", "compute"]


@pytest.mark.parametrize("bad", [{}, [], {"traceEvents": []}, {"traceEvents": [], "otherData": {}}])
def test_a_trace_of_something_else_cannot_be_merged(bad: Any) -> None:
    with pytest.raises(ValueError, match="not a trace of gradbus"):
        merge_chrome_traces([bad])


def test_the_clock_reads_both_clocks_at_one_moment() -> None:
    before = time.time_ns() - time.perf_counter_ns()
    clock = Clock.read()
    after = time.time_ns() - time.perf_counter_ns()
    slack_ns = 50_000_000  # a busy machine, a clock that is being set
    assert min(before, after) - slack_ns <= clock.unix_ns - clock.perf_ns <= max(before, after) + slack_ns


def test_a_profile_s_trace_follows_the_schema_and_two_merge() -> None:
    traces = []
    for rank in range(2):
        profile = Profile(rank)
        for number in range(3):
            with profile.step(number) as step:
                with step.span("compute", batch=number), step.span("encode"):
                    pass
                start_s = time.perf_counter()
                step.count("bytes_out", 100)
                step.add_span("wait", start_s, time.perf_counter())
                for name in ("a", "b"):
                    profile.add_span(name, start_s, time.perf_counter() + 0.001, sent_bytes=50)
        profile.add_span("eval", time.perf_counter(), time.perf_counter())
        traces.append(profile.chrome_trace())
        check_schema(traces[-1])
    merged = merge_chrome_traces(traces)
    check_schema(merged)
    for rank in range(2):
        assert rows(merged)[f"rank {rank}/step"] == ["step 0", "step 1", "step 2"]
        assert rows(merged)[f"rank {rank}/compute"] == ["compute", "encode"] * 3 + ["eval"]
        assert rows(merged)[f"rank {rank}/network"] == ["wait"] * 3
        sent = [event["args"] for event in of_kind(merged, "C") if event["pid"] == rank]
        assert sent == [{"bytes_out": 100}] * 3


def test_the_trace_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    profile = Profile(0)
    with profile.step(0):
        pass
    path = tmp_path / "deep" / "trace-rank-0.json"
    assert profile.write_trace(path)
    assert json.loads(path.read_text()) == profile.chrome_trace()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with structlog.testing.capture_logs() as logs:
        assert not profile.write_trace(path / "below-a-file")
    assert [entry["event"] for entry in logs] == ["trace not written"]

"""Spans and counters, windows of steps. Clocks are real; what is compared does not depend on speed."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from gradbus.runtime.profiling.profile import Profile, StepProfile


def run(profile: Profile, steps: range, each: Callable[[StepProfile], object] = lambda step: None) -> None:
    for number in steps:
        with profile.step(number) as step:
            each(step)


def waited(seconds: float) -> Callable[[StepProfile], object]:
    return lambda step: step.add_span("wait", 1.0, 1.0 + seconds)


def spent(profile: Profile, name: str) -> float:
    return profile.summary().total[name]


def spin(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def spin_and_fail(seconds: float) -> None:
    spin(seconds)
    raise ValueError("bad")


def test_windows_have_the_mean_and_the_maximum_of_their_steps() -> None:
    profile = Profile(0, window_steps=2)
    for number, sent in enumerate([10, 30, 5]):
        with profile.step(number) as step:
            step.count("bytes_out", sent)
            step.add_span("wait", 1.0, 1.0 + sent)
    (window,) = profile.summary().windows
    assert (window.first_step, window.last_step, window.steps) == (0, 1, 2)
    assert (window.mean["bytes_out"], window.max["bytes_out"]) == (20, 30)
    assert (window.mean["wait_s"], window.max["wait_s"]) == (20, 30)
    assert (window.total["bytes_out"], window.total["wait_s"]) == (40, 40)
    summary = profile.summary()
    assert (summary.steps, summary.first_step, summary.last_step) == (3, 0, 2)
    assert (summary.mean["bytes_out"], summary.max["bytes_out"], summary.total["bytes_out"]) == (15, 30, 45)


def test_each_window_is_a_line_in_the_log_with_its_waits_and_bytes() -> None:
    profile = Profile(3, window_steps=2)
    with capture_logs() as logs:
        for number, sent in enumerate([10, 30, 5]):
            with profile.step(number) as step:
                step.count("bytes_out", sent)
                step.add_span("wait", 1.0, 1.0 + sent)
    (line,) = (one for one in logs if one["event"] == "window")
    assert (line["log_level"], line["rank"], line["first_step"], line["last_step"]) == ("info", 3, 0, 1)
    assert (line["wait_s_mean"], line["wait_s_max"], line["bytes_out"], line["bytes_in"]) == (20, 30, 40, 0)
    assert 0 <= line["step_s_mean"] <= line["step_s_max"]


def test_a_step_without_a_span_counts_as_zero_for_it() -> None:
    profile = Profile(0, window_steps=4)
    run(profile, range(3))
    run(profile, range(3, 4), waited(2.0))
    assert profile.summary().windows[0].mean["wait_s"] == 0.5
    assert profile.summary().mean["wait_s"] == 0.5


def test_spans_of_one_name_add_up_within_a_step() -> None:
    profile = Profile(0)
    with profile.step(1) as step:
        for _ in range(3):
            step.add_span("encode", 1.0, 1.5)
            step.count("bytes_out", 7)
            step.count("messages")
    assert {name: spent(profile, name) for name in ("encode_s", "bytes_out", "messages")} == {
        "encode_s": 1.5,
        "bytes_out": 21,
        "messages": 3,
    }
    assert profile.summary().max["encode_s"] == 1.5


def test_a_span_counts_without_those_inside_it_so_that_the_parts_add_up_to_the_step() -> None:
    profile = Profile(0)
    with profile.step(1) as step, step.span("compute"):
        spin(0.002)
        with step.span("encode"):
            spin(0.004)
            with step.span("compute"):
                spin(0.002)
    total = profile.summary().total
    assert total["compute_s"] >= 0.004
    assert total["encode_s"] >= 0.004
    assert total["compute_s"] + total["encode_s"] + total["other_s"] == pytest.approx(total["step_s"])
    shown = {event["name"]: event["dur"] for event in profile.chrome_trace()["traceEvents"] if event["ph"] == "X"}
    assert shown["compute"] >= 2000
    assert shown["encode"] >= 6000  # whole, in the trace


def test_spans_of_different_tasks_are_not_inside_each_other() -> None:
    profile = Profile(0)

    async def first(step: StepProfile, go: asyncio.Event, gone: asyncio.Event) -> None:
        with step.span("compute"):
            go.set()
            await gone.wait()

    async def second(step: StepProfile, go: asyncio.Event, gone: asyncio.Event) -> None:
        await go.wait()
        with step.span("encode"):
            spin(0.003)
        gone.set()

    async def main() -> None:
        go, gone = asyncio.Event(), asyncio.Event()
        with profile.step(1) as step:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(first(step, go, gone))
                tasks.create_task(second(step, go, gone))

    asyncio.run(main())
    assert spent(profile, "encode_s") >= 0.003
    assert spent(profile, "compute_s") >= 0.003


def test_a_task_that_outlives_the_span_it_was_started_in_takes_nothing_from_it() -> None:
    profile = Profile(0)

    async def later(step: StepProfile, go: asyncio.Event) -> None:
        await go.wait()
        with step.span("encode"):
            spin(0.001)

    async def main() -> None:
        go = asyncio.Event()
        with profile.step(1) as step:
            with step.span("compute"):
                task = asyncio.create_task(later(step, go))
            go.set()
            await task

    asyncio.run(main())
    assert spent(profile, "encode_s") >= 0.001


def test_an_error_inside_a_span_leaves_it_measured_and_marked() -> None:
    profile = Profile(0)
    with profile.step(1) as step:
        with pytest.raises(ValueError, match="bad"), step.span("decode"):
            spin_and_fail(0.001)
        with step.span("apply"):
            pass
    assert spent(profile, "decode_s") >= 0.001
    events = {event["name"]: event for event in profile.chrome_trace()["traceEvents"] if event["ph"] == "X"}
    assert events["decode"]["args"] == {"error": "ValueError"}
    assert "args" not in events["apply"]


def test_a_step_that_fails_is_counted_and_in_no_mean() -> None:
    profile = Profile(0)
    run(profile, range(2), waited(1.0))
    with pytest.raises(ValueError, match="bad"):
        run(profile, range(2, 3), lambda step: (waited(60.0)(step), spin_and_fail(0.0)))
    run(profile, range(3, 4), waited(1.0))
    summary = profile.summary()
    assert (summary.steps, summary.failed_steps, summary.mean["wait_s"], summary.max["wait_s"]) == (3, 1, 1.0, 1.0)
    shown = [event for event in profile.chrome_trace()["traceEvents"] if event["name"] == "step 2"]
    assert [event["args"] for event in shown] == [{"step": 2, "error": "ValueError"}]


def test_steps_do_not_overlap() -> None:
    profile = Profile(0)
    with profile.step(4), pytest.raises(RuntimeError, match="step 5 begins inside step 4"):
        run(profile, range(5, 6))
    run(profile, range(5, 6))
    assert profile.summary().steps == 2


def test_what_happens_between_steps_is_kept_apart() -> None:
    profile = Profile(0)
    run(profile, range(2))
    profile.add_span("eval", 10.0, 13.0)
    profile.add_span("checkpoint", 13.0, 14.0)
    profile.count("bytes_out", 100)
    with profile.span("warm_up"):
        pass
    run(profile, range(2, 4))
    summary = profile.summary()
    assert {name: summary.outside[name] for name in ("eval_s", "checkpoint_s", "bytes_out")} == {
        "eval_s": 3.0,
        "checkpoint_s": 1.0,
        "bytes_out": 100,
    }
    assert summary.outside["warm_up_s"] >= 0
    assert "eval_s" not in summary.mean


def test_within_a_step_the_profile_reports_to_that_step() -> None:
    profile = Profile(0)
    with profile.step(1):
        profile.add_span("eval", 10.0, 13.0)
        profile.count("bytes_in", 5)
    assert (spent(profile, "eval_s"), spent(profile, "bytes_in")) == (3.0, 5)
    assert profile.summary().outside == {}


def test_a_collective_is_in_the_trace_alone() -> None:
    profile = Profile(0)
    with profile.step(1) as step:
        profile.add_span("bucket", 10.0, 13.0, bytes=7)
        step.add_span("hook", 10.0, 11.0)
    assert profile.summary().total.keys() == {"hook_s", "step_s", "other_s"}
    (shown,) = (event for event in profile.chrome_trace()["traceEvents"] if event.get("cat") == "collectives")
    assert (shown["name"], shown["dur"], shown["args"]) == ("bucket", 3e6, {"bytes": 7})


def test_what_comes_after_the_end_of_a_step_counts_for_the_next_one_or_the_total() -> None:
    profile = Profile(0)
    with profile.step(1) as first:
        pass
    first.count("bytes_in", 5)
    run(profile, range(2, 3))
    first.count("bytes_in", 6)
    assert profile.summary().total["bytes_in"] == 11
    run(profile, range(3, 4))
    assert profile.summary().total["bytes_in"] == 11


def test_an_end_before_the_start_takes_no_time() -> None:
    profile = Profile(0)
    with profile.step(1) as step:
        step.add_span("wait", 5.0, 4.0)
    assert spent(profile, "wait_s") == 0


def test_nothing_is_lost_when_several_threads_report_at_once() -> None:
    profile = Profile(0, window_steps=7, max_events=100)
    each, stop = 20_000, threading.Event()
    interval_s = sys.getswitchinterval()

    def report(step: StepProfile) -> None:
        for _ in range(each):
            step.count("bytes_out", 2)
            step.add_span("wait", 0.0, 1.0)
        with step.span("compute"):
            pass

    def read() -> None:
        while not stop.is_set():
            profile.summary()

    with profile.step(0) as first:
        pass
    threads = [threading.Thread(target=report, args=(first,)) for _ in range(3)]
    reader = threading.Thread(target=read)
    sys.setswitchinterval(1e-5)
    try:
        for thread in [*threads, reader]:
            thread.start()
        number = 1
        while any(thread.is_alive() for thread in threads):
            run(profile, range(number, number + 1))
            number += 1
    finally:
        stop.set()
        for thread in [*threads, reader]:
            thread.join()
        sys.setswitchinterval(interval_s)
    total = profile.summary().total
    assert (total["bytes_out"], total["wait_s"]) == (3 * each * 2, 3 * each)
    trace = profile.chrome_trace()
    shown = sum(event["ph"] == "X" for event in trace["traceEvents"])
    assert shown == 100
    assert trace["otherData"]["dropped_events"] == {"0": 3 * (each + 1) + number - 100}


def test_memory_is_bounded_whatever_the_number_of_steps_spans_and_names() -> None:
    profile = Profile(0, window_steps=1, max_events=50, max_windows=3)
    for number in range(300):
        with profile.step(number) as step:
            step.count(f"counter-{number}")
            step.count("bytes_out", 10)
    for _ in range(5000):  # and no step ends any more
        profile.add_span("bucket", 0.0, 1.0)
    assert len(profile._inbox) <= 1025  # noqa: SLF001 - what a summary has not taken yet shows nowhere else
    summary = profile.summary()
    assert [window.first_step for window in summary.windows] == [297, 298, 299]
    assert (summary.steps, summary.total["bytes_out"], summary.dropped_events) == (300, 3000, 5250)
    assert len(summary.total) < 70
    assert sum(amount for name, amount in summary.total.items() if name.startswith(("counter", "more"))) == 300


@pytest.mark.parametrize("bad", [{"window_steps": 0}, {"max_events": 0}, {"max_windows": 0}])
def test_bounds_below_one_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        Profile(0, **bad)  # type: ignore[arg-type]


def test_a_step_costs_little() -> None:
    """30 us are allowed for six spans and four counters, and 13 measured; the bound leaves room for busy machines."""
    profile = Profile(0)
    took_s = []
    for block in range(20):
        start_s = time.perf_counter()
        for number in range(50):
            with profile.step(50 * block + number) as step:
                for name in ("compute", "encode", "wait", "decode", "apply", "eval"):
                    with step.span(name):
                        pass
                for name in ("bytes_out", "bytes_in", "messages", "values"):
                    step.count(name, 5)
        took_s.append((time.perf_counter() - start_s) / 50)
    assert min(took_s) < 300e-6

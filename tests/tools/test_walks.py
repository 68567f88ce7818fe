"""Traced walks: what counts as an entered file."""

from __future__ import annotations

import asyncio

import walks

from gradbus.runtime.compute import ComputeThread


def test_a_coroutine_is_entered_when_it_is_called_and_not_when_it_goes_on_after_an_await() -> None:
    tracer = walks.Tracer()
    thread = ComputeThread("walk")
    with tracer:
        thread.stop_current()  # before the walk
        tracer.begin()
        assert asyncio.run(thread.run(max, 1, 2)) == 2  # the loop resumes it when the thread is done
        tracer.end()
        thread.close()
    (walk,) = tracer.walks
    assert [call.function for call in walk.calls if call.function == "ComputeThread.run"] == ["ComputeThread.run"]
    assert "ComputeThread.stop_current" not in {call.function for call in walk.calls}
    assert "runtime/compute.py" in walk.files


def test_moments_are_undone_and_calls_go_through() -> None:
    seen: list[str] = []
    before = ComputeThread.should_stop
    with walks.moments((ComputeThread, "should_stop", lambda: seen.append("asked"))):
        assert ComputeThread("moment").should_stop() is False
    assert seen == ["asked"]
    assert ComputeThread.should_stop is before


def test_a_walk_counts_how_often_each_thread_enters_a_file_from_another_one() -> None:
    calls = [
        walks.Call("one", "a.py", "f", ""), walks.Call("one", "b.py", "g", "a.py"),
        walks.Call("one", "b.py", "h", "b.py"), walks.Call("two", "b.py", "g", ""),
        walks.Call("one", "b.py", "g", "a.py"),
    ]  # fmt: skip
    walk = walks.Walk(calls)
    assert walk.files == ["a.py", "b.py"]
    assert walk.legs() == [("one", [("a.py", 1), ("b.py", 2)]), ("two", [("b.py", 1)])]
    assert walk.text("way").splitlines()[0] == "way: 2 files"

"""Traced walks: what counts as an entered file."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path

import pytest
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


def test_what_an_import_runs_does_not_count_and_later_calls_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runtime"
    folder.mkdir()
    (folder / "walked_late.py").write_text(
        "def doubled(x):\n    return 2 * x\n\n"
        "class Made:\n    size = doubled(1)\n    def grow(self):\n        return doubled(self.size)\n"
    )
    monkeypatch.setattr(walks, "_ROOT", f"{tmp_path}/")
    monkeypatch.syspath_prepend(folder)
    tracer = walks.Tracer()
    with tracer:
        tracer.begin()
        made = importlib.import_module("walked_late").Made()  # its body calls a function
        tracer.end()
        tracer.begin()
        assert made.grow() == 4
        type("Unlike", (), {})
        tracer.end()
    del sys.modules["walked_late"]
    importing, later = tracer.walks
    assert importing.files == []
    assert [call.function for call in later.calls] == ["Made.grow", "doubled"]
    assert later.calls_of("runtime/walked_late.py") == "    Made.grow <- no file of gradbus x 1"


def test_moments_are_undone_and_calls_go_through() -> None:
    seen: list[str] = []
    before = ComputeThread.should_stop
    with walks.moments((ComputeThread, "should_stop", lambda _thread: seen.append("asked"))):
        assert ComputeThread("moment").should_stop() is False
    assert seen == ["asked"]
    assert ComputeThread.should_stop is before


def test_a_walk_counts_how_often_each_thread_enters_a_file_from_another_one() -> None:
    calls = [
        walks.Call("one", "a.py", "f", ""), walks.Call("one", "b.py", "g", "a.py"),
        walks.Call("one", "b.py", "h", "b.py"), walks.Call("two", "b.py", "A.__init__", ""),
        walks.Call("one", "b.py", "g", "a.py"),
    ]  # fmt: skip
    walk = walks.Walk(calls)
    assert walk.files == ["a.py", "b.py"]
    assert walk.legs() == [("one", [("a.py", 1), ("b.py", 2)]), ("two", [("b.py", 1)])]
    assert walk.text("way").splitlines()[0] == "way: 2 files"
    assert walk.only_made == []
    assert walks.Walk([*calls, walks.Call("two", "c.py", "C.__init__", "a.py")]).only_made == ["c.py"]

"""The compute thread: the loop goes on, errors travel, and a cancel waits until the thread has let go."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from typing import Any

import pytest

from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.user_errors import user_error


def run_quietly(main: Any) -> Any:
    """``asyncio.run``, and nothing was left for the loop's exception handler ("never retrieved")."""
    complaints: list[dict[str, Any]] = []

    async def wrapped() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        result = await main()
        gc.collect()
        return result

    result = asyncio.run(wrapped())
    assert complaints == []
    return result


def test_a_result_comes_back_with_its_arguments() -> None:
    async def main() -> int:
        with ComputeThread() as compute:
            return await compute.run(lambda a, *, b: a - b, 5, b=2)

    assert run_quietly(main) == 3


def test_an_error_travels_to_the_caller_and_the_thread_goes_on() -> None:
    async def main() -> str:
        with ComputeThread() as compute:
            with pytest.raises(ZeroDivisionError):
                await compute.run(lambda: 1 / 0)
            return await compute.run(lambda: "still here")

    assert run_quietly(main) == "still here"


def test_functions_run_one_after_the_other_on_one_named_thread() -> None:
    async def main() -> None:
        with ComputeThread("train") as compute:
            order: list[int] = []
            names = await asyncio.gather(*(compute.run(note, order, number) for number in range(5)))
            assert order == list(range(5))
            assert len(set(names)) == 1
            assert names[0].startswith("gradbus-train")

    def note(order: list[int], number: int) -> str:
        order.append(number)
        return threading.current_thread().name

    run_quietly(main)


def test_the_loop_goes_on_while_a_function_runs() -> None:
    async def main() -> None:
        release = threading.Event()
        with ComputeThread() as compute:
            running = asyncio.create_task(compute.run(release.wait, 10))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not running.done()
            release.set()
            assert await running

    run_quietly(main)


def test_a_cancel_asks_the_function_to_stop_and_waits_until_it_has() -> None:
    async def main() -> None:
        started, let_go = threading.Event(), threading.Event()

        def work() -> None:
            started.set()
            while not compute.should_stop():
                time.sleep(0.001)
            time.sleep(0.02)  # it takes a moment to put things in order
            let_go.set()

        with ComputeThread() as compute:
            running = asyncio.create_task(compute.run(work))
            await asyncio.to_thread(started.wait, 10)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert let_go.is_set()

    run_quietly(main)


def test_an_error_of_a_cancelled_function_does_not_replace_the_cancel() -> None:
    async def main() -> None:
        started = threading.Event()

        def work() -> None:
            started.set()
            while not compute.should_stop():
                time.sleep(0.001)
            raise RuntimeError("given up")

        with ComputeThread() as compute:
            running = asyncio.create_task(compute.run(work))
            await asyncio.to_thread(started.wait, 10)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            del running

    run_quietly(main)


def test_a_function_that_had_not_started_never_runs_after_a_cancel_and_the_one_before_it_is_not_disturbed() -> None:
    async def main() -> None:
        release, ran = threading.Event(), threading.Event()
        with ComputeThread() as compute:
            first = asyncio.create_task(compute.run(release.wait, 10))
            second = asyncio.create_task(compute.run(ran.set))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            assert not compute.should_stop()
            release.set()
            assert await first
            await compute.run(lambda: None)
            assert not ran.is_set()

    run_quietly(main)


def test_a_function_that_does_not_stop_holds_its_caller_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbus.runtime.compute.LET_GO_S", 0.05)

    async def main() -> None:
        started, release = threading.Event(), threading.Event()

        def work() -> bool:
            started.set()
            return release.wait(10)

        with ComputeThread() as compute:
            running = asyncio.create_task(compute.run(work))
            await asyncio.to_thread(started.wait, 10)
            running.cancel()
            async with asyncio.timeout(5):
                with pytest.raises(asyncio.CancelledError):
                    await running
            release.set()

    run_quietly(main)


def test_the_wish_to_stop_is_forgotten_when_the_next_function_starts() -> None:
    async def main() -> None:
        with ComputeThread() as compute:
            compute.stop_current()
            assert compute.should_stop()
            assert await compute.run(lambda: not compute.should_stop())

    run_quietly(main)


def test_closing_asks_what_runs_to_stop_and_takes_nothing_new() -> None:
    async def main() -> None:
        started = threading.Event()

        def work() -> bool:
            started.set()
            while not compute.should_stop():
                time.sleep(0.001)
            return True

        compute = ComputeThread()
        running = asyncio.create_task(compute.run(work))
        waiting = asyncio.create_task(compute.run(lambda: None))
        await asyncio.to_thread(started.wait, 10)
        compute.close()
        assert await running
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(RuntimeError):
            await compute.run(lambda: None)

    run_quietly(main)


def test_who_may_follow_gets_the_result_where_closing_drops_its_function_from_the_queue() -> None:
    async def main() -> None:
        started = threading.Event()

        def work() -> None:
            started.set()
            while not compute.should_stop():
                time.sleep(0.001)

        compute = ComputeThread()
        running = asyncio.create_task(compute.run(work))
        following = asyncio.create_task(compute.run_or_follow(lambda: "state"))
        cancelled = asyncio.create_task(compute.run_or_follow(lambda: "state"))
        await asyncio.to_thread(started.wait, 10)
        compute.close()
        cancelled.cancel()
        assert await following == "state"
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await running
        assert await compute.run_or_follow(lambda: "later") == "later"

    run_quietly(main)


def test_a_rest_ends_when_the_function_is_to_stop_and_one_that_goes_on_rests_until_the_thread_is_closed() -> None:
    rested_s: list[float] = []
    is_resting, goes_on = threading.Event(), threading.Event()

    def deaf(compute: ComputeThread) -> None:
        for seconds in (60.0, 0.05, 60.0):
            began_s = time.monotonic()
            is_resting.set()
            compute.rest(seconds)
            rested_s.append(time.monotonic() - began_s)
            if len(rested_s) == 2:
                goes_on.set()

    async def main() -> None:
        with ComputeThread() as compute:
            running = asyncio.create_task(compute.run(deaf, compute))
            assert await asyncio.to_thread(is_resting.wait, 20)
            compute.stop_current()
            assert await asyncio.to_thread(goes_on.wait, 20)
        await running

    run_quietly(main)
    assert rested_s[0] < 50.0
    assert rested_s[1] >= 0.05, "it was asked to stop before"
    assert rested_s[2] < 50.0


def test_a_stop_iteration_reaches_the_caller_as_what_a_future_can_hold() -> None:
    async def main() -> None:
        with ComputeThread() as compute:
            async with asyncio.timeout(5):
                with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
                    await compute.run(lambda: next(iter(())))
                assert isinstance(caught.value.__cause__, StopIteration)
                assert await compute.run(lambda: 1) == 1

    run_quietly(main)


def test_a_function_that_ends_the_program_fails_with_an_error_that_has_its_line() -> None:
    def leave() -> None:
        sys.exit("no data")

    async def main() -> None:
        with ComputeThread() as compute:
            async with asyncio.timeout(5):
                with pytest.raises(RuntimeError, match=r"sys\.exit was called, with 'no data'") as caught:
                    await compute.run(leave)
                assert user_error(caught.value).place.endswith(f"{leave.__code__.co_firstlineno + 1} in leave")
                assert await compute.run(lambda: 1) == 1

    run_quietly(main)

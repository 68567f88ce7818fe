"""The receive thread: how one that waits does its work, and what does not end it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
from bus_helpers import Run, receiver_of
from cyclonedds.core import DDSException
from group_node import joined
from structlog.testing import capture_logs

import gradbus
from gradbus.runtime.bus import raw_endpoints
from gradbus.runtime.bus import wait_loop as wait_loop_module
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.wait_loop import IDLE_S, WaitLoop
from gradbus.runtime.errors import BusClosed, PeerLost
from gradbus.runtime.spinning import Spinning
from gradbus.runtime.transport.api import Periodic
from gradbus.runtime.transport.channels import ToController, collective_channel
from gradbus.runtime.transport.dds import participant
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import Frame, FrameKey, Kind

ends_a_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def break_it(bus: Bus) -> None:
    """Let the next turn of the receive thread fail."""

    def fail() -> None:
        raise OSError("dds_waitset_wait returned -1")

    receiver_of(bus).add_periodic(Periodic(fail))


class Looks:
    """Stands in for the wait set: there are news at one of the looks."""

    def __init__(self, news_at: int) -> None:
        self.count = 0
        self._news_at = news_at

    def wait(self, timeout_s: float) -> list[int]:
        self.count += 1
        return [1] if self.count == self._news_at else []


class Waits(Looks):
    """A wait takes its time, a millisecond at most."""

    def wait(self, timeout_s: float) -> list[int]:
        time.sleep(min(timeout_s, 0.001))
        return super().wait(timeout_s)

    def wake(self) -> None:
        pass


def test_who_waits_gives_its_core_to_others_until_what_it_waits_for_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, yields = Looks(news_at=3), list[int]()
    monkeypatch.setattr(wait_loop_module, "SPIN_S", 60.0)
    monkeypatch.setattr(wait_loop_module, "SPINNING", Spinning(cores=2))  # that of the process may rest after a stall
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(looks.count))
    loop = WaitLoop(cast("Any", looks), lambda numbers, until_s: bool(numbers), failed=lambda: None, ended=lambda: None)

    loop.poll_inline(lambda: looks.count == 3, time.monotonic() + 60.0)

    assert looks.count == 3
    assert yields == [1, 2]


class SignalAt:
    """Stands in for a signal that comes at the n-th moment when Python handles signals: as a function begins, or as a C
    function has returned. For :func:`sys.setprofile`."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_return"):
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt


def test_wherever_a_signal_ends_an_inline_wait_other_threads_can_wait_and_work_afterwards() -> None:
    def is_interrupted(loop: WaitLoop, looks: Looks, moment: int) -> bool:
        sys.setprofile(SignalAt(moment))
        try:
            loop.poll_inline(lambda: looks.count >= 3, time.monotonic() + 60.0)
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    for moment in range(1, 200):
        looks, looked, handled = Waits(news_at=0), list[int](), list[threading.Event]()

        def handle(numbers: list[int], until_s: float, handled: list[threading.Event] = handled) -> bool:
            for event in handled:
                event.set()
            return False

        loop = WaitLoop(cast("Any", looks), handle, failed=lambda: None, ended=lambda: None)
        was_interrupted = is_interrupted(loop, looks, moment)
        done = cast("Callable[[], bool]", partial(looked.append, 1))
        another = threading.Thread(target=loop.poll_inline, args=(done, time.monotonic() + 0.01))
        another.start()
        another.join(10.0)
        assert looked, f"no other thread can wait after a signal at moment {moment}"
        handled.append(threading.Event())  # a new one: the signal may come while its own lock is held
        loop.start()
        assert handled[0].wait(10.0), f"the thread cannot work after a signal at moment {moment}"
        loop.stop()
        loop.join(10.0)
        if not was_interrupted:
            break
    assert 10 < moment < 199


def test_who_asks_for_the_thread_while_another_one_waits_inline_has_it_when_that_wait_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wait_loop_module, "BACKOFF_S", 60.0)
    thread_works = threading.Event()

    def handle(numbers: list[int], until_s: float) -> bool:
        if asked and threading.get_ident() == loop.ident:
            thread_works.set()
        return False

    def done() -> bool:
        if time.monotonic() > began_s + 0.05:  # the thread has left the wait to this one by now
            loop.wake_io_thread()
            asked.append(True)
        return bool(asked)

    asked, began_s = list[bool](), time.monotonic()
    loop = WaitLoop(cast("Any", Waits(news_at=0)), handle, failed=lambda: None, ended=lambda: None)
    loop.start()
    try:
        loop.poll_inline(done, began_s + 60.0)
        assert thread_works.wait(10.0)
    finally:
        loop.stop()
        loop.join(10.0)


def test_who_asked_for_the_thread_before_another_one_waits_inline_has_it_when_that_wait_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wait_loop_module, "BACKOFF_S", 60.0)
    in_turn, go_on, was_inline, thread_works = (threading.Event() for _ in range(4))

    def handle(numbers: list[int], until_s: float) -> bool:
        if threading.get_ident() != loop.ident:
            was_inline.set()
        elif was_inline.is_set():
            thread_works.set()
        else:
            in_turn.set()
            assert go_on.wait(10.0)
        return False

    def done() -> bool:
        return was_inline.is_set() and time.monotonic() > began_s + 0.05

    began_s = time.monotonic()
    loop = WaitLoop(cast("Any", Waits(news_at=0)), handle, failed=lambda: None, ended=lambda: None)
    another = threading.Thread(target=loop.poll_inline, args=(done, began_s + 60.0))
    loop.start()
    try:
        assert in_turn.wait(10.0)
        assert not loop.is_relieved
        loop.is_asked = True
        another.start()
        while not loop._inline_thread and time.monotonic() < began_s + 10.0:  # noqa: SLF001 - no event tells of it
            time.sleep(0.001)
        go_on.set()
        assert thread_works.wait(10.0)
    finally:
        go_on.set()
        loop.stop()
        loop.join(10.0)
        another.join(10.0)


def test_the_thread_goes_on_at_once_when_it_is_asked_while_it_leaves_the_wait_to_others_and_nobody_waits() -> None:
    class Wanted(threading.Event):
        """Its wait ends at once while another thread waits inline, or has just done so; then it goes on."""

        def wait(self, timeout: float | None = None) -> bool:
            if loop._inline_thread or loop._was_inline:  # noqa: SLF001 - the moment that is meant passes at once
                return False
            backs_off.set()
            return super().wait(60.0)

    def handle(numbers: list[int], until_s: float) -> bool:
        if backs_off.is_set() and threading.get_ident() == loop.ident:
            thread_works.set()
        return False

    backs_off, thread_works, began_s = threading.Event(), threading.Event(), time.monotonic()
    loop = WaitLoop(cast("Any", Waits(news_at=0)), handle, failed=lambda: None, ended=lambda: None)
    loop._wanted = Wanted()  # noqa: SLF001 - as above
    loop.poll_inline(lambda: time.monotonic() > began_s + 0.001, began_s + 60.0)
    loop.start()
    try:
        assert backs_off.wait(10.0)
        loop.wake_io_thread()
        assert thread_works.wait(10.0)
    finally:
        loop.stop()
        loop.join(10.0)


def test_the_thread_is_relieved_from_the_begin_of_a_wait_inline_until_it_begins_a_turn_itself() -> None:
    handled, seen = threading.Event(), list[bool]()

    def handle(numbers: list[int], until_s: float) -> bool:
        if threading.get_ident() == loop.ident and not loop.is_relieved:
            handled.set()
        return False

    def done() -> bool:
        seen.append(loop.is_relieved)
        return len(seen) > 2

    loop = WaitLoop(cast("Any", Waits(news_at=0)), handle, failed=lambda: None, ended=lambda: None)
    assert not loop.is_relieved
    loop.poll_inline(done, time.monotonic() + 60.0)
    assert all(seen)
    assert loop.is_relieved
    loop.start()
    try:
        assert handled.wait(10.0)
    finally:
        loop.stop()
        loop.join(10.0)


def test_what_fails_while_somebody_does_the_work_of_the_thread_is_a_fault_of_the_bus(run: Run) -> None:
    async def main() -> None:
        fault = DDSException(DDSException.DDS_RETCODE_ERROR, "status of a reader")

        class Broken:
            def wait(self, timeout_s: float) -> list[int]:
                raise fault

        told = asyncio.Event()
        loop = WaitLoop(
            cast("Any", Broken()), lambda numbers, until_s: bool(numbers), failed=told.set, ended=lambda: None
        )
        loop.poll_inline(lambda: False, time.monotonic() + 60.0)
        assert loop.fault is fault
        await told.wait()

    run(main)


def test_what_is_called_periodically_is_called_soon_then_at_its_pace_and_no_more_when_it_says_so(run: Run) -> None:
    calls, looks = list[float](), Looks(news_at=0)
    paced, once = threading.Event(), list[bool]()

    def function() -> bool:
        calls.append(time.monotonic())
        if len(calls) == 2:
            loop.call_within(periodic, 0.0)
        if len(calls) == 3:
            paced.set()
        return len(calls) < 3

    looks = Waits(news_at=0)
    loop = WaitLoop(cast("Any", looks), lambda numbers, until_s: bool(numbers), failed=lambda: None, ended=lambda: None)
    periodic = Periodic(function, 0.2)
    loop.add_periodic(periodic)
    loop.add_periodic(Periodic(lambda: bool(once.append(True))))
    loop.start()
    assert paced.wait(20)
    time.sleep(0.01)
    loop.stop()
    loop.join(20)
    assert calls[1] - calls[0] >= 0.2
    assert calls[2] - calls[1] < 0.2  # it was asked for earlier
    assert len(calls) == 3
    assert once == [True]


def test_a_driver_in_place_of_the_thread_is_told_when_the_next_step_is_due() -> None:
    looks, calls, ended = Waits(news_at=2), list[str](), list[bool]()
    loop = WaitLoop(
        cast("Any", looks),
        lambda numbers, until_s: bool(numbers),
        failed=lambda: None,
        ended=lambda: ended.append(True),
    )
    assert loop.step() == IDLE_S  # nothing is to be called
    loop.add_periodic(Periodic(lambda: bool(calls.append("once")) or True, 0.5))
    assert loop.step() == 0.0  # there were news
    assert calls == ["once"]
    assert 0.0 < loop.step() <= 0.5
    assert calls == ["once"]
    loop.drop_rest()
    assert (loop.step(), ended) == (IDLE_S, [True])  # it holds no periodic calls


def test_frames_that_nobody_can_deal_with_are_counted_and_those_after_them_arrive(
    run: Run, place: dict[str, Any]
) -> None:
    topic = collective_channel("x")

    async def main() -> None:
        loop, good = asyncio.get_running_loop(), asyncio.Event()

        def take(frame: Frame) -> None:
            if frame.key.part:
                raise AttributeError("not there yet")
            loop.call_soon_threadsafe(good.set)

        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            port, away = one.raw_endpoints(), other.raw_endpoints()
            port.open_reader(topic, take)
            writer = away.open_writer(topic)
            await other.matched(lambda: writer.matched == 1, timeout_s=20)
            for part in (1, 2, 0):
                key = FrameKey(Kind.COLLECTIVE, 1, 0, 0, 1, 0, "x", part)
                assert away.write(writer, next(frames.split(key, b"")))
            await good.wait()
            assert one.rejected == {"handler failed": 2}

    with capture_logs() as lines:
        run(main)
    # Once for both. What DDS itself or the thread of another test says meanwhile is not of this reader.
    assert [line["topic"] for line in lines if line["event"] == "frame not handled"] == [topic.name]


@ends_a_thread
def test_whoever_waits_for_a_message_or_a_match_is_told_when_the_thread_has_ended(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async def everything() -> None:
            async for _ in bus.subscribe(ToController):
                raise AssertionError("nobody says anything")

        async with gradbus.connect(**place) as bus:
            waiting = [
                asyncio.create_task(bus.subscribe(ToController).get()),
                asyncio.create_task(everything()),
                asyncio.create_task(bus.matched(lambda: False, timeout_s=50)),
            ]
            await asyncio.sleep(0)
            break_it(bus)
            for task in waiting:
                with pytest.raises(BusClosed, match=r"the receive thread ended with .*dds_waitset_wait returned -1"):
                    await task

    run(main)


@ends_a_thread
def test_a_group_ends_with_the_thread_of_its_bus_and_leaves_at_once(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_endpoints, "REMOVAL_S", 30.0)  # so that who waits for the thread is known by it

    async def main() -> None:
        async def second() -> None:
            async with joined(place, 1, 2) as group:
                with pytest.raises(PeerLost):
                    await group.recv("never", source=0)

        other = asyncio.create_task(second())
        async with gradbus.connect(**place, lease_s=20.0) as bus:
            async with gradbus.join_group(bus, rank=0, world=2, collective_timeout_s=50.0) as group:
                pending = group.all_gather("x", b"")
                break_it(bus)
                for handle in (pending, group.all_gather("y", b"")):
                    with pytest.raises(BusClosed, match="the receive thread ended with"):
                        await handle
                left_s = time.monotonic()
            assert time.monotonic() - left_s < 20.0  # nobody waits for the thread to take the readers away
        await other

    run(main)


def test_a_group_is_closed_also_where_dds_does_not_delete_what_it_had(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_endpoints, "REMOVAL_S", 50.0)  # so that whoever waits for it in vain is known by it

    def fails(*endpoints: object) -> None:
        raise DDSException(-1, "no")

    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            port = bus.raw_endpoints()
            port.open_writer(collective_channel("g"))
            monkeypatch.setattr(participant.Participant, "close_endpoints", fails)
            with capture_logs() as lines:
                async with asyncio.timeout(40.0):
                    await port.close()
            assert "readers or writers not deleted" in [line["event"] for line in lines]

    run(main)

"""From the receive thread to the event loop: what comes at once is polled for, in order, and the loop is not held."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from bus_helpers import CLIENT, Run, reads, writer_of
from patience import until

import gradbus
from gradbus.commands.peer_link import END, HERE, PEER, ROOT, Link
from gradbus.runtime.bus import handover, wait_loop
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.wait_loop import SPIN_S, WaitLoop
from gradbus.runtime.transport.channels import ToController, collective_channel
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.frames import Frame, FrameKey, Kind
from gradbus.runtime.wire.messages import Control

TRIPS = 200


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Lengths of the polls on event loops, in seconds. Every wait for the bus begins with one."""
    taken: list[float] = []
    inline = WaitLoop.poll_inline

    def poll_inline(self: WaitLoop, done: Callable[[], bool], until_s: float, *, may_sleep: bool = True) -> None:
        began_s = time.monotonic()
        inline(self, done, until_s, may_sleep=may_sleep)
        taken.append(time.monotonic() - began_s)

    monkeypatch.setattr(WaitLoop, "poll_inline", poll_inline)
    monkeypatch.setattr(handover, "SHORT_SLEEPS", 0)
    return taken


@contextmanager
def echo(place: dict[str, Any]) -> Iterator[None]:
    """A bus on a loop in a thread of its own, that sends back each word."""

    async def answer() -> None:
        async with gradbus.connect(**place) as bus:
            with bus.subscribe(Control) as inbox:
                end = Link(bus, PEER, inbox)
                while (word := (await end.hear())[1]) != END:
                    await end.say(word)

    thread = threading.Thread(target=lambda: asyncio.run(asyncio.wait_for(answer(), 50.0)))
    thread.start()
    try:
        yield
    finally:
        thread.join(50.0)


def test_answers_that_come_at_once_are_polled_for_and_timers_and_other_tasks_have_their_turns(
    run: Run, place: dict[str, Any], polls: list[float]
) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1
            await asyncio.sleep(0.001)

    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            with bus.subscribe(Control) as inbox:
                end = Link(bus, ROOT, inbox)
                await end.meet(HERE)
                ticking = asyncio.create_task(tick())
                began_s = time.monotonic()
                for trip in range(TRIPS):
                    await end.say(str(trip))
                    while (await end.hear())[1] != str(trip):
                        pass
                took_s = time.monotonic() - began_s
                ticking.cancel()
                assert ticks >= min(TRIPS, 200 * took_s) / 10
                await end.say(END)

    with echo(place):
        run(main)
    assert polls


def test_messages_keep_their_order_whether_the_loop_is_woken_or_polls(
    run: Run,
    place: dict[str, Any],
    polls: list[float],  # so that it polls between the sleeps
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as bus, gradbus.connect(**place) as other:
            with bus.subscribe(ToController) as inbox:
                await reads(other, ToController)
                sending = threading.Thread(target=lambda: [send(other, number) for number in range(TRIPS)])
                sending.start()
                got = [await inbox.get() for _ in range(TRIPS)]
                sending.join()
                assert [int(message.body.reason) for message in got] == list(range(TRIPS))  # type: ignore[union-attr]

    def send(other: Bus, number: int) -> None:
        key = FrameKey(Kind.CONTROL, 0, 0, CLIENT.sender, CLIENT.incarnation, number)
        (frame,) = frames.split(key, control.encode(Leave(str(number))), chunk_bytes=control.MAX_BODY_BYTES)
        while not writer_of(other, ToController).write((), frame):
            time.sleep(0.001)

    run(main)


def test_a_wait_in_which_nothing_comes_is_asleep_but_for_its_beginning(
    run: Run, place: dict[str, Any], polls: list[float]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            with bus.subscribe(ToController) as inbox:
                while not polls:  # the loop may have had something else to do
                    waiting = asyncio.create_task(inbox.get())
                    await asyncio.sleep(0.05)  # time in which it could poll again
                    waiting.cancel()
                    await asyncio.wait([waiting])
                assert len(polls) == 1

    run(main)


def test_a_loop_that_polls_is_held_for_a_bounded_time_by_what_has_piled_up_and_the_thread_takes_the_rest(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, count = collective_channel("x"), 40
    monkeypatch.setattr(wait_loop, "BACKOFF_S", 30.0)  # the thread leaves the work to others, as while ranks wait
    takers: list[int] = []

    async def main() -> None:
        all_taken, loop = asyncio.Event(), asyncio.get_running_loop()

        def take(frame: Frame) -> None:
            time.sleep(2e-3)
            takers.append(threading.get_ident())
            if len(takers) == count:
                loop.call_soon_threadsafe(all_taken.set)

        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            port, away = one.raw_endpoints(), other.raw_endpoints()
            port.open_reader(topic, take)
            writer = away.open_writer(topic, retained_samples=count)
            await other.matched(lambda: writer.matched == 1, timeout_s=20)
            port.wait_loop.poll_inline(lambda: False, time.monotonic() + SPIN_S, may_sleep=False)
            # Else it would take what comes: no event tells of it.
            until(lambda: port.wait_loop._backs_off)  # noqa: SLF001
            for number in range(count):
                key = FrameKey(Kind.COLLECTIVE, 1, 0, 0, 1, number, "x")
                assert away.write(writer, next(frames.split(key, b"")))
            assert await away.drain(20.0)
            for _ in range(100):
                port.wait_loop.poll_inline(lambda: bool(takers), time.monotonic() + SPIN_S, may_sleep=False)
            polled = len(takers)
            port.wait_loop.wake_io_thread()
            await all_taken.wait()
            assert 0 < polled <= 8
            assert set(takers[:polled]) == {threading.get_ident()}
            assert threading.get_ident() not in takers[polled:]

    run(main)

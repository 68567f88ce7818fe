"""How a bus ends: in bounded time, whoever waits is told, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bus_helpers import CHIEF, CLIENT, MIB, MODEL, UPDATE, Run, lowest, reads
from patience import eventually

import gradbus
from gradbus.runtime.bus import raw_endpoints
from gradbus.runtime.bus.raw_endpoints import RawEndpoints
from gradbus.runtime.errors import BusClosed
from gradbus.runtime.transport.channels import ToController, collective_channel
from gradbus.runtime.transport.dds import domains
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate, Control, ModelBlob, TrainCmd

NEVER_TAKES = Path(__file__).parents[2] / "support" / "never_takes.py"
BOUND_S = 15.0  # of a second, on a machine that stands still for some; what is unsent would give up after 30 s
WRITERS = 12  # whose samples a process does not take: a second each, one after the other
both_loops = pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)


_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_before() -> Iterator[None]:
    """Threads of tests before this one do not count."""
    _earlier.update(threading.enumerate())
    yield
    _earlier.clear()


def threads_of_gradbus() -> list[str]:
    """Names of the bus threads that the test has started and that live. The one that closes a bus reports just before
    it ends."""
    started = [thread for thread in threading.enumerate() if thread not in _earlier]
    for thread in started:
        if thread.name == "gradbus-close":
            thread.join(5)
    of_process = ("gradbus-processes", "gradbus-unmap")  # one for all buses, which stays
    names = [thread.name for thread in started if thread.is_alive() and thread.name not in of_process]
    return [name for name in names if name.startswith("gradbus-")]


def threads_of_the_process() -> int:
    """All threads, those of DDS included, but for asyncio's own pool, which starts one more when it likes."""
    pool = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
    return len(os.listdir("/proc/self/task")) - pool


@both_loops
def test_after_the_close_no_thread_is_left_and_the_switch_interval_is_as_before(
    run: Run, place: dict[str, Any]
) -> None:
    before_s = sys.getswitchinterval()

    async def main() -> None:
        async with gradbus.connect(**place):
            async with gradbus.connect(**place) as bus:
                with bus.subscribe(ToController):
                    await bus.publish(CLIENT, Leave("x"))
                assert sys.getswitchinterval() < before_s
                assert sorted(threads_of_gradbus()) == ["gradbus-receive"] * 2 + ["gradbus-write"] * 2
            assert sys.getswitchinterval() < before_s  # the outer one is still open
        assert sys.getswitchinterval() == before_s
        assert threads_of_gradbus() == []

    run(main)


def test_a_bus_opened_and_closed_many_times_leaks_neither_threads_nor_files(run: Run, place: dict[str, Any]) -> None:
    async def once() -> None:
        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            with other.subscribe(ToController) as inbox:
                await reads(one, ToController)
                await one.publish(CLIENT, Leave("x"))
                await inbox.get()

    async def main() -> None:
        await once()
        assert threads_of_gradbus() == []
        threads, files = threads_of_the_process(), len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            await once()
        assert threads_of_gradbus() == []
        # The system takes a moment to bury a thread that has ended.
        await eventually(lambda: threads_of_the_process() <= threads)
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= files)

    run(main)


def test_after_the_close_everything_that_needs_the_bus_says_that_it_is_closed(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            bus.open_writer(ToController)
            bus.open_writer(ClientUpdate)
        with pytest.raises(BusClosed):
            await bus.publish(CLIENT, Leave("x"))
        with pytest.raises(BusClosed):
            await bus.publish(CHIEF, TrainCmd(1, 0, 1, 0.1, 0))
        with pytest.raises(BusClosed):
            await bus.send_update(UPDATE, 1, b"x")
        with pytest.raises(BusClosed):
            await bus.send_model(MODEL, b"x")
        with pytest.raises(BusClosed):
            bus.subscribe(ToController)
        with pytest.raises(BusClosed):
            await bus.matched(lambda: False, timeout_s=5)
        await bus.close()  # again: nothing happens

    run(main)


@both_loops
def test_whoever_waits_is_told_when_the_bus_closes(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            bus.open_writer(ToController)
            iterating = asyncio.create_task(everything(bus.subscribe(ToController)))
            getting = asyncio.create_task(bus.subscribe(ModelBlob).get())
            matching = asyncio.create_task(bus.matched(lambda: False, timeout_s=50))
            await asyncio.sleep(0)
        assert await iterating == []
        with pytest.raises(BusClosed):
            await getting
        with pytest.raises(BusClosed):
            await matching

    async def everything(inbox: Any) -> list[Any]:
        return [message async for message in inbox]

    run(main)


def test_a_send_after_a_close_that_had_to_wait_for_another_says_that_the_bus_is_closed(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as other:
            other.subscribe(ClientUpdate)
            async with gradbus.connect(**place) as one:
                one.open_writer(ModelBlob)
                await reads(one, ClientUpdate)
                sending = asyncio.create_task(one.send_update(UPDATE, 1, bytes(8 * MIB)))
                await asyncio.sleep(0)
            assert await sending == 8 * MIB
            async with asyncio.timeout(20.0):
                with pytest.raises(BusClosed):
                    await one.send_update(UPDATE, 1, b"x")
                with pytest.raises(BusClosed):
                    await one.send_model(MODEL, b"x")

    run(main)


def test_what_was_sent_just_before_the_close_still_arrives(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as other:
            inbox = other.subscribe(ToController, ClientUpdate)
            async with gradbus.connect(**place) as one:
                await reads(one, ToController)
                await reads(one, ClientUpdate)
                sending = asyncio.create_task(one.send_update(UPDATE, 1, bytes(8 * MIB)))
                await one.publish(CLIENT, Leave("last words"))
                await asyncio.sleep(0)
            assert await sending == 8 * MIB
            messages = [await inbox.get() for _ in range(9)]
            assert sum(isinstance(message, ClientUpdate) for message in messages) == 8
            assert Control(CLIENT.sender, CLIENT.incarnation, Leave("last words")) in messages

    run(main)


@both_loops
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "binding"])
def test_a_close_with_unsent_data_is_bounded_and_the_sender_is_told(
    run: Run, fast: bool, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as other:
            inbox = other.subscribe(ClientUpdate)
            async with gradbus.connect(**place, fast=fast) as one:
                await reads(one, ClientUpdate)
                stuck = [asyncio.create_task(one.send_update(UPDATE, 1, bytes(48 * MIB))) for _ in range(20)]
                await eventually(lambda: len(inbox) == 16)
                started_s = time.monotonic()
            assert time.monotonic() - started_s < BOUND_S
            for sending in stuck:  # 16 were on their way, the others waited for their turn
                with pytest.raises(BusClosed):
                    await sending

    run(main)


@both_loops
def test_a_close_whose_caller_is_cancelled_is_bounded_and_complete(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as other:
            inbox = other.subscribe(ClientUpdate)
            opened: asyncio.Future[gradbus.Bus] = asyncio.get_running_loop().create_future()
            leave = asyncio.Event()

            async def member() -> None:
                async with gradbus.connect(**place) as one:
                    await reads(one, ClientUpdate)
                    opened.set_result(one)
                    await leave.wait()

            running = asyncio.create_task(member())
            one = await opened
            sending = asyncio.create_task(one.send_update(UPDATE, 1, bytes(48 * MIB)))
            await eventually(lambda: len(inbox) == 16)
            leave.set()
            # It is in the middle of its close, as there is more to send; nothing public says that it has begun.
            await eventually(lambda: one._closed)  # noqa: SLF001
            started_s = time.monotonic()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert time.monotonic() - started_s < BOUND_S
            with pytest.raises(BusClosed):
                await sending
        assert threads_of_gradbus() == []

    run(main)


@pytest.fixture
def never_takes(place: dict[str, Any]) -> Iterator[None]:
    """A process with a reader of each topic of the job, which takes nothing."""
    command = [sys.executable, str(NEVER_TAKES), str(place["domain"]), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "watching\n"
            yield
        finally:
            process.kill()


async def port_with_unacknowledged(bus: gradbus.Bus, writers: int) -> RawEndpoints:
    port = bus.raw_endpoints()
    opened = [port.open_writer(collective_channel(f"group-{number}")) for number in range(writers)]
    await bus.matched(lambda: all(writer.matched for writer in opened), timeout_s=50)
    key = FrameKey(Kind.COLLECTIVE, 1, 0, 0, 1, 0, "x", 0)
    for writer in opened:
        for _ in range(8):  # twice as many as the reader keeps
            port.write(writer, next(frames.split(key, b"x")))
        assert not writer.wait_for_acks(0.0)
    return port


@pytest.mark.usefixtures("never_takes")
def test_writers_whose_samples_a_process_does_not_take_do_not_add_up_when_a_bus_closes(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> float:
        async with gradbus.connect(**place, security="none") as bus:
            await port_with_unacknowledged(bus, WRITERS)
            closing_s = time.monotonic()
        await eventually(lambda: threads_of_gradbus() == [])
        return time.monotonic() - closing_s

    assert run(main) < WRITERS / 2


@pytest.mark.usefixtures("never_takes")
def test_nor_do_they_add_up_when_a_group_closes_and_others_use_the_bus(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_endpoints, "REMOVAL_S", 50.0)  # so that the deletion is waited for to its end

    async def main() -> float:
        async with gradbus.connect(**place, security="none") as bus:
            port = await port_with_unacknowledged(bus, WRITERS)
            closing_s = time.monotonic()
            await port.close()
            return time.monotonic() - closing_s

    assert run(main) < WRITERS / 2


def test_a_bus_receives_while_readers_and_writers_of_a_group_are_being_deleted(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end, delete = threading.Event(), threading.Event(), domains.delete

    def held(entity: Any) -> None:
        if endpoint is not None and entity is lowest(endpoint).entity:
            began.set()
            assert may_end.wait(50)
        delete(entity)

    async def main() -> None:
        nonlocal endpoint
        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            inbox = one.subscribe(ToController)
            await reads(other, ToController)
            for is_reader in (True, False):
                port, topic = one.raw_endpoints(), collective_channel("group")
                endpoint = port.open_reader(topic, lambda _: None).inlet if is_reader else port.open_writer(topic)
                closing = asyncio.create_task(port.close())
                await eventually(began.is_set)
                await other.publish(CLIENT, Leave("x"))
                await inbox.get()
                assert not closing.done()
                may_end.set()
                await closing
                began.clear()
                may_end.clear()

    endpoint: Any = None
    monkeypatch.setattr(domains, "delete", held)
    monkeypatch.setattr(raw_endpoints, "REMOVAL_S", 50.0)
    try:
        run(main)
    finally:
        may_end.set()


def test_a_bus_whose_opening_is_cancelled_leaves_nothing_behind(run: Run, place: dict[str, Any]) -> None:
    before_s = sys.getswitchinterval()

    async def member() -> None:
        async with gradbus.connect(**place):
            raise AssertionError("cancelled before that")

    async def main() -> None:
        running = asyncio.create_task(member())
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert threads_of_gradbus() == []
        assert sys.getswitchinterval() == before_s
        async with gradbus.connect(**place, network="network"):  # the domain is free for other settings
            pass

    run(main)


def test_an_error_inside_the_block_passes_through_the_close(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            async with gradbus.connect(**place):
                raise ZeroDivisionError
        assert threads_of_gradbus() == []

    run(main)


@pytest.mark.parametrize("size", [1000, 256_000])  # what is small is copied, what is large lies in memory of DDS
def test_a_view_on_received_bytes_outlives_the_bus(run: Run, place: dict[str, Any], size: int) -> None:
    payload = bytes(number % 251 for number in range(size))

    async def main() -> memoryview:
        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            inbox = other.subscribe(ModelBlob)
            await reads(one, ModelBlob)
            await one.send_model(MODEL, payload)
            message = await inbox.get()
            assert isinstance(message, ModelBlob)
            return message.frame.data

    view = run(main)
    assert bytes(view) == payload

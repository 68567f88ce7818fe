"""What goes wrong under a group: it ends alone, says why, and leaves nothing behind on its bus."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from bus_helpers import CLIENT, Run, reads, topics_of
from group_node import LEASE_S, as_ranks, joined
from patience import eventually

import gradbus
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.raw_endpoints import RawEndpoints
from gradbus.runtime.bus.receiver import InboundChannel
from gradbus.runtime.bus.subscription import Subscription
from gradbus.runtime.collectives import Group, membership
from gradbus.runtime.collectives.engine import wire_name
from gradbus.runtime.collectives.formation import Formation
from gradbus.runtime.collectives.membership import REPLY_S
from gradbus.runtime.errors import BusError, PeerLost, WriteTimeout
from gradbus.runtime.transport.channels import CHANNELS, Channel, collective_channel
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.control import GroupHello, Leave
from gradbus.runtime.wire.frames import Frame, FrameKey, Kind
from gradbus.runtime.wire.messages import Control, Identity, Message

LATE_HELLO = GroupHello("world", 2, 0, False, False, 5, "host (process 1)", "", [])


class FullDisk:
    """A log whose stream cannot be written."""

    def warning(self, event: str, **facts: Any) -> None:
        raise OSError("No space left on device")

    exception = warning


def test_a_frame_that_comes_as_soon_as_a_reader_is_open_does_no_harm(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be for who was this rank before."""
    open_reader = RawEndpoints.open_reader
    key = FrameKey(Kind.COLLECTIVE, 77, 0, 1, 5, 0, wire_name("x", "barrier", ""))
    ((head, data),) = frames.split(key, b"", world=2)

    def opened(self: RawEndpoints, topic: Channel, take: Callable[[Frame], None]) -> InboundChannel:
        take(frames.parse(head + bytes(data)))
        return open_reader(self, topic, take)

    monkeypatch.setattr(RawEndpoints, "open_reader", opened)

    async def script(group: Group) -> None:
        assert group.stats.dropped == {"foreign group": 2}
        await group.barrier()

    run(lambda: as_ranks(place, 2, script))


# What is left on the bus


async def assert_all_is_heard(bus: Bus, other: Bus) -> None:
    """More control messages than an inbox holds come through: nobody has an inbox that he does not read."""
    await reads(other, Control)
    lot = 64
    with bus.subscribe(Control, only=lambda message: getattr(message, "body", None) == Leave("lot")) as inbox:
        for _ in range(CHANNELS[Control].inbox // lot + 1):
            for _ in range(lot):
                await other.publish(CLIENT, Leave("lot"), on=Control)
            async with asyncio.timeout(20):
                for _ in range(lot):
                    await inbox.get()


def test_a_group_that_cannot_be_opened_leaves_nothing_and_can_be_joined_later(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: RawEndpoints, topic: Channel, take: Callable[[Frame], None]) -> InboundChannel:
        raise BusError("no reader")

    async def main() -> None:
        async with gradbus.connect(**place, lease_s=LEASE_S) as bus, gradbus.connect(**place, lease_s=LEASE_S) as other:
            with monkeypatch.context() as patch:
                patch.setattr(RawEndpoints, "open_reader", refuse)
                with pytest.raises(BusError, match="no reader"):
                    async with gradbus.join_group(bus, rank=0, world=2):
                        raise AssertionError("not reached")
            await eventually(lambda: topics_of(bus) == ["train/control"])
            assert bus._ports == []  # noqa: SLF001 - one that is closed and kept shows nowhere else
            await assert_all_is_heard(bus, other)
            async with gradbus.join_group(bus, rank=0, world=1) as group:
                assert await group.barrier() == (0,)

    run(main)


@pytest.mark.parametrize("can_log", [True, False])
def test_a_group_that_fails_over_a_message_says_so_and_leaves_no_inbox_that_nobody_reads(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, can_log: bool
) -> None:
    failed = asyncio.Event()

    def fail(self: Formation) -> GroupHello:
        failed.set()
        raise RuntimeError("a mistake")

    async def main() -> None:
        if not can_log:
            monkeypatch.setattr(membership, "log", FullDisk())
        async with (
            gradbus.connect(**place, lease_s=LEASE_S) as bus,
            gradbus.connect(**place, lease_s=LEASE_S) as other,
            gradbus.join_group(bus, rank=0, world=1) as group,
        ):
            await reads(other, Control)
            monkeypatch.setattr(Formation, "hello_now", fail)
            await other.publish(Identity(1, 77), LATE_HELLO)  # which is answered
            await failed.wait()
            with pytest.raises(RuntimeError, match="a mistake"):
                await group.barrier()
            await assert_all_is_heard(bus, other)

    run(main)


def test_a_rank_is_lost_also_where_that_cannot_be_logged(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "log", FullDisk())
    seen = asyncio.Event()

    async def script(group: Group) -> None:
        await group.barrier()
        if group.rank == 0:
            # As the bus does when a process has ended: rank 1 is of this one.
            group._membership._on_gone(1, group.members[1].incarnation, "")  # noqa: SLF001
            with pytest.raises(PeerLost, match=r"rank 1: its process on .* is gone"):
                await group.barrier()
            seen.set()
        await seen.wait()  # a rank that has left in order is not lost

    run(lambda: as_ranks(place, 2, script))


# What others may send as often as they like


def test_probes_that_wait_for_the_loop_have_a_bound_and_are_told_once(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    handled: list[int] = []

    async def script(group: Group) -> None:
        place_of, loop = group._membership, asyncio.get_running_loop()  # noqa: SLF001 - probes are for it alone
        post = loop.call_soon_threadsafe

        def note(function: Any, *arguments: Any) -> Any:
            if getattr(function, "__self__", None) is place_of:
                told.append(function)
            return post(function, *arguments)

        def handle(rank: int, topic: int, members: int) -> bool:
            handled.append(members)
            return False

        monkeypatch.setattr(loop, "call_soon_threadsafe", note)
        monkeypatch.setattr(place_of.formation, "probe", handle)
        for number in range(2 * membership.MAX_PROBES):
            key = FrameKey(Kind.COLLECTIVE, number, 0, 1, 5, 0, "", 0)
            ((head, data),) = frames.split(key, b"", world=2)
            place_of.engine.receive(frames.parse(head + bytes(data)))
        assert (len(told), handled) == (1, [])
        await asyncio.sleep(0)
        assert handled == list(range(membership.MAX_PROBES))
        place_of.engine.receive(frames.parse(head + bytes(data)))
        assert len(told) == 2
        await asyncio.sleep(0)
        assert len(handled) == membership.MAX_PROBES + 1

    run(lambda: as_ranks(place, 1, script))


# What DDS does not take


def test_a_courtesy_that_dds_does_not_take_does_not_end_the_group(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replies, publish = set[int](), Bus.publish

    async def refuse(self: Bus, sender: Identity, message: Any) -> None:
        if isinstance(message, GroupHello) and message is not LATE_HELLO:
            replies.add(sender.sender)
            raise WriteTimeout("train/control", 30.0)
        await publish(self, sender, message)

    async def script(group: Group) -> None:
        await group.barrier()
        monkeypatch.setattr(Bus, "publish", refuse)
        await group.barrier()
        if group.rank == 0:  # one that comes too late
            async with gradbus.connect(**place, lease_s=LEASE_S) as late:
                await reads(late, Control, 2)
                while len(replies) < 2:  # who has answered somebody just now does not do so again at once
                    await late.publish(Identity(1, 77), LATE_HELLO)
                    await asyncio.sleep(REPLY_S)
        await group.barrier()

    run(lambda: as_ranks(place, 2, script))


def test_a_word_that_dds_does_not_take_is_not_the_silence_of_others(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Bus, sender: Identity, message: Any) -> None:
        raise WriteTimeout("train/control", 30.0)

    async def main() -> None:
        monkeypatch.setattr(Bus, "publish", refuse)
        with pytest.raises(WriteTimeout):
            async with joined(place, 0, 2):
                raise AssertionError("not reached")

    run(main)


# Who is cancelled while it leaves


def test_who_is_cancelled_while_its_group_ends_is_cancelled_and_the_group_has_ended(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    get, ending, go_on = Subscription.get, asyncio.Event(), asyncio.Event()

    async def slow(self: Subscription) -> Message:
        try:
            return await get(self)
        except asyncio.CancelledError:  # who waits for messages of the group is told to end
            ending.set()
            await go_on.wait()
            raise

    monkeypatch.setattr(Subscription, "get", slow)

    async def main() -> None:
        async with gradbus.connect(**place) as bus:

            async def member() -> None:
                async with gradbus.join_group(bus, rank=0, world=1):
                    pass

            leaving = asyncio.create_task(member())
            await ending.wait()
            leaving.cancel()
            asyncio.get_running_loop().call_soon(go_on.set)
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert bus._ports == []  # noqa: SLF001 - one that is closed and kept shows nowhere else
            assert topics_of(bus) == ["train/control"]

    run(main)


def test_a_port_whose_close_is_cancelled_during_a_write_is_closed_in_any_case(run: Run, place: dict[str, Any]) -> None:
    topic = collective_channel("x")
    in_dds, may_return = threading.Event(), threading.Event()

    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            port = bus.raw_endpoints()
            port.open_reader(topic, lambda frame: None)
            writer = port.open_writer(topic)

            def write(fields: Any, parts: Any) -> bool:
                in_dds.set()
                return may_return.wait(20)

            writer.write = write  # type: ignore[method-assign]
            writing = asyncio.create_task(asyncio.to_thread(port.write, writer, (b"",)))
            await asyncio.to_thread(in_dds.wait, 20)
            closing = asyncio.create_task(port.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            await eventually(lambda: topics_of(bus) == [])
            may_return.set()
            assert await writing

    run(main)

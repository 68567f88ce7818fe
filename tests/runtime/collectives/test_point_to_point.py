"""Messages between two ranks: the others call nothing, so nobody else's count may change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from bus_helpers import Run

import gradbus
from gradbus.runtime.collectives import Group

Script = Callable[[Group], Awaitable[Any]]


async def on_ranks(place: dict[str, Any], world: int, script: Script) -> list[Any]:
    async def rank(number: int) -> Any:
        async with contextlib.AsyncExitStack() as stack:
            bus = await stack.enter_async_context(gradbus.connect(**place, lease_s=20))
            group = await stack.enter_async_context(
                gradbus.join_group(bus, rank=number, world=world, collective_timeout_s=10)
            )
            return await script(group)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(rank(number)) for number in range(world)]
    return [task.result() for task in running]


def test_a_rank_sends_to_each_other_one_under_one_name(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> Any:
        if group.rank:
            return await group.recv("part", source=0)
        for rank in range(1, group.world):
            await group.send("part", b"for %d" % rank, to=rank)
        return None

    assert run(lambda: on_ranks(place, 4, script)) == [None, b"for 1", b"for 2", b"for 3"]


def test_two_ranks_send_to_each_other_under_one_name_whoever_begins(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> list[bytes]:
        other, got = 1 - group.rank, []
        for number in range(5):
            sent = group.send("both", b"%d from %d" % (number, group.rank), to=other)
            got.append(await group.recv("both", source=other))
            await sent
        return got

    first, second = run(lambda: on_ranks(place, 2, script))
    assert first == [b"%d from 1" % number for number in range(5)]
    assert second == [b"%d from 0" % number for number in range(5)]


def test_messages_between_some_ranks_do_not_part_the_counts_of_all(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> list[bytes]:
        if group.rank == 0:
            await group.send("x", b"hello", to=2)
        if group.rank == 2:
            assert await group.recv("x", source=0) == b"hello"
        return await group.all_gather("x", bytes([group.rank]))

    assert run(lambda: on_ranks(place, 3, script)) == [[b"\0", b"\1", b"\2"]] * 3

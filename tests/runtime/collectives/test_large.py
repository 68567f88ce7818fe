"""What is large waits for its receiver; what is small comes early and is kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from bus_helpers import Run

import gradbus
from gradbus.runtime.collectives import ALGORITHMS, Group
from gradbus.runtime.collectives.operation import RENDEZVOUS_BYTES

Script = Callable[[Group], Awaitable[Any]]


async def as_ranks(
    place: dict[str, Any],
    world: int,
    script: Script,
    *,
    connect: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> list[Any]:
    """The script on every rank of a group, each with a bus of its own; its results in rank order."""

    async def rank(number: int) -> Any:
        async with contextlib.AsyncExitStack() as stack:
            bus = await stack.enter_async_context(gradbus.connect(**place, lease_s=20, **connect))
            group = await stack.enter_async_context(gradbus.join_group(bus, rank=number, world=world, **options))
            return await script(group)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(rank(number)) for number in range(world)]
    return [task.result() for task in running]


@pytest.mark.parametrize(("size", "kept"), [(1000, 1000), (RENDEZVOUS_BYTES + 1, 0)])
def test_a_payload_before_the_local_call_is_kept_if_it_is_small_and_held_back_if_it_is_large(
    run: Run, place: dict[str, Any], size: int, kept: int
) -> None:
    async def script(group: Group) -> list[int]:
        if group.rank == 0:
            handle = group.all_gather("payload", b"x" * size)
            await group.barrier("called")
            return [len(payload) for payload in await handle]
        await group.barrier("called")  # came over the same topic after all that the call had to say
        assert group.stats.early_bytes == kept
        return [len(payload) for payload in await group.all_gather("payload", b"yz")]

    assert run(lambda: as_ranks(place, 2, script)) == [[size, 2]] * 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_ranks_with_little_room_for_early_frames_wait_for_whichever_is_late(
    run: Run, place: dict[str, Any], algorithm: Any, late: int
) -> None:
    """Without the wait, frames would be dropped for want of room, and the late call would fail."""

    async def script(group: Group) -> tuple[bool, int]:
        ones = torch.full((700_000,), float(group.rank + 1))
        handle = None if group.rank == late else group.all_reduce("sum", ones, out=ones, algorithm=algorithm)
        await group.barrier("called")
        handle = handle or group.all_reduce("sum", ones, out=ones, algorithm=algorithm)
        result = await handle
        return bool((result == 6).all()), group.stats.dropped["early"]

    assert run(lambda: as_ranks(place, 3, script, early_bytes=1 << 20)) == [(True, 0)] * 3


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_late_rank_finds_all_that_the_others_have_called_meanwhile(
    run: Run, place: dict[str, Any], shared_memory: bool
) -> None:
    """Several times what a rank keeps for calls to come: what it has no room for waits at the others."""
    sizes = [40_000] * 60 + [1000] * 400  # elements of 4 bytes: 11 MB

    async def script(group: Group) -> tuple[bool, int, int]:
        def call(number: int) -> Any:
            tensor = torch.full((sizes[number],), group.rank + number)
            return group.all_reduce(f"sum {number}", tensor)

        numbers = list(range(len(sizes)))
        handles: dict[int, Any] = {}
        if group.rank:
            handles = {number: call(number) for number in numbers}
        await group.barrier("called")
        kept = group.stats.early_bytes
        if not group.rank:
            handles = {number: call(number) for number in reversed(numbers)}
        right = [bool((await handles[number] == 3 + 3 * number).all()) for number in numbers]
        return all(right), kept, group.stats.dropped["early"]

    late, *others = run(
        lambda: as_ranks(place, 3, script, early_bytes=1 << 20, connect={"shared_memory": shared_memory})
    )
    assert [right for right, _, _ in (late, *others)] == [True] * 3
    assert [dropped for _, _, dropped in (late, *others)] == [0] * 3
    assert 0 < late[1] <= 1 << 19


def test_a_large_broadcast_waits_for_the_last_receiver(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> float:
        tensor = torch.full((RENDEZVOUS_BYTES // 4 + 1,), float(group.rank))
        handle = None if group.rank == 2 else group.broadcast("model", tensor, root=1)
        await group.barrier("called")
        if handle is None:
            assert group.stats.early_bytes == 0  # it was not sent yet
        await (handle or group.broadcast("model", tensor, root=1))
        return float(tensor.mean())

    assert run(lambda: as_ranks(place, 3, script)) == [1.0] * 3

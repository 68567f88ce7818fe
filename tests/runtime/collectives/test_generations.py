"""Elastic groups on real buses: all processes of a test in one, each with a bus of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from bus_helpers import Run
from group_node import LEASE_S
from patience import eventually
from structlog.testing import capture_logs

import gradbus
from gradbus.runtime.collectives import Group
from gradbus.runtime.collectives import generations as generations_module
from gradbus.runtime.collectives.generations import LOST, ElasticLimits, Generations, NoGeneration, open_generations
from gradbus.runtime.errors import BarrierTimeout, ConfigError

LIMITS = ElasticLimits(min_world=1, max_world=4, wait_s=20.0, collective_s=20.0)


@contextlib.asynccontextmanager
async def process(
    place: dict[str, Any], number: int, founders: int = 0, limits: ElasticLimits = LIMITS, **options: Any
) -> AsyncIterator[Generations]:
    async with (
        gradbus.connect(**place, lease_s=LEASE_S) as bus,
        open_generations(bus, number=number, founders=founders, limits=limits, **options) as generations,
    ):
        yield generations


async def exchange(group: Group, name: str) -> list[int]:
    return [int(payload) for payload in await group.all_gather(name, str(group.rank).encode())]


def test_survivors_of_a_lost_member_meet_in_the_next_generation_and_old_frames_are_foreign(
    run: Run, place: dict[str, Any]
) -> None:
    took_s: list[float] = []
    died_s = 0.0

    async def one(number: int) -> None:
        nonlocal died_s
        async with process(place, number, 3) as generations:
            try:
                async with generations.next_group() as group:
                    assert await exchange(group, "first") == [0, 1, 2]
                    if number == 0:
                        died_s = time.monotonic()
                        return
                    await exchange(group, "second")
            except LOST as error:
                generations.suspect(error)
            async with generations.next_group() as group:
                assert (group.world, group.rank) == (2, number - 1)
                assert await exchange(group, "second") == [0, 1]
                took_s.append(time.monotonic() - died_s)
                generations.end()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(one(number))

    run(main)
    assert max(took_s) < 5.0


def test_a_process_joins_while_members_rest_and_one_leaves_later(run: Run, place: dict[str, Any]) -> None:
    async def member(number: int) -> list[int]:
        worlds = []
        async with process(place, number, 2) as generations:
            with contextlib.suppress(NoGeneration):
                while len(worlds) < 3:
                    async with generations.next_group() as group:
                        worlds.append(group.world)
                        wanted = [False]
                        while not any(wanted):
                            if group.world == 3 and number == 1:
                                generations.leave()
                            wants = generations.change_is_wanted or (len(worlds) == 3)
                            wanted = await group.all_gather_object("rest", wants)
                    generations.rest()
        return worlds

    async def joiner() -> list[int]:
        worlds = []
        async with process(place, 7) as generations:
            while len(worlds) < 2:
                async with generations.next_group() as group:
                    worlds.append(group.world)
                    while not any(
                        await group.all_gather_object("rest", generations.change_is_wanted or len(worlds) == 2)
                    ):
                        pass
                generations.rest()
        return worlds

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(member(0)), tasks.create_task(member(1)), tasks.create_task(joiner())]
        assert [task.result() for task in found] == [[2, 3, 2], [2, 3], [3, 2]]

    run(main)


def test_founders_and_one_that_joins_are_answered_when_they_come(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations_module, "REPEAT_S", 60.0)
    monkeypatch.setattr(generations_module, "BUSY_REPEAT_S", 60.0)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(20.0):
            first = await stack.enter_async_context(process(place, 0, 2))
            # Until its first view has gone out, which nothing else here shows. Its next one comes in 60 s.
            await eventually(lambda: first._agreement.view().version)  # noqa: SLF001
            monkeypatch.setattr(generations_module, "BUSY_REPEAT_S", 0.1)  # of those that come: a first may be lost
            second = await stack.enter_async_context(process(place, 1, 2))
            await eventually(lambda: first.number == second.number == 1)
            third = await stack.enter_async_context(process(place, 2))
            await eventually(lambda: first.change_is_wanted and third.number == 1)

    run(main)


def test_one_that_does_not_fit_is_refused_by_name_and_the_members_go_on(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with (
            process(place, 0, 1, traits={"model": 1, "data": 2}) as generations,
            generations.next_group() as group,
            process(place, 1, traits={"model": 3, "data": 2}) as other,
        ):
            with pytest.raises(ConfigError, match="its model differs"):
                async with other.next_group():
                    pass
            assert not generations.change_is_wanted
            assert await exchange(group, "on") == [0]

    run(main)


def test_one_that_nobody_meets_says_whom_it_waits_for(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        limits = ElasticLimits(min_world=2, max_world=4, wait_s=0.5)
        async with process(place, 0, 3, limits) as generations:
            with pytest.raises(BarrierTimeout, match=r"waits for the processes \[1, 2\] of 3\): 1 of 3 ready"):
                async with generations.next_group():
                    pass

    run(main)


def test_a_process_that_waits_learns_that_the_run_has_ended(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        limits = ElasticLimits(min_world=1, max_world=1, wait_s=20.0)
        async with (
            process(place, 0, 1, limits) as generations,
            process(place, 1, 0, limits) as spare,
            generations.next_group(),
        ):
            waiting = asyncio.create_task(spare.next_group().__aenter__())
            await eventually(lambda: generations.waiting)
            generations.end()
            with pytest.raises(NoGeneration, match="has come to its end") as caught:
                await waiting
            assert caught.value.ended == 1

    run(main)


def test_the_only_member_leaves_although_a_spare_waits(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        limits = ElasticLimits(min_world=1, max_world=1, wait_s=20.0)
        async with process(place, 0, 1, limits) as generations, process(place, 1, 0, limits) as spare:
            async with generations.next_group():
                waiting = asyncio.create_task(spare.next_group().__aenter__())
                await eventually(lambda: generations.waiting)
                generations.leave()
            generations.rest()
            async with asyncio.timeout(10):
                with pytest.raises(NoGeneration, match="has left"):
                    async with generations.next_group():
                        pass
            waiting.cancel()

    run(main)


def test_one_that_leaves_before_its_first_group_is_in_none_although_its_generation_was_founded(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with process(place, 0, 1) as generations:
            await eventually(lambda: generations.number)
            generations.leave()
            with pytest.raises(NoGeneration, match="has left") as left:
                async with generations.next_group():
                    pass
            assert left.value.left

    run(main)


@pytest.mark.parametrize(
    ("limits", "founders"),
    [(ElasticLimits(min_world=3, max_world=2), 0), (ElasticLimits(min_world=2), 1), (ElasticLimits(max_world=2), 3)],
)
def test_sizes_that_do_not_fit_are_refused(
    run: Run, place: dict[str, Any], limits: ElasticLimits, founders: int
) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="elastic"):
            async with process(place, 0, founders, limits):
                pass

    run(main)


def test_founders_form_a_group_without_one_that_dies_before_the_first_generation(
    run: Run, place: dict[str, Any]
) -> None:
    limits = ElasticLimits(min_world=2, max_world=4, wait_s=20.0)

    async def rank(generations: Generations) -> list[int]:
        async with generations.next_group() as group:
            return await exchange(group, "x")

    async def main() -> None:
        async with process(place, 0, 3, limits) as first:
            async with process(place, 1, 3, limits):
                await eventually(lambda: first.waits_for == "the processes [2] of 3")
            async with process(place, 2, 3, limits) as last, asyncio.timeout(10.0):
                assert await asyncio.gather(rank(first), rank(last)) == [[0, 1], [0, 1]]

    run(main)


def test_founders_whose_process_0_has_died_give_up_after_the_time_of_a_collective(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> None:
        limits = ElasticLimits(min_world=1, max_world=4, wait_s=20.0, collective_s=0.3)
        async with process(place, 1, 3, limits) as generations:
            async with process(place, 0, 3, limits):
                await eventually(lambda: generations.waits_for == "the processes [2] of 3")
            started_s = time.monotonic()
            with pytest.raises(BarrierTimeout, match=r"process 0, which alone makes .* after 0\.3 s"):
                async with generations.next_group():
                    pass
            assert time.monotonic() - started_s < 5.0

    run(main)


def test_a_process_that_has_come_to_the_end_does_not_warn_of_the_others_ends(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        others = [process(place, number, 3) for number in (1, 2)]
        async with process(place, 0, 3) as generations:
            for one in others:
                await one.__aenter__()
            await eventually(lambda: generations.number == 1)
            with capture_logs() as logs:
                generations.end()
                await asyncio.gather(*(one.__aexit__(None, None, None) for one in others))  # before they meet again
                await eventually(lambda: "a majority" in generations.waits_for)
            assert not [line for line in logs if line["event"] == "waiting" and line["number"] == 0]

    run(main)

"""Groups whose ranks share memory: the same results, what is left afterwards, and what happens where there is none."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bus_helpers import Run, receiver_of
from federation import named_by
from group_node import LEASE_S, as_ranks, group_ranks
from memory_maps import mapped, open_files
from patience import eventually
from shared_scripts import (
    LARGE_SIZES,
    MIB,
    SIZES,
    beside_one_that_stands_still,
    every_size,
    killed_while_it_sends,
    shared_of,
    sum_on_this_thread,
)

import gradbus
from gradbus.runtime.collectives import Group, link, membership
from gradbus.runtime.errors import BarrierTimeout
from gradbus.runtime.shm import mailbox, transport
from gradbus.runtime.shm.segment import Bytes, SharedMemoryFault
from gradbus.runtime.shm.slots import SlotPool
from gradbus.runtime.transport.api import Periodic
from gradbus.runtime.wire.frames import CHUNK_BYTES

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")

WAIT_S = 10.0


# Processes


@pytest.mark.slow
@pytest.mark.parametrize(("world", "sizes"), [(2, SIZES + LARGE_SIZES), (3, SIZES)])
def test_results_are_the_same_with_and_without_it_and_leaving_gives_all_of_it_back(
    world: int, sizes: tuple[int, ...]
) -> None:
    digests = []  # of each rank: what all_to_all gives differs between them
    for share in (True, False):
        network = {"lease_s": LEASE_S, "shared_memory": share}
        with group_ranks(every_size, world, network=network, sizes=sizes) as ranks:
            found = []
            for node in ranks.start_all():
                assert node.wait(60.0) == 0
                (done,) = node.all("done")
                assert (done["dropped"], done["after"]) == ({}, (0, 0))
                assert done["inside"] == (world if share else 0)
                assert (done["slots"] >= max(sizes)) == share
                assert (done["letters"] > 100) == (share and mailbox.AVAILABLE)
                found.append(done["digest"])
            digests.append(found)
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_killed_rank_leaves_nothing_behind_and_nothing_of_it_stays_with_the_others() -> None:
    with group_ranks(killed_while_it_sends, 3) as ranks:
        nodes = ranks.start_all()
        pids = {node.process.pid for node in nodes}
        assert nodes[1].wait(60.0) == -signal.SIGKILL
        for node in (nodes[0], nodes[2]):
            assert node.wait(60.0) == 0
            (survived,) = node.all("survived")
            assert survived["lost"] == [1]
            assert survived["after"] == (0, 0)
            assert not survived["tracked"]
    assert named_by(pids) == []


@pytest.mark.slow
def test_a_rank_that_stands_still_with_slots_does_not_hold_up_the_others_and_all_is_there_when_it_goes_on() -> None:
    with group_ranks(beside_one_that_stands_still, 3) as ranks:
        nodes = ranks.start_all()
        for node in nodes:
            node.wait_for("ready")
        nodes[2].signal(signal.SIGSTOP)
        try:
            for rank in (0, 1):
                ranks.tell(rank)
            for node in nodes[:2]:
                assert node.wait_for("went on", timeout_s=WAIT_S)["pending"] == 20
        finally:
            nodes[2].signal(signal.SIGCONT)
        ranks.tell(2)
        for node in nodes:
            node.wait_for("done")
            assert node.wait() == 0


# One process


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The warnings of groups."""
    lines: list[dict[str, Any]] = []

    class Log:
        def warning(self, event: str, **facts: Any) -> None:
            lines.append({"event": event, **facts})

        def debug(self, event: str, **facts: Any) -> None:
            pass

    monkeypatch.setattr(membership, "log", Log())
    return lines


async def large_sum(group: Group, name: str = "x") -> None:
    assert float((await group.all_reduce(name, torch.ones(MIB)))[-1]) == group.world


@pytest.mark.usefixtures("nothing_is_left")
def test_a_group_that_never_forms_leaves_nothing_open(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            with pytest.raises(BarrierTimeout):
                async with gradbus.join_group(bus, rank=0, world=2, timeout_s=0.2):
                    pass

    run(main)


@pytest.mark.usefixtures("nothing_is_left")
def test_groups_and_subgroups_on_one_bus_have_memory_of_their_own_each(run: Run, place: dict[str, Any]) -> None:
    async def rank(number: int) -> None:
        async with gradbus.connect(**place, lease_s=LEASE_S) as bus:
            names = {"one": None, "two": None}
            async with (
                gradbus.join_group(bus, rank=number, world=3, name="one", timeout_s=20.0) as one,
                gradbus.join_group(bus, rank=number, world=3, name="two", timeout_s=20.0) as two,
            ):
                await asyncio.gather(*(large_sum(group, name) for group in (one, two) for name in names))
                assert shared_of(one) is not shared_of(two)
                if number != 1:
                    async with one.subgroup([0, 2]) as pair:
                        await asyncio.gather(large_sum(pair), asyncio.to_thread(wait_for_some, pair))
                        assert shared_of(pair).slots.sent_bytes >= 4 * MIB
                await one.barrier()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(rank(number))

    run(main)


def wait_for_some(group: Group) -> None:
    for step in range(20):
        for size in (5, MIB // 2):
            assert float(sum_on_this_thread(group, "waits", torch.ones(size), 2 * step + (size > 5))[-1]) == group.world


def test_who_awaits_and_who_waits_go_on_side_by_side(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        async def awaits() -> None:
            for step in range(30):
                assert await group.all_gather("awaited", bytes([group.rank]) * 40_000, round_id=step) == [
                    bytes([rank]) * 40_000 for rank in range(group.world)
                ]

        await asyncio.gather(awaits(), asyncio.to_thread(wait_for_some, group), large_sum(group))
        assert sum(group.stats.dropped.values()) == 0

    run(lambda: as_ranks(place, 2, script))


def test_memory_that_cannot_be_opened_is_done_without_and_logged_once(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    def refuse(place: str, size: int) -> Bytes:
        raise SharedMemoryFault("no permission")

    async def script(group: Group) -> None:
        await large_sum(group)
        assert shared_of(group).slots.sent_bytes == 0
        assert shared_of(group).mailbox is None

    monkeypatch.setattr(transport, "attach", refuse)
    run(lambda: as_ranks(place, 3, script))
    assert len(logged) == 3  # one for each rank, though there are two others
    assert {line["event"] for line in logged} == {"no shared memory"}
    assert all("no permission" in line["reason"] for line in logged)


def test_where_one_rank_is_elsewhere_the_others_share_what_is_for_them_alone(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    places: dict[str, int] = {}
    really = membership.is_here

    def is_here(place: str) -> bool:
        """Rank 2 is on another machine: nobody sees its memory, and it sees nobody's."""
        task = asyncio.current_task()
        mine = int(task.get_name().rpartition("-")[2]) if task is not None else -1
        return really(place) and mine != 2 and places.get(place) != 2

    made = membership.SharedMemoryTransport.__init__

    def note(self: Any, rank: int, *arguments: Any) -> None:
        made(self, rank, *arguments)
        places[self.place] = rank

    async def script(group: Group) -> int:
        await large_sum(group, "all")
        assert int(shared_of(group).slots.sent_bytes) == 0 or group.rank < 2
        if group.rank < 2:
            other = 1 - group.rank
            sent = group.send(f"from {group.rank}", bytes(MIB), to=other)
            assert await group.recv(f"from {other}", source=other) == bytes(MIB)
            await sent
        await group.barrier()
        assert shared_of(group).mailbox is None
        return int(shared_of(group).slots.sent_bytes)

    monkeypatch.setattr(membership, "is_here", is_here)
    monkeypatch.setattr(membership.SharedMemoryTransport, "__init__", note)
    sent = run(lambda: as_ranks(place, 3, script))
    assert sent[0] >= MIB
    assert sent[1] >= MIB
    assert sent[2] == 0
    assert logged == []


@pytest.mark.usefixtures("nothing_is_left")
def test_it_is_not_used_where_it_is_switched_off(run: Run, place: dict[str, Any]) -> None:
    before = mapped()

    async def rank(number: int) -> None:
        async with (
            gradbus.connect(**place, lease_s=LEASE_S, shared_memory=False) as bus,
            gradbus.join_group(bus, rank=number, world=2, timeout_s=20.0) as group,
        ):
            await large_sum(group)
            assert shared_of(group) is None
            assert mapped() == before
            await group.barrier()

    async def main() -> None:
        await asyncio.gather(rank(0), rank(1))

    run(main)


@pytest.mark.usefixtures("nothing_is_left")
def test_a_group_closes_while_a_thread_waits_in_it(run: Run, place: dict[str, Any]) -> None:
    """What that thread looks at stays mapped until it has left, and no longer."""
    errors: list[BaseException] = []

    def wait(group: Group, visits: threading.Event) -> None:
        try:
            visits.set()
            sum_on_this_thread(group, "never", torch.ones(10))
        except BaseException as error:
            errors.append(error)

    async def script(group: Group) -> threading.Thread | None:
        await large_sum(group)
        if group.rank == 1:
            return None
        visits = threading.Event()
        thread = threading.Thread(target=wait, args=(group, visits))
        thread.start()
        await asyncio.to_thread(visits.wait, WAIT_S)
        # The other rank may have left by now, and then the wait is over before it is seen here.
        while mailbox.AVAILABLE and thread.is_alive() and not shared_of(group).mailbox.is_polled:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return thread

    thread, _ = run(lambda: as_ranks(place, 2, script))
    thread.join(WAIT_S)
    assert [type(error).__name__ for error in errors] in (["BusClosed"], ["PeerLost"])
    errors.clear()


def test_a_handle_that_is_cancelled_gives_its_buffer_back_while_others_hold_the_slots(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it is sent, and a part waits: nothing that is written to the buffer then reaches the other rank."""
    put, part_bytes, cancelled = SlotPool.put, 4 * CHUNK_BYTES, threading.Event()
    called_off = asyncio.Event()

    def is_held(self: SlotPool, readers: Sequence[int], data: Any) -> bytes | None:
        return put(self, readers, data) if cancelled.is_set() or self.sent_bytes < part_bytes else None

    monkeypatch.setattr(SlotPool, "put", is_held)
    monkeypatch.setattr(link, "SLOT_WAIT_S", WAIT_S)  # what waits does not go over DDS meanwhile

    async def script(group: Group) -> None:
        vector = torch.ones(8 * MIB)  # 32 MiB
        if group.rank == 0:
            handle = group.broadcast("model", vector, timeout_s=WAIT_S)
            await eventually(lambda: shared_of(group).slots.sent_bytes == part_bytes)
            handle.cancel()
            vector.fill_(-1)
            cancelled.set()
            called_off.set()
        else:
            handle = group.broadcast("model", vector, timeout_s=2 * WAIT_S)
            await called_off.wait()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):  # time in which something could come, but must not
                    await handle
            assert bool((vector == 1).all())
        await group.barrier()
        for step in range(3):  # the slots that were in use are used again
            await large_sum(group, f"{step}")

    run(lambda: as_ranks(place, 2, script))


def test_what_is_added_again_while_it_ends_is_called_again(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            calls: list[int] = []
            twice = threading.Event()

            def function() -> bool:
                calls.append(1)
                if len(calls) == 1:
                    receiver_of(bus).add_periodic(Periodic(function))
                else:
                    twice.set()
                return False

            receiver_of(bus).add_periodic(Periodic(function))
            assert await asyncio.to_thread(twice.wait, WAIT_S)

    run(main)


def test_to_wait_on_a_bus_that_is_closed_does_no_harm(run: Run, place: dict[str, Any]) -> None:
    calls: list[str] = []

    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            thread = receiver_of(bus).thread
        thread.add_periodic(Periodic(lambda: bool(calls.append("called"))))
        pumping = threading.Thread(target=thread.poll_inline, args=(lambda: False, float("inf")), daemon=True)
        pumping.start()
        await asyncio.to_thread(pumping.join, WAIT_S)
        assert not pumping.is_alive()
        assert calls == []

    run(main)


def test_the_support_names_what_the_kernel_names(tmp_path: Path) -> None:
    """Else the tests above could not fail."""
    before = mapped(), open_files()
    segment = gradbus.runtime.shm.segment.Segment(1 << 16)
    assert (mapped(), open_files()) == (before[0] + 1, before[1] + 1)
    del segment

"""Who belongs to a group: joining, what does not fit, leaving in order or not."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from bus_helpers import Run
from group_node import LEASE_S, as_ranks, joined
from patience import eventually

import gradbus
from gradbus.runtime.collectives import Group, formation
from gradbus.runtime.collectives.formation import Formation
from gradbus.runtime.collectives.membership import Membership
from gradbus.runtime.errors import BarrierTimeout, BusClosed, ConfigError, PeerLost
from gradbus.runtime.wire.control import GroupHello, GroupLeave
from gradbus.runtime.wire.messages import Control

both_loops = pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)


@both_loops
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_ranks_know_all_members_in_order(run: Run, place: dict[str, Any], world: int) -> None:
    async def script(group: Group) -> Any:
        assert (group.world, group.name, group.lost) == (world, "some_name", {})
        assert [member.rank for member in group.members] == list(range(world))
        assert all(member.incarnation > 0 and "process" in member.host for member in group.members)
        await group.barrier()  # nobody leaves before
        return group.members

    assert len(set(run(lambda: as_ranks(place, world, script, name="some_name")))) == 1


def test_a_rank_that_comes_late_is_waited_for(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async def rank(number: int, start: asyncio.Event) -> None:
            await start.wait()
            async with joined(place, number, 3) as group:
                assert await group.all_gather("x", bytes([number])) == [b"\0", b"\1", b"\2"]

        now, later = asyncio.Event(), asyncio.Event()
        now.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rank(0, now))
            tasks.create_task(rank(2, now))
            late = tasks.create_task(rank(1, later))
            await asyncio.wait([late], timeout=0.5)
            later.set()

    run(main)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rank": 2}, "expected 0 .. 1"),
        ({"rank": -1}, "expected 0 .. 1"),
        ({"rank": 0.0}, "expected 0 .. 1"),
        ({"world": 0}, "within 1 .. 1024"),
        ({"world": 1025}, "within 1 .. 1024"),
        ({"world": "2"}, "within 1 .. 1024"),
        ({"name": ""}, "letters, digits and underscores"),
        ({"name": "a/b"}, "letters, digits and underscores"),
        ({"name": "x" * 65}, "letters, digits and underscores"),
        ({"name": "x\n"}, "letters, digits and underscores"),
        ({"timeout_s": 0}, "timeout_s must be > 0"),
        ({"collective_timeout_s": float("nan")}, "collective_timeout_s must be > 0"),
    ],
)
def test_what_cannot_be_a_rank_of_a_group_is_refused_at_once(
    run: Run, place: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            with pytest.raises(ConfigError, match=why):
                async with gradbus.join_group(bus, **{"rank": 0, "world": 2, **options}):
                    raise AssertionError("not reached")

    run(main)


async def _gives_up(waits: Membership, timeout_s: float) -> BarrierTimeout:
    """Wait so long from now on, whoever has been known before."""
    with pytest.raises(BarrierTimeout) as caught:
        await waits.form(timeout_s)
    return caught.value


@asynccontextmanager
async def _waiting(place: dict[str, Any], rank: int, world: int) -> AsyncIterator[Membership]:
    """A rank that waits for a group on a bus of its own, and leaves as :func:`gradbus.join_group` does."""
    async with gradbus.connect(**place, network=gradbus.NetworkConfig(lease_s=LEASE_S)) as bus:
        waits = Membership(bus, "world", rank, world, early_bytes=1 << 20, early_age_s=60.0)
        try:
            yield waits
        finally:
            await waits.close(ok=False, reason=waits.gave_up or "was stopped")


async def _meets(waits: Membership, condition: Callable[[], bool]) -> None:
    """Wait for the group until a condition holds."""
    forming = asyncio.create_task(waits.form(60.0))
    await eventually(condition)
    forming.cancel()
    await asyncio.wait([forming])


@both_loops
def test_each_rank_that_gives_up_names_those_who_have_never_come_and_who_was_there(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with _waiting(place, 2, 4) as last:
            async with _waiting(place, 0, 4) as first:
                meeting = asyncio.create_task(_meets(last, lambda: last.formation.missing == (1, 3)))
                await _meets(first, lambda: first.formation.missing == (1, 3))
                await meeting
                error = await _gives_up(first, 0.1)
                assert str(error).startswith("group 'world', rank 0: 2 of 4 ready after 0.1 s, missing [1, 3]. Start")
                assert (error.missing, error.ready, error.needed) == ((1, 3), 2, 4)
            await _meets(last, lambda: bool(last.formation.departed))
            error = await _gives_up(last, 0.2)
        assert str(error).startswith(
            "group 'world', rank 2 (rank 0 was here, and gave up after 0.1 s without ranks [1, 3]): "
            "1 of 4 ready after 0.2 s, missing [1, 3]. Start"
        )
        assert (error.missing, error.ready, error.needed) == ((1, 3), 1, 4)

    run(main)


def test_if_all_ranks_have_come_but_not_at_one_time_none_is_missing(run: Run, place: dict[str, Any]) -> None:
    """A rank that is stopped, one that ends with an error, and what :func:`gradbus.join_group` sends as it gives up."""

    async def main() -> None:
        async with _waiting(place, 1, 3) as last:
            for rank, why in ((0, "gave up after 0.3 s without ranks [1, 2]"), (2, "was stopped")):
                known = asyncio.create_task(_meets(last, lambda rank=rank: rank in last.formation.departed))
                if rank == 2:
                    async with _waiting(place, rank, 3) as other:
                        await _meets(other, lambda: last.formation.knows(2, other.identity.incarnation))
                while rank == 0 and not known.done():  # until the other one has received a hello
                    with pytest.raises(BarrierTimeout):
                        async with joined(place, 0, 3, timeout_s=0.3):
                            raise AssertionError("not reached")
                await known
                await _meets(last, lambda rank=rank: rank in last.formation.departed)  # also that of the last try
                assert last.formation.departed[rank].startswith(why[:20])
            error = await _gives_up(last, 0.1)
        assert error.missing == ()
        assert "rank 2 was here, and was stopped): 1 of 3 ready after 0.1 s. Start all ranks again" in str(error)

    run(main)


async def _fails_to_join(place: dict[str, Any], rank: int, world: int, why: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=why):
        async with joined(place, rank, world, **options):
            raise AssertionError("not reached")


def test_ranks_of_different_worlds_both_say_so_at_once(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_fails_to_join(place, 0, 2, "rank 1 on .* says world 3, this process .rank 0. says 2"))
            tasks.create_task(_fails_to_join(place, 1, 3, "rank 0 on .* says world 2, this process .rank 1. says 3"))
        assert time.monotonic() - start_s < 10  # of 20

    run(main)


def test_a_second_process_of_one_rank_gives_up_and_does_not_disturb_the_group(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        taken = asyncio.Event()

        async def script(group: Group) -> None:
            if group.rank == 1:
                await _fails_to_join(place, 1, 2, r"rank 1 is taken by .*\(process")
                taken.set()
            await taken.wait()
            assert await group.all_gather("x", b"") == [b"", b""]

        await as_ranks(place, 2, script)

    run(main)


def test_a_bus_holds_one_rank_of_a_group(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as bus, gradbus.join_group(bus, rank=0, world=1, name="a"):
            with pytest.raises(ConfigError, match="already holds a rank of group 'a'"):
                async with gradbus.join_group(bus, rank=0, world=1, name="a"):
                    raise AssertionError("not reached")
            async with gradbus.join_group(bus, rank=0, world=1, name="b") as other:
                assert await other.barrier() == (0,)

    run(main)


# Leaving


@both_loops
def test_a_rank_that_leaves_in_order_does_not_disturb_those_who_wait_for_a_third(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> None:
        third = asyncio.Event()

        async def script(group: Group) -> None:
            if group.rank == 0:  # has all it wants, and goes
                await group.send("x", b"last words" * 1000, to=1)
                return
            if group.rank == 2:
                await third.wait()
                await group.send("y", b"late", to=1)
                return
            late = group.recv("y", source=2)
            assert await group.recv("x", source=0) == b"last words" * 1000
            await eventually(lambda: 0 in group.lost)
            assert "left: done" in group.lost[0]
            assert not late.done()
            third.set()
            assert await late == b"late"
            with pytest.raises(PeerLost) as caught:
                await group.all_gather("z", b"")
            assert caught.value.ranks[0] == 0

        await as_ranks(place, 3, script)

    run(main)


@both_loops
@pytest.mark.parametrize("repetition", range(5))
def test_the_last_collective_before_all_leave_ends_well_on_all_ranks(
    run: Run, place: dict[str, Any], repetition: int
) -> None:
    async def script(group: Group) -> None:
        out = torch.ones(400_000)
        await group.all_reduce("x", out, out=out, algorithm=("ring", "shards", "direct")[repetition % 3])  # type: ignore[arg-type]
        assert bool((out == 3).all())

    run(lambda: as_ranks(place, 3, script))


@both_loops
def test_a_rank_that_leaves_with_an_exception_ends_what_the_others_wait_for_and_says_why(
    run: Run, place: dict[str, Any]
) -> None:
    class Mistake(Exception):
        pass

    async def main() -> None:
        looked = asyncio.Barrier(2)  # nobody leaves before both have seen who is lost

        async def script(group: Group) -> None:
            if group.rank == 1:
                await group.barrier()
                raise Mistake("division by zero")
            pending = group.all_gather("x", b"")
            between = group.recv("y", source=2 - group.rank) if group.rank == 0 else None
            await group.barrier()
            start_s = time.monotonic()
            for handle in (pending, group.all_gather("later", b"")):
                with pytest.raises(PeerLost, match="rank 1: failed with Mistake: division by zero, at ") as caught:
                    await handle
                assert caught.value.ranks == (1,)
                assert "division by zero" in caught.value.reasons[1]
            assert time.monotonic() - start_s < 10  # of 20
            assert group.lost.keys() == {1}
            await looked.wait()
            if between is not None:
                assert await between == b"still here"  # that one does not need rank 1
            else:
                await group.send("y", b"still here", to=0)
            await eventually(lambda: group.stats.pending == 0)

        results = await asyncio.gather(*(_run(place, rank, script) for rank in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [type(None), Mistake, type(None)]

    run(main)


@pytest.mark.parametrize("in_order", [True, False])
def test_who_leaves_because_a_rank_has_died_names_that_rank_to_those_who_have_not_noticed_yet(
    run: Run, place: dict[str, Any], in_order: bool
) -> None:
    async def script(group: Group) -> None:
        await group.barrier()
        if group.rank == 0:
            await waiting.wait()
            # As when its lease has ended, here before elsewhere: leases are of the test's own process.
            group._engine.lose(1, reason)  # noqa: SLF001
            try:
                await group.all_gather("x", b"")
            except PeerLost:
                if not in_order:
                    raise
        if group.rank == 2:
            handle = group.all_gather("x", b"")
            waiting.set()  # it is through the barrier, and expects something of both
            with pytest.raises(PeerLost) as caught:
                await handle
            assert caught.value.reasons == {1: f"{reason} (told by rank 0)"}
        if group.rank == 1:
            await eventually(lambda: 2 in group.lost)

    waiting, reason = asyncio.Event(), "failed with ValueError: no"

    async def main() -> list[Any]:
        async with gradbus.connect(**place, network=gradbus.NetworkConfig(lease_s=LEASE_S)) as observer:
            with observer.subscribe(Control) as inbox:
                ends = await asyncio.gather(*(_run(place, rank, script) for rank in range(3)), return_exceptions=True)
                told: dict[int, GroupLeave] = {}
                while told.keys() != {0, 1, 2}:
                    message = await inbox.get()
                    if isinstance(message, Control) and isinstance(message.body, GroupLeave):
                        told[message.sender] = message.body
        for rank in (0, 2):  # who was told of it tells the same, and not by whom
            assert dict(zip(told[rank].lost, told[rank].lost_reasons, strict=True))[1] == reason
        return ends

    assert [type(end) for end in run(main)] == [type(None) if in_order else PeerLost, type(None), type(None)]


def test_what_a_rank_has_seen_itself_of_a_loss_it_passes_on_and_not_what_another_told_it_later(
    run: Run, place: dict[str, Any]
) -> None:
    async def script(group: Group) -> None:
        await group.barrier()
        if group.rank != 1:
            # As when its lease has ended: leases are of the test's own process.
            group._engine.lose(1, f"seen by rank {group.rank}")  # noqa: SLF001
            knows[group.rank].set()
        if group.rank == 0:
            await knows[2].wait()
        if group.rank == 2:
            with pytest.raises(PeerLost) as caught:
                await group.recv("nothing", source=0)
            assert caught.value.ranks == (0,)
        if group.rank == 1:
            await eventually(lambda: 2 in group.lost)

    knows = {rank: asyncio.Event() for rank in (0, 2)}

    async def main() -> dict[int, GroupLeave]:
        told: dict[int, GroupLeave] = {}
        async with gradbus.connect(**place, network=gradbus.NetworkConfig(lease_s=LEASE_S)) as observer:
            with observer.subscribe(Control) as inbox:
                ends = await asyncio.gather(*(_run(place, rank, script) for rank in range(3)), return_exceptions=True)
                assert ends == [None, None, None]
                while told.keys() != {0, 1, 2}:
                    message = await inbox.get()
                    if isinstance(message, Control) and isinstance(message.body, GroupLeave):
                        told[message.sender] = message.body
        return told

    told = run(main)
    assert {rank: told[rank].lost_reasons for rank in (0, 2)} == {0: ["seen by rank 0"], 2: ["seen by rank 2"]}


async def _run(place: dict[str, Any], rank: int, script: Any) -> None:
    async with joined(place, rank, 3) as group:
        await script(group)


@both_loops
def test_a_rank_that_leaves_as_soon_as_it_has_joined_keeps_nobody_from_joining(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        for _ in range(10):
            async with asyncio.TaskGroup() as tasks:
                for rank in range(2):
                    tasks.create_task(_join_and_leave(place, rank))

    async def _join_and_leave(place: dict[str, Any], rank: int) -> None:
        async with joined(place, rank, 2):
            pass

    run(main)


def test_handles_that_are_left_over_end_when_their_group_ends(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        handles = []

        async def script(group: Group) -> None:
            if group.rank == 0:
                handles.append(group.all_gather("x", b""))
                handles.append(group.recv("y", source=1))
            await group.barrier()
            if group.rank == 1:  # it stays until the other has left: its own leaving would end them, too
                for handle in handles:
                    with pytest.raises(BusClosed, match="left group 'world'"):
                        await handle

        await as_ranks(place, 2, script)

    run(main)


def test_a_bus_that_is_closed_ends_what_is_pending_and_the_group_still_closes(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        closed = asyncio.Event()

        async def first() -> None:
            async with gradbus.connect(**place, lease_s=LEASE_S) as bus:
                async with gradbus.join_group(bus, rank=0, world=2) as group:
                    pending = group.all_gather("x", b"")
                    await bus.close()
                    for handle in (pending, group.all_gather("y", b"")):
                        with pytest.raises(BusClosed):
                            await handle
                closed.set()

        async def second() -> None:
            async with joined(place, 1, 2) as group:
                with pytest.raises(PeerLost):
                    await group.recv("never", source=0)
                await closed.wait()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(first())
            tasks.create_task(second())

    run(main)


def test_a_rank_whose_loop_is_slow_has_joined_a_group_although_the_others_left_it_meanwhile(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word that forms the group and the other's farewell wait for its loop together."""
    hello_now, linked, other_left = Formation.hello_now, threading.Event(), threading.Event()
    ranks: dict[int, Formation] = {}

    def stand_still() -> None:
        assert other_left.wait(10)
        time.sleep(0.05)  # all that the other said was acknowledged before; now it is in the queue, too

    def said(self: Formation) -> GroupHello:
        ranks[self.me.rank] = self
        if self.me.rank == 1 and len(ranks) == 2 and all(one.linked for one in ranks.values()) and not linked.is_set():
            linked.set()
            asyncio.get_running_loop().call_soon(stand_still)
        hello = hello_now(self)
        return hello if linked.is_set() else dataclasses.replace(hello, linked=False)

    monkeypatch.setattr(Formation, "hello_now", said)
    monkeypatch.setattr(formation, "NEWS_S", 1e-6)  # it is out before the loop stands still

    async def comes_and_goes() -> None:
        async with joined(place, 0, 2):
            pass
        other_left.set()

    async def main() -> None:
        elsewhere = asyncio.create_task(asyncio.to_thread(asyncio.run, comes_and_goes()))
        async with joined(place, 1, 2) as group:
            with pytest.raises(PeerLost, match="rank 0: left: done"):
                await group.barrier()
        await elsewhere

    run(main)

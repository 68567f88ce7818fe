"""Groups that form anew under their name, and groups within groups."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from bus_helpers import Run, participant_of
from group_node import LEASE_S, as_ranks
from patience import eventually

import gradbus
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.collectives import Group, Member
from gradbus.runtime.errors import CollectiveError, PeerLost
from gradbus.runtime.security import Level, Security
from gradbus.runtime.security.job_key import new_job_key, write_secret_file
from gradbus.runtime.wire.control import GroupHello
from gradbus.runtime.wire.messages import Control, Identity

both_loops = pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)


# Coming back


@both_loops
def test_a_group_forms_anew_under_its_name_when_all_have_left_however_fast_some_are(
    run: Run, place: dict[str, Any]
) -> None:
    """The fast ones are back before the slow ones have left: what they hear of the former group does not count."""

    async def main() -> None:
        async def rank(number: int) -> None:
            async with gradbus.connect(**place, lease_s=LEASE_S) as bus:
                for life in range(6):
                    async with gradbus.join_group(bus, rank=number, world=3, timeout_s=20.0) as group:
                        payloads = [f"{life} {other}".encode() for other in range(3)]
                        assert await group.all_gather("x", payloads[number]) == payloads
                        if (number + life) % 3 == 0:
                            await asyncio.sleep(0.15)  # while the others have left and say hello
                        assert sum(group.stats.dropped.values()) == 0

        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(rank(number))

    run(main)


@both_loops
def test_after_a_loss_the_survivors_and_a_new_start_form_the_group_anew(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async def rank(number: int) -> None:
            async with gradbus.connect(**place, lease_s=LEASE_S) as bus:
                for life in range(3):
                    try:
                        async with gradbus.join_group(bus, rank=number, world=3, timeout_s=20.0) as group:
                            assert await group.all_gather("x", bytes([life])) == [bytes([life])] * 3
                            if life < 2 and number == 1:
                                raise RuntimeError("it falls")
                            await group.all_gather("y", bytes([life]))
                            assert life == 2
                    except RuntimeError:
                        continue
                    except PeerLost as error:
                        assert 1 in error.ranks  # noqa: PT017 - the loop goes on

        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(rank(number))

    run(main)


def test_a_rank_that_is_back_on_its_bus_may_hear_what_its_former_start_said(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as here, gradbus.connect(**place) as there:

            async def rank(number: int) -> tuple[Member, ...]:
                async with gradbus.join_group((here, there)[number], rank=number, world=2, timeout_s=20.0) as group:
                    return group.members

            with here.subscribe(Control) as heard:
                (members, _) = await asyncio.gather(rank(0), rank(1))
                back = asyncio.create_task(rank(1))
                while True:
                    word = await heard.get()
                    if (
                        isinstance(word, Control)
                        and isinstance(word.body, GroupHello)
                        and word.incarnation > members[1].incarnation
                    ):
                        break
                former = Identity(1, members[1].incarnation)
                for _ in range(5):
                    await here.publish(former, word.body)
                await asyncio.gather(rank(0), back)

    run(main)


def test_a_rank_that_comes_while_the_former_group_still_stands_waits_for_its_end(
    run: Run, place: dict[str, Any]
) -> None:
    """Rank 1 left and is back; the others learn of it, leave and come back, too. Nothing of the first group counts."""

    async def main() -> None:
        async def rank(number: int) -> None:
            async with gradbus.connect(**place, lease_s=LEASE_S) as bus:
                async with gradbus.join_group(bus, rank=number, world=2) as group:
                    first = group.members
                    await group.barrier()
                    if number == 0:
                        await asyncio.sleep(0.3)  # rank 1 is forming a group by then
                        with pytest.raises(PeerLost):
                            await group.barrier()
                async with gradbus.join_group(bus, rank=number, world=2, timeout_s=20.0) as group:
                    assert group.lost == {}
                    assert all(a.incarnation < b.incarnation for a, b in zip(first, group.members, strict=True))
                    assert await group.barrier() == (0, 1)

        async with asyncio.TaskGroup() as tasks:
            for number in range(2):
                tasks.create_task(rank(number))

    run(main)


# Groups within


@both_loops
def test_subgroups_count_their_ranks_anew_and_do_not_hear_each_other(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        ranks = [2, 0] if group.rank in (0, 2) else [1, 3]
        async with group.subgroup(ranks) as part:
            assert part.world == 2
            assert part.rank == ranks.index(group.rank)
            assert await part.all_gather("x", bytes([group.rank])) == [bytes([rank]) for rank in ranks]
            assert len(await group.all_gather("x", b"")) == 4  # the whole group goes on meanwhile
            async with part.subgroup([0, 1], name="pair") if ranks == [1, 3] else part.subgroup([1, 0]) as inner:
                assert len(await inner.all_gather("x", b"")) == 2
        async with group.subgroup(ranks) as again:
            assert await again.barrier() == (0, 1)
        async with group.subgroup(list(range(4))) as everybody:
            assert await everybody.barrier() == (0, 1, 2, 3)

    run(lambda: as_ranks(place, 4, script))


def test_a_rank_that_leaves_a_subgroup_stays_in_the_group(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        try:
            async with group.subgroup([0, 1, 2]) as part:
                await part.barrier()
                if part.rank == 1:
                    raise RuntimeError("enough of this")
                with pytest.raises(PeerLost, match="enough of this"):
                    await part.all_gather("x", b"")
        except RuntimeError:
            assert group.rank == 1
        assert group.lost == {}
        assert await group.barrier() == (0, 1, 2)

    run(lambda: as_ranks(place, 3, script))


def test_long_names_and_many_ranks_make_a_valid_name_for_a_subgroup(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        async with group.subgroup([0]) as part:
            assert len(part.name) <= 64
            assert await part.barrier() == (0,)

    run(lambda: as_ranks(place, 1, script, name="n" * 64))


def test_an_object_that_cannot_be_read_fails_the_one_who_reads_it(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        if group.rank == 0:
            handle = group.all_gather("x", b"\xc1 is no msgpack")
            assert len(await handle) == 2
        else:
            with pytest.raises(CollectiveError, match="no object in msgpack"):
                await group.all_gather_object("x", 1)
        await group.barrier()

    run(lambda: as_ranks(place, 2, script))


@pytest.mark.parametrize("level", ["none", "psk"])
def test_groups_that_were_left_leave_nothing_in_dds(
    run: Run, place: dict[str, Any], level: Level, tmp_path: Path
) -> None:
    """A bus may see any number of groups, and each has topics of its own."""

    def children(bus: Bus) -> int:
        return len(participant_of(bus).entity.get_children())

    async def main() -> None:
        write_secret_file(tmp_path / "key", new_job_key().text)
        security = Security(level="psk", key_file=tmp_path / "key") if level == "psk" else Security()
        async with gradbus.connect(**place, security=security) as bus:
            with bus.subscribe(Control):
                bus.open_writer(Control)
                before = children(bus)
                for number in range(3):
                    async with gradbus.join_group(bus, rank=0, world=1, name=f"group{number}") as group:
                        await group.barrier()
                        assert children(bus) > before
                async with asyncio.timeout(10.0):
                    await eventually(lambda: children(bus) == before)  # the receive thread deletes them

    run(main)

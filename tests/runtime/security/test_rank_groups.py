"""Groups of ranks whose nodes have keys of their own, over DDS."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from bus_helpers import membership_of
from dds_domains import new_domain
from group_node import group_ranks
from group_scripts import known_ranks
from identities import Identities
from patience import eventually, run

import gradbus
from gradbus.commands.run.status import observe
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.errors import BarrierTimeout, ConfigError, JobInUse, JoinRefused, PeerLost
from gradbus.runtime.security import Security
from gradbus.runtime.security.identity import key_epoch
from gradbus.runtime.wire.messages import Control

_numbers = count()
Place = dict[str, Any]


@pytest.fixture
def known(tmp_path: Path) -> Identities:
    identities = Identities(tmp_path, clients=0)
    for rank in (1, 2):
        identities.allow_rank(f"host-{rank}", rank)
    return identities


@pytest.fixture
def place() -> Place:
    return {"job": f"ranks-{os.getpid()}-{next(_numbers)}", "domain": new_domain()}


@pytest.fixture
def opens(known: Identities, place: Place) -> Callable[..., Any]:
    def connect(name: str, rank: int, **security: Any) -> Any:
        return gradbus.connect(**place, lease_s=5.0, security=Security(**known.rank_security(name, rank, **security)))

    return connect


async def sum_of(bus: Bus, rank: int, world: int, name: str = "world") -> float:
    """Form a group and add something."""
    async with gradbus.join_group(bus, rank=rank, world=world, name=name, timeout_s=15.0) as group:
        return float(await group.all_reduce("sum", torch.tensor(rank + 1.0)))


async def together(*jobs: Any) -> list[Any]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(job) for job in jobs]
    return [task.result() for task in running]


@pytest.mark.slow
def test_a_group_of_known_processes_works_strangers_stay_out_and_who_is_removed_is_lost_while_the_others_go_on(
    known: Identities,
) -> None:
    known.new("stranger")
    known.allow(known.new("watcher"), "observer")
    names = ["server", "host-1", "host-2"]
    securities = {f"rank_{rank}": {"security": known.rank_security(name, rank)} for rank, name in enumerate(names)}
    limits = {"collective_timeout_s": 20.0}
    with group_ranks(known_ranks, 3, network={"lease_s": 5.0}, limits=limits) as ranks:
        nodes = ranks.start_all(**securities)
        works = [node.wait_for("works") for node in nodes]
        where = ranks.place
        run(strangers_stay_out(known, where))
        known.remove("host-2")
        ended = [node.wait_for("ended") for node in nodes]
        went_on = [node.wait_for("went on") for node in nodes[:2]]
        assert [node.wait() for node in nodes] == [0, 0, 0]
    assert [event["kind"] for event in ended] == ["PeerLost", "PeerLost", "JoinRefused"]
    assert all("rank 2" in event["text"] and "taken off the allow list" in event["text"] for event in ended[:2])
    assert "host-2 has been taken off the allow list" in ended[2]["text"]
    assert went_on[0]["key"] == went_on[1]["key"]
    for before, after in zip(works, went_on, strict=False):  # not a frame was lost by the change of keys
        assert before["rejected"].get("no key", 0) == after["rejected"].get("no key", 0)


async def strangers_stay_out(known: Identities, where: Place) -> None:
    async def join(security: Security) -> None:
        async with gradbus.connect(**where, lease_s=5.0, security=security) as bus:
            with bus.subscribe(Control):
                await eventually(lambda: bus.misconfiguration)  # it has heard of the others, however long that takes
            await sum_of_short(bus)

    async def sum_of_short(bus: Bus) -> None:
        async with gradbus.join_group(bus, rank=2, world=3, timeout_s=0.8):
            raise AssertionError("it is in")

    with pytest.raises(BarrierTimeout, match="encrypts what it sends, and this one does not"):
        await join(Security(level="none"))
    with pytest.raises(JoinRefused, match="stranger is not on the allow list of the controller"):
        await join(Security(**known.rank_security("stranger", 2)))
    with pytest.raises(BarrierTimeout, match=r"has not admitted this one.*expects ed25519"):
        await join(Security(**known.rank_security("host-2", 2) | {"controller_key": public_of(known, "stranger")}))
    watcher = known.security("watcher")
    settings = BusSettings(
        job=where["job"],
        domain=where["domain"],
        security="identity",
        key_file=Path(watcher["key_file"]),
        controller_key=watcher["controller_key"],
        lease_s=5.0,
    )
    for listen_s in (1.2, 6.0):  # the longer one where a rank said nothing within the shorter one
        picture = await observe(settings, timeout_s=10.0, listen_s=listen_s)
        states = [rank["state"] for group in picture["groups"] if group["group"] == "world" for rank in group["ranks"]]
        if states == ["works"] * 3:
            return
    raise AssertionError(picture)


def public_of(known: Identities, name: str) -> str:
    return str(known.security("server", pinned=name)["controller_key"])


def test_processes_of_one_machine_share_its_key_and_a_rank_that_the_list_does_not_give_is_refused_in_words(
    opens: Callable[..., Any], known: Identities
) -> None:
    async def main() -> None:
        async with opens("server", 0) as zero, opens("server", 1) as one, opens("host-2", 2) as two:
            buses = enumerate((zero, one, two))
            assert await together(*(sum_of(bus, rank, 3) for rank, bus in buses)) == [6.0] * 3
            await eventually(lambda: membership_of(two).keys.has_key)
            with pytest.raises(
                ConfigError, match=r"rank 1 is not one of .* gives host-2: 2\. Give this process another"
            ):
                await sum_of(two, 1, 3)
            both = [sum_of(zero, 1, 2, "pair"), sum_of(two, 0, 2, "pair")]  # other numbers than those of the job
            assert await together(*both) == [3.0] * 2

    run(main())


def test_when_the_giver_of_the_keys_is_gone_those_who_are_in_go_on_and_with_its_next_start_all_are_there_again(
    opens: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_epoch, "FORMER_RANKS_S", 0.5)

    async def main() -> None:
        async with opens("host-1", 1) as one, opens("host-2", 2) as two:
            async with opens("server", 0) as zero:
                await together(*(sum_of(bus, rank, 3) for rank, bus in enumerate((zero, one, two))))
            assert await together(sum_of(one, 0, 2, "pair"), sum_of(two, 1, 2, "pair")) == [3.0] * 2
            async with opens("host-2", 2) as late:
                with pytest.raises(
                    BarrierTimeout, match=r"as a rule rank 0, with the key ed25519:.*start it, and compare"
                ):
                    async with gradbus.join_group(late, rank=2, world=3, timeout_s=0.5):
                        pass
            async with opens("server", 0) as zero:
                assert await together(*(sum_of(bus, rank, 3) for rank, bus in enumerate((zero, one, two)))) == [6.0] * 3

    run(main())


def test_rank_0_must_have_the_key_that_the_others_expect_and_two_of_them_do_not_share_a_job(
    opens: Callable[..., Any],
) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"host-1 is to give the keys of the job, as rank 0 does"):
            async with opens("host-1", 0):
                pass
        async with opens("server", 0, allow_file=None), opens("server", 0) as second:
            with pytest.raises(JobInUse, match="the job is held by the controller"):
                async with gradbus.join_group(second, rank=0, world=2, timeout_s=10.0):
                    pass

    run(main())


def test_a_bus_for_ranks_is_none_for_a_federated_run(opens: Callable[..., Any]) -> None:
    async def main() -> None:
        async with opens("server", 0) as bus:
            for check in (bus.access_policy.check_client, bus.access_policy.check_controller):
                with pytest.raises(ConfigError, match="this bus is for ranks of a group"):
                    check()
            with bus.subscribe(Control):
                pass

    run(main())


def test_a_rank_that_is_removed_while_it_waits_in_a_collective_is_told_at_once(
    opens: Callable[..., Any], known: Identities
) -> None:
    async def main() -> None:
        async with opens("server", 0) as zero, opens("host-1", 1) as one:
            ends: dict[int, str] = {}

            async def wait(bus: Bus, rank: int) -> None:
                try:
                    async with gradbus.join_group(bus, rank=rank, world=2, timeout_s=15.0) as group:
                        if rank == 0:
                            known.remove("host-1")
                            await asyncio.sleep(30.0)
                        await group.all_reduce("never", torch.ones(3))
                except (JoinRefused, PeerLost) as error:
                    ends[rank] = type(error).__name__

            waiting = asyncio.create_task(wait(zero, 0))
            await wait(one, 1)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert ends == {1: "JoinRefused"}

    run(main())

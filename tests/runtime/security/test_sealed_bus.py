"""Sealed buses over DDS, and an outsider among them that replays what it has heard."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from bus_helpers import membership_of, readers_in_dds
from dds_domains import new_domain
from outsider import JOB_TOPICS, Outsider
from patience import eventually, run, until

import gradbus
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.transport_factory import transport_maker
from gradbus.runtime.errors import BarrierTimeout
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security import Security, membership
from gradbus.runtime.security.job_key import new_job_key, write_secret_file
from gradbus.runtime.security.peers import MAX_HELD_EACH
from gradbus.runtime.security.sealed import SealedInlet
from gradbus.runtime.transport.channels import CHANNELS, ToController, collective_channel
from gradbus.runtime.transport.dds import libddsc
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey, Kind
from gradbus.runtime.wire.messages import Control, Identity, ModelBlob, PeerGone, TrainCmd

CLIENT, SERVER = Identity(7, 1), Identity(CONTROLLER, 1)
COMMAND = TrainCmd(1, 0, 1, 0.5, 0)
_numbers = count()

Opens = Callable[[], AbstractAsyncContextManager[Bus]]


@pytest.fixture
def place() -> dict[str, Any]:
    return {"job": f"sealed-{os.getpid()}-{next(_numbers)}", "domain": new_domain(), "lease_s": 1.0}


@pytest.fixture
def keyed(place: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Arguments of ``connect`` for a member of the job."""
    write_secret_file(tmp_path / "key", new_job_key().text)
    return {**place, "security": Security(level="psk", key_file=tmp_path / "key")}


@asynccontextmanager
async def talking(one: Bus, other: Bus) -> AsyncIterator[Any]:
    """``one`` speaks, ``other`` listens; the two are matched."""
    with other.subscribe(ToController) as inbox:
        one.open_writer(ToController)
        await one.matched(lambda: readers_in_dds(one, ToController) > 0, timeout_s=20)
        yield inbox


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "binding"])
def test_sealed_buses_talk_over_every_topic_and_a_late_one_still_gets_command_and_model(
    keyed: dict[str, Any], fast: bool
) -> None:
    async def main() -> None:
        model = random.randbytes(2_500_000)
        async with gradbus.connect(**keyed, fast=fast) as one:
            one.open_writer(ModelBlob, retained_samples=3)
            await one.publish(SERVER, COMMAND)
            await one.send_model(FrameKey(Kind.MODEL, 1, 1, CONTROLLER, 1), model, flags=Flags.DELTA)
            async with gradbus.connect(**keyed, fast=fast) as late:
                with late.subscribe(TrainCmd, ModelBlob) as inbox:
                    got = [await inbox.get() for _ in range(4)]
                assert [one for one in got if isinstance(one, TrainCmd)] == [COMMAND]
                parts = sorted((one.frame.seq, bytes(one.frame.data)) for one in got if isinstance(one, ModelBlob))
                assert b"".join(data for _, data in parts) == model
                flags = {one.frame.flags for one in got if isinstance(one, ModelBlob)}
                assert flags == {Flags.DELTA | Flags.HEAD_CRC}  # the tag says what a checksum of the payload would
                assert not one.rejected
                assert not late.rejected

    run(main())


def test_a_late_one_gets_all_of_a_model_that_dds_refused_at_first(
    keyed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "LEEWAY_S", 0)
    model = random.randbytes(2_500_000)
    write, tries = libddsc.write_made, count()

    def full_twice(entity: int, sertype: int, head: bytes, room_bytes: int, make: Callable[[memoryview], None]) -> int:
        if room_bytes > 100_000 and next(tries) % 3 < 2:
            return libddsc.RETCODE_TIMEOUT
        return write(entity, sertype, head, room_bytes, make)

    monkeypatch.setattr(libddsc, "write_made", full_twice)

    async def main() -> None:
        async with gradbus.connect(**keyed) as one:
            one.open_writer(ModelBlob, retained_samples=3)
            await one.send_model(FrameKey(Kind.MODEL, 1, 1, CONTROLLER, 1), model)
            await eventually(lambda: membership_of(one).cipher.moment >= 1)
            async with gradbus.connect(**keyed) as late:
                with late.subscribe(ModelBlob) as inbox:
                    parts = sorted([(m.frame.seq, bytes(m.frame.data)) for m in [await inbox.get() for _ in range(3)]])
                assert b"".join(data for _, data in parts) == model
                assert not late.rejected

    run(main())


def test_as_many_samples_are_taken_as_there_are_of_those_that_were_held_back_and_those_that_dds_has(
    keyed: dict[str, Any],
) -> None:
    opened = transport_maker(
        keyed["job"], domain=keyed["domain"], network=NetworkConfig(), fast=None, security=keyed["security"]
    )
    one, other = opened(), opened()
    try:
        writer, reader = one.outlet(CHANNELS[ToController]), other.inlet(CHANNELS[ToController])
        assert isinstance(reader, SealedInlet)
        for endpoint in (writer, reader):
            until(lambda endpoint=endpoint: endpoint.refresh() or endpoint.matched)
        for _ in range(3):
            assert writer.write((), (b"x",))
        assert writer.wait_for_acks(20.0)
        for held in ("first", "second"):
            reader._release(held, 1)  # noqa: SLF001 - what the membership is given, for one that is authenticated later
        taken = [raw for raw, _ in reader.take(4)]
        assert taken[:2] == ["first", "second"]
        assert len(taken) == 4
        assert len(reader.take(4)) == 1
    finally:
        other.close()
        one.close()


def test_an_outsider_hears_no_word_in_clear_and_is_not_heard(keyed: dict[str, Any], place: dict[str, Any]) -> None:
    async def main() -> None:
        with Outsider(place["job"], place["domain"], echoes=True) as outsider:
            async with gradbus.connect(**keyed) as one, gradbus.connect(**keyed) as other, talking(one, other) as inbox:
                outsider.wait_for_readers(1)
                await eventually(lambda: readers_in_dds(one, ToController) > 1)
                for number in count():
                    await one.publish(CLIENT, Leave(f"word {number}"))
                    assert (await inbox.get()).body == Leave(f"word {number}")
                    # Chance decides which bits are damaged, and most of them are those of an envelope that is known.
                    if number >= 20 and all(other.rejected[why] for why in ("replay", "tag", "other key")):
                        break
                assert not inbox
                await eventually(lambda: len(outsider.heard) >= 20)  # it hears on a thread of its own
        assert outsider.in_clear == []
        assert not any(b"word" in sample for _, sample in outsider.heard)

    run(main())


def test_a_recording_is_not_taken_by_a_process_that_was_started_later(
    keyed: dict[str, Any], place: dict[str, Any]
) -> None:
    async def main() -> None:
        with Outsider(place["job"], place["domain"]) as outsider:
            async with gradbus.connect(**keyed) as one, gradbus.connect(**keyed) as other, talking(one, other) as inbox:
                await eventually(lambda: readers_in_dds(one, ToController) > 1)  # the outsider, too
                await one.publish(CLIENT, Leave("in the first run"))
                await inbox.get()
                await eventually(lambda: any(name == "train/control/controller" for name, _ in outsider.heard))
                await eventually(lambda: sum(name == "train/session" for name, _ in outsider.heard) >= 2)
            recorded = list(outsider.heard)
            async with gradbus.connect(**keyed) as late:
                with late.subscribe(ToController) as inbox:
                    outsider.wait_for_readers(1)
                    outsider.wait_for_readers(1, "train/session")
                    outsider.say_all(recorded)
                    outsider.say_all(recorded)  # the second time it is known
                    await eventually(lambda: late.rejected["replay"] >= len(recorded))
                    async with gradbus.connect(**keyed) as one, talking(one, late):
                        await one.publish(CLIENT, Leave("in the second run"))
                        assert (await inbox.get()).body == Leave("in the second run")
                        assert not inbox

    run(main())


def test_a_recording_of_a_process_that_is_gone_is_not_taken_by_one_that_heard_it(
    keyed: dict[str, Any], place: dict[str, Any]
) -> None:
    async def main() -> None:
        with Outsider(place["job"], place["domain"]) as outsider:
            async with gradbus.connect(**keyed) as other:
                async with gradbus.connect(**keyed) as one, talking(one, other) as inbox:
                    await eventually(lambda: readers_in_dds(one, ToController) > 1)
                    await one.publish(CLIENT, Leave("once"))
                    await inbox.get()
                    await eventually(lambda: any(name == "train/control/controller" for name, _ in outsider.heard))
                with other.subscribe(ToController) as inbox:
                    await eventually(lambda: other.matched_writers(ToController) == 1)
                    outsider.say_all(outsider.heard)
                    await eventually(lambda: other.rejected["replay"] >= 2)
                    waiting = [await inbox.get() for _ in range(len(inbox))]
                    assert not any(isinstance(message, Control) for message in waiting)

    run(main())


def test_a_recording_of_a_living_process_is_not_taken_by_one_that_was_restarted(
    keyed: dict[str, Any], place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "LEEWAY_S", 0)

    async def main() -> None:
        with Outsider(place["job"], place["domain"]) as outsider:
            async with gradbus.connect(**keyed) as one:
                await one.publish(SERVER, TrainCmd(1, 0, 1, 0.5, 0))
                await one.publish(SERVER, COMMAND)
                async with gradbus.connect(**keyed) as other, talking(one, other) as inbox:
                    await eventually(lambda: readers_in_dds(one, ToController) > 1)
                    await one.publish(CLIENT, Leave("before"))
                    await inbox.get()
                    await eventually(lambda: any(name == "train/control/controller" for name, _ in outsider.heard))
                await eventually(lambda: membership_of(one).cipher.moment >= 1)
                async with gradbus.connect(**keyed) as again, talking(one, again) as inbox:
                    with again.subscribe(TrainCmd) as commands:
                        assert await commands.get() == COMMAND  # DDS has it still
                    outsider.say_all(heard for heard in outsider.heard if heard[0] == "train/control/controller")
                    await eventually(lambda: again.rejected["old"] >= 1)
                    await one.publish(CLIENT, Leave("after"))
                    assert (await inbox.get()).body == Leave("after")
                    assert not inbox

    run(main())


def test_who_says_words_again_that_a_process_has_missed_and_goes_takes_nobody_along(
    keyed: dict[str, Any], place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "LEEWAY_S", 60)

    async def main() -> None:
        with ExitStack() as stack:
            outsider = stack.enter_context(Outsider(place["job"], place["domain"]))
            async with gradbus.connect(**keyed) as other, gradbus.connect(**keyed) as one:
                one.open_writer(ToController)
                await eventually(lambda: readers_in_dds(one, ToController) > 0)  # the outsider alone
                for number in range(5):
                    await one.publish(CLIENT, Leave(f"unheard {number}"))
                await eventually(lambda: sum(name == "train/control/controller" for name, _ in outsider.heard) >= 5)
                async with talking(one, other) as inbox:
                    outsider.wait_for_readers(1)
                    await eventually(lambda: readers_in_dds(one, ToController) > 1)
                    await one.publish(CLIENT, Leave("heard"))
                    assert (await inbox.get()).body == Leave("heard")
                    outsider.say_all([heard for heard in outsider.heard if heard[0] == "train/control/controller"][:5])
                    assert [(await inbox.get()).body for _ in range(5)] == [Leave(f"unheard {n}") for n in range(5)]
                    await eventually(lambda: other.matched_writers(ToController) > 1)
                    stack.close()
                    await eventually(lambda: other.matched_writers(ToController) == 1)
                    await one.publish(CLIENT, Leave("still there"))
                    assert (await inbox.get()).body == Leave("still there")
                    await one.close()
                    assert await inbox.get() == PeerGone(CLIENT.sender, CLIENT.incarnation)

    run(main())


def test_a_flood_of_a_recording_takes_a_bounded_amount_of_memory(keyed: dict[str, Any], place: dict[str, Any]) -> None:
    async def main() -> None:
        with Outsider(place["job"], place["domain"]) as outsider:
            async with gradbus.connect(**keyed) as one, gradbus.connect(**keyed) as other, talking(one, other) as inbox:
                await eventually(lambda: readers_in_dds(one, ToController) > 1)
                for _ in range(100):
                    await one.publish(CLIENT, Leave("x" * 1000))
                    await inbox.get()
                await eventually(
                    lambda: len({data for name, data in outsider.heard if name == "train/control/controller"}) >= 100
                )
            recorded = list(dict.fromkeys(outsider.heard))  # it may have heard some twice
            spoken = sum(name == "train/control/controller" for name, _ in recorded)
            outsider.wait_for_nobody()
            async with gradbus.connect(**keyed) as late:
                with late.subscribe(ToController):
                    await eventually(lambda: late.matched_writers(ToController) > 0)
                    outsider.wait_for_readers(1)
                    outsider.say_all(recorded)
                    await eventually(lambda: late.rejected["unauthenticated"] == spoken - MAX_HELD_EACH)

    run(main())


def test_two_keys_in_one_job_are_told_of_on_both_sides(place: dict[str, Any], tmp_path: Path) -> None:
    async def main() -> None:
        members = []
        for name in ("one", "other"):
            write_secret_file(tmp_path / name, new_job_key().text)
            members.append({**place, "security": Security(level="psk", key_file=tmp_path / name)})
        async with gradbus.connect(**members[0]) as one, gradbus.connect(**members[1]) as other:
            await eventually(lambda: one.rejected["other key"] and other.rejected["other key"])
            for bus in (one, other):
                with pytest.raises(BarrierTimeout, match="Likely reason: a process of this job has another job key"):
                    await bus.matched(lambda: False, timeout_s=0.01)

    run(main())


def test_a_sealed_and_an_open_process_are_told_of_each_other(keyed: dict[str, Any], place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**keyed) as sealed, gradbus.connect(**place, security="none") as plain:
            async with talking(sealed, plain), talking(plain, sealed):
                await sealed.publish(CLIENT, Leave("x"))
                await plain.publish(CLIENT, Leave("x"))
                await eventually(lambda: plain.rejected["sealed"] and sealed.rejected["not sealed"])
            assert "set bus.security alike" in plain.misconfiguration
            assert "set bus.security alike" in sealed.misconfiguration

    run(main())


def test_a_sealed_group_adds_up_what_an_outsider_can_neither_read_nor_change(
    keyed: dict[str, Any], place: dict[str, Any]
) -> None:
    async def rank(number: int, ready: asyncio.Barrier) -> torch.Tensor:
        async with (
            gradbus.connect(**keyed, shared_memory=False) as bus,
            gradbus.join_group(bus, rank=number, world=2, name="g") as group,
        ):
            await ready.wait()
            total = torch.zeros(300_000)
            for step in range(5):
                tensor = torch.full((300_000,), float(number + step))
                total += await group.all_reduce("grad", tensor, round_id=step)
            await eventually(lambda: bus.rejected["replay"] > 0)  # the outsider says it all on a thread of its own
            return total

    async def main() -> None:
        topics = (*JOB_TOPICS, *map(collective_channel, ("g", "g/0", "g/1")))
        with Outsider(place["job"], place["domain"], topics=topics, echoes=True) as outsider:
            ready = asyncio.Barrier(2)
            sums = await asyncio.gather(rank(0, ready), rank(1, ready))
            expected = {"train/frame/g/0", "train/frame/g/1", "train/control"}
            await eventually(lambda: {name for name, _ in list(outsider.heard)} >= expected)
        for total in sums:
            assert torch.equal(total, torch.full((300_000,), 25.0))
        assert outsider.in_clear == []

    run(main())


@pytest.mark.parametrize("world", [2, 3])
def test_what_ranks_of_one_process_hear_is_opened_by_each_of_them(keyed: dict[str, Any], world: int) -> None:
    """DDS gives all of them the same memory, and keeps it for readers that it finds again: one that decrypted it in
    place would take it from the others."""

    async def rank(number: int) -> list[torch.Tensor]:
        async with (
            gradbus.connect(**keyed, shared_memory=False) as bus,
            gradbus.join_group(bus, rank=number, world=world, name="g") as group,
        ):
            gathered: list[torch.Tensor] = []
            for step in range(3):
                gathered += await group.all_gather("part", torch.full((300_000,), float(number + step)), round_id=step)
            assert not any(reason in bus.rejected for reason in ("tag", "not sealed"))
            return gathered

    async def main() -> None:
        for gathered in await asyncio.gather(*(rank(number) for number in range(world))):
            expected = [float(other + step) for step in range(3) for other in range(world)]
            assert [float(tensor.mean()) for tensor in gathered] == expected

    run(main())

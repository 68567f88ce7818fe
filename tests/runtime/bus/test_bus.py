"""Messages over real DDS on loopback, with several buses in one process."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from bus_helpers import (
    BODIES,
    CHIEF,
    CLIENT,
    CONTROLS,
    MIB,
    MODEL,
    UPDATE,
    Run,
    reads,
)

import gradbus
from gradbus.runtime.errors import BarrierTimeout, BusClosed, ConfigError
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.channels import CHANNELS, ToClients, ToController
from gradbus.runtime.wire.assembler import Assembler
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, ModelBlob, PeerGone, TrainCmd

both_loops = pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)
both_paths = pytest.mark.parametrize("fast", [True, False], ids=["fast", "binding"])


@both_loops
@both_paths
def test_each_kind_of_message_arrives_as_it_was_sent(run: Run, fast: bool, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place, fast=fast) as one, gradbus.connect(**place, fast=fast) as other:
            assert one.fast_path is fast
            inbox = other.subscribe(TrainCmd, ClientUpdate, ModelBlob, *CONTROLS)
            for kind in (TrainCmd, ClientUpdate, ModelBlob, ToController, ToClients):
                await reads(one, kind)
            command = TrainCmd(3, 600, 2, 0.05, 11)
            await one.publish(CHIEF, command)
            assert await inbox.get() == command
            for body in BODIES:
                await one.publish(CLIENT, body)
                assert await inbox.get() == Control(CLIENT.sender, CLIENT.incarnation, body)
            for size in (0, 1, 3, 5000, MIB + 7):
                payload = random.Random(size).randbytes(size)
                await one.send_update(UPDATE, 600, payload)
                first = await inbox.get()
                assert isinstance(first, ClientUpdate)
                assert (first.client_id, first.round_id, first.num_samples) == (7, 3, 600)
                assert bytes(first.frame.data) == payload[:MIB]
                if size > MIB:
                    rest = await inbox.get()
                    assert isinstance(rest, ClientUpdate)
                    assert bytes(rest.frame.data) == payload[MIB:]
            await one.send_model(MODEL, b"weights", flags=Flags.DELTA)
            model = await inbox.get()
            assert isinstance(model, ModelBlob)
            assert (model.round_id, model.frame.key, model.frame.flags) == (3, MODEL, Flags.DELTA | Flags.HEAD_CRC)
            assert bytes(model.frame.data) == b"weights"
            assert not other.rejected
            assert other.received_bytes == one.sent_bytes

    run(main)


def test_a_late_subscriber_gets_the_newest_command_and_no_older_one(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as one:
            for round_id in (1, 2, 3):
                await one.publish(CHIEF, TrainCmd(round_id, 0, 1, 0.1, 0))
            async with gradbus.connect(**place) as late:
                inbox = late.subscribe(TrainCmd)
                assert await inbox.get() == TrainCmd(3, 0, 1, 0.1, 0)
                await one.publish(CHIEF, TrainCmd(4, 0, 1, 0.1, 0))
                assert await inbox.get() == TrainCmd(4, 0, 1, 0.1, 0)

    run(main)


def test_a_late_subscriber_gets_the_newest_model_whole(run: Run, place: dict[str, Any]) -> None:
    newest = random.Random(3).randbytes(4 * MIB)

    async def main() -> None:
        async with gradbus.connect(**place) as one:
            one.open_writer(ModelBlob, retained_samples=4)
            older = FrameKey(Kind.MODEL, 1, 2, CONTROLLER, CHIEF.incarnation, 0)
            await one.send_model(older, bytes(4 * MIB))
            await one.send_model(MODEL, newest)
            async with gradbus.connect(**place) as late:
                with late.subscribe(ModelBlob) as inbox:
                    messages = [await inbox.get() for _ in range(4)]
                    assert {message.frame.key for message in messages} == {MODEL}  # type: ignore[union-attr]
                    assembler = Assembler()
                    assembler.expect(MODEL, max_bytes=4 * MIB)
                    for message in messages:
                        assembler.feed(message.frame)  # type: ignore[union-attr]
                    assert assembler.take(MODEL) == newest

    run(main)


def test_what_is_not_retained_does_not_reach_a_late_subscriber(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as one:
            await one.publish(CLIENT, Leave("early"))
            await one.send_update(UPDATE, 1, b"early")
            async with gradbus.connect(**place) as late:
                inbox = late.subscribe(ToController, ClientUpdate)
                await reads(one, ToController)
                await reads(one, ClientUpdate)
                await one.publish(CLIENT, Leave("late"))
                assert await inbox.get() == Control(CLIENT.sender, CLIENT.incarnation, Leave("late"))

    run(main)


def test_two_jobs_in_one_domain_do_not_see_each_other(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        stranger = {**place, "job": place["job"] + "-other"}
        async with (
            gradbus.connect(**place) as one,
            gradbus.connect(**place) as two,
            gradbus.connect(**stranger) as three,
            gradbus.connect(**stranger) as four,
        ):
            ours, theirs = two.subscribe(ToController), four.subscribe(ToController)
            await reads(one, ToController)
            await reads(three, ToController)
            for number in range(10):
                await one.publish(CLIENT, Leave(f"ours {number}"))
                await three.publish(CLIENT, Leave(f"theirs {number}"))
            assert [(await ours.get()).body.reason for _ in range(10)] == [f"ours {n}" for n in range(10)]  # type: ignore[union-attr]
            assert [(await theirs.get()).body.reason for _ in range(10)] == [f"theirs {n}" for n in range(10)]  # type: ignore[union-attr]
            assert (one.matched_readers(ToController), four.matched_writers(ToController)) == (1, 1)
            assert not len(ours)
            assert not len(theirs)

    run(main)


def test_every_subscription_gets_every_message_and_none_that_it_did_not_ask_for(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            first, second, models = (
                other.subscribe(ToController),
                other.subscribe(ToController),
                other.subscribe(ModelBlob),
            )
            await reads(one, ToController)
            bodies = [Leave(f"{number}") for number in range(5)]
            for body in bodies:
                await one.publish(CLIENT, body)
            for inbox in (first, second):
                assert [(await inbox.get()).body for _ in bodies] == bodies  # type: ignore[union-attr]
            assert len(models) == 0
            first.close()
            await one.publish(CLIENT, Leave("later"))
            assert (await second.get()).body == Leave("later")  # type: ignore[union-attr]
            with pytest.raises(BusClosed):
                await first.get()

    run(main)


def test_what_a_subscription_does_not_want_neither_reaches_it_nor_fills_its_inbox(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            everything = other.subscribe(ToController)
            picky = other.subscribe(ToController, only=lambda message: getattr(message, "body", None) == Leave("now"))
            await reads(one, ToController)
            for number in range(3):
                await one.publish(CLIENT, Leave(f"{number}"))
            assert [(await everything.get()).body for _ in range(3)] == [Leave(f"{n}") for n in range(3)]  # type: ignore[union-attr]
            assert len(picky) == 0
            everything.close()
            for _ in range(12):  # three times as many as the inbox holds, if anybody had to take them
                for _ in range(CHANNELS[ToController].inbox // 4):
                    await one.publish(CLIENT, Leave("later"))
                await one.publish(CLIENT, Leave("now"))
                async with asyncio.timeout(20):
                    assert (await picky.get()).body == Leave("now")  # type: ignore[union-attr]
            assert not other.rejected

    run(main)


def test_a_domain_has_one_network_configuration_in_a_process_while_it_is_open(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place):
            with pytest.raises(ConfigError, match="other network settings"):
                async with gradbus.connect(**place, network=NetworkConfig(profile="network")):
                    pass
            async with gradbus.connect(**place):
                pass
        async with gradbus.connect(**place, network=NetworkConfig(profile="network")):
            pass

    run(main)


def test_a_peer_that_leaves_is_told_of_once_for_each_of_its_identities(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as one:
            inbox = one.subscribe(ToController)
            async with gradbus.connect(**place) as other:
                await reads(other, ToController)
                for sender in (Identity(1, 10), Identity(2, 20), Identity(1, 10)):
                    await other.publish(sender, Leave("x"))
                    await inbox.get()
            lost = [await inbox.get(), await inbox.get()]
            assert lost == [PeerGone(1, 10), PeerGone(2, 20)]
            await one.matched(lambda: one.matched_writers(ToController) == 0, timeout_s=20)
            assert len(inbox) == 0

    run(main)


def test_waiting_for_a_match_ends_at_its_deadline_and_leaves_nothing_behind(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            bus.open_writer(ToController)
            for _ in range(5):
                with pytest.raises(BarrierTimeout, match="a friend"):
                    await bus.matched(lambda: bus.matched_readers(ToController) > 0, timeout_s=0.01, what="a friend")
            # A client waits so with every heartbeat, for days, and only its memory would show it.
            assert bus._match_waiters == []  # noqa: SLF001

    run(main)

"""Large payloads over real DDS: whole, without holding up the loop or each other, and with back-pressure."""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any

import pytest
from bus_helpers import (
    CHIEF,
    CLIENT,
    MIB,
    MODEL,
    UPDATE,
    Run,
    delays_of_the_loop,
    payload_from,
    reads,
)
from patience import eventually

import gradbus
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.subscription import Subscription
from gradbus.runtime.errors import WriteTimeout
from gradbus.runtime.transport.channels import ToController
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate, Control, ModelBlob

both_loops = pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)
both_paths = pytest.mark.parametrize("fast", [True, False], ids=["fast", "binding"])


@both_loops
@both_paths
def test_a_model_of_32_mib_arrives_whole(run: Run, fast: bool, place: dict[str, Any]) -> None:
    payload = random.Random(1).randbytes(32 * MIB)

    async def main() -> None:
        async with gradbus.connect(**place, fast=fast) as one, gradbus.connect(**place, fast=fast) as other:
            inbox = other.subscribe(ModelBlob)
            await reads(one, ModelBlob)
            receiving = asyncio.create_task(payload_from(inbox, MODEL, 32 * MIB))
            assert await one.send_model(MODEL, payload) == len(payload)
            assert await receiving == payload

    run(main)


@both_loops
def test_the_loop_goes_on_while_a_large_model_is_sent_and_received(run: Run, place: dict[str, Any]) -> None:
    """Sender and receiver share this loop. Most transfers: a busy machine makes single ones worse, never better."""
    payload = bytes(32 * MIB)

    async def one_transfer(one: Bus, inbox: Subscription, transfer: int) -> float:
        key = FrameKey(Kind.MODEL, 1, 3, CONTROLLER, CHIEF.incarnation, transfer)
        stop = asyncio.Event()
        delays = asyncio.create_task(delays_of_the_loop(stop))
        receiving = asyncio.create_task(payload_from(inbox, key, 32 * MIB))
        await asyncio.sleep(0)  # they have begun
        await one.send_model(key, payload)
        await receiving
        stop.set()
        return (await delays)[-1]

    async def main() -> None:
        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            inbox = other.subscribe(ModelBlob)
            await reads(one, ModelBlob)
            late_s = [await one_transfer(one, inbox, transfer) for transfer in range(5)]
            assert statistics.median(late_s) < 0.05, late_s

    run(main)


@both_paths
def test_a_consumer_that_does_not_read_makes_the_writer_wait_and_nothing_is_lost(
    run: Run, fast: bool, place: dict[str, Any]
) -> None:
    payload = random.Random(2).randbytes(64 * MIB)

    async def main() -> None:
        async with gradbus.connect(**place, fast=fast) as one, gradbus.connect(**place, fast=fast) as other:
            inbox = other.subscribe(ClientUpdate)
            await reads(one, ClientUpdate)
            sending = asyncio.create_task(one.send_update(UPDATE, 1, payload))
            # 16 frames in the inbox, 16 in the DDS reader, and the one that waits.
            await eventually(lambda: len(inbox) == 16 and one.sent_bytes["train/client_update"] >= 32 * (MIB + 80))
            done, _ = await asyncio.wait([sending], timeout=0.2)  # time in which it could go on, but must not
            assert not done
            assert len(inbox) == 16
            assert one.sent_bytes["train/client_update"] <= 33 * (MIB + 80)
            assert await payload_from(inbox, UPDATE, 64 * MIB) == payload
            await sending

    run(main)


def test_a_topic_that_waits_does_not_hold_up_another(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            stuck = other.subscribe(ClientUpdate)
            inbox = other.subscribe(ToController, ModelBlob)
            for kind in (ClientUpdate, ToController, ModelBlob):
                await reads(one, kind)
            sending = asyncio.create_task(one.send_update(UPDATE, 1, bytes(40 * MIB)))
            await eventually(lambda: len(stuck) == 16)
            async with asyncio.timeout(15):  # half of the time after which the other topic would give up
                await one.publish(CLIENT, Leave("now"))
                assert await inbox.get() == Control(CLIENT.sender, CLIENT.incarnation, Leave("now"))
                await one.send_model(MODEL, b"small")
                assert isinstance(await inbox.get(), ModelBlob)
            assert not sending.done()
            assert len(await payload_from(stuck, UPDATE, 40 * MIB)) == 40 * MIB
            await sending

    run(main)


def test_models_for_a_consumer_that_does_not_read_are_dropped_and_counted_and_the_writer_goes_on(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            inbox = other.subscribe(ModelBlob)
            await reads(one, ModelBlob)
            async with asyncio.timeout(20):
                await one.send_model(MODEL, bytes(100 * MIB))
                await eventually(lambda: len(inbox) + other.rejected["inbox full"] == 100)
            assert len(inbox) == 64

    run(main)


def test_sending_fails_when_nothing_is_taken_for_too_long(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place, stall_timeout_s=0.3) as one, gradbus.connect(**place) as other:
            inbox = other.subscribe(ClientUpdate)
            await reads(one, ClientUpdate)
            with pytest.raises(WriteTimeout, match="train/client_update") as caught:
                await one.send_update(UPDATE, 1, bytes(64 * MIB))
            assert (caught.value.topic, caught.value.timeout_s) == ("train/client_update", 0.3)
            while len(inbox):
                await inbox.get()

    run(main)


def test_a_send_that_is_cancelled_lets_go_of_its_payload_and_the_next_one_goes_through(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            inbox = other.subscribe(ClientUpdate)
            await reads(one, ClientUpdate)
            payload = bytearray(64 * MIB)
            sending = asyncio.create_task(one.send_update(UPDATE, 1, payload))
            await eventually(lambda: len(inbox) == 16)
            sending.cancel()
            async with asyncio.timeout(15):  # half of the time after which it would give up by itself
                with pytest.raises(asyncio.CancelledError):
                    await sending
            other_key = FrameKey(Kind.UPDATE, 1, 3, CLIENT.sender, CLIENT.incarnation, 2)
            again = asyncio.create_task(one.send_update(other_key, 1, b"again"))
            while True:
                message = await inbox.get()
                assert isinstance(message, ClientUpdate)
                if message.frame.key == other_key:
                    break
            await again

    run(main)


def test_only_the_frames_that_are_asked_for_are_sent_again(run: Run, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
            inbox = other.subscribe(ClientUpdate, ModelBlob)
            await reads(one, ClientUpdate)
            await reads(one, ModelBlob)
            await one.send_update(UPDATE, 1, bytes(5 * MIB), only=[1, 4, 9])
            await one.send_model(MODEL, bytes(5 * MIB), only=[2])
            got = [await inbox.get() for _ in range(3)]  # two topics: which is looked at first is not promised
            for kind, sent in ((ClientUpdate, [1, 4]), (ModelBlob, [2])):
                assert [message.frame.seq for message in got if isinstance(message, kind)] == sent

    run(main)

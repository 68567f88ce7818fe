"""The bus between two processes."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
import zlib
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
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
    delays_of_the_loop,
    membership_of,
    readers_in_dds,
    reads,
)
from patience import eventually, soonest

import gradbus
from gradbus.runtime.security import membership
from gradbus.runtime.security.membership import LivenessChallenge
from gradbus.runtime.security.sealed import SealedOutlet
from gradbus.runtime.transport.channels import ToClients, ToController
from gradbus.runtime.wire.messages import ClientUpdate, Control, ModelBlob, PeerGone, TrainCmd

pytestmark = pytest.mark.slow
CHILD = Path(__file__).with_name("bus_child.py")
# Where a busy machine stands still for longer than that, DDS forgets the reader and what it owes.
LEASE_S = 20.0


class Child:
    """The other process."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def says(self) -> Any:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, "the child has ended; its error stands above"
        return json.loads(line)


@asynccontextmanager
async def child(
    role: str, place: dict[str, Any], *, lease_s: float = LEASE_S, path: str = "fast", ends_with: int = 0
) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, CHILD, role, place["job"], str(place["domain"]), str(lease_s), path, stdin=PIPE, stdout=PIPE
    )
    try:
        yield Child(process)
        process.stdin.close()  # type: ignore[union-attr]
        assert await process.wait() == ends_with
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("here", "there"), [("fast", "fast"), ("fast", "binding"), ("binding", "fast")], ids=" and ".join
)
def test_each_kind_of_message_arrives_in_another_process_and_comes_back(
    run: Run, here: str, there: str, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with (
            gradbus.connect(**place, lease_s=LEASE_S, fast=here == "fast") as bus,
            child("talk", place, path=there) as other,
        ):
            assert await other.says() == "listening"
            for kind in (TrainCmd, ClientUpdate, ModelBlob, ToController, ToClients):
                await reads(bus, kind)
            command = TrainCmd(3, 600, 2, 0.05, 11)
            await bus.publish(CHIEF, command)
            assert await other.says() == repr(command)
            await bus.send_update(UPDATE, 600, b"an update")
            assert await other.says() == ["ClientUpdate", b"an update".hex()]
            await bus.send_model(MODEL, b"a model")
            assert await other.says() == ["ModelBlob", b"a model".hex()]
            for body in BODIES:
                await bus.publish(CLIENT, body)
                assert await other.says() == repr(Control(CLIENT.sender, CLIENT.incarnation, body))
            inbox = bus.subscribe(TrainCmd, ClientUpdate, ModelBlob, *CONTROLS)
            other.tell("your turn")
            messages = []
            while len(messages) < 3 + len(BODIES):
                message = await inbox.get()
                # What we retain reaches our own new reader, too.
                if isinstance(message, TrainCmd | ModelBlob) and type(message) in map(type, messages):
                    continue
                messages.append(message)
            assert [type(message) for message in messages].count(Control) == len(BODIES)
            bodies = [m.body for m in messages if isinstance(m, Control)]
            assert all(body in bodies for body in BODIES)  # there is no order between topics
            assert command in messages
            assert set(bus.rejected) <= {"repeated"}  # what we retain ourselves, under the same name and number
            inbox.close()
            other.tell("end")

    run(main)


@pytest.mark.parametrize(("here", "there"), [("fast", "binding"), ("binding", "fast")], ids=" to ".join)
def test_a_model_arrives_whole_in_a_process_whose_topics_are_of_the_other_kind(
    run: Run, here: str, there: str, place: dict[str, Any]
) -> None:
    payload = random.Random(6).randbytes(3 * MIB + 1)

    async def main() -> None:
        async with (
            gradbus.connect(**place, lease_s=LEASE_S, fast=here == "fast") as bus,
            child("receive", place, path=there) as other,
        ):
            assert await other.says() == "listening"
            await reads(bus, ModelBlob)
            other.tell(str(len(payload)))
            await bus.send_model(MODEL, payload)
            crc, _ = await other.says()
            assert crc == zlib.crc32(payload)
            other.tell("end")

    run(main)


@pytest.mark.timeout(240)  # three attempts, and until the tests of other workers have ended
def test_a_model_of_32_mib_arrives_whole_and_both_loops_go_on_meanwhile(run: Run, place: dict[str, Any]) -> None:
    """Meanwhile: in most of the transfers, for a busy machine makes single ones worse, never better. The first two
    warm both up, and do not count."""
    payload = random.Random(4).randbytes(32 * MIB)

    async def late_s() -> float:
        async with gradbus.connect(**place, lease_s=LEASE_S) as bus, child("receive", place) as other:
            assert await other.says() == "listening"
            await reads(bus, ModelBlob)
            here, there = [], []
            for _ in range(7):
                other.tell(str(len(payload)))
                stop = asyncio.Event()
                delays = asyncio.create_task(delays_of_the_loop(stop))
                await asyncio.sleep(0)  # it has begun
                await bus.send_model(MODEL, payload)
                crc, late_s = await other.says()
                stop.set()
                late = await delays
                assert crc == zlib.crc32(payload)
                here.append(late[-1])
                there.append(late_s)
            other.tell("end")
            return max(statistics.median(here[2:]), statistics.median(there[2:]))

    assert soonest(lambda: run(late_s), 0.05) < 0.05


def test_a_process_that_does_not_read_makes_the_writer_wait_in_bounded_memory_and_loses_nothing(
    run: Run, place: dict[str, Any]
) -> None:
    payload = random.Random(5).randbytes(128 * MIB)

    async def main() -> None:
        async with gradbus.connect(**place, lease_s=LEASE_S) as bus, child("hesitate", place) as other:
            assert await other.says() == "listening"
            await reads(bus, ClientUpdate)
            sending = asyncio.create_task(bus.send_update(UPDATE, 1, payload))
            done, _ = await asyncio.wait([sending], timeout=1.5)
            assert not done
            # 16 frames in its inbox, 16 in its reader, 16 MB on the way, and the one that waits.
            assert bus.sent_bytes["train/client_update"] < 64 * MIB
            other.tell("read")
            assert await other.says() < 80  # MiB more than before
            assert await other.says() == zlib.crc32(payload)
            assert await sending == len(payload)

    run(main)


def test_a_reader_counts_once_both_processes_know_that_the_other_is_alive_and_then_misses_nothing(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it could hold few samples, and would drop the rest."""
    payload = random.Random(6).randbytes(128 * MIB)
    announce_again = LivenessChallenge.announce_again
    monkeypatch.setattr(membership, "ACKNOWLEDGED_S", 60.0)
    has_come = False
    monkeypatch.setattr(SealedOutlet, "is_acknowledged", property(lambda self: has_come))

    async def main() -> None:
        async with gradbus.connect(**place, lease_s=LEASE_S) as bus, child("prove", place) as other:
            assert await other.says() == "listening"
            bus.open_writer(ClientUpdate)
            await bus.matched(lambda: readers_in_dds(bus, ClientUpdate) == 1, timeout_s=20.0)
            assert bus.matched_readers(ClientUpdate) == 0
            nonlocal has_come
            membership = membership_of(bus)
            monkeypatch.setattr(LivenessChallenge, "announce_again", lambda self: None)
            other.tell("prove it")
            await eventually(lambda: len(membership.known()) == 1)
            assert bus.matched_readers(ClientUpdate) == 0  # it does not know this process yet
            monkeypatch.setattr(LivenessChallenge, "announce_again", announce_again)
            membership.liveness.announce_again()
            (challenge,) = (one.challenge for one in membership.cipher.peers.authenticated())
            liveness = membership.liveness
            await eventually(lambda: challenge in liveness._sent)  # noqa: SLF001 - nothing has acknowledged it yet
            assert bus.matched_readers(ClientUpdate) == 0  # that may be lost, and is sent again
            has_come = True
            await reads(bus, ClientUpdate)
            assert await bus.send_update(UPDATE, 1, payload) == len(payload)
            assert await other.says() == zlib.crc32(payload)

    run(main)


def test_a_process_killed_at_once_is_told_of_when_its_lease_has_ended(run: Run, place: dict[str, Any]) -> None:
    """Of three one: a machine that stands still makes single ones later, never earlier."""

    async def kill_one() -> float:
        async with gradbus.connect(**place) as bus, child("live", place, lease_s=1.0, ends_with=-9) as other:
            inbox = bus.subscribe(ToController)
            assert await inbox.get() == Control(CLIENT.sender, CLIENT.incarnation, BODIES[0])
            other.process.kill()
            await other.process.wait()
            killed_s = time.monotonic()
            assert await inbox.get() == PeerGone(CLIENT.sender, CLIENT.incarnation)
            return time.monotonic() - killed_s

    async def main() -> None:
        took_s: list[float] = []
        while not took_s or (len(took_s) < 3 and min(took_s) >= 3):
            took_s.append(await kill_one())
        assert min(took_s) < 3

    run(main)


def test_a_process_whose_interpreter_is_held_does_not_stop_what_the_others_say_to_each_other(
    run: Run, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place, lease_s=LEASE_S) as bus, child("hold", place) as other:
            assert await other.says() == "listening"
            await reads(bus, ToClients)
            other.tell("hold it")
            began_s = time.monotonic()
            for _ in range(12_000):  # its reader has room for 4,096, and DDS for a few thousand more
                await bus.publish(CHIEF, BODIES[2])
            assert time.monotonic() - began_s < 30.0
            assert await other.says() == "back"
            await bus.publish(CHIEF, BODIES[2])
            assert await other.says() == "has heard"

    run(main)

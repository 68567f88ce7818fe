"""Bytes that are no message, on every topic: counted by their reason, and nobody notices anything else."""

from __future__ import annotations

import ctypes as ct
import math
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from bus_helpers import CLIENT, MODEL, UPDATE, Run
from patience import eventually

import gradbus
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.channels import CHANNELS, ToController
from gradbus.runtime.transport.dds import libddsc
from gradbus.runtime.transport.dds.participant import Participant, Writer
from gradbus.runtime.transport.sample_layout import SampleLayout
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate, Control, ModelBlob, TrainCmd

pytestmark = pytest.mark.faults

both_paths = pytest.mark.parametrize("fast", [True, False], ids=["fast", "binding"])
KINDS = (TrainCmd, ClientUpdate, ModelBlob, ToController)
FIELDS: dict[type[Any], tuple[int, ...]] = {ClientUpdate: (0, 0, 0), ModelBlob: (0,), ToController: ()}
CONTROL = FrameKey(Kind.CONTROL, 0, 0, CLIENT.sender, CLIENT.incarnation, 1)


@pytest.fixture
def place(place: dict[str, Any]) -> dict[str, Any]:
    """Of what is sealed, garbage does not come so far: see tests/runtime/security."""
    return {**place, "security": "none"}


class Stranger:
    """A participant of the job that is no bus: it writes whatever it likes."""

    def __init__(self, place: dict[str, Any], *, fast: bool = True) -> None:
        self._participant = Participant(
            domain_id=place["domain"], partition=place["job"], network=NetworkConfig(), fast=fast
        )
        self.writers: dict[type[Any], Writer] = {kind: self._participant.outlet(CHANNELS[kind]) for kind in KINDS}

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self._participant.close()

    async def matched(self) -> None:
        for writer in self.writers.values():
            entity = writer.entity
            await eventually(lambda entity=entity: entity.get_publication_matched_status().current_count == 1)

    def write(self, kind: type[Any], fields: tuple[Any, ...], data: bytes | None = None) -> None:
        assert self.writers[kind].write(fields, () if data is None else (data,))

    def write_raw(self, kind: type[Any], sample: bytes) -> None:
        """Any bytes, which DDS would refuse to send: written over a sample that it has looked at. They come as they are
        to a reader in this process whose topics are of the same kind; shorter ones with zeros behind."""
        writer = self.writers[kind]
        looked_at = right_sample(kind, writer.layout, len(sample))
        head = looked_at[:-4]  # behind which there are zeros

        def write_over(room: memoryview) -> None:
            # `write_made` has both in one piece of memory, which DDS sends.
            begin = ct.addressof(ct.c_char.from_buffer(room)) - len(head)
            assert ct.string_at(begin, len(head)) == head
            ct.memmove(begin, sample, len(sample))

        entity, sertype = libddsc.handle_of(writer.entity), libddsc.sertype_of(writer.entity)
        assert libddsc.write_made(entity, sertype, head, 4, write_over) == libddsc.RETCODE_OK


def right_sample(kind: type[Any], layout: SampleLayout, size: int) -> bytes:
    """One that DDS takes, of at least so many bytes."""
    if kind is TrainCmd:
        (command,) = layout.parts((1, 0, 1, 0.1, 0), ())
        assert isinstance(command, bytes)
        return command.ljust(-(-size // 4) * 4, b"\0")
    octets = max(0, -(-size // 4) * 4 - len(layout.prefix(*FIELDS[kind], 0)))
    return layout.prefix(*FIELDS[kind], octets) + bytes(octets)


def frame(key: FrameKey, payload: bytes, chunk_bytes: int = 1 << 20) -> bytes:
    head, data = next(iter(frames.split(key, payload, chunk_bytes=chunk_bytes)))
    return head + bytes(data)


def garbage() -> Iterator[tuple[type[Any], tuple[Any, ...], bytes | None, str]]:
    """(topic, fields, bytes, the reason under which it is counted)."""
    rng = random.Random(0)
    heads: list[tuple[type[Any], tuple[Any, ...]]] = [(ClientUpdate, (7, 3, 1)), (ModelBlob, (3,)), (ToController, ())]
    for kind, fields in heads:
        yield kind, fields, b"", "short"
        for size in (1, 79, 80, 200):
            yield kind, fields, rng.randbytes(size), "short" if size < 80 else "magic"
    damaged = bytearray(frame(UPDATE, b"payload"))
    damaged[-1] ^= 1
    yield ClientUpdate, (7, 3, 1), bytes(damaged), "crc"
    # Frames that are whole, and in the wrong place.
    yield ClientUpdate, (8, 3, 1), frame(UPDATE, b"x"), "mismatch"
    yield ClientUpdate, (7, 4, 1), frame(UPDATE, b"x"), "mismatch"
    yield ClientUpdate, (7, 3, 1), frame(MODEL, b"x"), "mismatch"
    yield ClientUpdate, (-1, 3, 1), frame(FrameKey(Kind.UPDATE, 1, 3, CONTROLLER, 1), b"x"), "mismatch"
    yield ModelBlob, (3,), frame(UPDATE, b"x"), "mismatch"
    yield ModelBlob, (4,), frame(MODEL, b"x"), "mismatch"
    yield ModelBlob, (3,), frame(FrameKey(Kind.MODEL, 1, 3, 7, 1), b"x"), "mismatch"
    yield ToController, (), frame(UPDATE, b"x"), "mismatch"
    yield ToController, (), frame(CONTROL, bytes(20), chunk_bytes=10), "mismatch"
    yield ToController, (), frame(CONTROL, b""), "control"
    yield ToController, (), frame(CONTROL, rng.randbytes(100)), "control"
    yield ToController, (), frame(CONTROL, control.encode(Leave("x")) + b"\0"), "control"
    for command in ((0, 0, 1, 0.1, 0), (-5, 0, 1, 0.1, 0), (1, -1, 1, 0.1, 0), (1, 0, -1, 0.1, 0)):
        yield TrainCmd, command, None, "command"
    for lr in (math.nan, math.inf, -math.inf):
        yield TrainCmd, (1, 0, 1, lr, 0), None, "command"


@both_paths
def test_garbage_on_every_topic_is_counted_by_its_reason_and_the_next_message_arrives(
    run: Run, fast: bool, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place, fast=fast) as bus:
            inbox = bus.subscribe(TrainCmd, ClientUpdate, ModelBlob, ToController)
            with Stranger(place) as stranger:
                await stranger.matched()
                for expected, (kind, fields, data, reason) in enumerate(garbage(), start=1):
                    before = bus.rejected[reason]
                    stranger.write(kind, fields, data)
                    await eventually(lambda: len(inbox) + bus.rejected.total() == expected)  # noqa: B023 - awaited here
                    assert bus.rejected[reason] == before + 1, (kind, fields, data, reason, bus.rejected)
                assert len(inbox) == 0
                stranger.write(ToController, (), frame(CONTROL, control.encode(Leave("still here"))))
                assert await inbox.get() == Control(CLIENT.sender, CLIENT.incarnation, Leave("still here"))

    run(main)


def representations() -> Iterator[bytes]:
    """Samples that are not what our types are."""
    body = struct.pack(">I", 8) + b"12345678"
    yield b"\x00\x00\x00\x00" + body  # big-endian, which DDS would have turned round
    yield b"\x00\x06\x00\x00" + body
    yield b"\x00\x07\x00\x00" + struct.pack("<I", 8) + b"12345678"  # XCDR2: read, and then no frame
    for head in (b"\x00\x01\x00\x00", b"\x00\x07\x00\x00", b"\x00\x00\x00\x00", b"\x00\x0b\x00\x00"):
        yield head
        yield head + b"\xff\xff\xff\xff"
        yield head + b"\xff\xff\xff\x7f" + bytes(100)
    rng = random.Random(1)
    for size in (4, 8, 40, 400):
        yield rng.randbytes(size)


@both_paths
def test_samples_in_other_representations_end_neither_the_thread_nor_the_bus_and_are_counted(
    run: Run, fast: bool, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place, fast=fast) as bus:
            inbox = bus.subscribe(ToController, ClientUpdate, ModelBlob, TrainCmd)
            with Stranger(place, fast=fast) as stranger:
                await stranger.matched()
                written = 0
                for kind in KINDS:
                    for sample in representations():
                        stranger.write_raw(kind, sample)
                        written += 1
                        await eventually(lambda: len(inbox) + bus.rejected.total() == written)  # noqa: B023 - awaited here
                assert bus.rejected["sample"] > written / 2
                for _ in range(len(inbox)):
                    assert isinstance(await inbox.get(), TrainCmd)  # some bytes are numbers in range
                stranger.write(ToController, (), frame(CONTROL, control.encode(Leave("still here"))))
                assert await inbox.get() == Control(CLIENT.sender, CLIENT.incarnation, Leave("still here"))

    run(main)

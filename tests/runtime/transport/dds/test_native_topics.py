"""The two kinds of topics, Cyclone's own and the binding's: whoever has the one talks with whoever has the other.

Within one process, where Cyclone turns the one kind of sample into the other. How they meet on the wire is in
test_bus_processes.py, and against a program that knows the IDL alone in test_idl.py.
"""

from __future__ import annotations

import asyncio
import ctypes as ct
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from bus_helpers import CHIEF, CLIENT, MIB, MODEL, UPDATE, Run, participant_of, payload_from, reads
from cyclonedds.topic import Topic
from patience import eventually
from structlog.testing import capture_logs

import gradbus
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.collectives.reductions import Contribution
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.channels import Channel, ToController, channel_of
from gradbus.runtime.transport.dds import libddsc, native_topics, participant
from gradbus.runtime.transport.dds.idl_types import IDL_TYPES
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.messages import ClientUpdate, ModelBlob, TrainCmd

COMMAND = TrainCmd(3, 0, 1, 0.5, 7)
PAYLOAD = random.Random(5).randbytes(3 * MIB + 1)


@pytest.fixture
def no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not tested the fast path yet: each does so once, and this one has."""
    monkeypatch.setattr(participant, "_fast_path", [])


def is_cyclones_own(bus: Bus) -> bool:
    with bus.subscribe(ToController):
        topics = participant_of(bus).topics
        names = topics.names
        (kind,) = {isinstance(topics.enter(name, None), native_topics.CTopic) for name in names}
        for name in names:
            topics.leave(name)
        return kind


@pytest.mark.parametrize("fast", [True, False], ids=["from fast to binding", "from binding to fast"])
def test_what_one_kind_of_topic_sends_the_other_one_gets(run: Run, fast: bool, place: dict[str, Any]) -> None:
    async def main() -> None:
        async with gradbus.connect(**place, fast=fast) as one, gradbus.connect(**place, fast=not fast) as other:
            assert (is_cyclones_own(one), is_cyclones_own(other)) == (fast, not fast)
            commands, words = other.subscribe(TrainCmd), other.subscribe(ToController)
            models, updates = other.subscribe(ModelBlob), other.subscribe(ClientUpdate)
            for kind in (TrainCmd, ToController, ModelBlob, ClientUpdate):
                await reads(one, kind)
            await one.publish(CHIEF, COMMAND)
            await one.publish(CLIENT, Leave("done"))
            assert await anext(aiter(commands)) == COMMAND
            assert (await anext(aiter(words))).body == Leave("done")
            for inbox, key, send in (
                (models, MODEL, one.send_model(MODEL, PAYLOAD)),
                (updates, UPDATE, one.send_update(UPDATE, 1, PAYLOAD)),
            ):
                receiving = asyncio.create_task(payload_from(inbox, key, len(PAYLOAD)))
                await send
                assert await receiving == PAYLOAD

    run(main)


@pytest.mark.parametrize("fast", [True, False], ids=["fast first", "binding first"])
def test_jobs_that_share_a_participant_each_have_their_own_kind(run: Run, fast: bool, place: dict[str, Any]) -> None:
    """Cyclone knows a topic of a participant by its name, whatever type it is of."""
    elsewhere = place | {"job": place["job"] + "-second"}

    async def main() -> None:
        async with gradbus.connect(**place, fast=fast) as one, gradbus.connect(**elsewhere, fast=not fast) as other:
            assert participant_of(one).entity is participant_of(other).entity
            assert (is_cyclones_own(one), is_cyclones_own(other)) == (fast, not fast)
            async with gradbus.connect(**place) as reader, gradbus.connect(**elsewhere) as second_reader:
                for bus, inbox in ((one, reader.subscribe(ModelBlob)), (other, second_reader.subscribe(ModelBlob))):
                    await reads(bus, ModelBlob)
                    receiving = asyncio.create_task(payload_from(inbox, MODEL, len(PAYLOAD)))
                    await bus.send_model(MODEL, PAYLOAD)
                    assert await receiving == PAYLOAD

    run(main)


@pytest.mark.parametrize("reader_fast", [True, False], ids=["to fast", "to binding"])
@pytest.mark.parametrize("fast", [True, False], ids=["from fast", "from binding"])
def test_who_comes_late_gets_what_is_retained_whichever_kind_it_has(
    run: Run, fast: bool, reader_fast: bool, place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place, fast=fast) as one:
            one.open_writer(ModelBlob, retained_samples=4)
            await one.publish(CHIEF, COMMAND)
            await one.send_model(MODEL, PAYLOAD)
            async with gradbus.connect(**place, fast=reader_fast) as late:
                assert await payload_from(late.subscribe(ModelBlob), MODEL, len(PAYLOAD)) == PAYLOAD
                assert await anext(aiter(late.subscribe(TrainCmd))) == COMMAND

    run(main)


def test_discovery_tells_the_same_of_both_kinds(run: Run, place: dict[str, Any]) -> None:
    async def told(kind: type[Any], fast: bool) -> tuple[Any, ...]:
        """What a reader of the binding hears of a writer."""
        plain = {**place, "security": "none"}
        async with gradbus.connect(**plain, fast=False) as bus, gradbus.connect(**plain, fast=fast) as writer:
            reader = participant_of(bus).inlet(channel_of(kind))
            try:
                await reads(writer, kind)
                await eventually(lambda: reader.entity.get_subscription_matched_status().current_count == 1)
                (handle,) = reader.entity.get_matched_publications()
                data = reader.entity.get_matched_publication_data(handle)
                return data.topic_name, data.type_name, str(data.type_id), str(data.qos)
            finally:
                reader.close()

    async def main() -> None:
        for kind in (TrainCmd, ClientUpdate, ModelBlob, ToController):
            assert await told(kind, fast=True) == await told(kind, fast=False)

    run(main)


class CycloneDescriptor(ct.Structure):
    """dds_topic_descriptor_t, as in dds_public_impl.h."""

    _fields_ = (
        ("m_size", ct.c_uint32), ("m_align", ct.c_uint32), ("m_flagset", ct.c_uint32), ("m_nkeys", ct.c_uint32),
        ("m_typename", ct.c_char_p), ("m_keys", ct.c_void_p), ("m_nops", ct.c_uint32), ("m_ops", ct.c_void_p),
        ("m_meta", ct.c_char_p), ("type_information", ct.c_void_p), ("type_information_size", ct.c_uint32),
        ("type_mapping", ct.c_void_p), ("type_mapping_size", ct.c_uint32), ("representations", ct.c_uint32),
    )  # fmt: skip

    def values(self) -> list[Any]:
        plain = [self.m_size, self.m_align, self.m_flagset, self.m_nkeys, self.m_typename, self.m_keys, self.m_meta]
        return [
            *plain,
            ct.string_at(self.m_ops, 4 * self.m_nops),
            ct.string_at(self.type_information, self.type_information_size),
            ct.string_at(self.type_mapping, self.type_mapping_size),
            self.representations,
        ]


@pytest.mark.parametrize("name", ["TrainCmd", "ClientUpdate", "ModelBlob", "Frame"])
def test_a_type_is_described_as_cyclone_itself_would(run: Run, name: str, place: dict[str, Any]) -> None:
    """Cyclone describes it from the binding's topic; the bus does not have it do so, see the module."""
    get_typeinfo = libddsc.function("dds_get_typeinfo", ct.c_int32, ct.c_int32, ct.c_void_p)
    create = libddsc.function(
        "dds_create_topic_descriptor", ct.c_int32, ct.c_int, ct.c_int32, ct.c_void_p, ct.c_int64, ct.c_void_p
    )
    free_typeinfo = libddsc.function("dds_free_typeinfo", ct.c_int32, ct.c_void_p)
    delete = libddsc.function("dds_delete_topic_descriptor", None, ct.c_void_p)
    idl_type = IDL_TYPES[name]

    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            entity = participant_of(bus).entity
            topic = Topic(entity, "described", idl_type)
            info, made = ct.c_void_p(), ct.c_void_p()
            assert get_typeinfo(libddsc.handle_of(topic), ct.byref(info)) == libddsc.RETCODE_OK
            assert create(1, libddsc.handle_of(entity), info, 0, ct.byref(made)) == libddsc.RETCODE_OK
            assert made.value
            free_typeinfo(info)
            try:
                ours = ct.addressof(native_topics.describe(idl_type))
                expected = CycloneDescriptor.from_address(made.value).values()
                assert CycloneDescriptor.from_address(ours).values() == expected
            finally:
                delete(made)

    run(main)


@pytest.mark.usefixtures("no_verdict")
def test_where_cyclone_cannot_make_the_topics_the_bus_goes_through_the_binding_and_says_so(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libddsc, "missing", [])
    # As with a wheel of Cyclone that lacks this call, of which there is none here.
    monkeypatch.setattr(native_topics, "_create_topic", libddsc.function("dds_no_such_function", ct.c_int32))
    why = "initialisation of a gradbus.runtime.transport.dds.native_topics.CTopic"

    async def main() -> None:
        with capture_logs() as lines:
            async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
                assert not is_cyclones_own(one)
                inbox = other.subscribe(ModelBlob)
                await reads(one, ModelBlob)
                receiving = asyncio.create_task(payload_from(inbox, MODEL, len(PAYLOAD)))
                await one.send_model(MODEL, PAYLOAD)
                assert await receiving == PAYLOAD
        assert [why in line["reason"] for line in lines if line["event"] == "slow path"] == [True, True]

    run(main)


@asynccontextmanager
async def matched_pair(place: dict[str, Any]) -> AsyncIterator[tuple[participant.Writer, participant.Reader]]:
    """A writer of frames and its reader, on two participants, with nothing between them and DDS."""
    place = {**place, "fast": True, "security": "none"}
    async with gradbus.connect(**place) as one, gradbus.connect(**place) as other:
        topic = Channel("train/made", "Frame", False, False, 16, 0, 1.0, False, lambda sample: sample)
        writer, reader = participant_of(one).outlet(topic), participant_of(other).inlet(topic)
        await eventually(lambda: writer.entity.get_publication_matched_status().current_count == 1)
        try:
            yield writer, reader
        finally:
            writer.close()
            reader.close()


async def next_sample(reader: participant.Reader) -> Any:
    taken: list[Any] = []

    def has_come() -> bool:
        taken.extend(reader.take(1))
        return bool(taken)

    await eventually(has_come)
    return taken[0][0]


SIZES = [1, libddsc.JOINED_BYTES + 1, libddsc.BLANK_BYTES, MIB + 200, 5 * MIB + 3]


@pytest.mark.parametrize("size", SIZES)
def test_a_sample_that_is_made_where_dds_keeps_it_arrives_whole(run: Run, size: int, place: dict[str, Any]) -> None:
    made = random.Random(size).randbytes(size)

    def make(room: memoryview) -> None:
        assert len(room) == size
        room[:] = made

    async def main() -> None:
        async with matched_pair(place) as (writer, reader):
            head = writer.layout.prefix(size)
            sertype = libddsc.sertype_of(writer.entity)
            assert libddsc.write_made(libddsc.handle_of(writer.entity), sertype, head, size, make) == libddsc.RETCODE_OK
            assert reader.octets(await next_sample(reader)) == made

    run(main)


def test_of_a_sample_that_could_not_be_made_nothing_is_written(run: Run, place: dict[str, Any]) -> None:
    def fail(room: memoryview) -> None:
        room[:5] = b"hello"
        raise ValueError("no more")

    async def main() -> None:
        async with matched_pair(place) as (writer, reader):
            sertype = libddsc.sertype_of(writer.entity)
            with pytest.raises(ValueError, match="no more"):
                libddsc.write_made(libddsc.handle_of(writer.entity), sertype, writer.layout.prefix(MIB), MIB, fail)
            assert writer.write((), (b"next",))
            assert reader.octets(await next_sample(reader)) == b"next"

    run(main)


@pytest.mark.parametrize("size", SIZES)
def test_a_sample_in_one_piece_arrives_as_one_in_parts_does(run: Run, size: int, place: dict[str, Any]) -> None:
    octets = random.Random(size).randbytes(size)

    async def main() -> None:
        async with matched_pair(place) as (writer, reader):
            head = writer.layout.prefix(size)
            for parts in ((head + octets,), (head, octets), (head, octets[:1], octets[1:])):
                libddsc.write(libddsc.handle_of(writer.entity), libddsc.sertype_of(writer.entity), parts)
                assert reader.octets(await next_sample(reader)) == octets

    run(main)


def test_what_ranks_add_up_lies_where_arithmetic_is_fast(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails with another version of Cyclone, its samples lie elsewhere: change the padding of names."""
    offsets: list[int] = []
    chunk = Contribution.chunk

    def note(self: Contribution, seq: int, offset: int, data: Any) -> None:
        offsets.append(data.ctypes.data % 16)
        chunk(self, seq, offset, data)

    monkeypatch.setattr(Contribution, "chunk", note)

    async def rank(number: int) -> None:
        network = NetworkConfig(shared_memory=False)
        async with (
            gradbus.connect(**place, network=network) as bus,
            gradbus.join_group(bus, rank=number, world=2) as group,
        ):
            for name in ("a", "ab", "grad/0", "some longer name"):
                tensor = torch.full((300_000,), 1.0 + number, dtype=torch.float64)
                assert (await group.all_reduce(name, tensor) == 3.0).all()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(2):
                tasks.create_task(rank(number))

    run(main)
    assert set(offsets) == {0}

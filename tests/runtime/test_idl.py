"""The hand-written types against those that ``idlc`` generates from the IDL file, which is what other programs have.

The generated package is called ``gradbus``, as the IDL module is, so it lives in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import cyclonedds
import pytest
from cyclonedds.__idlc__ import idlpy_path
from cyclonedds.__library__ import library_path
from dds_domains import new_domain
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENT_S

import gradbus
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.channels import ToController, channel_of
from gradbus.runtime.transport.dds import idl_types
from gradbus.runtime.transport.dds.network import build_xml
from gradbus.runtime.transport.sample_layout import SampleError
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, Message, ModelBlob, TrainCmd

TYPES: dict[str, Any] = {
    "TrainCmd": idl_types.TrainCmdType,
    "ClientUpdate": idl_types.ClientUpdateType,
    "ModelBlob": idl_types.ModelBlobType,
    "Frame": idl_types.FrameType,
}
SAMPLES: list[tuple[str, list[Any]]] = [
    ("TrainCmd", [1, 0, 1, 0.01, 0]),
    ("TrainCmd", [2**31 - 1, 600, 5, -1e300, -(2**31)]),
    *(("ClientUpdate", [7, -3, 2**40 + 1, "00ff10" * size]) for size in (0, 1, 2, 3, 4, 100)),
    *(("ModelBlob", [12, "a5" * size]) for size in (0, 1, 2, 3, 4, 5)),
    *(("Frame", ["5a" * size]) for size in (0, 1, 2, 3, 4, 5)),
]

GENERATED = """
import dataclasses, json, sys
import gradbus
from gradbus import _gradbus as generated

def sample_of(name, values):
    kind = getattr(generated, name)
    return kind(*(list(bytes.fromhex(value)) if isinstance(value, str) else value for value in values))

answers = {"package": gradbus.__file__, "types": {}, "samples": [], "read": []}
for name in ("TrainCmd", "ClientUpdate", "ModelBlob", "Frame"):
    kind = getattr(generated, name)
    kind.__idl__.populate()
    answers["types"][name] = {
        "typename": kind.__idl_typename__.replace("::", "."),
        "fields": [field.name for field in dataclasses.fields(kind)],
    }
request = json.load(sys.stdin)
for name, values in request["samples"]:
    sample = sample_of(name, values)
    answers["samples"].append([sample.serialize(use_version_2=second).hex() for second in (False, True)])
for (name, values), ours in zip(request["samples"], request["ours"]):
    answers["read"].append(getattr(generated, name).deserialize(bytes.fromhex(ours)) == sample_of(name, values))
json.dump(answers, sys.stdout)
"""


# Another program: it knows the IDL file and docs/wire.md, nothing of ours. It sends one sample of each topic as soon as
# somebody listens, and tells what it got.
FOREIGN = """
import dataclasses, json, sys
from cyclonedds.core import DDSStatus, InstanceState, Policy, Qos, ReadCondition, SampleState, ViewState, WaitSet
from cyclonedds.domain import Domain, DomainParticipant
from cyclonedds.pub import DataWriter, Publisher
from cyclonedds.sub import DataReader, Subscriber
from cyclonedds.topic import Topic
from cyclonedds.util import duration
from gradbus import _gradbus as generated

def wait(condition, until):
    waitset = WaitSet(participant)
    waitset.attach(condition)
    while not (found := until()):
        if not waitset.wait(duration(seconds=20)):
            sys.exit(f"{topic}: nobody there")
    return found

request = json.load(sys.stdin)
domain = Domain(request["domain"], request["xml"])
participant = DomainParticipant(request["domain"])
partition = Qos(Policy.Partition(partitions=[request["job"]]))
publisher, subscriber = Publisher(participant, qos=partition), Subscriber(participant, qos=partition)
common = (Policy.Reliability.Reliable(duration(seconds=1)), Policy.IgnoreLocal.Participant, Policy.History.KeepAll)
ends, got = [], {}
for name, (topic, retained) in request["topics"].items():
    durability = Policy.Durability.TransientLocal if retained else Policy.Durability.Volatile
    topic = Topic(participant, topic, getattr(generated, name))
    qos = Qos(*common, durability)
    writer, reader = DataWriter(publisher, topic, qos=qos), DataReader(subscriber, topic, qos=qos)
    writer.set_status_mask(DDSStatus.PublicationMatched)
    ends.append((name, writer, reader))
for name, writer, reader in ends:
    wait(writer, lambda: writer.take_status() and writer.get_publication_matched_status().current_count)
    values = (list(bytes.fromhex(value)) if isinstance(value, str) else value for value in request["samples"][name])
    writer.write(getattr(generated, name)(*values))
    ready = ReadCondition(reader, InstanceState.Any | SampleState.Any | ViewState.Any)
    (sample,) = wait(ready, lambda: reader.take(1))
    got[name] = [bytes(v).hex() if isinstance(v, (list, bytes)) else v for v in dataclasses.astuple(sample)]
    writer.wait_for_acks(duration(seconds=20))
json.dump(got, sys.stdout)
"""


def ours(name: str, values: list[Any]) -> Any:
    return TYPES[name](*(bytes.fromhex(value) if isinstance(value, str) else value for value in values))


def fields_of(sample: Any) -> list[Any]:
    """The fields as in SAMPLES."""
    values = (getattr(sample, name) for name in type(sample).__dataclass_fields__)
    return [bytes(value).hex() if isinstance(value, bytes | memoryview) else value for value in values]


def working_idlc(folder: Path) -> Path:
    """A copy of the compiler from the wheel. Packaging has left its dynamic section in a segment that is marked
    read-only, which ends it before it starts on some systems; the copy has that segment writable."""
    program = bytearray((Path(cyclonedds.__file__).parent / ".libs" / "idlc").read_bytes())
    at, count = struct.unpack_from("<Q", program, 32)[0], struct.unpack_from("<H", program, 56)[0]
    for entry in range(at, at + 56 * count, 56):
        if struct.unpack_from("<II", program, entry) == (1, 4):  # a loaded segment that is only readable
            struct.pack_into("<I", program, entry + 4, 6)
    copy = folder / "idlc"
    copy.write_bytes(program)
    copy.chmod(0o755)
    return copy


@pytest.fixture(scope="module")
def generated_folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the generated package lies."""
    folder = tmp_path_factory.mktemp("idl")
    (folder / "gradbus.idl").write_bytes((root / "runtime" / "gradbus.idl").read_bytes())
    environment = os.environ | {"LD_LIBRARY_PATH": str(library_path.parent)}
    command = [working_idlc(folder), "-l", idlpy_path, "gradbus.idl"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def generated(generated_folder: Path) -> dict[str, Any]:
    """What the generated types say."""
    request = {
        "samples": SAMPLES,
        "ours": [ours(name, values).serialize().hex() for name, values in SAMPLES],
    }
    done = subprocess.run(
        [sys.executable, "-c", GENERATED],
        cwd=generated_folder,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    assert Path(answers["package"]).parent.parent == generated_folder
    return answers


@pytest.mark.parametrize("name", TYPES)
def test_a_type_has_the_name_and_the_fields_of_the_idl(name: str, generated: dict[str, Any]) -> None:
    assert TYPES[name].__idl_typename__.replace("::", ".") == generated["types"][name]["typename"] == f"gradbus.{name}"
    assert list(TYPES[name].__dataclass_fields__) == generated["types"][name]["fields"]


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_a_sample_has_the_bytes_of_the_generated_serialiser(number: int, generated: dict[str, Any]) -> None:
    first, _ = generated["samples"][number]
    theirs, mine = bytes.fromhex(first), ours(*SAMPLES[number]).serialize()
    assert mine[:2] == theirs[:2]
    assert mine[4:] == theirs[4:].ljust(len(mine) - 4, b"\0")
    assert len(mine) % 4 == 0


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_samples_of_the_generated_serialiser_are_read(number: int, generated: dict[str, Any]) -> None:
    name, values = SAMPLES[number]
    for data in generated["samples"][number]:
        assert fields_of(TYPES[name].deserialize(bytes.fromhex(data))) == values
        assert fields_of(TYPES[name].deserialize(memoryview(bytes.fromhex(data)))) == values


def test_the_generated_types_read_our_samples(generated: dict[str, Any]) -> None:
    assert generated["read"] == [True] * len(SAMPLES)


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_a_sample_cut_short_is_a_sample_error(number: int) -> None:
    name, values = SAMPLES[number]
    data = ours(name, values).serialize()
    payload = len(bytes.fromhex(values[-1])) if isinstance(values[-1], str) else 0
    for size in range(len(data) - (-payload % 4)):  # padding may be missing
        with pytest.raises(SampleError):
            TYPES[name].deserialize(data[:size])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("head", ["00000000", "00060000", "00030000", "00090000", "ffff0000", "01000000"])
def test_another_representation_is_a_sample_error(name: str, head: str) -> None:
    with pytest.raises(SampleError, match="encapsulation"):
        TYPES[name].deserialize(bytes.fromhex(head) + bytes(64))


def check_sample_or_error(data: bytes) -> None:
    for kind in TYPES.values():
        try:
            sample = kind.deserialize(data)
        except SampleError:
            continue
        assert len(getattr(sample, "data", b"")) <= len(data)


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.binary(max_size=64))
def test_any_bytes_are_a_sample_or_a_sample_error(data: bytes) -> None:
    check_sample_or_error(data)


@settings(derandomize=True, deadline=None, max_examples=500)
@given(head=st.sampled_from(["00010000", "00070000", "00010003"]), data=st.binary(max_size=64))
def test_any_bytes_behind_a_right_encapsulation_are_a_sample_or_a_sample_error(head: str, data: bytes) -> None:
    check_sample_or_error(bytes.fromhex(head) + data)


def test_a_payload_is_not_copied_when_it_is_read() -> None:
    data = bytearray(ours("Frame", ["00" * 8]).serialize())
    sample = idl_types.FrameType.deserialize(data)
    data[8:16] = b"changed!"
    assert bytes(sample.data) == b"changed!"


def frame(kind: Kind, sender: int, payload: bytes) -> bytes:
    ((head, data),) = frames.split(FrameKey(kind, 1, 1, sender, 2), payload)
    return head + bytes(data)


KINDS = (TrainCmd, ClientUpdate, ModelBlob, ToController)
THEIRS: dict[str, list[Any]] = {
    "TrainCmd": [1, 2, 3, 0.25, 5],
    "ClientUpdate": [8, 1, 600, frame(Kind.UPDATE, 8, b"them").hex()],
    "ModelBlob": [1, frame(Kind.MODEL, CONTROLLER, b"them").hex()],
    "Frame": [frame(Kind.CONTROL, 8, control.encode(Leave("them"))).hex()],
}


@pytest.mark.slow
def test_a_program_made_from_the_idl_file_alone_talks_with_us_on_every_topic(generated_folder: Path) -> None:
    received, told = asyncio.run(talk_with_foreign_program(generated_folder))
    assert TrainCmd(1, 2, 3, 0.25, 5) in received
    assert Control(8, 2, Leave("them")) in received
    assert [bytes(m.frame.data) for m in received if isinstance(m, ClientUpdate) and m.client_id == 8] == [b"them"]
    assert b"them" in [bytes(m.frame.data) for m in received if isinstance(m, ModelBlob)]
    assert told["TrainCmd"] == [4, 0, 1, 0.5, 7]
    assert told["ClientUpdate"][:3] == [7, 1, 600]
    assert told["ClientUpdate"][3] == frame(Kind.UPDATE, 7, b"us").hex()
    assert told["ModelBlob"] == [1, frame(Kind.MODEL, CONTROLLER, b"us").hex()]
    ours_again = frames.parse(bytes.fromhex(told["Frame"][0]))
    assert control.decode(ours_again.data) == Leave("us")


async def talk_with_foreign_program(generated_folder: Path) -> tuple[list[Message], dict[str, Any]]:
    """What our bus received, our own words included, and what the program says it did."""
    job, domain = f"idl-{os.getpid()}", new_domain()
    request = {
        "job": job, "domain": domain, "xml": build_xml(NetworkConfig(lease_s=PATIENT_S)), "samples": THEIRS,
        "topics": {topic.sample_type: (topic.name, topic.retained) for topic in map(channel_of, KINDS)},
    }  # fmt: skip
    place = {"job": job, "domain": domain, "lease_s": PATIENT_S, "security": "none"}
    async with asyncio.timeout(60), gradbus.connect(**place) as bus:
        with bus.subscribe(*KINDS) as inbox:
            for kind in KINDS:
                bus.open_writer(kind)
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", FOREIGN, cwd=generated_folder, stdin=PIPE, stdout=PIPE
            )
            answer = asyncio.ensure_future(child.communicate(json.dumps(request).encode()))
            # Each topic has our own reader, too.
            await bus.matched(lambda: all(bus.matched_readers(kind) == 2 for kind in KINDS), timeout_s=30)
            # Of two commands in a reader only the newest is kept, so ours goes out when theirs is in.
            received = [await inbox.get()]
            await bus.publish(Identity(7, 2), TrainCmd(4, 0, 1, 0.5, 7))
            await bus.send_update(FrameKey(Kind.UPDATE, 1, 1, 7, 2), 600, b"us")
            await bus.send_model(FrameKey(Kind.MODEL, 1, 1, CONTROLLER, 2), b"us")
            await bus.publish(Identity(7, 2), Leave("us"))
            received += [await inbox.get() for _ in range(7)]
            out, _ = await answer
        assert child.returncode == 0
        assert not bus.rejected
        return received, json.loads(out)

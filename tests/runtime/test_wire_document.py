"""docs/wire.md says what the code does."""

from __future__ import annotations

import dataclasses
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from doc_pages import rows, section

from gradbus.runtime.transport.channels import (
    AMONG_RANKS,
    CHANNELS,
    FROM_CLIENTS,
    TO_ONE_CLIENT,
    collective_channel,
    inbox_channel,
)
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.control import Body
from gradbus.runtime.wire.frames import Flags, Kind

TYPES = {
    "U32": "uint32",
    "World": "uint32",
    "U64": "uint64",
    "Round": "round",
    "OpenRound": "integer",
    "Natural32": "integer",
    "I32": "integer",
    "Name": "name",
    "Label": "name",
    "ClientName": "client name",
    "Annotated[int, Field(ge=-1, le=2147483646)]": "integer",
    "Text": "text",
    "Lines": "text",
    "Seconds": "seconds",
    "Seqs": "seqs",
    "Ranks": "ranks",
    "Ids": "ids",
    "IdRanges": "id ranges",
    "ClientOrders": "text",
    "JsonText": "JSON",
    "Incarnations": "uint64s",
    "Waits": "waits",
    "Counts": "counts",
    "Options": "options",
    "Metrics": "metrics",
    "Patterns": "patterns",
    "Rules": "rules",
    "Reasons": "reasons",
    "Attempt": "uint32",
    "Binary": "binary",
    "Finite": "float",
    "Annotated[bytes, Field(max_length=MAX_BINARY // 2)]": "binary",
    "Annotated[int, Field(ge=2, le=255)]": "integer",
    "Packet": "integer",
    "Packets": "list of integers",
    "Annotated[int, Field(ge=0, le=3)]": "integer",
    "bool": "bool",
    "float": "float",
    "Annotated[float, Field(gt=0, le=1)]": "float",
    "Annotated[float, Field(ge=0.01, le=3600, allow_inf_nan=False)]": "seconds",
    "Annotated[int, Field(ge=0, le=1 << 30)]": "integer",
    "Annotated[int, Field(ge=1, le=1 << 30)]": "integer",
    "Annotated[int, Field(ge=0, le=1 << 40)]": "integer",
    "Literal[1, 2]": "integer",
}


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "wire.md").read_text(encoding="utf-8")


def test_the_header_has_the_offsets_and_sizes_of_the_code(page: str) -> None:
    table = rows(section(page, "Frame"), "offset")
    at, expected = 0, []
    for field in re.findall(r"\d*[a-zA-Z]", frames.HEADER.format):
        expected.append((str(at), str(struct.calcsize(f"<{field}"))))
        at += struct.calcsize(f"<{field}")
    assert at == frames.HEADER_BYTES
    assert [(row[0], row[1]) for row in table[: len(expected)]] == expected
    assert [row[:3] for row in table[len(expected) :]] == [
        [str(at), "name_bytes", "name"],
        [f"{at} + name_bytes", "size", "data"],
    ]


def test_the_header_has_the_fields_of_the_code_in_their_order(page: str) -> None:
    """Each field gets a value of its own, and stands where the page says."""
    key = frames.FrameKey(Kind.COLLECTIVE, 0xA1, 0xA2, 0xA3, 0xA4, 0xA5, "xyz", 0xA6)
    ((head, data),) = frames.split(key, bytes(35), chunk_bytes=5, flags=0xA7, world=0xA8, only=[2])
    assert len(data) == 5
    known = {
        "version": 2, "kind": 4, "flags": 0xA7, "job": 0xA1, "round_id": 0xA2, "sender": 0xA3, "incarnation": 0xA4,
        "transfer": 0xA5, "part": 0xA6, "name_bytes": 3, "world": 0xA8, "seq": 2, "seq_cnt": 7, "total_bytes": 35,
        "offset": 10, "size": 5, "reserved": 0,
    }  # fmt: skip
    found = {}
    for offset, size, name, *_ in rows(section(page, "Frame"), "offset")[:-2]:
        found[name] = int.from_bytes(head[int(offset) : int(offset) + int(size)], "little")
    assert {name: found[name] for name in known} == known
    assert set(found) == set(known) | {"magic", "crc"}
    assert frames.MAGIC.hex(" ") in section(page, "Frame")


def test_kinds_and_flags_have_the_numbers_of_the_code(page: str) -> None:
    text = section(page, "Frame")
    assert {row[0]: int(row[1]) for row in rows(text, "kind")} == {kind.name: kind.value for kind in Kind}
    assert {row[0]: 1 << int(row[1]) for row in rows(text, "flag")} == {flag.name: flag.value for flag in Flags if flag}


def test_topics_have_the_quality_of_service_of_the_code(page: str) -> None:
    table = {row[0].strip("`"): row for row in rows(section(page, "Topics"), "topic")}
    topics = [*CHANNELS.values(), collective_channel("<group>"), collective_channel("<group>/<rank>")]
    topics.append(replace(inbox_channel(1), name="train/control/<incarnation>"))
    assert table.keys() == {topic.name for topic in topics}
    for topic in topics:
        _, idl_type, _, durability, history, in_reader, in_process, when_full = table[topic.name]
        assert idl_type == f"`gradbus::{topic.sample_type}`"
        assert durability == ("transient-local" if topic.retained else "volatile")
        kept = f"keep all, readers the last {topic.reader_samples}" if topic.overwrites else "keep all"
        assert history == ("keep last 1" if topic.keep_last else kept)
        assert int(in_reader) == (1 if topic.keep_last else topic.reader_samples)
        assert int(in_process) == topic.inbox
        assert when_full.startswith("dropped") is topic.may_drop
        assert topic.ignore_local is topic.name.startswith("train/frame/")
        is_short = topic.name == "train/train_cmd" or topic.name.startswith(("train/control", "train/frame/"))
        assert topic.block_s == (0.01 if is_short else 0.1)


def test_the_recipients_of_each_control_message_are_those_of_the_code(page: str) -> None:
    table = [row[:2] for row in rows(section(page, "Who receives a control message"), "messages")]
    found = {topic: set(kinds.split(", ")) for kinds, topic in table if "others" not in kinds and kinds != "Closing"}
    assert found == {
        "`train/control/controller`": {kind.__name__ for kind in FROM_CLIENTS},
        "the inbox of the process whose incarnation is in the message": {kind.__name__ for kind in TO_ONE_CLIENT},
        "`train/control`": {kind.__name__ for kind in AMONG_RANKS},
    }


def test_every_control_message_is_there_with_its_fields_in_order_and_their_types(page: str) -> None:
    for kind in get_args(Body):
        table = [row[:2] for row in rows(section(page, kind.__name__), "field")]
        of_base = {field.name for base in kind.__mro__[1:-1] for field in dataclasses.fields(base)}
        own = [field for field in dataclasses.fields(kind) if field.name not in of_base]
        assert table == [[field.name, TYPES[str(field.type)]] for field in own], kind
    below = page[page.index("## Control messages") : page.index("## A round")]
    assert f"| ranks | array of at most {control.MAX_SEQS} ranks, each below 2^20 |" in below
    assert set(re.findall(r"^### (\w+)", below, re.MULTILINE)) == {kind.__name__ for kind in get_args(Body)}


def test_limits_and_versions_are_those_of_the_code(page: str) -> None:
    limits = {row[0]: row[1].replace(",", "") for row in rows(section(page, "Limits"), "what")}
    assert limits["slice of a frame"] == f"{frames.MAX_CHUNK_BYTES} bytes; {frames.CHUNK_BYTES} are sent"
    assert limits["frames of a payload"] == str(frames.MAX_FRAMES)
    assert limits["name"] == f"{frames.MAX_NAME_BYTES} bytes"
    assert limits["control body"] == f"{control.MAX_BODY_BYTES} bytes"
    assert limits["numbers of frames in one request"] == str(control.MAX_SEQS)
    versions = {row[0]: row[1] for row in rows(section(page, "Versions"), "byte")}
    assert versions["`version` of a frame"] == str(frames.VERSION)
    assert versions["`protocol` of Hello"] == str(control.PROTOCOL)


def test_every_reason_to_refuse_a_frame_is_explained(root: Path, page: str) -> None:
    source = (root / "runtime" / "wire" / "frames.py").read_text(encoding="utf-8")
    reasons = set(re.findall(r'FrameError\(\s*"(\w+)"', source))
    assert {row[0] for row in rows(section(page, "What is refused"), "reason")} == reasons
    for file in ("transport/channels.py", "wire/assembler.py", "wire/control.py"):
        source = (root / "runtime" / file).read_text(encoding="utf-8")
        for reason in re.findall(r'FrameError\(\s*"(\w+)"', source):
            assert f"`{reason}`" in section(page, "What is refused"), reason

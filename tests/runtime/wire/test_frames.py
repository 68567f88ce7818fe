"""The 80-byte header against an oracle made of ``struct`` alone, and every way in which bytes can be wrong.

``python tests/runtime/wire/test_frames.py`` writes the golden frames anew.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.runtime.errors import FrameError
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import CONTROLLER, Flags, FrameKey, Kind

GOLDEN = Path(__file__).parents[2] / "golden" / "frames.json"
REASONS = {"short", "magic", "version", "kind", "limits", "crc", "name"}


def padded(name: str) -> str:
    """The name field of a collective: NULs until it is 8 bytes longer than a multiple of 16, as it was when these were
    kept. How many there are is up to the sender."""
    while len(name.encode()) % 16 != 8:
        name += "\0"
    return name


HEAD_CRC = 16
# One frame of each kind, as plain numbers: what ``split`` gets and what the oracle writes.
CASES: dict[str, dict[str, Any]] = {
    "control": {
        "kind": 1, "job": 0, "round_id": 0, "sender": 7, "incarnation": 0x0102030405060708, "transfer": 3, "part": 0,
        "name": "", "flags": 0, "world": 0, "chunk_bytes": 65536, "seq": 0,
        "payload": b"\x92\xa5Leave\x81\xa6reason\xa4done",
    },
    "update": {
        "kind": 2, "job": 0xFEDCBA9876543210, "round_id": 12, "sender": 41, "incarnation": 0x1122334455667788,
        "transfer": 9, "part": 0, "name": "", "flags": 0, "world": 0, "chunk_bytes": 10, "seq": 1,
        "payload": bytes(range(25)),
    },
    "model_last": {
        "kind": 3, "job": 0xFEDCBA9876543210, "round_id": 11, "sender": 0xFFFFFFFF, "incarnation": 1, "transfer": 5,
        "part": 0, "name": "", "flags": 1, "world": 0, "chunk_bytes": 10, "seq": 2, "payload": bytes(range(25)),
    },
    "collective": {
        "kind": 4, "job": 1, "round_id": 1000, "sender": 1, "incarnation": 2, "transfer": 4096, "part": 6,
        "name": "conv1.weight \u00df", "flags": 0x0302, "world": 4, "chunk_bytes": 1 << 20, "seq": 0,
        "payload": struct.pack("<4f", 1.0, -2.0, 0.5, 8.0),
    },
    "group_tensor": {
        "kind": 4, "job": 0xBA720994A28EC939, "round_id": 17, "sender": 1, "incarnation": 0xAB, "transfer": 2,
        "part": 0, "name": padded("shape ü\0all_gather tensor\0float32 2,3"), "flags": 0, "world": 2,
        "chunk_bytes": 1 << 20, "seq": 0, "payload": struct.pack("<6f", 0.0, 1.0, -2.0, 3.5, 1e-9, 1e30),
    },
    "group_local": {
        "kind": 4, "job": 0xBA720994A28EC939, "round_id": 17, "sender": 0, "incarnation": 1, "transfer": 0, "part": 1,
        "name": padded("grad/0\0all_reduce shards mean float64 /2 5\0"), "flags": HEAD_CRC, "world": 2,
        "chunk_bytes": 1 << 20, "seq": 0, "payload": struct.pack("<3d", 0.5, -0.25, 1e300),
    },
    "group_receipt": {
        "kind": 4, "job": 0xBA720994A28EC939, "round_id": 0, "sender": 1, "incarnation": 0xAB, "transfer": 0,
        "part": 65535, "name": padded("model\0broadcast 0 tensor bfloat16 10,784\0"), "flags": HEAD_CRC, "world": 2,
        "chunk_bytes": 1 << 20, "seq": 0, "payload": b"",
    },
    "group_probe": {
        "kind": 4, "job": 0xBA720994A28EC939, "round_id": 0, "sender": 0, "incarnation": 1, "transfer": 0, "part": 1,
        "name": "", "flags": 0, "world": 2, "chunk_bytes": 1 << 20, "seq": 0, "payload": b"",
    },
    "empty": {
        "kind": 3, "job": 2, "round_id": 0, "sender": 0xFFFFFFFF, "incarnation": 3, "transfer": 1, "part": 0,
        "name": "", "flags": 0, "world": 0, "chunk_bytes": 1 << 20, "seq": 0, "payload": b"",
    },
}  # fmt: skip


def by_hand(case: dict[str, Any]) -> bytes:
    """The frame, field by field."""
    name, chunk, payload = case["name"].encode(), case["chunk_bytes"], case["payload"]
    start = case["seq"] * chunk
    data = payload[start : start + chunk]
    head = b"AG2\0"
    head += struct.pack("<BBH", 2, case["kind"], case["flags"])
    head += struct.pack("<Q", case["job"])
    head += struct.pack("<I", case["round_id"])
    head += struct.pack("<I", case["sender"])
    head += struct.pack("<Q", case["incarnation"])
    head += struct.pack("<I", case["transfer"])
    head += struct.pack("<HH", case["part"], len(name))
    head += struct.pack("<I", case["world"])
    head += struct.pack("<I", case["seq"])
    head += struct.pack("<I", max(1, (len(payload) + chunk - 1) // chunk))
    head += struct.pack("<Q", len(payload))
    head += struct.pack("<Q", start)
    head += struct.pack("<I", len(data))
    head += bytes(4)
    covered = head + name + (b"" if case["flags"] & HEAD_CRC else data)
    return head + struct.pack("<I", zlib.crc32(covered)) + name + data


def key_of(case: dict[str, Any]) -> FrameKey:
    return FrameKey(
        Kind(case["kind"]),
        case["job"],
        case["round_id"],
        case["sender"],
        case["incarnation"],
        case["transfer"],
        case["name"],
        case["part"],
    )


def made(case: dict[str, Any]) -> bytes:
    ((head, data),) = frames.split(
        key_of(case),
        case["payload"],
        chunk_bytes=case["chunk_bytes"],
        flags=case["flags"],
        world=case["world"],
        only=[case["seq"]],
    )
    return head + bytes(data)


def signed(frame: bytes) -> bytes:
    """The frame with its CRC put right, as somebody would who forges one."""
    return frame[:76] + zlib.crc32(frame[80:], zlib.crc32(frame[:76])).to_bytes(4, "little") + frame[80:]


def changed(frame: bytes, at: int, layout: str, value: int) -> bytes:
    """The frame with one field changed and a right CRC."""
    patched = bytearray(frame)
    struct.pack_into(layout, patched, at, value)
    return signed(bytes(patched))


@pytest.mark.parametrize("name", CASES)
def test_a_frame_has_the_bytes_of_the_table(name: str) -> None:
    assert made(CASES[name]) == by_hand(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_frame_has_the_bytes_that_were_kept(name: str) -> None:
    assert made(CASES[name]).hex() == json.loads(GOLDEN.read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize("name", CASES)
def test_a_kept_frame_is_read_with_every_field(name: str) -> None:
    case = CASES[name]
    frame = frames.parse(bytes.fromhex(json.loads(GOLDEN.read_text(encoding="utf-8"))[name]))
    start = case["seq"] * case["chunk_bytes"]
    assert frame.key == key_of(case)
    assert (frame.flags, frame.world, frame.seq) == (case["flags"], case["world"], case["seq"])
    assert (frame.total_bytes, frame.offset) == (len(case["payload"]), start)
    assert frame.data == case["payload"][start : start + case["chunk_bytes"]]


def test_the_header_is_80_bytes() -> None:
    assert frames.HEADER_BYTES == 80
    ((head, _),) = frames.split(FrameKey(Kind.MODEL, 0, 0, 0, 0), b"abc")
    assert len(head) == 80


def test_the_name_stands_between_header_and_payload() -> None:
    ((head, data),) = frames.split(FrameKey(Kind.COLLECTIVE, 0, 0, 0, 0, name="fc.bias"), b"abc")
    assert head[80:] == b"fc.bias"
    assert bytes(data) == b"abc"


U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
KEYS = st.builds(
    FrameKey,
    kind=st.sampled_from(Kind),
    job=U64,
    round_id=U32,
    sender=U32,
    incarnation=U64,
    transfer=U32,
    name=NAMES,
    part=U16,
)


@settings(derandomize=True, deadline=None)
@given(key=KEYS, payload=st.binary(max_size=400), chunk_bytes=st.integers(1, 500), flags=U16, world=U32)
def test_what_is_split_is_read_back(key: FrameKey, payload: bytes, chunk_bytes: int, flags: int, world: int) -> None:
    flags &= ~Flags.SHARED  # such a frame has a descriptor in the place of its slice
    parts = frames.split(key, payload, chunk_bytes=chunk_bytes, flags=flags, world=world)
    parsed = [frames.parse(head + bytes(data)) for head, data in parts]
    assert b"".join(bytes(frame.data) for frame in parsed) == payload
    assert [frame.seq for frame in parsed] == list(range(frames.chunk_count(len(payload), chunk_bytes)))
    for frame in parsed:
        assert (frame.key, frame.flags, frame.world) == (key, flags, world)
        assert (frame.seq_cnt, frame.total_bytes) == (len(parsed), len(payload))
        assert frame.offset == frame.seq * chunk_bytes


def shared_frame(kind: Kind = Kind.COLLECTIVE, descriptor: bytes = b"12345678") -> bytes:
    key = FrameKey(kind, 1, 2, 3, 4, name="w")
    data = memoryview(bytes(1000))
    return frames.head(key, data, 1, 2000, chunk_bytes=1000, flags=Flags.SHARED, descriptor=descriptor) + descriptor


def test_a_frame_may_have_a_descriptor_in_the_place_of_its_slice() -> None:
    frame = frames.parse(shared_frame())
    assert (frame.size, frame.offset, frame.seq, frame.seq_cnt, frame.total_bytes) == (1000, 1000, 1, 2, 2000)
    assert bytes(frame.data) == b"12345678"


def test_a_changed_descriptor_does_not_pass_the_crc() -> None:
    sample = bytearray(shared_frame())
    sample[-1] ^= 1
    with pytest.raises(FrameError) as info:
        frames.parse(sample)
    assert info.value.reason == "crc"


@pytest.mark.parametrize(
    ("kind", "descriptor"),
    [(Kind.UPDATE, b"12345678"), (Kind.COLLECTIVE, b"1234567"), (Kind.COLLECTIVE, b""), (Kind.COLLECTIVE, bytes(12))],
)
def test_a_descriptor_has_8_bytes_and_stands_in_frames_of_collectives_only(kind: Kind, descriptor: bytes) -> None:
    with pytest.raises(FrameError):
        frames.parse(shared_frame(kind, descriptor))


@pytest.mark.parametrize(("seq", "count", "fits"), [(0, 3, True), (0, 4, False), (2, 1, True), (2, 2, False)])
def test_a_frame_has_no_more_descriptors_than_there_are_slices_left(seq: int, count: int, fits: bool) -> None:
    key = FrameKey(Kind.COLLECTIVE, 1, 2, 3, 4, name="w")
    descriptors = bytes(range(8 * count))
    data = memoryview(bytes(1000))
    head = frames.head(key, data, seq, 3000, chunk_bytes=1000, flags=Flags.SHARED, descriptor=descriptors)
    if fits:
        assert bytes(frames.parse(head + descriptors).data) == descriptors
    else:
        with pytest.raises(FrameError) as info:
            frames.parse(head + descriptors)
        assert info.value.reason == "short"


def test_a_frame_has_16_descriptors_at_most() -> None:
    key = FrameKey(Kind.COLLECTIVE, 1, 2, 3, 4, name="w")
    for count in (frames.MAX_DESCRIPTORS, frames.MAX_DESCRIPTORS + 1):
        data, descriptors = memoryview(bytes(10)), bytes(8 * count)
        head = frames.head(key, data, 0, 1000, chunk_bytes=10, flags=Flags.SHARED, descriptor=descriptors)
        if count == frames.MAX_DESCRIPTORS:
            assert len(frames.parse(head + descriptors).data) == 8 * count
        else:
            with pytest.raises(FrameError):
                frames.parse(head + descriptors)


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_frame_or_a_frame_error(data: bytes) -> None:
    check_frame_or_error(data)


@settings(derandomize=True, deadline=None, max_examples=1000)
@given(
    fields=st.tuples(
        st.integers(0, 6),
        U16,
        U64,
        U32,
        U32,
        U64,
        U32,
        U16,
        st.integers(0, 300) | U16,
        U32,
        st.integers(0, 3) | U32,
        st.integers(0, 3) | U32,
        st.integers(0, 60) | U64,
        st.integers(0, 60) | U64,
        st.integers(0, 40) | U32,
    ),
    rest=st.binary(max_size=60),
)
def test_any_header_with_a_right_crc_is_a_frame_or_a_frame_error(fields: tuple[int, ...], rest: bytes) -> None:
    head = struct.pack("<4sBBHQIIQIHHIIIQQII", b"AG2\0", 2, *fields, 0)
    check_frame_or_error(signed(head + bytes(4) + rest))


def check_frame_or_error(data: bytes) -> None:
    reason, frame = None, None
    try:
        frame = frames.parse(data)
    except FrameError as error:
        reason = error.reason
    if frame is None:
        assert reason in REASONS
    else:
        assert len(frame.data) <= frames.MAX_CHUNK_BYTES
        assert 0 <= frame.seq < frame.seq_cnt <= frames.MAX_FRAMES
        assert frame.offset + len(frame.data) <= frame.total_bytes


def test_of_all_small_headers_just_those_that_split_makes_are_accepted() -> None:
    """Otherwise some bytes of a payload could be left unwritten although all its frames had come."""
    key = FrameKey(Kind.UPDATE, 1, 1, 1, 1)
    makeable = set()
    for total_bytes in range(7):
        for chunk_bytes in range(1, 9):
            for head, _ in frames.split(key, bytes(total_bytes), chunk_bytes=chunk_bytes):
                makeable.add(struct.unpack_from("<IIQQI", head, 44))
    accepted = set()
    ((head, _),) = frames.split(key, b"")
    for numbers in itertools.product(range(7), range(8), range(7), range(8), range(8)):
        whole = head[:44] + struct.pack("<IIQQI", *numbers) + bytes(8) + bytes(numbers[-1])
        with contextlib.suppress(FrameError):
            frames.parse(signed(whole))
            accepted.add(numbers)
    assert accepted == makeable


@pytest.mark.parametrize("name", CASES)
def test_any_flipped_bit_is_noticed_but_in_data_that_the_crc_leaves_out(name: str) -> None:
    whole = made(CASES[name])
    unchecked = len(CASES[name]["payload"]) if CASES[name]["flags"] & HEAD_CRC else 0
    for bit in range((len(whole) - unchecked) * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            frames.parse(flipped)
    if unchecked:
        frames.parse(whole[:-1] + bytes([whole[-1] ^ 1]))


@pytest.mark.parametrize("name", CASES)
def test_a_frame_cut_or_grown_at_any_place_is_noticed(name: str) -> None:
    whole = made(CASES[name])
    for size in range(len(whole)):
        with pytest.raises(FrameError):
            frames.parse(whole[:size])
    with pytest.raises(FrameError):
        frames.parse(whole + b"\0")


WRONG = {
    "another magic": ("update", 0, "<I", 0x00314741, "magic"),
    "version 1": ("update", 4, "<B", 1, "version"),
    "kind 0": ("update", 5, "<B", 0, "kind"),
    "kind 5": ("update", 5, "<B", 5, "kind"),
    "a name of 256 bytes": ("update", 38, "<H", 256, "limits"),
    "number beyond the count": ("update", 44, "<I", 3, "limits"),
    "no frames at all": ("empty", 48, "<I", 0, "limits"),
    "too many frames": ("update", 48, "<I", (1 << 20) + 1, "limits"),
    "a chunk of more than 8 MiB": ("update", 68, "<I", (8 << 20) + 1, "limits"),
    "more bytes than are there": ("update", 68, "<I", 11, "short"),
    "an end behind the end": ("update", 52, "<Q", 15, "limits"),
    "chunks that do not reach the end": ("update", 52, "<Q", 31, "limits"),
    "chunks that go beyond the end": ("update", 48, "<I", 4, "limits"),
    "an only frame that does not start at the start": ("collective", 60, "<Q", 1, "limits"),
    "a last frame longer than the others": ("model_last", 60, "<Q", 8, "limits"),
    "an offset that is not its number's": ("update", 60, "<Q", 11, "limits"),
    "an offset that overflows 64 bits": ("update", 60, "<Q", (1 << 64) - 1, "limits"),
    "a last frame that does not end the payload": ("model_last", 52, "<Q", 26, "limits"),
    "an empty frame of a payload that is not empty": ("empty", 52, "<Q", 1, "limits"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_forged_header_is_refused_although_its_crc_is_right(what: str) -> None:
    name, at, layout, value, reason = WRONG[what]
    with pytest.raises(FrameError) as caught:
        frames.parse(changed(made(CASES[name]), at, layout, value))
    assert caught.value.reason == reason


def test_a_name_that_is_not_utf8_is_refused() -> None:
    whole = made(CASES["collective"])
    with pytest.raises(FrameError) as caught:
        frames.parse(signed(whole[:80] + b"\xff" + whole[81:]))
    assert caught.value.reason == "name"


def test_only_the_wanted_frames_are_made_and_numbers_out_of_range_are_left_out() -> None:
    key = FrameKey(Kind.UPDATE, 1, 1, 1, 1)
    all_parts = [head + bytes(data) for head, data in frames.split(key, bytes(95), chunk_bytes=10)]
    some = [head + bytes(data) for head, data in frames.split(key, bytes(95), chunk_bytes=10, only=[9, 2, -1, 10, 2])]
    assert some == [all_parts[9], all_parts[2], all_parts[2]]
    assert list(frames.split(key, bytes(95), chunk_bytes=10, only=[])) == []


def test_slices_of_the_payload_are_not_copies() -> None:
    payload = bytearray(30)
    parts = list(frames.split(FrameKey(Kind.MODEL, 1, 1, 1, 1), payload, chunk_bytes=10))
    payload[:] = bytes(range(30))
    assert b"".join(bytes(data) for _, data in parts) == bytes(range(30))


def test_what_a_receiver_would_refuse_is_not_sent() -> None:
    key = FrameKey(Kind.MODEL, 1, 1, 1, 1)
    for chunk_bytes in (0, -1, frames.MAX_CHUNK_BYTES + 1):
        with pytest.raises(ValueError, match="chunk_bytes must be within"):
            list(frames.split(key, b"abc", chunk_bytes=chunk_bytes))
    with pytest.raises(ValueError, match="at most 1048576"):
        list(frames.split(key, bytes(frames.MAX_FRAMES + 1), chunk_bytes=1, only=[]))
    with pytest.raises(ValueError, match="name of 256 bytes"):
        list(frames.split(FrameKey(Kind.COLLECTIVE, 1, 1, 1, 1, name="\u00df" * 128), b"abc"))


def test_flags_leave_room_for_the_dtype() -> None:
    assert all(flag < 1 << 8 for flag in Flags)
    assert CONTROLLER == 0xFFFF_FFFF


def write_golden() -> None:
    GOLDEN.write_text(json.dumps({name: by_hand(case).hex() for name, case in CASES.items()}, indent=1) + "\n")


if __name__ == "__main__":
    write_golden()

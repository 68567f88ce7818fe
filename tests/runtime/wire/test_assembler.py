"""Frames in every order, doubled, lost, foreign and forged: the payload comes out whole, or not at all."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.runtime.errors import FrameError
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.assembler import Assembler, Verdict
from gradbus.runtime.wire.frames import Frame, FrameKey, Kind

KEY = FrameKey(Kind.UPDATE, 1, 2, 3, 4, 5)
OTHER = FrameKey(Kind.UPDATE, 1, 2, 3, 4, 6)


def frames_of(key: FrameKey, payload: bytes, chunk_bytes: int, flags: int = 0) -> list[Frame]:
    parts = frames.split(key, payload, chunk_bytes=chunk_bytes, flags=flags)
    return [frames.parse(head + bytes(data)) for head, data in parts]


def forged(
    *, key: FrameKey = KEY, seq: int = 0, seq_cnt: int = 1, total_bytes: int, offset: int = 0, data: bytes = b""
) -> Frame:
    """A frame with numbers of our choice and a right CRC. Raises FrameError if its numbers contradict each other."""
    ((head, _),) = frames.split(key, b"")
    whole = bytearray(head + data)
    whole[44:72] = struct.pack("<IIQQI", seq, seq_cnt, total_bytes, offset, len(data))
    whole[76:80] = zlib.crc32(whole[80:], zlib.crc32(whole[:76])).to_bytes(4, "little")
    return frames.parse(bytes(whole))


def put_together(parts: list[Frame], max_bytes: int = 1 << 20) -> bytes:
    assembler = Assembler()
    assembler.expect(KEY, max_bytes=max_bytes)
    verdicts = [assembler.feed(part) for part in parts]
    assert verdicts.count(Verdict.COMPLETE) == 1
    return bytes(assembler.take(KEY))


def reason_of(assembler: Assembler, frame: Frame) -> str:
    with pytest.raises(FrameError) as caught:
        assembler.feed(frame)
    return caught.value.reason


PAYLOADS = st.binary(min_size=0, max_size=300)
CHUNKS = st.integers(1, 320)


@settings(derandomize=True, deadline=None)
@given(payload=PAYLOADS, chunk_bytes=CHUNKS, seed=st.integers(0, 1 << 16))
def test_the_order_of_the_frames_does_not_matter(payload: bytes, chunk_bytes: int, seed: int) -> None:
    parts = frames_of(KEY, payload, chunk_bytes)
    shuffled = random.Random(seed).sample(parts, len(parts))
    assert put_together(parts) == payload
    assert put_together(parts[::-1]) == payload
    assert put_together(shuffled) == payload


@settings(derandomize=True, deadline=None)
@given(payload=PAYLOADS, chunk_bytes=CHUNKS, seed=st.integers(0, 1 << 16))
def test_frames_that_come_twice_and_foreign_ones_between_change_nothing(
    payload: bytes, chunk_bytes: int, seed: int
) -> None:
    rng = random.Random(seed)
    parts = frames_of(KEY, payload, chunk_bytes)
    foreign = frames_of(OTHER, bytes(40), 7)
    mixed = rng.sample(parts[:-1] * 2 + foreign * 2, len(parts) * 2 - 2 + len(foreign) * 2)
    assembler = Assembler()
    assembler.expect(KEY, max_bytes=1 << 20)
    for part in mixed:
        if part.key == KEY:
            assert assembler.feed(part) in (Verdict.STORED, Verdict.REPEATED)
        else:
            assert reason_of(assembler, part) == "unexpected"
    assert assembler.feed(parts[-1]) is Verdict.COMPLETE
    assert assembler.feed(parts[0]) is Verdict.REPEATED
    assert bytes(assembler.take(KEY)) == payload


def test_the_first_copy_of_a_frame_wins() -> None:
    assembler = Assembler()
    assembler.expect(KEY, max_bytes=100)
    assembler.feed(frames_of(KEY, b"a" * 10, 5)[0])
    assert assembler.feed(frames_of(KEY, b"b" * 10, 5)[0]) is Verdict.REPEATED
    assembler.feed(frames_of(KEY, b"b" * 10, 5)[1])
    assert bytes(assembler.take(KEY)) == b"aaaaabbbbb"


def test_two_attempts_of_one_sender_never_mix() -> None:
    assembler = Assembler()
    assembler.expect(KEY, max_bytes=100)
    assembler.expect(OTHER, max_bytes=100)
    first, second = frames_of(KEY, b"a" * 20, 5), frames_of(OTHER, b"b" * 20, 5)
    for one, two in zip(first, second, strict=True):
        assembler.feed(one)
        assembler.feed(two)
    assert bytes(assembler.take(KEY)) == b"a" * 20
    assert bytes(assembler.take(OTHER)) == b"b" * 20


@pytest.mark.parametrize("field", ["kind", "job", "round_id", "sender", "incarnation", "transfer", "name", "part"])
def test_a_frame_whose_key_differs_in_one_field_is_another_transfers(field: str) -> None:
    value = {"kind": Kind.MODEL, "name": "x"}.get(field, 77)
    assembler = Assembler()
    assembler.expect(KEY, max_bytes=100)
    other = KEY._replace(**{field: value})
    assert reason_of(assembler, frames_of(other, b"abc", 5)[0]) == "unexpected"


def test_nothing_is_allocated_for_what_nobody_expects() -> None:
    assembler = Assembler()
    assembler.expect(KEY, max_bytes=1 << 20)
    chunk = bytes(1 << 20)
    huge = forged(key=OTHER, seq_cnt=1 << 20, total_bytes=1 << 40, data=chunk)
    granted = forged(seq_cnt=1 << 20, total_bytes=1 << 40, data=chunk)
    tracemalloc.start()
    try:
        assert reason_of(assembler, huge) == "unexpected"
        assert reason_of(assembler, granted) == "oversized"
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * 1024
    assert len(assembler) == 1


def test_memory_is_what_was_granted_however_many_transfers_come() -> None:
    tracemalloc.start()
    try:
        assembler = Assembler()
        for number in range(100):
            key = KEY._replace(transfer=number)
            assembler.expect(key, max_bytes=4096)
            assembler.feed(forged(key=key, seq_cnt=4096, total_bytes=4096, data=b"x"))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 << 20  # the bytes and one flag a frame


def test_a_payload_of_just_the_granted_size_is_taken_and_one_byte_more_is_not() -> None:
    assembler = Assembler()
    assembler.expect(KEY, max_bytes=20)
    assert reason_of(assembler, frames_of(KEY, bytes(21), 5)[0]) == "oversized"
    for part in frames_of(KEY, bytes(20), 5):
        verdict = assembler.feed(part)
    assert verdict is Verdict.COMPLETE


CONTRADICTIONS = {
    "another total": frames_of(KEY, bytes(41), 10)[1],
    "another number of frames": frames_of(KEY, bytes(40), 8)[1],
    "another chunk size": forged(seq=1, seq_cnt=4, total_bytes=40, offset=11, data=bytes(11)),
    "a last frame at another place": forged(seq=3, seq_cnt=4, total_bytes=40, offset=33, data=bytes(7)),
    "the only frame of a payload of one": frames_of(KEY, bytes(40), 40)[0],
    "an empty payload": frames_of(KEY, b"", 40)[0],
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_frame_that_contradicts_earlier_ones_is_refused_and_spoils_nothing(what: str) -> None:
    payload = bytes(range(40))
    parts = frames_of(KEY, payload, 10)
    assembler = Assembler()
    assembler.expect(KEY, max_bytes=100)
    assembler.feed(parts[0])
    assert reason_of(assembler, CONTRADICTIONS[what]) == "mismatch"
    for part in parts[1:]:
        assembler.feed(part)
    assert bytes(assembler.take(KEY)) == payload


@settings(derandomize=True, deadline=None, max_examples=1000)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 30), st.integers(0, 30), st.integers(0, 12)),
        max_size=12,
    )
)
def test_whatever_frames_come_a_complete_payload_has_every_byte_written(numbers: list[tuple[int, ...]]) -> None:
    """All frames carry the byte 7; a byte that no frame covered would be left as it was in memory."""
    assembler = Assembler()
    assembler.expect(KEY, max_bytes=30)
    for seq, seq_cnt, total_bytes, offset, size in numbers:
        try:
            verdict = assembler.feed(
                forged(seq=seq, seq_cnt=seq_cnt, total_bytes=total_bytes, offset=offset, data=b"\7" * size)
            )
        except FrameError:
            continue
        if verdict is Verdict.COMPLETE:
            payload = bytes(assembler.take(KEY))
            assert payload == b"\7" * len(payload)
            return


def test_missing_frames_are_named_in_order_and_at_most_so_many() -> None:
    parts = frames_of(KEY, bytes(100), 10)
    assembler = Assembler()
    assert assembler.missing(KEY) is None
    assembler.expect(KEY, max_bytes=100)
    assert assembler.missing(KEY) is None
    assembler.feed(parts[7])
    assembler.feed(parts[2])
    assert assembler.missing(KEY) == [0, 1, 3, 4, 5, 6, 8, 9]
    assert assembler.missing(KEY, limit=3) == [0, 1, 3]
    for part in parts:
        assembler.feed(part)
    assert assembler.missing(KEY) == []


def test_forgetting_frees_the_memory_and_refuses_what_comes_later() -> None:
    parts = frames_of(KEY, bytes(4 << 20), 1 << 20)
    tracemalloc.start()
    try:
        assembler = Assembler()
        assembler.expect(KEY, max_bytes=4 << 20)
        assembler.feed(parts[0])
        held_bytes, _ = tracemalloc.get_traced_memory()
        assembler.forget(KEY)
        freed_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes - freed_bytes >= 4 << 20
    assert reason_of(assembler, parts[1]) == "unexpected"
    assert KEY not in assembler
    assembler.forget(KEY)  # again: nothing happens


def test_an_expectation_that_is_repeated_keeps_what_has_come() -> None:
    parts = frames_of(KEY, bytes(20), 10)
    assembler = Assembler()
    assembler.expect(KEY, max_bytes=20)
    assembler.feed(parts[0])
    assembler.expect(KEY, max_bytes=20)
    assert assembler.feed(parts[1]) is Verdict.COMPLETE


def test_only_a_complete_payload_can_be_taken_and_only_once() -> None:
    parts = frames_of(KEY, bytes(20), 10)
    assembler = Assembler()
    for prepare in (lambda: None, lambda: assembler.expect(KEY, max_bytes=20), lambda: assembler.feed(parts[0])):
        prepare()
        with pytest.raises(KeyError):
            assembler.take(KEY)
    assembler.feed(parts[1])
    assembler.take(KEY)
    with pytest.raises(KeyError):
        assembler.take(KEY)
    assert len(assembler) == 0


def test_what_is_taken_can_be_written_to() -> None:
    assembler = Assembler()
    assembler.expect(KEY, max_bytes=20)
    assembler.feed(frames_of(KEY, b"abc", 10)[0])
    payload = assembler.take(KEY)
    payload[0] = 120
    assert bytes(payload) == b"xbc"

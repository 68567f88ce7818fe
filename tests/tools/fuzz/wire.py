"""Targets: frames, control messages, objects and places of shared memory, as they come from the bus."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from fuzz.target import Target, must, reads_back
from gradbus.runtime.collectives import engine, objects
from gradbus.runtime.collectives.data_movement import NewPayload
from gradbus.runtime.collectives.tensors import Bytes, describe
from gradbus.runtime.errors import CollectiveError, FrameError
from gradbus.runtime.shm import segment
from gradbus.runtime.shm.segment import SharedMemoryFault
from gradbus.runtime.transport.channels import CHANNELS, collective_channel, store_channel
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.assembler import Assembler, Verdict
from gradbus.runtime.wire.frames import CONTROLLER, Frame, FrameKey, Kind
from gradbus.torch.store import messages as store_messages

_GRANTED_BYTES = 1 << 20
_COLLECTIVE_BYTES = 4 << 20
_CHUNK = memoryview(bytes(frames.CHUNK_BYTES))
_CHUNK_FLOATS = frames.CHUNK_BYTES // 4
_CRC = slice(frames.HEADER_BYTES - 4, frames.HEADER_BYTES)
_TOPICS = (*CHANNELS.values(), collective_channel("g"), store_channel())


def with_crc(frame: bytes) -> bytes:
    """The frame with the right checksum, which random changes would never find."""
    if len(frame) < frames.HEADER_BYTES:
        return frame
    head, rest = frame[: _CRC.start], frame[_CRC.stop :]
    flags, name_bytes = struct.unpack_from("<H", head, 6)[0], struct.unpack_from("<H", head, 38)[0]
    covers_all = not flags & frames.Flags.HEAD_CRC or flags & frames.Flags.SHARED
    covered = rest if covers_all else rest[:name_bytes]
    return head + zlib.crc32(covered, zlib.crc32(head)).to_bytes(4, "little") + rest


def _parsed(data: bytes) -> Frame | None:
    try:
        return frames.parse(data)
    except FrameError:
        return None


def _read_frame(data: bytes) -> None:
    for candidate in (data, with_crc(data)):
        frame = _parsed(candidate)
        if frame is None:
            continue
        must(0 <= frame.seq < frame.seq_cnt <= frames.MAX_FRAMES, "the number of the frame is beyond their count")
        must(frame.offset + frame.size <= frame.total_bytes, "the slice ends behind the payload")
        if frame.flags & frames.Flags.SHARED:
            count, rest = divmod(len(frame.data), frames.DESCRIPTOR_BYTES)
            must(not rest and 0 < count <= min(frames.MAX_DESCRIPTORS, frame.seq_cnt - frame.seq), "descriptors")
        else:
            must(len(frame.data) == frame.size, "size")
        sample = SimpleNamespace(
            data=candidate,
            client_id=frame.key.sender,
            round_id=frame.key.round_id,
            num_samples=1,
            subset_size=0,
            epochs=1,
            lr=0.1,
            seed=0,
        )
        for topic in _TOPICS:
            try:
                topic.to_message(sample)
            except FrameError:
                continue
        if frame.flags & frames.Flags.SHARED:
            continue  # of a collective: no assembler gets one
        assembler = Assembler()
        try:
            assembler.expect(frame.key, max_bytes=_GRANTED_BYTES)
            verdict = assembler.feed(frame)
        except FrameError:
            continue
        must((verdict is Verdict.COMPLETE) == (frame.seq_cnt == 1), "a payload is complete with its last frame")


def _frames_of(key: FrameKey, payload: bytes, chunk_bytes: int, flags: int = 0) -> list[bytes]:
    return [head + data for head, data in frames.split(key, payload, chunk_bytes=chunk_bytes, flags=flags)]


def _frame_seeds() -> list[bytes]:
    body = control.encode(control.Status(1, 2, "training", 3, 4))
    seeds = _frames_of(FrameKey(Kind.UPDATE, 1, 2, 3, 4, 5), bytes(range(200)), 64)
    seeds += _frames_of(FrameKey(Kind.MODEL, 1, 2, CONTROLLER, 4, 5), b"", 64, frames.Flags.DELTA)
    seeds += _frames_of(FrameKey(Kind.CONTROL, 1, 0, CONTROLLER, 4), body, 1 << 16)
    collective = FrameKey(Kind.COLLECTIVE, 1, 2, 3, 4, 5, "g\0s\0f", 1)
    seeds += [_with_descriptors(collective, count) for count in (1, 2, frames.MAX_DESCRIPTORS)]
    return seeds + _frames_of(collective, b"abc", 64, frames.Flags.HEAD_CRC)


def _with_descriptors(key: FrameKey, count: int) -> bytes:
    """A frame with descriptors of so many slices in shared memory, the last ones of a payload."""
    descriptors = bytes(range(frames.DESCRIPTOR_BYTES)) * count
    data = memoryview(bytes(64))
    head = frames.head(
        key, data, 1, 64 * (1 + count), chunk_bytes=64, flags=frames.Flags.SHARED, descriptor=descriptors
    )
    return head + descriptors


def _read_transfer(data: bytes) -> None:
    """Many frames for one transfer: each of its length, two bytes, and that much of a frame."""
    key = FrameKey(Kind.UPDATE, 1, 2, 3, 4, 5)
    assembler = Assembler()
    assembler.expect(key, max_bytes=_GRANTED_BYTES)
    while len(data) >= 2 and key in assembler:
        size = int.from_bytes(data[:2], "little")
        frame, data = _parsed(with_crc(data[2 : 2 + size])), data[2 + size :]
        if frame is None:
            continue
        try:
            verdict = assembler.feed(frame._replace(key=key))
        except FrameError:
            continue
        must((verdict is Verdict.COMPLETE) <= (assembler.missing(key) == []), "complete, and frames are missing")
        if verdict is Verdict.COMPLETE:
            must(len(assembler.take(key)) == frame.total_bytes, "the payload is not as long as its frames state")


def _transfer_seeds() -> list[bytes]:
    key = FrameKey(Kind.UPDATE, 1, 2, 3, 4, 5)
    parts = [_frames_of(key, bytes(range(200)), chunk_bytes) for chunk_bytes in (64, 100, 1000)]
    parts += [_frames_of(key, b"", 64), parts[0][::-1], [*parts[0], *parts[1]]]
    return [_framed(some) for some in parts]


def _control_seeds() -> list[bytes]:
    bodies: list[control.Body] = [
        control.Hello(3, 10, 5, True, 1, "idle", -1, -1, "h 1", 1, "m/b/1"),
        control.Welcome(0, 1, 2, 3, "sq8", '{"density": 0.1, "chunk_elems": 8192}', 4, 0.5),
        control.Refused(0, 1, "no"),
        control.Status(1, 2, "training", 3, 4),
        control.UploadRequest(1, 2, 3, 4, 5, 0.5, 0.1, 0.2, "m/b/1 2 3 00", 0.1, 1.0, 2.0),
        control.PacketRequest(1, 2, 3, 4, 5, 0.5, 0.1, 0.2, update=3, packet=2, last=True),
        control.PacketsMissing(0, 1, 2, 3, [4, 5]),
        control.RetransmitRequest(0, 1, 2, 3, [4, 5]),
        control.MaskRoster(1, 2, 3, 4, 5, bytes(200)),
        control.MaskShares(0, 1, 2, 3, 4, [0, 5], bytes(82)),
        control.ModelAvailable(1, 2, 3, True, 4, "m"),
        control.TrainingFailure(1, 2, "Traceback"),
        control.EvaluationRequest(1, 2, "0,3-7", 9.5),
        control.EvaluationResult(1, 2, 3, {"loss": 0.5}, "", 0.5),
        control.GroupHello("g", 2, 3, True, False, 4, "h", "m", [0, 1]),
        control.GroupLeave("g", 1, True, "", [1], ["gone"]),
    ]
    return [*map(control.encode, bodies), b"\x80" * 100, b"\x92\xa5Hello\x80"]


def _pack_store(message: store_messages.Message) -> bytes:
    return bytes(store_messages.frame_of(message, sender=0, incarnation=1, to=2)[1])


def _store_seeds() -> list[bytes]:
    messages: list[store_messages.Message] = [
        store_messages.StoreJoin(1, 2, "h 1"),
        store_messages.StoreStatus("taken", "h 1"),
        store_messages.StoreRequest(3, "compare_set", ["key"], [b"old", b"new"], -1, 0.5),
        store_messages.StoreAnswer(3, "done", ["key"], [b"value"], 7, ""),
        store_messages.StoreStatus("closed", "gone"),
    ]
    return [*map(_pack_store, messages), b"\xdc\x10\x00" * 9 + b"\x80" * 99]


def _object_seeds() -> list[bytes]:
    values: list[Any] = [None, [1, 2.5, "text", b"bytes", True], {"a": {"b": [1 << 40]}, 3: -1}, list(range(300))]
    return [*map(objects.pack, values), b"\xdd\x00\x3f\xff\xff" * 5]


class _Watched(NewPayload):
    """Notes where the chunks lie that it takes."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.taken: list[tuple[int, int]] = []  # offset and end, in bytes

    def chunk(self, seq: int, offset: int, data: Bytes) -> None:
        self.taken.append((offset, offset + len(data)))
        super().chunk(seq, offset, data)

    def covers(self, size: int) -> bool:
        """Whether the chunks make so many bytes, without a gap and none twice."""
        edges = [(0, 0), *sorted(self.taken), (size, size)]
        return all(before[1] == after[0] for before, after in itertools.pairwise(edges))


def _in_memory(frame: Frame) -> list[Frame]:
    """The chunks that a frame's descriptors stand for, as :class:`.slots.SlotPool` finds them."""
    found, chunk_bytes = [], frame.chunk_bytes
    for seq in range(frame.seq, frame.seq + len(frame.data) // frames.DESCRIPTOR_BYTES):
        size = min(chunk_bytes, frame.total_bytes - seq * chunk_bytes)
        if 0 < size <= frames.CHUNK_BYTES:
            found.append(frame._replace(seq=seq, offset=seq * chunk_bytes, size=size, data=_CHUNK[:size]))
    return found


def _read_collective(data: bytes) -> None:
    """The name of a collective's frame, which says what the payload is; then the frames of the payload."""
    text, _, rest = data.partition(b"\n")
    name, _, meta, _ = engine.parts_of(text.decode("utf-8", "replace"))
    del name
    stream, total_bytes = _Watched(_COLLECTIVE_BYTES), 0
    while len(rest) >= 2 and not stream.complete:
        size = int.from_bytes(rest[:2], "little")
        frame, rest = _parsed(with_crc(rest[2 : 2 + size])), rest[2 + size :]
        if frame is None:
            continue
        try:
            for piece in _in_memory(frame) if frame.flags & frames.Flags.SHARED else [frame]:
                total_bytes = piece.total_bytes
                stream.feed(piece, meta)
        except CollectiveError:
            return
    if stream.complete:
        value = stream.value
        must(stream.covers(total_bytes), "a payload is complete, and bytes of it have not come")
        must((len(value) if isinstance(value, bytes) else value.nbytes) == total_bytes, "it has another size")


def _collective_seeds() -> list[bytes]:
    import torch

    seeds = []
    for payload, meta in ((b"abc", ""), (bytes(24), describe(torch.zeros(2, 3))), (b"", describe(torch.zeros(0)))):
        name = engine.wire_name("grads/17", "all_gather", meta)
        parts = _frames_of(FrameKey(Kind.COLLECTIVE, 1, 2, 3, 4, 5, name, 1), payload, frames.CHUNK_BYTES)
        seeds.append(name.encode() + b"\n" + _framed(parts))
    for meta in ("", describe(torch.zeros(2 * _CHUNK_FLOATS + 5))):  # larger ones, in shared memory
        name = engine.wire_name("grads/17", "all_gather", meta)
        key = FrameKey(Kind.COLLECTIVE, 1, 2, 3, 4, 5, name, 1)
        seeds += [name.encode() + b"\n" + _framed(_described(key, counts)) for counts in ((3,), (1, 2), (1, 1, 1))]
        short = _described(key, (1, 2), first_bytes=frames.CHUNK_BYTES - 100)  # chance would take long to find such
        seeds.append(name.encode() + b"\n" + _framed(short))
    return seeds


def _framed(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(2, "little") + frame for frame in parts)


def _described(key: FrameKey, counts: Sequence[int], first_bytes: int = frames.CHUNK_BYTES) -> list[bytes]:
    """Frames with descriptors of a payload of two chunks and a bit in shared memory, so many chunks each.

    ``first_bytes``: the size of the first chunk, as its frame states it.
    """
    made, first, total = [], 0, 2 * frames.CHUNK_BYTES + 20
    for count in counts:
        descriptors = bytes(frames.DESCRIPTOR_BYTES) * count
        size = min(frames.CHUNK_BYTES, total - first * frames.CHUNK_BYTES) if first else first_bytes
        made.append(
            frames.head(key, _CHUNK[:size], first, total, flags=frames.Flags.SHARED, descriptor=descriptors)
            + descriptors
        )
        first += count
    return made


def _read_place(data: bytes) -> None:
    """The text that names a place in shared memory, of this machine in most inputs."""
    text = data.decode("utf-8", "replace")
    for place in (text, f"{segment.machine()} {text}"):
        for read in (segment.read, segment.attach):
            try:
                read(place, 4096)
            except SharedMemoryFault:
                continue
            must(False, f"{place!r} was taken for shared memory")


TARGETS = {
    # A payload in pieces of one byte takes as much again to know which of them are here.
    "frame": Target(_read_frame, 2 * _GRANTED_BYTES, _frame_seeds),
    "transfer": Target(_read_transfer, 2 * _GRANTED_BYTES, _transfer_seeds),
    "control": Target(
        reads_back(control.decode, control.encode, FrameError),
        control.MAX_BODY_MEMORY,
        _control_seeds,
        max_len=control.MAX_BODY_BYTES,
    ),
    "store": Target(
        reads_back(store_messages.decode, _pack_store, FrameError),
        store_messages.MAX_MEMORY,
        _store_seeds,
        max_len=1 << 16,
    ),
    "object": Target(
        reads_back(objects.unpack, objects.pack, CollectiveError),
        objects.MAX_OBJECT_MEMORY,
        _object_seeds,
        max_len=1 << 16,
    ),
    "collective": Target(_read_collective, 2 * _COLLECTIVE_BYTES, _collective_seeds),
    "place": Target(_read_place, 1 << 16, lambda: [f"1 3 {'00' * segment.TOKEN_BYTES}".encode(), b"0 0 0"]),
}

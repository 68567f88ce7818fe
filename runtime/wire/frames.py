"""Frames: how a payload of any size travels as samples of bounded size. Bytes only, no I/O.

A frame is an 80-byte header, a name, and a slice of the payload. docs/wire.md shows every byte. The header says which
transfer the slice belongs to, where it goes and how much there is in all, so that frames may come in any order, twice,
or not at all; :class:`gradbus.runtime.wire.assembler.Assembler` puts them together again.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

from gradbus.runtime.errors import FrameError

MAGIC = b"AG2\0"
SEALED_MAGIC = b"GBS\0"  # of an envelope, see gradbus.runtime.security
VERSION = 2
CHUNK_BYTES = 1 << 20  # measured: 1 MiB is best or equal, 128 KiB costs twice the time
MAX_CHUNK_BYTES = 8 << 20
MAX_FRAMES = 1 << 20  # of one payload: 1 TiB at the default chunk size
MAX_NAME_BYTES = 255
DESCRIPTOR_BYTES = 8
MAX_DESCRIPTORS = 16  # of one frame
CONTROLLER = 0xFFFF_FFFF  # sender id of the controller; clients and ranks count from 0
UNASSIGNED = 0xFFFF_FFFE  # sender id of every client that waits for the controller to assign an id to its name

# magic, version, kind, flags | job | round, sender | incarnation | transfer, part, name length | world, seq, seq_cnt |
# total, offset | size, reserved, crc
HEADER = struct.Struct("<4sBBH Q II Q IHH III QQ I4xI".replace(" ", ""))
HEADER_BYTES = HEADER.size
_CRC_AT = HEADER_BYTES - 4
_SENDER_AT, _INCARNATION_AT = 20, 24


class Kind(IntEnum):
    """Holds what a frame carries."""

    CONTROL = 1
    UPDATE = 2
    MODEL = 3
    COLLECTIVE = 4


class Flags(IntFlag):
    """Properties of the payload, and of the frame."""

    NONE = 0
    DELTA = 1
    FINAL = 2
    NON_FINITE = 4
    SEALED = 8
    HEAD_CRC = 16  # the CRC-32 covers header and name alone: for data that does not leave the machine, or is sealed
    # The slice, and perhaps some after it, lie in memory of the sender's; the frame has descriptors in their place.
    SHARED = 32


# As plain numbers: to look at a bit of an IntFlag takes 2 us.
_SHARED, _HEAD_CRC = int(Flags.SHARED), int(Flags.HEAD_CRC)


class FrameKey(NamedTuple):
    """Which transfer a frame belongs to. Two payloads never share a key.

    Attributes:
        kind: what it carries.
        job: id of the run (federated) or of the group (data parallel), 64 bits.
        round_id: round or step.
        sender: client id, rank, or CONTROLLER.
        incarnation: which start of the sender, 64 bits, higher is younger.
        transfer: number of the payload among those of this incarnation.
        name: tensor or operation; empty for whole models.
        part: further number for whoever needs one.
    """

    kind: Kind
    job: int
    round_id: int
    sender: int
    incarnation: int
    transfer: int = 0
    name: str = ""
    part: int = 0


def is_later(number: int, than: int) -> bool:
    """Whether a transfer has a later number than another one of the same sender: those of control messages are counted
    modulo 2^32."""
    return 0 < (number - than) & 0xFFFF_FFFF < 0x8000_0000


class Frame(NamedTuple):
    """One checked frame. ``data`` is a view on the bytes it was parsed from, offset and sizes are in bytes.

    With the flag SHARED, ``data`` are the descriptors of the slice, which has ``size`` bytes, and of those after it.
    """

    key: FrameKey
    flags: int
    world: int
    seq: int
    seq_cnt: int
    total_bytes: int
    offset: int
    size: int
    data: memoryview

    @property
    def chunk_bytes(self) -> int:
        """Size of the chunks that the payload was cut into; the only frame of a payload is one chunk."""
        return self.offset // self.seq if self.seq else self.size


_KINDS = {int(kind): kind for kind in Kind}


def chunk_count(total_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Number of frames of a payload; an empty payload has one empty frame."""
    return max(1, -(-total_bytes // chunk_bytes))


def bytes_in(total_bytes: int, numbers: Iterable[int], chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return how many bytes of a payload these frames have, headers left out. Numbers out of range have none."""
    return sum(max(0, min(chunk_bytes, total_bytes - number * chunk_bytes)) for number in numbers if number >= 0)


def head(  # noqa: PLR0913 - the fields of a header
    key: FrameKey,
    data: memoryview,
    seq: int,
    total_bytes: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    flags: int = 0,
    world: int = 0,
    descriptor: bytes = b"",
) -> bytes:
    """Header and name of frame ``seq`` of a payload; its slice of the payload follows on the wire.

    Args:
        data: the slice. total_bytes: of the whole payload.
        descriptor: what follows instead of the slice, with the flag SHARED; perhaps more than one.
    """
    name = key.name.encode()
    start = seq * chunk_bytes
    packed = HEADER.pack(
        MAGIC,
        VERSION,
        key.kind,
        flags,
        key.job,
        key.round_id,
        key.sender,
        key.incarnation,
        key.transfer,
        key.part,
        len(name),
        world,
        seq,
        chunk_count(total_bytes, chunk_bytes),
        total_bytes,
        start,
        len(data),
        0,
    )
    crc = zlib.crc32(name, zlib.crc32(packed[:_CRC_AT]))
    if flags & _SHARED:
        crc = zlib.crc32(descriptor, crc)
    elif not flags & _HEAD_CRC:
        crc = zlib.crc32(data, crc)
    return packed[:_CRC_AT] + crc.to_bytes(4, "little") + name


def split(
    key: FrameKey,
    payload: Any,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    flags: int = 0,
    world: int = 0,
    only: Sequence[int] | None = None,
) -> Iterator[tuple[bytes, memoryview]]:
    """Frames of a payload, made one at a time: (header with name, slice of the payload).

    Args:
        key: the transfer.
        payload: contiguous bytes-like; slices of it are handed out, nothing is copied.
        chunk_bytes: bytes of payload in a frame.
        flags: see :class:`Flags`.
        world: number of ranks, 0 where that has no meaning.
        only: numbers of the frames to make (those that a receiver misses); numbers out of range are left out.

    Raises:
        ValueError: name or chunk too long, or more frames than a receiver accepts.
    """
    view = memoryview(payload).cast("B")
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes must be within 1 .. {MAX_CHUNK_BYTES}, got {chunk_bytes}")
    count = chunk_count(len(view), chunk_bytes)
    if count > MAX_FRAMES:
        raise ValueError(f"payload of {len(view)} bytes makes {count} frames of {chunk_bytes}, at most {MAX_FRAMES}")
    if len(key.name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"name of {len(key.name.encode())} bytes, at most {MAX_NAME_BYTES}: {key.name[:40]!r}...")
    for seq in range(count) if only is None else only:
        if 0 <= seq < count:
            data = view[seq * chunk_bytes : (seq + 1) * chunk_bytes]
            yield head(key, data, seq, len(view), chunk_bytes=chunk_bytes, flags=flags, world=world), data


def _fits(seq: int, seq_cnt: int, total_bytes: int, offset: int, size: int) -> bool:
    """Whether this is frame ``seq`` of a payload cut into equal chunks, of which the last may be shorter.

    With this, frames of one payload and one chunk size that are all there cover every byte exactly once.
    """
    if seq_cnt == 1:
        return offset == 0 and size == total_bytes <= MAX_CHUNK_BYTES
    if total_bytes == 0:
        return False
    chunk_bytes = offset // seq if seq else size
    return (
        0 < chunk_bytes <= MAX_CHUNK_BYTES
        and offset == seq * chunk_bytes
        and seq_cnt == chunk_count(total_bytes, chunk_bytes)
        and size == min(chunk_bytes, total_bytes - offset)
    )


def _size_with_descriptors(size: int, head_bytes: int, slices: int) -> int:
    """The size of a frame with descriptors nearest to ``size``, at most one for each of the slices that are left."""
    count = (size - head_bytes) // DESCRIPTOR_BYTES
    return head_bytes + DESCRIPTOR_BYTES * max(1, min(count, slices, MAX_DESCRIPTORS))


def sender_of(data: Any) -> int:
    """The sender that the bytes of a frame say. Nothing is checked but that they have one.

    Raises:
        FrameError: ``short``.
    """
    if len(data) < HEADER_BYTES:
        raise FrameError("short", f"frame of {len(data)} bytes, the header alone has {HEADER_BYTES}")
    return int.from_bytes(data[_SENDER_AT : _SENDER_AT + 4], "little")


def incarnation_of(data: Any) -> int:
    """The incarnation that the bytes of a frame say, as :func:`sender_of`."""
    sender_of(data)
    return int.from_bytes(data[_INCARNATION_AT : _INCARNATION_AT + 8], "little")


def parse(data: Any) -> Frame:  # noqa: C901 - one check after the other, in the order of what each relies on
    """Check the bytes of one frame. Sizes and limits come before anything else; nothing is copied or allocated.

    Raises:
        FrameError: with ``reason`` one of short, magic, version, kind, limits, crc, name.
    """
    view = memoryview(data).cast("B")
    if len(view) < HEADER_BYTES:
        raise FrameError("short", f"frame of {len(view)} bytes, the header alone has {HEADER_BYTES}")
    (
        magic,
        version,
        kind,
        flags,
        job,
        round_id,
        sender,
        incarnation,
        transfer,
        part,
        name_bytes,
        world,
        seq,
        seq_cnt,
        total_bytes,
        offset,
        size,
        crc,
    ) = HEADER.unpack_from(view)
    if magic != MAGIC:
        if magic == SEALED_MAGIC:
            raise FrameError(
                "sealed",
                "a process of this job encrypts what it sends, and this one does not: set bus.security alike for all",
            )
        raise FrameError("magic", f"frame starts with {magic.hex()}, expected {MAGIC.hex()}")
    if version != VERSION:
        raise FrameError("version", f"frame of version {version}, this program speaks {VERSION}")
    known = _KINDS.get(kind)
    if known is None:
        raise FrameError("kind", f"frame of unknown kind {kind}")
    if name_bytes > MAX_NAME_BYTES or size > MAX_CHUNK_BYTES or not 0 < seq_cnt <= MAX_FRAMES or seq >= seq_cnt:
        raise FrameError(
            "limits", f"frame {seq} of {seq_cnt} with {size} bytes and a name of {name_bytes} is out of limits"
        )
    shared = flags & _SHARED
    if shared and kind != Kind.COLLECTIVE:
        raise FrameError("kind", f"frame of kind {kind} with descriptors; only those of collectives have some")
    said = HEADER_BYTES + name_bytes + size
    if shared:
        said = _size_with_descriptors(len(view), HEADER_BYTES + name_bytes, seq_cnt - seq)
    if len(view) != said:
        raise FrameError("short", f"frame of {len(view)} bytes, its header says {said}")
    if not _fits(seq, seq_cnt, total_bytes, offset, size):
        raise FrameError("limits", f"frame {seq} of {seq_cnt} stands at byte {offset} with {size} of {total_bytes}")
    covered = HEADER_BYTES + name_bytes if flags & _HEAD_CRC and not shared else len(view)
    if zlib.crc32(view[HEADER_BYTES:covered], zlib.crc32(view[:_CRC_AT])) != crc:
        raise FrameError("crc", f"frame {seq} of {seq_cnt} from sender {sender}: its bytes do not match its CRC-32")
    try:
        name = str(view[HEADER_BYTES : HEADER_BYTES + name_bytes], "utf-8")
    except UnicodeDecodeError:
        raise FrameError("name", f"frame {seq} of {seq_cnt} from sender {sender}: its name is not UTF-8") from None
    key = FrameKey(known, job, round_id, sender, incarnation, transfer, name, part)
    return Frame(key, flags, world, seq, seq_cnt, total_bytes, offset, size, view[HEADER_BYTES + name_bytes :])

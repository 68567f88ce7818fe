"""The envelope around a sample: a clear header of fixed size, and the encrypted sample. Bytes only, no keys.

The whole header is authenticated together with the job and topic of the envelope (:func:`associated`): a changed bit of
it, or an envelope that is moved to another job or topic, makes the tag wrong.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from gradbus.runtime.errors import FrameError
from gradbus.runtime.wire.frames import MAX_CHUNK_BYTES, SEALED_MAGIC

MAGIC = SEALED_MAGIC
VERSION = 1
SESSION_BYTES = 16
KEY_ID_BYTES = 8
TAG_BYTES = 16
# magic | version, level, reserved | epoch | size | counter | session | key id | moment, reserved
_HEAD = struct.Struct("<4sBBHIIQ16s8sI4x")
HEADER_BYTES = _HEAD.size
OVERHEAD_BYTES = HEADER_BYTES + TAG_BYTES
MAX_PLAIN_BYTES = MAX_CHUNK_BYTES + 4096  # a chunk, the header and name of its frame, the fields of its sample
PSK, GROUP, MEMBER = 1, 2, 3  # levels, as the header has them
_LEVELS = (PSK, GROUP, MEMBER)


class EnvelopeHeader(NamedTuple):
    """The clear header of an envelope.

    Attributes:
        level: kind of the key: PSK (of all members), GROUP (of the controller and all that it has admitted), or
            MEMBER (of the controller and one of them).
        epoch: number of the key among those of its kind.
        size: bytes of the encrypted sample, without the tag.
        counter: number of the envelope in its stream, from 1; with the session it makes the nonce.
        session: random id of one start of one process.
        key_id: public identifier of the key.
        moment: time of encryption, in seconds since the session began.
    """

    level: int
    epoch: int
    size: int
    counter: int
    session: bytes
    key_id: bytes
    moment: int


def head(level: int, epoch: int, size: int, counter: int, session: bytes, key_id: bytes, moment: int) -> bytes:
    """Return the bytes of a header, from the fields of :class:`EnvelopeHeader`."""
    return _HEAD.pack(MAGIC, VERSION, level, 0, epoch, size, counter, session, key_id, moment)


def pack(header: EnvelopeHeader) -> bytes:
    """Return the bytes of a header."""
    return head(*header)


def parse(view: memoryview) -> EnvelopeHeader:
    """Parse the header of an envelope. Sizes and limits are checked, the tag is not; nothing is allocated.

    Raises:
        FrameError: with ``reason`` one of short, not sealed, version, limits.
    """
    if len(view) < OVERHEAD_BYTES:
        raise FrameError("short", f"envelope of {len(view)} bytes, at least {OVERHEAD_BYTES}")
    magic, version, level, reserved, epoch, size, counter, session, key_id, moment = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise FrameError("not sealed", "a process of this job sends without encryption: set bus.security alike for all")
    if version != VERSION or level not in _LEVELS or reserved:
        raise FrameError("version", f"envelope of version {version}, level {level}; this program knows {VERSION}")
    if size > MAX_PLAIN_BYTES or len(view) != size + OVERHEAD_BYTES or not counter:
        raise FrameError("limits", f"envelope {counter} of {len(view)} bytes says that it holds {size}")
    return EnvelopeHeader(level, epoch, size, counter, session, key_id, moment)


def other_level() -> FrameError:
    """Return the error for an envelope of another security level."""
    return FrameError("other level", "an envelope of another level of security: all members must use the same")


def nonce(counter: int) -> bytes:
    """Return the nonce of an envelope: 96 bits, never used twice with one key."""
    return counter.to_bytes(12, "big")


def associated(job: str, topic: str) -> bytes:
    """Return the digest of job and topic that is authenticated with every header."""
    text = b"gradbus/1 envelope\0" + job.encode() + b"\0" + topic.encode()
    return hashlib.sha256(text).digest()

"""The message of one rank about one bucket: a header, and for each parameter a section of a size that all ranks know.

| offset | size | field |
|---|---|---|
| 0 | 4 | ``47 48 00 01`` "GH" |
| 4 | 4 | hook, uint32: its place in :data:`HOOKS` |
| 8 | 4 | rank, uint32 |
| 12 | 4 | step, uint32 |
| 16 | 8 | digest of the names, shapes, strides and order of the bucket's parameters |
| 24 | 8 | digest of the options |
| 32 | | sections, each padded to 8 bytes |

All little-endian. A section either has a fixed content, or holds a payload that may be shorter than the section: length
(uint32), flags (uint8; 1 = the gradient was zero, 2 = it was not finite), 3 bytes 0, payload.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradbus.runtime.errors import CollectiveError

MAGIC = b"GH\x00\x01"
HOOKS = ("dgc", "top_k", "byte_grad", "bf16")  # new ones come last: the places travel

_HEADER = struct.Struct("<4sIIIQQ")
_PREFIX = struct.Struct("<IB3x")
_ALIGNMENT = 8
_ABSENT, _NON_FINITE = 0x01, 0x02
_MAX_BYTES = 1 << 32


class BucketHeader(NamedTuple):
    """What the ranks must agree on, and the sender."""

    hook: int
    rank: int
    step: int
    parameters: int
    options: int


class Payload(NamedTuple):
    """The content of a section of varying length. ``data`` shares memory with the section."""

    data: memoryview
    is_absent: bool
    is_finite: bool


def digest(text: str) -> int:
    """64 bits of ``text``."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def lay_out(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where the sections begin, and, last, the size of the message.

    Raises:
        ValueError: 4 GiB or more.
    """
    starts = [_HEADER.size]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    if starts[-1] >= _MAX_BYTES:
        raise ValueError(f"a bucket takes {starts[-1]} bytes, at most 2**32 - 1; use a smaller bucket_cap_mb of DDP")
    return tuple(starts)


def write_header(message: Tensor, header: BucketHeader) -> None:
    """Into ``message``: uint8, shape (size,)."""
    _HEADER.pack_into(_bytes(message), 0, MAGIC, *header._replace(step=header.step & 0xFFFF_FFFF))


def check_header(message: Tensor, own: BucketHeader, rank: int) -> None:
    """What came from ``rank`` is an answer to what this rank has sent.

    Raises:
        CollectiveError: it is not; the text has the difference.
    """
    magic, *fields = _HEADER.unpack_from(_bytes(message), 0)
    if magic != MAGIC:
        raise CollectiveError(f"rank {rank} sent a bucket that starts with {magic!r}, expected {MAGIC!r}; newer peer?")
    theirs = BucketHeader(*fields)
    if theirs == own._replace(rank=rank, step=own.step & 0xFFFF_FFFF):
        return
    if theirs.hook != own.hook:
        name = HOOKS[theirs.hook] if theirs.hook < len(HOOKS) else f"number {theirs.hook}"
        reason = f"has registered hook {name}, this rank {HOOKS[own.hook]}; register the same on all ranks"
    elif theirs.options != own.options:
        reason = "gave its hook state other options; give the same on all ranks"
    elif theirs.parameters != own.parameters:
        reason = "has other parameters in this bucket; same model, memory format and options of DDP on all ranks?"
    elif theirs.step != own.step & 0xFFFF_FFFF:
        reason = f"is at step {theirs.step}, this rank at {own.step}; have all loaded a state of the same step?"
    else:
        reason = f"claims to be rank {theirs.rank}"
    raise CollectiveError(f"rank {rank} {reason}")


def payload_section_bytes(max_payload_bytes: int) -> int:
    """The size of a section for payloads of up to so many bytes."""
    return _PREFIX.size + max_payload_bytes


def write_payload(section: Tensor, payload: bytes, *, is_absent: bool, is_finite: bool) -> None:
    """Into ``section``: uint8, shape (size,)."""
    view = _bytes(section)
    if len(payload) > len(view) - _PREFIX.size:
        raise AssertionError(f"payload of {len(payload)} bytes, the section has {len(view) - _PREFIX.size}")
    _PREFIX.pack_into(view, 0, len(payload), _ABSENT * is_absent | _NON_FINITE * (not is_finite))
    view[_PREFIX.size : _PREFIX.size + len(payload)] = payload


def read_payload(section: Tensor) -> Payload:
    """Raises CollectiveError: a length beyond the section, or unknown flags."""
    view = _bytes(section)
    length, flags = _PREFIX.unpack_from(view, 0)
    if length > len(view) - _PREFIX.size or flags & ~(_ABSENT | _NON_FINITE):
        raise CollectiveError(f"section of {len(view)} bytes has length {length}, flags {flags:#04x}; newer peer?")
    data = view[_PREFIX.size : _PREFIX.size + length].toreadonly()
    return Payload(data, bool(flags & _ABSENT), not flags & _NON_FINITE)


def floats(section: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The first ``count`` values of a section, shape (count,); shares its memory."""
    return section[: count * dtype.itemsize].view(dtype)


def _bytes(tensor: Tensor) -> memoryview:
    """Of a tensor of this module's own; shares memory with it."""
    return tensor.numpy().data

"""What a client sends in a round: sections, each a vector, and the facts that it announces of its training.

The first section is the model's, in the codec of the run. A strategy may ask for more, such as the control variate of
SCAFFOLD. An update of the model's section alone is the bytes of its codec; one of several has a table in front of them
(docs/wire.md). Every section describes its own codec, and is checked by the length that is expected of it before
anything is allocated.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradbus import codecs
from gradbus.codecs import Codec, CodecError, Parsed
from gradbus.codecs.base import Payload, as_view

MODEL = "model"
MAGIC = b"GBXU"
VERSION = 1
MAX_SECTIONS = 8
NAME_BYTES = 24

_HEADER = struct.Struct("<4sBBH")
_ENTRY = struct.Struct(f"<{NAME_BYTES}sQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Holds what a client has announced of an update. All of it is the client's word; the Controller checks ranges.

    Attributes:
        num_samples: the weight of the update: what was announced, at most the cap.
        steps: of the optimizer; 0: not known.
        loss: mean training loss; None: there is none. metrics: other numbers by name, finite.
        staleness: rounds since the model that it was trained from was the newest; 0 where rounds are synchronous.
    """

    client_id: int
    num_samples: int
    round_id: int = 0
    steps: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    staleness: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The content of an update, of which every byte has been checked.

    Attributes:
        model: the model's section. others: the others by name, as the strategy expects them.
    """

    model: Parsed
    others: Mapping[str, Parsed] = field(default_factory=dict)

    def with_model(self, model: Parsed) -> Update:
        """Return the same update with another model section."""
        return dataclasses.replace(self, model=model)


def join(sections: Sequence[tuple[str, bytes | memoryview]]) -> bytes | memoryview:
    """The bytes of an update of these sections: name and encoded content, the model's first.

    Raises:
        ValueError: too many, or a name that is not ASCII of at most 24 bytes.
    """
    if len(sections) == 1:
        return sections[0][1]
    if not 1 <= len(sections) <= MAX_SECTIONS:
        raise ValueError(f"an update of {len(sections)} sections: expected at most {MAX_SECTIONS}")
    table = b""
    for name, content in sections:
        if not 0 < len(name) <= NAME_BYTES or not name.isascii():
            raise ValueError(f"a section {name!r}: expected a name of 1 to {NAME_BYTES} ASCII characters")
        table += _ENTRY.pack(name.encode("ascii"), len(content))
    return b"".join([_HEADER.pack(MAGIC, VERSION, len(sections), 0), table, *(content for _, content in sections)])


def overhead_bytes(others: Mapping[str, int], codec: Codec | None = None) -> int:
    """Most bytes that an update has beside the model's section, where these are expected, with their lengths, in this
    codec or in float32."""
    if not others:
        return 0
    plain = codecs.get("fp32")
    bodies = sum(max(plain.max_bytes(dim), (codec or plain).max_bytes(dim)) for dim in others.values())
    return _HEADER.size + (1 + len(others)) * _ENTRY.size + bodies


def parse(payload: Payload, *, expected_dim: int, others: Mapping[str, int], own: Sequence[type[Codec]] = ()) -> Update:
    """Check an update and make it readable.

    Args:
        payload: any contiguous buffer; kept alive by the result, and not to be changed while that is used.
        expected_dim: values of the model. others: name and number of values of each other section, in their order.
        own: codecs that are not built in, which sections may be in.

    Raises:
        CodecError: other sections than these, lengths that do not add up, or what :func:`gradbus.codecs.parse` raises.
    """
    if not others:
        return Update(codecs.parse(payload, expected_dim=expected_dim, own=own))
    view, expected = as_view(payload), {MODEL: expected_dim, **others}
    first = _HEADER.size + len(expected) * _ENTRY.size
    if len(view) < first or view[:4] != MAGIC:
        raise CodecError(
            f"update of {len(view)} bytes that begins with {bytes(view[:4])!r}: the strategy of this run expects one "
            f"with the sections {', '.join(expected)}. Choose the training rule that makes them"
        )
    _, version, count, reserved = _HEADER.unpack_from(view)
    if (version, count, reserved) != (VERSION, len(expected), 0):
        raise CodecError(f"update of version {version} with {count} sections, expected {VERSION} and {len(expected)}")
    found: dict[str, Parsed] = {}
    position = first
    for number, (name, dim) in enumerate(expected.items()):
        named, size = _ENTRY.unpack_from(view, _HEADER.size + number * _ENTRY.size)
        if named != name.encode("ascii").ljust(NAME_BYTES, b"\0"):
            raise CodecError(f"section {number} is named {named.rstrip(bytes(1))!r}, expected {name!r}")
        if size > len(view) - position:
            raise CodecError(f"section {name!r} of {size} bytes: {len(view) - position} are left")
        found[name] = codecs.parse(view[position : position + size], expected_dim=dim, own=own)
        if name != MODEL and not found[name].is_delta:
            raise CodecError(f"section {name!r} holds weights: expected a difference, of version 2 of its codec")
        position += size
    if position != len(view):
        raise CodecError(f"update of {len(view)} bytes: its sections end at {position}")
    return Update(found.pop(MODEL), found)

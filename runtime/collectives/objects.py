"""Plain Python objects as bytes, for collectives: numbers, text, bytes, lists, maps, None in msgpack. Never pickle.

Incoming bytes are read with limits, and tuples arrive as lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire import bounded_msgpack

MAX_OBJECT_BYTES = 4 << 20
MAX_OBJECT_MEMORY = 64 * MAX_OBJECT_BYTES  # that an object of so many bytes may take: small maps and texts take most
_LIMITS = bounded_msgpack.Limits(
    MAX_OBJECT_BYTES,
    text_bytes=MAX_OBJECT_BYTES,
    binary_bytes=MAX_OBJECT_BYTES,
    items=MAX_OBJECT_BYTES,
    fields=MAX_OBJECT_BYTES,
    containers=1 << 18,
    any_keys=True,
)


def pack(value: Any) -> bytes:
    """Bytes of an object. Raises ValueError: it holds something that has no place in msgpack, or is too large."""
    try:
        packed: bytes = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"an object is made of numbers, text, bytes, lists, maps, None and bool; this one cannot be sent: {error}"
        ) from None
    if len(packed) > MAX_OBJECT_BYTES:
        raise ValueError(f"an object of {len(packed)} bytes, at most {MAX_OBJECT_BYTES}; send a tensor or bytes")
    if len(packed) > _LIMITS.containers:  # only then can it have more lists and maps: each takes a byte
        try:
            bounded_msgpack.unpack(packed, _LIMITS)
        except bounded_msgpack.PackingError as error:
            raise ValueError(f"no rank would take this object: {error}; send it in parts, or as a tensor") from None
    return packed


def unpack(data: bytes) -> Any:
    """The object. Raises CollectiveError: the bytes are none within the limits."""
    if not isinstance(data, bytes):
        raise CollectiveError("a tensor came where an object was expected")
    try:
        return bounded_msgpack.unpack(data, _LIMITS)
    except bounded_msgpack.PackingError as error:
        raise CollectiveError(f"the bytes are no object in msgpack within the limits: {error}") from None


def unpack_all(values: Sequence[bytes] | None) -> list[Any] | None:
    """The objects, or None where there are none."""
    return None if values is None else [unpack(value) for value in values]

"""msgpack from outside: nothing is made of it before it is known to fit its limits.

msgpack alone lets a message grow: a byte becomes an empty map of 64, a list of five bytes reserves room for as many
values as it claims, and lists within lists do so again. So a first pass, which makes nothing, sees that all that is
claimed is there, and in the second every list and map counts. Only what JSON knows, and bytes, comes out: no extension
types, no timestamps. docs/fuzzing.md says what the limits come to in memory.

Messages are arrays ``[kind, {field: value}]``, of which a dataclass says what may be in them. A body is checked against
it (exact types, ranges). Unknown fields are skipped, so that a newer peer may send more; an unknown kind is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack
from pydantic import ValidationError

from gradbus.runtime.errors import FrameError


class Limits(NamedTuple):
    """Of one message.

    Attributes:
        total_bytes: of the message. text_bytes: of one text. binary_bytes: of one byte string, 0: there are none.
        items: of one list. fields: of one map. containers: lists and maps in all.
        any_keys: keys of maps may be other than text or bytes.
    """

    total_bytes: int
    text_bytes: int
    binary_bytes: int
    items: int
    fields: int
    containers: int
    any_keys: bool = False


class PackingError(ValueError):
    """Says that what came is not msgpack within the limits."""


def unpack(data: bytes | memoryview, limits: Limits) -> Any:
    """The only object in ``data``.

    Raises:
        PackingError: there is none, there is more, or it is beyond a limit.
        MemoryError: there is none left. Not a fault of the message, whose limits hold, and so not one of its errors.
    """
    size = len(data)
    if size > limits.total_bytes:
        raise PackingError(f"{size} bytes, at most {limits.total_bytes}")
    left = limits.containers

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise PackingError(f"more than {limits.containers} lists and maps")
        return container

    def refuse(code: int, data: bytes) -> Any:
        raise PackingError(f"extension type {code}")

    try:
        whole = msgpack.Unpacker(max_buffer_size=max(1, size))
        whole.feed(data)
        whole.skip()  # this alone finds lists that claim more than there is
        del whole  # it holds a copy
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=not limits.any_keys,
            object_hook=count,
            list_hook=count,
            ext_hook=refuse,
            max_str_len=limits.text_bytes,
            max_bin_len=limits.binary_bytes,
            max_array_len=limits.items,
            max_map_len=limits.fields,
            max_ext_len=0,
        )
    except (PackingError, MemoryError):
        raise
    except Exception as error:  # msgpack raises many kinds: ValueError, StackError, UnicodeDecodeError, TypeError ...
        raise PackingError(f"{type(error).__name__}: {error}"[:200]) from None


def pack_body(body: Any, max_bytes: int) -> bytes:
    """Bytes of a message.

    Raises:
        ValueError: longer than a receiver accepts.
    """
    # Fields are flat by design: no nested dataclasses, so no deep copy of what they hold.
    fields = {field.name: getattr(body, field.name) for field in dataclasses.fields(body)}
    packed: bytes = msgpack.packb([type(body).__name__, fields])
    if len(packed) > max_bytes:
        raise ValueError(f"{type(body).__name__} of {len(packed)} bytes, at most {max_bytes}")
    return packed


def read_body(data: bytes | memoryview, limits: Limits, kinds: Mapping[str, type[Any]], reason: str) -> Any:
    """The message in ``data``: one of ``kinds``, by name, which are dataclasses of pydantic.

    Raises:
        FrameError: ``reason``: too long, not msgpack, of an unknown kind, or against the schema.
    """
    try:
        raw = unpack(data, limits)
    except PackingError as error:
        raise FrameError(reason, f"{reason} body is not msgpack within limits: {error}") from None
    if not isinstance(raw, list) or len(raw) != 2 or not isinstance(raw[0], str) or not isinstance(raw[1], dict):
        raise FrameError(reason, f"{reason} body is not [kind, fields]")
    name, found = raw
    kind = kinds.get(name)
    if kind is None:
        raise FrameError(reason, f"{reason} message of unknown kind {name[:40]!r}")
    if unknown := found.keys() - kind.__dataclass_fields__.keys():
        if not all(isinstance(one, str) for one in unknown):
            raise FrameError(reason, f"{reason} body has field names that are not text")
        # Not even the names may reach pydantic: they are foreign text.
        found = {one: value for one, value in found.items() if one not in unknown}
    try:
        return kind(**found)  # pydantic checks every field here
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise FrameError(reason, f"{raw[0]}.{where}: {first['msg']}") from None

"""Bodies of messages as bytes: a msgpack array ``[kind, {field: value}]``, of which a dataclass says what may be in it.

A body is read with limits on every length, checked against its dataclass (exact types, ranges), and anything else is a
:class:`FrameError`. Unknown fields are skipped, so that a newer peer may say more; unknown kinds are an error that the
receiver counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgpack
from pydantic import ValidationError

from gradbus.runtime.errors import FrameError
from gradbus.runtime.wire.bounded_msgpack import Limits, PackingError, unpack


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
    if not all(isinstance(name, str) for name in raw[1]):
        raise FrameError(reason, f"{reason} body has field names that are not text")
    kind = kinds.get(raw[0])
    if kind is None:
        raise FrameError(reason, f"{reason} message of unknown kind {raw[0][:40]!r}")
    try:
        # pydantic checks every field here. Of unknown ones not even the names may reach it: they are foreign text.
        return kind(**{name: value for name, value in raw[1].items() if name in kind.__dataclass_fields__})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise FrameError(reason, f"{raw[0]}.{where}: {first['msg']}") from None

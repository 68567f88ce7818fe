"""Messages between a host and its training processes: over a socket pair that only these two have.

A message is a JSON object and byte strings behind it: 8 bytes (length of the JSON, number of the strings), 8 bytes for
the length of each string, then all of them. Both ends are one program, so there are no versions.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradbus.runtime.json_text import parse_json

_HEAD = struct.Struct("<II")
_MAX_JSON_BYTES = 1 << 20
_MAX_PARTS = 16


class Parcel(NamedTuple):
    """A message. ``parts``: what would be large or slow as JSON."""

    head: dict[str, Any]
    parts: Sequence[Any] = ()

    def __bytes__(self) -> bytes:
        """All but the parts themselves."""
        text = json.dumps(self.head).encode()
        sizes = [memoryview(part).nbytes for part in self.parts]
        return _HEAD.pack(len(text), len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + text


class ChannelClosed(Exception):
    """The process at the other end has ended."""


def send(to: socket.socket, parcel: Parcel) -> None:
    """Send, and block meanwhile. Raises ChannelClosed."""
    try:
        for part in (bytes(parcel), *parcel.parts):
            to.sendall(part)
    except OSError as error:
        raise ChannelClosed(str(error)) from None


def receive(source: socket.socket) -> Parcel:
    """The next message; blocks until it is here. Raises ChannelClosed."""

    def exactly(size: int) -> bytearray:
        found = bytearray(size)
        view = memoryview(found)
        while view:
            try:
                count = source.recv_into(view)
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not count:
                raise ChannelClosed("its process has ended")
            view = view[count:]
        return found

    length, count = _lengths(exactly(_HEAD.size))
    sizes = struct.unpack(f"<{count}Q", exactly(8 * count))
    head = parse_json(exactly(length).decode())
    return Parcel(head, [exactly(size) for size in sizes])


async def send_soon(to: socket.socket, parcel: Parcel) -> None:
    """As :func:`send`, without blocking the loop. The socket is one that does not block."""
    loop = asyncio.get_running_loop()
    try:
        for part in (bytes(parcel), *parcel.parts):
            await loop.sock_sendall(to, part)
    except OSError as error:
        raise ChannelClosed(str(error)) from None


async def receive_soon(source: socket.socket) -> Parcel:
    """As :func:`receive`, without blocking the loop. The socket is one that does not block."""
    loop = asyncio.get_running_loop()

    async def exactly(size: int) -> bytearray:
        found = bytearray(size)
        view = memoryview(found)
        while view:
            try:
                count = await loop.sock_recv_into(source, view)
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not count:
                raise ChannelClosed("its process has ended")
            view = view[count:]
        return found

    length, count = _lengths(await exactly(_HEAD.size))
    sizes = struct.unpack(f"<{count}Q", await exactly(8 * count))
    head = parse_json((await exactly(length)).decode())
    return Parcel(head, [await exactly(size) for size in sizes])


def _lengths(head: bytes | bytearray) -> tuple[int, int]:
    length, count = _HEAD.unpack(head)
    if length > _MAX_JSON_BYTES or count > _MAX_PARTS:
        raise ChannelClosed("what came is no message")
    return length, count

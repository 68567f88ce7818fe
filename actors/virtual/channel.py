"""Messages between a host and its training processes: over a socket pair that only these two have.

A message is a JSON object and byte strings behind it: 8 bytes (length of the JSON, number of the strings), 8 bytes for
the length of each string, then all of them. Both ends are one program, so there are no versions.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Generator, Sequence
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
    message = _message()
    try:
        wanted = next(message)
        while True:
            wanted = message.send(source.recv_into(wanted))
    except StopIteration as end:
        parcel: Parcel = end.value
        return parcel
    except OSError as error:
        raise ChannelClosed(str(error)) from None


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
    loop, message = asyncio.get_running_loop(), _message()
    try:
        wanted = next(message)
        while True:
            wanted = message.send(await loop.sock_recv_into(source, wanted))
    except StopIteration as end:
        parcel: Parcel = end.value
        return parcel
    except OSError as error:
        raise ChannelClosed(str(error)) from None


def _message() -> Generator[memoryview, int, Parcel]:
    """Yields memory that the next bytes belong in, and is sent how many have come. Returns the message."""

    def exactly(size: int) -> Generator[memoryview, int, bytearray]:
        found = bytearray(size)
        view = memoryview(found)
        while view:
            count = yield view
            if not count:
                raise ChannelClosed("its process has ended")
            view = view[count:]
        return found

    length, count = _HEAD.unpack((yield from exactly(_HEAD.size)))
    if length > _MAX_JSON_BYTES or count > _MAX_PARTS:
        raise ChannelClosed("what came is no message")
    sizes = struct.unpack(f"<{count}Q", (yield from exactly(8 * count)))
    head = parse_json((yield from exactly(length)).decode())
    parts = []
    for size in sizes:
        parts.append((yield from exactly(size)))  # noqa: PERF401 - a comprehension cannot yield
    return Parcel(head, parts)

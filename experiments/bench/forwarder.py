"""The bytes of federated rounds through a forwarder that stores nothing: what a relay is measured against.

It stands where the relay would, and TLS is on all connections, as there. Controller and clients dial it, as they dial a
relay; a connection of the one and one of the other are a pair, and what comes from either goes to the other. Of what is
under way it holds no more than the next piece: an end that does not read stops the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from gradbus.experiments.bench.relay import TlsFolder

T = TypeVar("T")

PIECE_BYTES = 256 << 10
_DIAL_S = 60.0  # until the forwarder listens
_AGAIN_S = 0.05


class ForwardedStream(NamedTuple):
    """One end of a connection."""

    reader: StreamReader
    writer: StreamWriter


@dataclass(frozen=True, slots=True)
class ForwardedRounds:
    """What is forwarded: in each round ``num_bytes`` to each client, then as many back. Clients are numbered."""

    files: TlsFolder
    port: int
    clients: int
    num_bytes: int
    rounds: int

    async def dial(self, number: int) -> ForwardedStream:
        """Connect to the forwarder, as one of the two ends of a client's pair. Raises TimeoutError."""
        tls = self.files.context(ssl.PROTOCOL_TLS_CLIENT)
        async with asyncio.timeout(_DIAL_S):
            while True:
                try:
                    found = await asyncio.open_connection(self.files.host, self.port, ssl=tls, limit=PIECE_BYTES)
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(_AGAIN_S)
        stream = ForwardedStream(*found)
        stream.writer.write(bytes([number]))
        return stream


async def forward(plan: ForwardedRounds) -> str:
    """Be the forwarder until all pairs have ended. Return the congestion control that the kernel gives its sockets."""
    waiting: dict[int, ForwardedStream] = {}
    ended = asyncio.Semaphore(0)
    algorithms: set[str] = set()

    async def accept(reader: StreamReader, writer: StreamWriter) -> None:
        algorithms.add(_congestion_control(writer))
        stream = ForwardedStream(reader, writer)
        (number,) = await reader.readexactly(1)
        other = waiting.pop(number, None)
        if other is None:
            waiting[number] = stream
            return
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(stream, other), name=f"to {number}")
            both.create_task(_copy(other, stream), name=f"from {number}")
        ended.release()

    tls = plan.files.context(ssl.PROTOCOL_TLS_SERVER)
    async with await asyncio.start_server(accept, plan.files.host, plan.port, ssl=tls, limit=PIECE_BYTES):
        for _ in range(plan.clients):
            await ended.acquire()
    return ", ".join(sorted(algorithms))


async def control_forwarded(plan: ForwardedRounds, note: Callable[..., T], *arguments: object) -> list[T]:
    """Be the controller. Return what ``note(*arguments)`` gave at the end of each round."""
    streams = [await plan.dial(number) for number in range(plan.clients)]
    noted = []
    for _ in range(plan.rounds):
        async with asyncio.TaskGroup() as clients:
            for number, stream in enumerate(streams):
                clients.create_task(_send_and_receive(stream, plan.num_bytes), name=f"client {number}")
        noted.append(note(*arguments))
    for stream in streams:
        await _close(stream)
    return noted


async def join_forwarded(plan: ForwardedRounds, number: int) -> None:
    """Be a client: send back as many bytes as have come, until the controller ends."""
    stream = await plan.dial(number)
    for _ in range(plan.rounds):
        await _receive(stream, plan.num_bytes)
        await _send(stream, plan.num_bytes)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await stream.reader.read()
    await _close(stream)


async def _send_and_receive(stream: ForwardedStream, num_bytes: int) -> None:
    await _send(stream, num_bytes)
    await _receive(stream, num_bytes)


async def _send(stream: ForwardedStream, num_bytes: int) -> None:
    piece = memoryview(bytes(PIECE_BYTES))
    for at in range(0, num_bytes, PIECE_BYTES):
        stream.writer.write(piece[: num_bytes - at])
        await stream.writer.drain()


async def _receive(stream: ForwardedStream, num_bytes: int) -> None:
    """Raises EOFError: the other end has ended before."""
    left = num_bytes
    while left:
        got = await stream.reader.read(min(left, PIECE_BYTES))
        if not got:
            raise EOFError(f"the other end ended with {left} of {num_bytes} bytes missing")
        left -= len(got)


async def _copy(source: ForwardedStream, sink: ForwardedStream) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while got := await source.reader.read(PIECE_BYTES):
            sink.writer.write(got)
            await sink.writer.drain()
    await _close(sink)


async def _close(stream: ForwardedStream) -> None:
    stream.writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await stream.writer.wait_closed()


def _congestion_control(writer: StreamWriter) -> str:
    connection: socket.socket = writer.get_extra_info("socket")
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()

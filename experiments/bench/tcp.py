"""A bare TCP connection on this machine, as a reference for the bus: an echo in a process of its own.

Blocking sockets and no framework: what the kernel takes for the same bytes between two processes.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import ExitStack
from typing import Self

from gradbus.experiments.bench.processes import Processes

_HEADER = struct.Struct("<QQ")  # bytes of the message, bytes of the answer
_TIMEOUT_S = 60.0


class Echo:
    """The near end. Use it as a context manager; it blocks, so nothing else should have to run meanwhile."""

    def __enter__(self) -> Self:
        with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_TIMEOUT_S)
            stack.enter_context(Processes()).start("echo", _serve, server.getsockname()[1])
            self._socket = stack.enter_context(server.accept()[0])
            _prepare(self._socket)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()  # the other end reads the end of the stream, and ends

    def round_trip_s(self, size: int) -> float:
        """Seconds until so many bytes are there and so many have come back."""
        return self._exchange(bytearray(size), 1, size)

    def stream_s(self, size: int, count: int) -> float:
        """Seconds until so many messages are there, by one byte that comes back at the end."""
        return self._exchange(bytearray(size), count, 1)

    def _exchange(self, payload: bytearray, count: int, answer: int) -> float:
        answered = bytearray(answer)
        began_s = time.perf_counter()
        for number in range(count):
            self._socket.sendall(_HEADER.pack(len(payload), answer if number == count - 1 else 0))
            self._socket.sendall(payload)
        _receive(self._socket, answered)
        return time.perf_counter() - began_s


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, into: bytearray | memoryview) -> bool:
    """Fill it. False: the stream has ended."""
    view = memoryview(into)
    while len(view):
        count = connection.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


def _serve(port: int) -> None:
    header, buffer = bytearray(_HEADER.size), bytearray()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        _prepare(connection)
        while _receive(connection, header):
            size, answer = _HEADER.unpack(header)
            if len(buffer) < max(size, answer):
                buffer = bytearray(max(size, answer))
            view = memoryview(buffer)
            if not _receive(connection, view[:size]):
                return
            connection.sendall(view[:answer])

"""A bare TCP connection on this machine, as something to measure the bus against: an echo in a process of its own.

``python -m gradbus.experiments.bench.tcp`` is the other end. Blocking sockets and no framework: what the kernel asks
for the same bytes between two processes.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from typing import Self

_HEADER = struct.Struct("<QQ")  # bytes of the message, bytes of the answer
_TIMEOUT_S = 60.0


class Echo:
    """The near end. Use it as a context manager; it blocks, so nothing else should have to run meanwhile."""

    def __enter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_TIMEOUT_S)
            port = server.getsockname()[1]
            self._process = subprocess.Popen([sys.executable, "-P", "-m", __name__, str(port)])
            try:
                self._socket, _ = server.accept()
            except BaseException:
                self._end()
                raise
        _prepare(self._socket)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()  # the other end reads the end of the stream, and goes
        self._end()

    def _end(self) -> None:
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def round_trip_s(self, size: int) -> float:
        """Seconds until so many bytes are there and so many have come back."""
        return self._exchange(bytearray(size), 1, size)

    def stream_s(self, size: int, count: int) -> float:
        """Seconds until so many messages are there, by one word at the end."""
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
            view.release()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

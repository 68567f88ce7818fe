"""Which connections the HTTP servers of the dashboard and of a relay keep open, so that no other user of the machine
can lock the owner out.

Any user can connect to 127.0.0.1, and a connection that sends nothing costs its peer nothing. Two bounds hold:

- By time: a connection that has not sent a whole request in :data:`REQUEST_S` is closed, and one that asks for nothing
  more after an answer in :data:`IDLE_S`.
- By peer: connections of other users are at most :data:`MAX_FOREIGN`. Whose a connection is stands in the kernel's
  table of sockets; where there is none (it is Linux's), all count as the owner's.

Where a bound is reached, a new connection is not refused: the one that has waited longest is closed for it, and one of
another user before one of the owner. Only connections that wait can be closed so, none that is being answered.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gradbus.runtime.logs import get_logger

MAX_CONNECTIONS = 32
MAX_FOREIGN = 8  # of them, of other users
REQUEST_S = 5.0  # for the first request to come in
IDLE_S = 15.0  # between two requests
_ESTABLISHED = "01"
_TABLE = Path("/proc/net/tcp")
_MAX_TABLE_BYTES = 16 << 20  # 100,000 sockets

log = get_logger("http")


@dataclass(slots=True)
class _Open:
    """``until_s``: when it is closed if no request has come; None: it is being answered."""

    is_own: bool
    since_s: float
    until_s: float | None


class Connections:
    """The open connections. For any number of threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Open] = {}

    def admit(self, connection: socket.socket, *, is_own: bool) -> bool:
        """Take a new connection, and close another one for it if need be. False: all others are being answered."""
        with self._lock:
            foreign = sum(not one.is_own for one in self._open.values())
            if len(self._open) >= MAX_CONNECTIONS or (not is_own and foreign >= MAX_FOREIGN):
                waiting = [
                    (one.is_own, one.since_s, other)
                    for other, one in self._open.items()
                    if one.until_s is not None and (is_own or not one.is_own)
                ]
                if not waiting:
                    return False
                self._close(min(waiting, key=lambda found: found[:2])[-1])
            now_s = self._clock()
            self._open[connection] = _Open(is_own, now_s, now_s + REQUEST_S)
            return True

    def answering(self, connection: socket.socket) -> None:
        """A whole request has come in."""
        with self._lock:
            if (one := self._open.get(connection)) is not None:
                one.until_s = None

    def waiting(self, connection: socket.socket) -> None:
        """The request is answered."""
        with self._lock:
            if (one := self._open.get(connection)) is not None:
                one.since_s = self._clock()
                one.until_s = one.since_s + IDLE_S

    def forget(self, connection: socket.socket) -> None:
        """The connection is closed."""
        with self._lock:
            self._open.pop(connection, None)

    def close_late(self) -> None:
        """Close those whose time is over."""
        with self._lock:
            now_s = self._clock()
            for connection in [c for c, one in self._open.items() if one.until_s is not None and one.until_s < now_s]:
                self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        """Wake the thread that reads from it, which then closes it."""
        del self._open[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class BoundedServer(ThreadingHTTPServer):
    """Answers each connection on a thread, as far as :class:`Connections` admits it.

    Attributes:
        connections: those that are open; handlers report what they do with theirs.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.connections = Connections()
        super().__init__(address, handler)

    def is_owner(self, peer_port: int) -> bool:
        """Return whether a connection from this port counts as the owner's."""
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection, or close it where there is no room."""
        if not self.connections.admit(request, is_own=self.is_owner(client_address[1])):
            self.shutdown_request(request)  # a browser tries again
            return
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Run by the thread that accepts, after each of its polls."""
        self.connections.close_late()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.connections.forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a handler, such as a peer that has gone."""
        log.debug("request failed", exc_info=True)


def is_own(peer_port: int, server_port: int, table: Path = _TABLE) -> bool:
    """Return whether the peer of a connection over 127.0.0.1 is this user, or root, who may look at everything anyway.

    True also where that is not known. A connection that its peer has closed already is nobody's, and not the owner's.
    """
    try:
        with table.open("rb") as file:
            lines = file.read(_MAX_TABLE_BYTES).decode("ascii", errors="replace").splitlines()[1:]
    except OSError:
        return True
    ports = (f":{peer_port:04X}", f":{server_port:04X}")
    for line in lines:
        fields = line.split(maxsplit=8)  # number, local and remote address, state, queues, timer, retransmits, uid
        if len(fields) == 9 and (fields[1][-5:], fields[2][-5:]) == ports and fields[3] == _ESTABLISHED:
            return int(fields[7]) in (os.geteuid(), 0)
    return False

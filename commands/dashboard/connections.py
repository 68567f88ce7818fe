"""Which connections the dashboard keeps open, so that no other user of the machine can lock its owner out.

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
from pathlib import Path

MAX_CONNECTIONS = 32
MAX_FOREIGN = 8  # of them, of other users
REQUEST_S = 5.0  # for the first request to come in
IDLE_S = 15.0  # between two requests
_ESTABLISHED = "01"
_TABLE = Path("/proc/net/tcp")
_MAX_TABLE_BYTES = 16 << 20  # 100,000 sockets


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

"""A port that passes bytes on to another one, at a rate, until it is told to hold them, or to break its links."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from types import TracebackType
from typing import Self

CHUNK_BYTES = 64 << 10


class TcpProxy:
    """Forwards connections to a port of 127.0.0.1 on a thread of its own.

    Attributes:
        port: where it listens.
    """

    def __init__(self, target_port: int, *, downlink_bytes_s: float = 0.0) -> None:
        """``downlink_bytes_s``: what it passes on from the target in a second; 0: all."""
        self._downlink_bytes_s, self._rests_until_s = downlink_bytes_s, 0.0
        self._servers: set[socket.socket] = set()
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._bell, self._rings = socket.socketpair()
        self._others: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._forgotten: list[socket.socket] = []  # open for the target, and silent
        self._is_held = self._is_closed = self._breaks = self._forgets = self._ends_answers = False
        self._accepts = True
        for one in (self._bell, self._listener):
            self._selector.register(one, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="test-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def hold(self) -> None:
        """Pass nothing on: to both ends it is as if a cable were pulled."""
        self._change(is_held=True)

    def let_pass(self) -> None:
        """Pass on what waits, and everything from now on."""
        self._change(is_held=False)

    def break_links(self, *, refuse: bool = False) -> None:
        """Close all connections. ``refuse``: and those that come, until :meth:`accept`."""
        self._change(breaks=True, accepts=not refuse)

    def forget_links(self) -> None:
        """Close all connections at the dialling end only, as a router on the way does that has lost its table: to the
        target they stand, and nothing comes."""
        self._change(forgets=True)

    def end_answers(self) -> None:
        """Tell the dialling ends that nothing more comes, as a target does that ends its side."""
        self._change(ends_answers=True)

    def accept(self) -> None:
        """Accept connections again."""
        self._change(accepts=True)

    def close(self) -> None:
        """End the thread and all connections."""
        self._change(is_closed=True)
        self._thread.join(10.0)

    def _change(self, **values: bool) -> None:
        with self._lock:
            for name, value in values.items():
                setattr(self, f"_{name}", value)
        with contextlib.suppress(OSError):
            self._rings.send(b"!")

    def _run(self) -> None:
        while True:
            rest_s = self._rests_until_s - time.monotonic()
            ready = self._selector.select(rest_s if rest_s > 0.0 else None)
            with self._lock:
                if self._is_closed:
                    break
                if self._breaks:
                    self._breaks = False
                    for one in list(self._others):
                        self._drop(one)
                if self._forgets:
                    self._forgets = False
                    self._forgotten += [self._forget(client) for client in list(self._clients)]
                if self._ends_answers:
                    self._ends_answers = False
                    for client in self._clients:
                        client.shutdown(socket.SHUT_WR)
                for key, _ in ready:
                    one = key.fileobj
                    assert isinstance(one, socket.socket)
                    self._handle(one)
                self._watch()
        for one in list(self._others):
            self._drop(one)
        for one in (*self._forgotten, self._listener, self._bell, self._rings):
            one.close()
        self._selector.close()

    def _handle(self, one: socket.socket) -> None:
        if one is self._bell:
            one.recv(CHUNK_BYTES)
        elif one is self._listener:
            self._accept()
        elif one in self._others and not self._is_held:
            self._forward(one)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            if not self._accepts:
                raise ConnectionRefusedError
            server = self._dial()
        except OSError:
            client.close()
            return
        self._others[client], self._others[server] = server, client
        self._clients.add(client)

    def _dial(self) -> socket.socket:
        server = socket.create_connection(("127.0.0.1", self._target_port))
        if self._downlink_bytes_s:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK_BYTES)
            self._servers.add(server)
        return server

    def _forward(self, one: socket.socket) -> None:
        other = self._others[one]
        try:
            data = one.recv(CHUNK_BYTES // 4)
            if one in self._servers:
                self._rests_until_s = time.monotonic() + len(data) / self._downlink_bytes_s
            if not data:
                raise ConnectionResetError
            other.sendall(data)  # a receiver that is stopped holds up this proxy, which is its own
        except OSError:
            self._drop(one)

    def _drop(self, one: socket.socket) -> None:
        other = self._others.pop(one, None)
        if other is None:
            return
        del self._others[other]
        self._clients -= {one, other}
        for end in (one, other):
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
            end.close()

    def _forget(self, client: socket.socket) -> socket.socket:
        """Close the dialling end of a connection, and return its other end."""
        server = self._others.pop(client)
        del self._others[server]
        self._clients.remove(client)
        for end in (client, server):
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
        client.close()
        return server

    def _watch(self) -> None:
        """Look at the connections unless they are held."""
        rests = time.monotonic() < self._rests_until_s
        for one in self._others:
            is_watched = one in self._selector.get_map()
            is_held = self._is_held or (rests and one in self._servers)
            if is_held and is_watched:
                self._selector.unregister(one)
            elif not is_held and not is_watched:
                self._selector.register(one, selectors.EVENT_READ)

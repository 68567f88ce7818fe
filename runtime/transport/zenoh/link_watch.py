"""The links of a member that listens: the others of its job are told whose host has closed one, as a relay tells them.

A relay does so on its event loop, beside its access log. A member has no loop that always turns: its host's may be at
work for seconds. So this is a thread, which does what the router reports.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from gradbus.runtime.logs import get_logger
from gradbus.runtime.network.tcp_connections import Connection, canonical, find_connections
from gradbus.runtime.transport.zenoh.disconnections import TURN_S, Disconnections
from gradbus.runtime.transport.zenoh.router import LinkChange

MAX_CHANGES = 4_096  # that wait; the ends of those beyond are found by looking, and left to the lease
CLOSE_S = 2.0  # for a last announcement

log = get_logger("bus")


class WatchedRouter(Protocol):
    """The part of :class:`~gradbus.runtime.transport.zenoh.router.Router` that is used here."""

    def watch_links(self, report: Callable[[LinkChange], None]) -> None:
        """See there."""

    def watch_members(self) -> None:
        """See there."""

    def addresses(self) -> set[str]:
        """See there."""

    def announce_disconnected(self, peer: str) -> int:
        """See there."""


@dataclass(slots=True)
class _Link:
    peer: str
    connection: Connection | None = None


class LinkWatch:
    """Follows the links of a router from its making until :meth:`close`."""

    def __init__(
        self,
        router: WatchedRouter,
        lease_s: float,
        find: Callable[[Iterable[str]], Mapping[str, Connection]] = find_connections,
    ) -> None:
        """Args:
        lease_s: after so long a silence the others take this router for dead.
        find: returns the connections of this process by the address of the other end.
        """
        self._router = router
        self._find = find
        self._links: dict[str, _Link] = {}  # by address, oldest first
        self._disconnections = Disconnections(lease_s, time.monotonic())
        self._look_s = time.monotonic() + TURN_S
        self._changes: queue.Queue[LinkChange | None] = queue.Queue(MAX_CHANGES)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="gradbus-links", daemon=True)
        router.watch_members()
        router.watch_links(self._report)
        self._thread.start()

    def close(self) -> None:
        """End the watch. The router is closed after it: else its connections would stay open in here."""
        self._is_closed = True
        self._report(None)
        self._thread.join(CLOSE_S)

    def _report(self, change: LinkChange | None) -> None:  # on a thread of Zenoh's
        with contextlib.suppress(queue.Full):
            self._changes.put_nowait(change)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._wait()
                self._look()
                for peer in self._disconnections.take_due(time.monotonic()):
                    if self._router.announce_disconnected(peer):
                        log.debug("disconnection announced", peer=peer)
        finally:
            for link in self._links.values():
                if link.connection is not None:
                    link.connection.close()

    def _wait(self) -> None:
        """Take the changes that are here; else wait for one until something is due."""
        now_s = time.monotonic()
        due_in_s = self._disconnections.due_in_s(now_s)
        wait_s = max(0.0, self._look_s - now_s)
        try:
            change = self._changes.get(timeout=wait_s if due_in_s is None else min(wait_s, due_in_s))
            while change is not None:
                self._note(change)
                change = self._changes.get_nowait()
        except queue.Empty:
            self._connect()

    def _note(self, change: LinkChange) -> None:
        address = canonical(change.address)
        if change.is_up:
            self._end(address)  # one whose end was not reported
            self._links[address] = _Link(change.peer)
            self._disconnections.note_open(change.peer)
        else:
            self._end(address)

    def _connect(self) -> None:
        """Find the connections of the links that have none yet, together: a look takes longer with more of them."""
        missing = [address for address, link in self._links.items() if link.connection is None]
        for address, connection in (self._find(missing) if missing else {}).items():
            self._links[address].connection = connection

    def _end(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is None or link.connection is None:
            return
        if all(one.peer != link.peer for one in self._links.values()):  # else it has dialled again before
            self._disconnections.note_ended(link.peer, link.connection, time.monotonic())
        link.connection.close()

    def _look(self) -> None:
        """Find the links whose end the router does not report, every :data:`TURN_S`."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + TURN_S
        self._disconnections.note_turn(now_s)
        known = list(self._links)  # before the router is asked: later ones may not be there yet
        up = {canonical(address) for address in self._router.addresses()} if known else set()
        for address in known:
            if address not in up:
                self._end(address)

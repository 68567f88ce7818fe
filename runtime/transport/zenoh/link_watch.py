"""Watches the links of a member that listens. If a host closes one, it tells the other members, as a relay does.

A relay does so on its event loop, beside its access log. A member has no loop that always turns: its host's may be at
work for seconds. So this is a thread, which does what the router reports.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gradbus.runtime.logs import get_logger
from gradbus.runtime.network.disconnections import TURN_S, Disconnections
from gradbus.runtime.network.tcp_connections import Connection, canonical, most_second_descriptors
from gradbus.runtime.transport.zenoh.router import LinkChange, Router

MAX_CHANGES = 4_096  # that wait; the ends of those beyond are found by looking, and left to the lease
FIND_S = 0.02  # after a link has opened: connections of those that come together are looked for once
CLOSE_S = 2.0  # for a last announcement

log = get_logger("bus")


@dataclass(slots=True)
class _Link:
    peer: str
    connection: Connection | None = None


class LinkWatch:
    """Follows the links that others have dialled to a router, from its making until :meth:`close`."""

    def __init__(
        self,
        router: Router,
        lease_s: float,
        find: Callable[[Iterable[str]], Mapping[str, Connection]],
        most: int | None = None,
    ) -> None:
        """Args:
        lease_s: after so long a silence the others take this router for dead.
        find: returns the connections that others have dialled, by the address of the other end.
        most: connections that are held; of further ones the end is known after the lease. None: as many as leave enough
            descriptors to the program.
        """
        self._router = router
        self._find = find
        self._most = most_second_descriptors() if most is None else most
        self._links: dict[str, _Link] = {}  # by address, oldest first
        self._disconnections = Disconnections(lease_s, time.monotonic())
        self._find_s = math.inf  # when to look for the connections of new links
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
                self._take_changes(self._wait_s(time.monotonic()))
                self._do_what_is_due()
        except Exception:  # the ends of links are known after the lease from now on
            if not self._is_closed:
                log.exception("links are not watched any more")
        finally:
            for link in self._links.values():
                if link.connection is not None:
                    link.connection.close()

    def _wait_s(self, now_s: float) -> float:
        due_in_s = self._disconnections.due_in_s(now_s)
        next_s = min(self._look_s, self._find_s, math.inf if due_in_s is None else now_s + due_in_s)
        return max(0.0, next_s - now_s)

    def _take_changes(self, wait_s: float) -> None:
        """Take the changes that are here, and wait for one if there are none."""
        with contextlib.suppress(queue.Empty):
            change = self._changes.get(timeout=wait_s) if wait_s else self._changes.get_nowait()
            while change is not None:
                self._note(change)
                change = self._changes.get_nowait()

    def _do_what_is_due(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._find_s:
            self._connect()
        if now_s >= self._look_s and not self._is_closed:
            self._look(now_s)
        self._take_changes(0.0)  # who is back by now is not announced
        for peer in self._disconnections.take_due(time.monotonic()):
            if self._router.announce_disconnected(peer):
                log.debug("disconnection announced", peer=peer)

    def _note(self, change: LinkChange) -> None:
        address = canonical(change.address)
        self._end(address)  # also of one that opens: the end of its last link was not reported
        if change.is_up:
            self._links[address] = _Link(change.peer)
            self._disconnections.note_open(change.peer)
            self._find_s = min(self._find_s, time.monotonic() + FIND_S)

    def _connect(self) -> None:
        """Find the connections of the links that have none yet."""
        self._find_s = math.inf
        missing = [address for address, link in self._links.items() if link.connection is None]
        room = max(0, self._most - (len(self._links) - len(missing)))
        for address, connection in self._find(missing[-room:] if room else ()).items():
            self._links[address].connection = connection

    def _end(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is None or link.connection is None:
            return
        if all(one.peer != link.peer for one in self._links.values()):  # else it has dialled again before
            self._disconnections.note_ended(link.peer, link.connection, time.monotonic())
        link.connection.close()

    def _look(self, now_s: float) -> None:
        """Find the links whose end the router does not report."""
        self._look_s = now_s + TURN_S
        self._disconnections.note_turn(now_s)
        known = list(self._links)  # before the router is asked: later ones may not be there yet
        up = {canonical(address) for address in self._router.addresses()} if known else set()
        for address in known:
            if address not in up:
                self._end(address)

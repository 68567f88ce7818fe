"""The sessions of a relay: who is connected, since when, and how many bytes went through, by node.

A *node* is the name in a client's certificate, which its authority vouches for; empty where clients show none. A *peer*
is a session of Zenoh, whose id is new each time a process starts. Nothing here does I/O, apart from reading counters of
sockets that :class:`CarriedBytes` gives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

from gradbus.runtime.network.tcp_connections import CarriedBytes, Connection

MAX_NODES = 1_000  # that are counted by name: names come from certificates, and there may be an authority of millions
OTHER_NODES = "(others)"


@dataclass(slots=True)
class RelaySession:
    """Holds one session. ``address``: of the other end, ``HOST:PORT``. ``opened_s``: on a monotonic clock.
    ``is_refused``: its node has too many, and it is being ended."""

    peer: str
    address: str
    node: str
    opened_s: float
    connection: Connection | None = None
    is_refused: bool = False

    @property
    def traffic(self) -> CarriedBytes:
        """Return the bytes that it has carried so far; zeros while its connection has not been found."""
        return CarriedBytes() if self.connection is None else self.connection.traffic()


@dataclass(slots=True)
class NodeTotals:
    """Counts of a node since the relay has started. Bytes are those of sessions that are closed."""

    opened: int = 0
    closed: int = 0
    refused: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


@dataclass(slots=True)
class Sessions:
    """The open sessions and the totals by node. One thread changes them; any may call :meth:`by_node`."""

    max_per_node: int | None = None
    _open: dict[str, RelaySession] = field(default_factory=dict)  # by address: a session has one link; oldest first
    _totals: dict[str, NodeTotals] = field(default_factory=dict)
    # For what belongs together: a session that closed between a look at the totals and one at the open sessions would
    # be in neither, and counters would fall.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def count(self) -> int:
        """Return how many sessions are open."""
        return len(self._open)

    def open(self, peer: str, address: str, node: str, now_s: float) -> RelaySession:
        """Add a session and return it."""
        with self._lock:
            session = self._open[address] = RelaySession(peer, address, node, now_s)
            self._of(node).opened += 1
        return session

    def is_over_limit(self, session: RelaySession) -> bool:
        """Return whether its node already had as many sessions as it may when it opened, and count the refusal if so.

        Later sessions do not count against it, nor do those that were refused: so of many that open at the same time,
        those within the limit stay.
        """
        if self.max_per_node is None:
            return False
        earlier = takewhile(lambda one: one is not session, self._open.values())
        if sum(one.node == session.node and not one.is_refused for one in earlier) < self.max_per_node:
            return False
        with self._lock:
            session.is_refused = True
            self._of(session.node).refused += 1
        return True

    def close(self, address: str) -> RelaySession | None:
        """Remove a session and add its bytes to the totals. None: there is no such session."""
        with self._lock:
            session = self._open.pop(address, None)
            if session is None:
                return None
            totals, traffic = self._of(session.node), session.traffic
            totals.closed += 1
            totals.received_bytes += traffic.received_bytes
            totals.sent_bytes += traffic.sent_bytes
        return session

    def has_newer(self, than: RelaySession) -> bool:
        """Return whether one with the same id is open that came later. Older ones may be open whose end was missed."""
        return any(one.peer == than.peer and one.opened_s > than.opened_s for one in self._open.values())

    def all(self) -> list[RelaySession]:
        """Return the open sessions."""
        return list(self._open.values())

    def connect(self, find: Callable[[Iterable[str]], Mapping[str, Connection]]) -> list[RelaySession]:
        """Find the connections of the sessions that have none yet, and return these sessions.

        Args:
            find: returns connections by address.
        """
        missing = [session for session in self.all() if session.connection is None]
        found = find([session.address for session in missing]) if missing else {}
        for session in missing:
            session.connection = found.get(session.address)
        return missing

    def by_node(self) -> dict[str, tuple[int, NodeTotals]]:
        """Return, for each node, how many sessions it has open and its totals, bytes of open sessions included."""
        with self._lock:
            found = {node: (0, replace(totals)) for node, totals in self._totals.items()}
            for session in self._open.values():
                count, totals = found.setdefault(self._counted_as(session.node), (0, NodeTotals()))
                traffic = session.traffic
                totals.received_bytes += traffic.received_bytes
                totals.sent_bytes += traffic.sent_bytes
                found[self._counted_as(session.node)] = count + 1, totals
        return found

    def _of(self, node: str) -> NodeTotals:
        return self._totals.setdefault(self._counted_as(node), NodeTotals())

    def _counted_as(self, node: str) -> str:
        return node if node in self._totals or len(self._totals) < MAX_NODES else OTHER_NODES

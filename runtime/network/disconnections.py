"""Which sessions of a router have been closed by their hosts and have not come back: plain decisions, without a clock.

The router is a relay, or a member that listens
(:mod:`~gradbus.runtime.transport.zenoh.link_watch`); "relay" here means both.

**Theory of operation.** When a process ends, however it ends, its kernel closes its connections, and the relay knows it
within milliseconds (FIN, or RST where data was waiting). A cable that is pulled, a machine without power, a router
that forgets a connection at one end close nothing: the relay breaks such a link itself, after the lease. The state of
the connection at the relay tells these two apart (:mod:`.tcp_connections`). Only the first is
passed on: the relay publishes it under the token of the session.

Four things look the same and are not the end of a process:

* A process gives up its link because nothing came from the relay for the relay's lease. What closes the connection then
  arrives late, when the link works again. But meanwhile the relay has sent keep-alives that were never acknowledged, so
  its kernel was repeating them: a connection on which something is being repeated says nothing.
* The same, and it is the relay that stood still. It knows that by its own clock, and takes nothing that it finds then
  for the end of a process.
* A proxy or router on the way closes both halves of a connection that works. Its process dials again at once, which
  takes four round trips. So a session has :func:`redial_s` to come back: 0.04 s on a network whose round trips are
  short, some tenths of a second across a continent. No rule could be faster and right.
* The same, and dialling again takes longer, as with a proxy that starts again. Nobody can know that in time. So others
  take the news for what it is: this peer is not here now. They stop waiting for it, and go on with it when it sends
  again. What cannot be undone, such as the end of a group of ranks, waits for the lease as before.
"""

from __future__ import annotations

import math

from gradbus.runtime.network.tcp_connections import Connection

DISCONNECTED = b"disconnected"  # what a relay publishes under the token of such a session
REDIAL_S = 0.04  # to set up TCP, TLS and a session on a busy machine, beside the time on the way
REDIAL_ROUND_TRIPS = 5  # TCP 1, TLS 1, Zenoh 2, and one for what is late
TURN_S = 1.0  # a router looks at least so often whether it has stood still
MAX_AWAITED = 65_536  # sessions that may come back; those beyond are left to the lease


def redial_s(round_trip_s: float) -> float:
    """Return the time that a live process has to dial again after its connection was closed.

    Args:
        round_trip_s: of that connection, as measured while it stood.
    """
    return REDIAL_S + REDIAL_ROUND_TRIPS * round_trip_s


class Disconnections:
    """Sessions whose connection was closed by their host, until they are back or their time is over.

    Which session dials again is known by its id, which is new each time a process starts.
    """

    def __init__(self, lease_s: float, now_s: float) -> None:
        """``lease_s``: after so long a silence of this router the others take it for dead."""
        self._lease_s = lease_s
        self._turned_s = now_s  # when this process last looked at the time
        self._stood_still_s = -math.inf  # when it last found that it had stood still
        self._due_s: dict[str, float] = {}  # by session

    def note_turn(self, now_s: float) -> None:
        """Take note that this process runs, at least every :data:`TURN_S`."""
        if self._is_late(now_s):
            self._stood_still_s = now_s
        self._turned_s = now_s

    def _is_late(self, now_s: float) -> bool:
        """Return whether this process has had no turn for so long that others may have given it up."""
        return now_s > self._turned_s + TURN_S + self._lease_s / 2

    def note_ended(self, session: str, connection: Connection, now_s: float) -> bool:
        """Take note that the link of a session has ended. Returns whether its host has closed it while it worked: not
        if this process has stood still until a moment ago, as then who has closed a connection may live."""
        has_stood_still = self._is_late(now_s) or now_s < self._stood_still_s + TURN_S
        if has_stood_still or not connection.closed_by_peer(self._lease_s):
            return False
        self.note_closed(session, connection.round_trip_s, now_s)
        return True

    def note_closed(self, session: str, round_trip_s: float, now_s: float) -> None:
        """Take note that the host of a session has closed its connection while it worked."""
        if len(self._due_s) < MAX_AWAITED:
            self._due_s[session] = now_s + redial_s(round_trip_s)

    def note_open(self, session: str) -> None:
        """Take note that a session is there, which may be one that is back."""
        self._due_s.pop(session, None)

    def take_due(self, now_s: float) -> list[str]:
        """Return the sessions that have not come back in their time, each once."""
        due = [session for session, due_s in self._due_s.items() if due_s <= now_s]
        for session in due:
            del self._due_s[session]
        return due

    def due_in_s(self, now_s: float) -> float | None:
        """Return the seconds until the next one is due, 0 or more; None: none is awaited."""
        return max(0.0, min(self._due_s.values()) - now_s) if self._due_s else None

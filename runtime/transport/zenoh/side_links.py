"""Further links of a session, for large messages: what many send to it comes side by side, and apart from small ones.

**Why.** TCP learns the rate of a link from what it has sent. A connection that carries answers of a few bytes for a
while forgets what it knew, and then takes seconds to reach the rate of the link again (seen with BBR: an update of
4.8 MB began at 1 Mbit/s of 100). And where packets are lost, many connections lose less than one: when the updates of a
round come together, all senders have a connection of their own to the relay, which has one to the receiver.

**Theory of operation.** Each side link is a session of its own. Large messages leave over the first one. An inlet that
many write to divides its outlets among the links, and tells each in its answers over which one it wants to have the
samples: then these travel under a key with the number of the link (:mod:`.keys`), which that session subscribes to. So
all that an outlet sends to its only inlet takes the same way, and keeps its order. While a side link does not stand, or
leads to another relay, the session itself does its work. What is lost or comes twice while they change is sent again,
or recognized, as always. A side link that stands and brings nothing is closed by Zenoh after the lease, as any link.

A thread (``gradbus-side``) opens the links and moves the subscriptions: both may wait. Nobody depends on it: where no
side link comes up, all goes over the session. A relay that bears fewer sessions of one node closes those beyond, as
often as they come: so a side link that breaks now and again while that of the session stands is given up, and all are
closed while that of the session is broken, for which they would leave no room.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zenoh
from zenoh.handlers import Callback

from gradbus.runtime.logs import get_logger
from gradbus.runtime.transport.zenoh.session import OPEN_S

if TYPE_CHECKING:
    from gradbus.runtime.transport.zenoh.session_api import Declaration

SIDE_LINKS = 4  # of a session
MAX_BREAKS, BREAKS_S = 3, 3600.0  # of a side link while that of the session stands, and within which time
RETRY_S, MAX_RETRY_S = 30.0, 600.0  # until another attempt, after one that failed, and after many
CLOSE_S = OPEN_S + 1.0  # for the thread, which may be opening a session

log = get_logger("bus")


class SideLinks:
    """The links beside that of a session. None is there before somebody asks for it (:meth:`open`).

    Attributes:
        count: of the links. numbered: expressions that were declared on the session itself.
    """

    def __init__(self, main: zenoh.Session, open_session: Callable[[], zenoh.Session], count: int = SIDE_LINKS) -> None:
        """``open_session``: opens one more session like ``main``; it may take seconds, and raise ZError."""
        self.count = count
        self.numbered = 0
        self._open_session = open_session
        self._sessions: dict[int, Any] = {0: main}  # by link; only the thread adds to it
        self._relays: dict[int, str] = {}  # by link that stands: what is at its other end
        self._broken: deque[int] = deque()  # links
        self._breaks: dict[int, list[float]] = {}  # by link: when it broke, while that of the session stood
        self._given_up: set[int] = set()
        self._retry_s, self._pause_s = 0.0, RETRY_S
        self._listeners: dict[int, Any] = {}  # by link
        self._subscriptions: dict[int, _Moving] = {}
        self._lock = threading.Lock()  # of subscriptions and thread; nothing waits with it
        self._wanted = 0  # links, from the first on
        self._woken = threading.Event()
        self._is_closed = self._has_failed = False
        self._thread: threading.Thread | None = None

    def open(self, link: int) -> None:
        """Have the side links up to this one opened, if they are not. Waits for nothing."""
        if link <= self._wanted:
            return
        with self._lock:
            self._wanted = max(link, self._wanted)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="gradbus-side", daemon=True)
                self._thread.start()
        self._woken.set()

    def close(self) -> None:
        """Close the side links."""
        with self._lock:
            self._is_closed = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _is_up(self, link: int) -> bool:
        relay = self._relays.get(link)
        is_there = link in self._sessions and link not in self._given_up and not self._has_failed
        return is_there and relay is not None and relay == self._relays.get(0)

    @property
    def outgoing(self) -> Any:
        """Return the session over whose link large messages leave: the first one while it stands; None: none does."""
        return self._sessions.get(1) if self._is_up(1) else None

    # Subscriptions

    def subscribe(self, expression: str, note: Callable[[Any], None], link: int) -> Declaration:
        """Subscribe over a side link, and over the session while that does not stand. Raises ZError."""
        made = _Moving(self, expression, note, link)
        made.declared = self._declare(made, 0)
        with self._lock:
            self._subscriptions[id(made)] = made
        self._woken.set()
        return made

    def _declare(self, moving: _Moving, way: int) -> Any:
        self.numbered += way == 0
        return self._sessions[way].declare_subscriber(moving.expression, Callback(moving.note, indirect=False))

    def forget(self, moving: _Moving) -> None:
        """Take a subscription back. Raises ZError."""
        with self._lock:
            if self._subscriptions.pop(id(moving), None) is None:
                return
        moving.declared.undeclare()

    def _move(self) -> None:
        """Move subscriptions to where they belong. Raises ZError."""
        with self._lock:
            subscriptions = list(self._subscriptions.values())
        for moving in subscriptions:
            way = moving.link if self._is_up(moving.link) else 0
            if moving.way == way:
                continue
            declared = self._declare(moving, way)
            with self._lock:
                if id(moving) in self._subscriptions:
                    moving.declared, declared, moving.way = declared, moving.declared, way
            with contextlib.suppress(zenoh.ZError):  # its session is closed, and it with it
                declared.undeclare()

    # The thread

    def _run(self) -> None:
        try:
            self._watch(0)
            while not self._is_closed:
                self._settle()
                self._woken.wait(RETRY_S)
                self._woken.clear()
        except Exception:
            if not self._is_closed:
                log.exception("large messages share the link of small ones from now on")
        finally:
            self._has_failed = True
            self._close_links(*self._sessions)

    def _settle(self) -> None:
        """Do what the links that have come up or broken ask for."""
        while self._broken:
            self._note_break(self._broken.popleft())
        self._move()
        relay = self._relays.get(0)
        if relay is not None:  # links that have dialled again may lead elsewhere
            self._close_links(*(link for link in self._sessions if self._relays.get(link, relay) != relay))
        self._close_links(*self._given_up)
        for link in range(1, 1 + self._wanted):
            if link not in self._sessions and link not in self._given_up and 0 in self._relays and not self._is_closed:
                self._open_link(link)
                self._move()

    def _note_break(self, link: int) -> None:
        if link == 0:
            self._given_up.clear()
            self._breaks.clear()
            self._retry_s, self._pause_s = 0.0, RETRY_S
            self._close_links(*self._sessions)
        elif link in self._sessions:
            now_s = time.monotonic()
            lately = [when_s for when_s in self._breaks.get(link, ()) if when_s > now_s - BREAKS_S]
            self._breaks[link] = [*lately, now_s]
            if len(self._breaks[link]) >= MAX_BREAKS:
                self._given_up.add(link)

    def _open_link(self, link: int) -> None:
        if time.monotonic() < self._retry_s:
            return
        try:
            session = self._open_session()
            if self._relays.get(0) not in [str(zid) for zid in session.info.routers_zid()]:
                session.close()
                raise zenoh.ZError("it does not lead to the relay of the session")
        except zenoh.ZError as error:  # such as of a relay that bears no more sessions
            write = log.info if self._pause_s == RETRY_S else log.debug
            write("large messages share a link", side_link=link, reason=str(error))
            self._retry_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_RETRY_S)
        else:
            self._sessions[link] = session
            self._watch(link)

    def _close_links(self, *links: int) -> None:
        closing = {link: self._sessions.pop(link) for link in set(links) & (set(self._sessions) - {0})}
        for link in closing:
            self._relays.pop(link, None)
        if closing and not self._is_closed:
            with contextlib.suppress(zenoh.ZError):  # the session is closed, too
                self._move()
        for session in closing.values():
            with contextlib.suppress(zenoh.ZError):
                session.close()

    def _watch(self, link: int) -> None:
        session = self._sessions[link]

        def note(event: Any) -> None:  # on a thread of Zenoh's
            if self._sessions.get(link) is not session:
                return
            relay = str(event.transport.zid)
            if event.kind == zenoh.SampleKind.PUT:
                self._relays[link] = relay
            elif self._relays.get(link) == relay and self._relays.pop(link, None) is not None:
                self._broken.append(link)
            self._woken.set()

        watch = session.info.declare_transport_events_listener
        self._listeners[link] = watch(Callback(note, indirect=False), history=True)


@dataclass(slots=True, eq=False)
class _Moving:
    """A subscription over a side link. ``way``: the number of the session that receives for it now."""

    links: SideLinks
    expression: str
    note: Callable[[Any], None]
    link: int
    declared: Any = None
    way: int = 0

    def undeclare(self) -> None:
        """See :meth:`.Declaration.undeclare`."""
        self.links.forget(self)

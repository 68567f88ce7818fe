"""Further links of a session, for large messages: what many send to it comes side by side, and apart from small ones.

**Why.** TCP learns the rate of a link from what it has sent. A connection that carries answers of a few bytes for a
while forgets what it knew, and then takes seconds to reach the rate of the link again (seen with BBR: an update of
4.8 MB began at 1 Mbit/s of 100). And where packets are lost, many connections lose less than one: when the updates of a
round come together, all senders have a connection of their own to the relay, which has one to the receiver.

**Theory of operation.** Each side link is a session of its own. What is not urgent leaves over the first one. An inlet
that many write to divides its outlets among the links, and tells each in its answers over which one it wants to have
the samples: then these travel under a key with the number of the link (:mod:`.keys`), which that session subscribes to.
So all samples of an outlet take the same way, and keep their order. Until a side link stands, and while it is broken,
the session itself does its work. What is lost or comes twice while they change is sent again, or recognized, as always.

A thread (``gradbus-side``) opens the links and moves the subscriptions: both may wait. Nobody depends on it: where no
side link comes up, all goes over the session. A relay that bears fewer sessions of one node closes those beyond, as
often as they come: so a side link that breaks now and again while that of the session stands is given up.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zenoh
from zenoh.handlers import Callback

from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.logs import get_logger

if TYPE_CHECKING:
    from gradbus.runtime.transport.zenoh.session_api import Declaration

SIDE_LINKS = 4  # of a session
MAX_BREAKS = 3  # of a side link while that of the session stands
CLOSE_S = 1.0  # for the thread, which may be opening a link

log = get_logger("bus")


class SideLinks:
    """The links beside that of a session. None is there before somebody asks for it (:meth:`open`).

    Attributes:
        count: of the links.
    """

    def __init__(self, main: zenoh.Session, open_session: Callable[[], zenoh.Session], count: int = SIDE_LINKS) -> None:
        """``open_session``: opens one more session like ``main``; it may take seconds."""
        self.count = count
        self._sessions: list[Any] = [main]  # by link
        self._open_session = open_session
        self._listeners: list[Any] = []
        self._wanted = 0  # links, from the first on
        self._is_refused = False  # one was not opened: no others are tried
        self._events: deque[tuple[int, bool]] = deque()  # links that have come up, or broken
        self._up: set[int] = set()
        self._breaks: Counter[int] = Counter()  # since that of the session broke
        self._given_up: set[int] = set()
        self._subscriptions: dict[int, _Moving] = {}
        self._lock = threading.Lock()  # of the subscriptions; held while they are declared, so not for callbacks
        self._starting = threading.Lock()
        self._woken = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def open(self, link: int) -> None:
        """Have the side links up to this one opened, if they are not. Waits for nothing."""
        if link <= self._wanted:
            return
        with self._starting:
            self._wanted = max(link, self._wanted)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="gradbus-side", daemon=True)
                self._thread.start()
        self._woken.set()

    @property
    def outgoing(self) -> Any:
        """Return the session over whose link large messages leave: the first one while it stands; None: none does."""
        return self._sessions[1] if 1 in self._up and 1 not in self._given_up else None

    def subscribe(self, expression: str, note: Callable[[Any], None], link: int) -> Declaration:
        """Subscribe over a side link, and over the session until that stands. Raises ZError."""
        made = _Moving(self, expression, note, link)
        with self._lock:
            self._declare(made, 0)
            self._subscriptions[id(made)] = made
        self._woken.set()
        return made

    def forget(self, moving: _Moving) -> None:
        """Take a subscription back. Raises ZError."""
        with self._lock:
            if self._subscriptions.pop(id(moving), None) is not None:
                moving.declared.undeclare()

    def close(self) -> None:
        """Close the side links. One that is being opened is closed by the thread."""
        self._is_closed = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _declare(self, moving: _Moving, way: int) -> None:
        """Have another session receive, by its number; then take back where it came before. With the lock."""
        before, moving.way = moving.declared, way
        moving.declared = self._sessions[way].declare_subscriber(
            moving.expression, Callback(moving.note, indirect=False)
        )
        if before is not None:
            with contextlib.suppress(zenoh.ZError):  # its session is closed, and it with it
                before.undeclare()

    # The thread

    def _run(self) -> None:
        try:
            self._watch(0)
            while not self._is_closed:
                while len(self._sessions) <= self._wanted and not (self._is_closed or self._is_refused):
                    self._open_link(len(self._sessions))
                self._move()
                self._woken.wait()
                self._woken.clear()
        except zenoh.ZError as error:  # the session is closed, or about to be
            log.debug("side links are not used any more", reason=str(error))
        finally:
            self._up.clear()
            for session in self._sessions[1:]:
                with contextlib.suppress(zenoh.ZError):
                    session.close()

    def _open_link(self, link: int) -> None:
        try:
            self._sessions.append(self._open_session())
        except (BusError, ConfigError) as error:  # such as a relay that bears no more sessions
            log.info("large messages share the link of others", side_links=link - 1, reason=str(error))
            self._is_refused = True
        else:
            self._watch(link)

    def _watch(self, link: int) -> None:
        def note(event: Any) -> None:  # on a thread of Zenoh's
            self._events.append((link, event.kind == zenoh.SampleKind.PUT))
            self._woken.set()

        watch = self._sessions[link].info.declare_transport_events_listener
        self._listeners.append(watch(Callback(note, indirect=False), history=True))

    def _move(self) -> None:
        """Move subscriptions to where they belong."""
        while self._events:
            self._note_change(*self._events.popleft())
        with self._lock:
            for moving in self._subscriptions.values():
                way = moving.link if moving.link in self._up - self._given_up else 0
                if moving.way != way:
                    self._declare(moving, way)

    def _note_change(self, link: int, is_up: bool) -> None:
        change = self._up.add if is_up else self._up.discard
        change(link)
        if is_up:
            return
        self._breaks[link] += 1
        if link == 0:  # so the others may break, too: the relay ends
            self._breaks.clear()
        elif self._breaks[link] == MAX_BREAKS:
            self._given_up.add(link)
            self._sessions[link].close()


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

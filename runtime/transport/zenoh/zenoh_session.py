"""A session of the library of Zenoh, as outlets and inlets use it (:mod:`.session_api`).

**Theory of operation.** A put of Zenoh waits while the queue of its priority is full, for a second or so, and then its
message is dropped (:mod:`.relay_settings`) and sent again as what is lost on the way. So threads (``gradbus-put``), one
for urgent messages and one for others, make all puts, and outlets stop when too much waits for them. No message is
*express*: such a one takes a batch for itself, here and in the relay, of which a queue has a few, so that most of a
burst would be dropped. A single one leaves as soon without.

A relay looks up who is to have a message, among all that are there for each message: with two hundred sessions that is
most of its work. It remembers that for keys that are declared to it (measured with 400 subscribers: 1 us of its
processor a message rather than 75, for 70 us once). What a declaration leaves behind is not freed when it is taken
back: each further one takes longer, and numbers of keys have 16 bits, after which one stands for two keys. So only keys
that are used often are declared, a bounded number in the life of a session, and none once it has declared much.

Zenoh calls back on threads of its own, which hold up the link as long as they are away.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import zenoh
from zenoh.handlers import Callback

from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.transport.channels import WINDOW_BYTES
from gradbus.runtime.transport.peer_id import PeerId
from gradbus.runtime.transport.zenoh.keys import session_token
from gradbus.runtime.transport.zenoh.link_watch import LinkWatch
from gradbus.runtime.transport.zenoh.session_api import Declaration
from gradbus.runtime.transport.zenoh.side_links import SideLinks

CONGESTED_BYTES = WINDOW_BYTES // 4  # of one urgency wait to be put: outlets stop
MAX_WAITING_BYTES = 2 * WINDOW_BYTES  # of one urgency
CLOSE_S = 1.0  # for what waits, and for a put that does not end
DECLARED_AT = 16  # uses of a key: those of one round, as of a model, are used less
MAX_DECLARED = 1024  # keys of one urgency, in the life of a session
MAX_COUNTED = 4096  # keys of one urgency whose uses are counted: those used last
MAX_NUMBERED = 30_000  # declarations of any kind, of 65,536 numbers, up to which declared keys are used
_MESSAGE_BYTES = 256  # of a message beside its content, so that small ones take a bounded memory, too

_URGENT, _DATA = zenoh.Priority.INTERACTIVE_HIGH, zenoh.Priority.DATA

log = get_logger("bus")


class ZenohSession:
    """Wraps an open session, and closes it."""

    def __init__(
        self, session: zenoh.Session, *, watch: LinkWatch | None = None, side_links: SideLinks | None = None
    ) -> None:
        """``watch``: of the links of a router, which has no relay that it depends on. ``side_links``: over which
        messages may come as well. Both are closed with the session."""
        self._session = session
        self._watch = watch
        self._side_links = side_links
        self._is_router = watch is not None
        self._links: set[str] = set()
        self._link_changed: Callable[[bool], None] | None = None
        self._room_made: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._lanes = {urgent: _Lane(self._lock) for urgent in (True, False)}
        self._is_closed = False
        self._numbered = 0  # declarations so far, of which each may take a number of a key
        self._listener: Declaration | None = None
        self._presence: Declaration | None = None

    def show_presence(self, job: str, owner: PeerId) -> None:
        """Tell relays that a transport takes part in a job over this session while it is open. Raises BusError."""
        self._presence = self.declare_token(session_token(job, str(self._session.zid()), owner))

    # Links

    def start(self, link_changed: Callable[[bool], None], room_made: Callable[[], None]) -> None:
        """See :meth:`.LinkSession.start`."""
        self._link_changed, self._room_made = link_changed, room_made
        if not self._is_router:
            watch = self._session.info.declare_transport_events_listener
            self._listener = _Declared(
                "its links", partial(watch, Callback(self._note_link, indirect=False), history=True)
            )

    def _note_link(self, event: Any) -> None:
        with self._lock:
            was_linked = self.is_linked
            change = self._links.add if event.kind == zenoh.SampleKind.PUT else self._links.discard
            change(str(event.transport.zid))
            is_linked = self.is_linked
        if was_linked != is_linked and self._link_changed is not None:
            self._link_changed(is_linked)

    @property
    def is_linked(self) -> bool:
        """See :attr:`.LinkSession.is_linked`."""
        return self._is_router or bool(self._links)

    # Publishing

    def is_congested(self, *, urgent: bool) -> bool:
        """See :meth:`.LinkSession.is_congested`."""
        return self._lanes[urgent].is_congested

    def publish(self, key: str, message: bytes | bytearray, *, urgent: bool, apart: bool = False) -> bool:
        """See :meth:`.LinkSession.publish`."""
        with self._lock:
            lane = self._lanes[urgent]
            if self._is_closed or not self.is_linked or lane.waiting_bytes >= MAX_WAITING_BYTES:
                return False
            lane.waiting.append((key, message, apart))
            lane.waiting_bytes += len(message) + _MESSAGE_BYTES
            lane.is_congested = lane.is_congested or lane.waiting_bytes >= CONGESTED_BYTES
            if lane.thread is None:
                lane.thread = threading.Thread(target=self._run, args=(urgent,), name="gradbus-put", daemon=True)
                lane.thread.start()
            lane.changed.notify()
        return True

    def _put(self, key: str, message: bytes | bytearray, *, urgent: bool, apart: bool) -> None:
        options: dict[str, Any] = {
            "congestion_control": zenoh.CongestionControl.DROP,
            "priority": _URGENT if urgent else _DATA,
        }
        keys = self._lanes[urgent].keys
        side = self._side_links.outgoing if apart and self._side_links is not None else None
        try:
            if side is not None:
                with contextlib.suppress(zenoh.ZError):  # it is being closed
                    side.put(key, message, **options)
                    return
            if keys.is_due(key):
                keys.declared[key] = self._session.declare_publisher(key, **options)
            publisher = keys.declared.get(key) if self._count_numbered() < MAX_NUMBERED else None
            if publisher is None:
                self._session.put(key, message, **options)
            else:
                publisher.put(message)
        except zenoh.ZError as error:
            if not self._is_closed:
                log.error("message not sent", key=key, reason=str(error))

    def _count_numbered(self) -> int:
        return self._numbered + (self._side_links.numbered if self._side_links is not None else 0)

    def _run(self, urgent: bool) -> None:
        lane = self._lanes[urgent]
        while True:
            with self._lock:
                lane.changed.wait_for(lambda: self._is_closed or lane.waiting)
                if not lane.waiting:
                    return
                key, message, apart = lane.waiting.popleft()
            self._put(key, message, urgent=urgent, apart=apart)
            with self._lock:
                lane.waiting_bytes -= len(message) + _MESSAGE_BYTES
                has_room = lane.is_congested and 2 * lane.waiting_bytes < CONGESTED_BYTES
                if has_room:
                    lane.is_congested = False
            del message  # it may be large, and the next one late
            if has_room and self._room_made is not None:
                self._room_made()

    # Declarations

    @property
    def side_links(self) -> int:
        """See :attr:`.LinkSession.side_links`."""
        return self._side_links.count if self._side_links is not None else 0

    def request_side_links(self, link: int) -> None:
        """See :meth:`.LinkSession.request_side_links`."""
        if self._side_links is not None:
            self._side_links.open(link)

    def subscribe(self, expression: str, received: Callable[[str, bytes], None], *, link: int = 0) -> Declaration:
        """See :meth:`.LinkSession.subscribe`."""

        def note(sample: Any) -> None:
            received(str(sample.key_expr), sample.payload.to_bytes())

        if link and self._side_links is not None:
            return _Declared(expression, partial(self._side_links.subscribe, expression, note, link))
        self._numbered += 1
        declare = partial(self._session.declare_subscriber, expression, Callback(note, indirect=False))
        return _Declared(expression, declare)

    def declare_token(self, key: str) -> Declaration:
        """See :meth:`.LinkSession.declare_token`."""
        self._numbered += 1
        return _Declared(key, partial(self._session.liveliness().declare_token, key))

    def watch_tokens(self, expression: str, changed: Callable[[str, bool], None]) -> Declaration:
        """See :meth:`.LinkSession.watch_tokens`."""

        def note(sample: Any) -> None:
            changed(str(sample.key_expr), sample.kind == zenoh.SampleKind.PUT)

        self._numbered += 1
        watch = self._session.liveliness().declare_subscriber
        return _Declared(expression, partial(watch, expression, Callback(note, indirect=False), history=True))

    def close(self) -> None:
        """See :meth:`.LinkSession.close`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            threads = [one.thread for one in self._lanes.values() if one.thread is not None]
            for lane in self._lanes.values():
                lane.changed.notify()
        for thread in threads:
            thread.join(CLOSE_S)
        for also in (self._watch, self._side_links):
            if also is not None:
                also.close()
        try:
            self._session.close()
        except zenoh.ZError as error:  # the relay does not read any more; the link ends with the process at the latest
            log.debug("session not closed in time", reason=str(error))
        for thread in threads:
            thread.join(CLOSE_S)


class _Lane:
    """The messages of one urgency that wait to be put, in order.

    Attributes:
        changed: wakes its thread. waiting_bytes: of messages that wait, and of the one in a put.
            is_congested: outlets stop until half of them have left.
        keys: that are declared. Only the thread uses them.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.changed = threading.Condition(lock)
        self.waiting: deque[tuple[str, bytes | bytearray, bool]] = deque()
        self.waiting_bytes = 0
        self.is_congested = False
        self.keys = DeclaredKeys()
        self.thread: threading.Thread | None = None


class DeclaredKeys:
    """Which keys are declared to the relay, and how often others were used.

    Attributes:
        declared: their publishers, by key.
    """

    def __init__(self) -> None:
        self.declared: dict[str, Any] = {}
        self._uses: OrderedDict[str, int] = OrderedDict()  # the newest last

    def is_due(self, key: str) -> bool:
        """Count a use of a key. Returns whether it should be declared now."""
        if key in self.declared or len(self.declared) >= MAX_DECLARED:
            return False
        uses = self._uses.pop(key, 0) + 1
        if uses >= DECLARED_AT:
            return True
        self._uses[key] = uses
        if len(self._uses) > MAX_COUNTED:
            self._uses.popitem(last=False)
        return False


class _Declared:
    """Wraps what is declared on a session of Zenoh."""

    def __init__(self, key: str, declare: Callable[[], Any]) -> None:
        """Declare it. Raises BusError."""
        self._key = key
        try:
            self._made = declare()
        except zenoh.ZError as error:
            raise BusError(f"Zenoh cannot declare {key}: {error}; the session may be closed") from error

    def undeclare(self) -> None:
        """See :meth:`.Declaration.undeclare`."""
        try:
            self._made.undeclare()
        except zenoh.ZError as error:  # the session is closed, and it with it
            log.debug("not undeclared", key=self._key, reason=str(error))

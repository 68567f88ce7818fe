"""State that the endpoints of one transport share: their session and time, and what they know of the tokens of others.

**Theory of operation.** Callbacks of the session only note what they are told (:meth:`ZenohPlace.post`). All decisions
are made under the lock of the schedule, by its thread or by one that waits for news anyway. Nothing waits under it.

A token that goes says one of two things. While our own link stands, the endpoint is gone, or its link is: it counts as
lost at once. When our own link breaks, all tokens go, which says nothing about their endpoints: those that come back
within the lease have not been lost at all. The order of the two reports is not defined, so a token is missed for
:data:`GRACE_S` before its endpoint is lost.

Every process of a job shows tokens on a channel for partners (:attr:`.Channel.for_partners`). There an endpoint finds
those of a transport once some endpoint of this place has found one of it on another channel, which both sides do.

A relay may report that the host of a transport has closed its connection
(:mod:`~gradbus.runtime.network.disconnections`). Any process could send such a report where a relay does not prevent
it, but only the relay can take tokens away: so a report counts for endpoints whose tokens are gone, and for no others.
They are lost at once, and inlets tell of it (:meth:`.api.Inlet.take_disconnected`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gradbus.runtime import forks
from gradbus.runtime.errors import BusClosed, BusError
from gradbus.runtime.transport.api import PeerId
from gradbus.runtime.transport.channels import WINDOW_BYTES, Channel
from gradbus.runtime.transport.flags import ChangeFlag, FlagWaiter
from gradbus.runtime.transport.schedule import NetworkSchedule
from gradbus.runtime.transport.zenoh.keys import ChannelKeys, endpoint_id, last_part, owner_of
from gradbus.runtime.transport.zenoh.messages import BadMessage
from gradbus.runtime.transport.zenoh.session_api import Declaration, LinkSession

GRACE_S = 0.05  # within which the break of a link is reported, before or after the tokens that go with it
LINGER_S = 1.0  # an outlet that is closed stays so long at most, until its samples are acknowledged
MAX_PEERS = 4096  # that one endpoint remembers: anybody can show tokens
MAX_WAITING = 65_536  # messages that were received, and not looked at yet
MAX_WAITING_BYTES = 4 * WINDOW_BYTES


class ZenohPlace:
    """Where the endpoints of one transport are.

    Attributes:
        own: what the transport calls itself. node: whose time passes in waits, for the schedule.
        members: the transports that belong to the job, see :class:`~gradbus.runtime.transport.api.JobMembers`; None:
            all do, or it is not known.
        rejected: counts of dropped messages, by reason.
    """

    def __init__(
        self, session: LinkSession, schedule: NetworkSchedule, job: str, own: PeerId, lease_s: float, node: Any
    ) -> None:
        self.session = session
        self.schedule = schedule
        self.job = job
        self.own = own
        self.lease_s = lease_s
        self.node = node
        self.members: frozenset[PeerId] | None = None
        self.rejected: Counter[str] = Counter()
        self.endpoints: dict[str, ZenohEndpoint] = {}
        self.waiters: list[FlagWaiter] = []
        self._partners: dict[PeerId, None] = {}  # the newest last
        self._numbers = itertools.count(1)
        self._posted: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        self._posted_bytes = 0
        self._drain_is_due = False
        self._broke_s = -math.inf  # when the link did last
        self._made_in = forks.generation
        session.start(self._link_changed, self._room_made)

    # From any thread, and from callbacks

    def post(self, function: Callable[..., None], *arguments: Any, num_bytes: int = 0, may_drop: bool = False) -> None:
        """Have a function called soon with the lock. ``may_drop``: not if too much waits already, but counted."""
        with self.schedule.lock:
            if may_drop and (len(self._posted) >= MAX_WAITING or self._posted_bytes >= MAX_WAITING_BYTES):
                self.rejected["too much waits"] += 1
                return
            self._posted.append((num_bytes, function, arguments))
            self._posted_bytes += num_bytes
            if any(waiter.is_waiting for waiter in self.waiters):
                self.schedule.notify()  # one thread to wake, which needs what comes of it
            elif not self._drain_is_due:
                self._drain_is_due = True
                self.schedule.at(self.schedule.now_s(), self.drain)

    def _link_changed(self, is_linked: bool) -> None:
        self.post(self._note_link, is_linked)

    def _room_made(self) -> None:
        self.post(self._use_room)

    # With the lock

    def drain(self) -> None:
        """Handle what was posted."""
        self._drain_is_due = False
        while self._posted:
            num_bytes, function, arguments = self._posted.popleft()
            self._posted_bytes -= num_bytes
            try:
                function(*arguments)
            except BadMessage as error:
                self.rejected[str(error)] += 1

    def after(self, seconds: float, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function after a delay, with the lock."""
        self.schedule.at(self.schedule.now_s() + seconds, function, *arguments)

    def _note_link(self, is_linked: bool) -> None:
        if not is_linked:
            self._broke_s = self.schedule.now_s()

    def note_disconnected(self, owner: PeerId) -> None:
        """Take note that a relay says that the host of a transport has closed its connection."""
        for endpoint in list(self.endpoints.values()):
            endpoint.note_disconnected(owner)

    def _use_room(self) -> None:
        for endpoint in list(self.endpoints.values()):
            endpoint.use_room()
        self.schedule.notify()

    def is_foreign(self, owner: PeerId) -> bool:
        """Return whether a transport is known not to belong to the job, or has not said so yet."""
        return self.members is not None and owner != self.own and owner not in self.members

    def is_partner(self, owner: PeerId) -> bool:
        """Return whether an endpoint of this place has found one of this transport."""
        return owner in self._partners

    def note_partner(self, owner: PeerId) -> None:
        """Take note that an endpoint of this place has found one of a transport, on a channel that is not for partners.
        Those that are for partners find theirs now."""
        if owner in self._partners or owner == self.own:
            return
        self._partners[owner] = None
        if len(self._partners) > MAX_PEERS:  # anybody can show tokens
            del self._partners[next(iter(self._partners))]
        for endpoint in list(self.endpoints.values()):
            endpoint.find_partner(owner)

    def link_broke_since(self, when_s: float) -> bool:
        """Return whether the link of this transport has broken since then, or is broken."""
        return self._broke_s >= when_s or not self.session.is_linked

    def wake_waiters(self) -> None:
        """End the waits of the waiters."""
        for waiter in self.waiters:
            waiter.on_news()

    # Without the lock

    def waiter(self) -> FlagWaiter:
        """Make a waiter, which handles what was posted before it looks."""
        made = FlagWaiter(self.schedule, self.node, self.drain)
        with self.schedule.lock:
            self.waiters.append(made)
        return made

    def check_process(self) -> None:
        """Raise ForkedProcess in a child by fork."""
        forks.check(self._made_in, "the transport on Zenoh")

    def next_number(self) -> int:
        """Return a number that no endpoint and no peer of this place has."""
        return next(self._numbers)

    def close_endpoints(self, endpoints: Sequence[ZenohEndpoint]) -> None:
        """Close them together: outlets stay until their samples have arrived, for :data:`LINGER_S` at most. In a child
        by fork it does nothing: a thread of the parent may have held the lock."""
        if self._made_in != forks.generation:
            return
        with self.schedule.lock:
            closing = [one for one in endpoints if not one.is_closed]
            for one in closing:
                one.is_closed = True
            self.schedule.notify()  # writes that wait
            if not all(one.is_settled for one in closing):
                with contextlib.suppress(BusError):  # the transport has failed: nothing arrives any more
                    self.schedule.wait(self.node, lambda: all(one.is_settled for one in closing), LINGER_S)
            for one in closing:
                self.endpoints.pop(one.id, None)
        for one in closing:
            one.withdraw()


class ZenohEndpoint(ABC):
    """Holds the parts that outlets and inlets have in common.

    Attributes:
        id: see :mod:`.keys`.
    """

    def __init__(self, place: ZenohPlace, channel: Channel, *, side: str, other_side: str) -> None:
        """``side``: what it is, as :meth:`.ChannelKeys.token` calls it."""
        self.place = place
        self.channel = channel
        self.id = endpoint_id(place.own, place.next_number())
        self.keys = ChannelKeys(place.job, channel.name)
        self.changes = ChangeFlag()
        self.matched = 0
        self.is_closed = False
        self.schedule = place.schedule
        self._side, self._other_side = side, other_side
        self._declared: list[Declaration] = []
        self._missed: dict[str, float] = {}  # tokens that have gone, and when
        self._refused: dict[str, PeerId] = {}  # tokens that there was no room for, the newest last
        self._strangers: dict[str, PeerId] = {}  # tokens of transports that are no partners yet, the newest last

    @abstractmethod
    def subscriptions(self) -> list[tuple[str, int, Callable[[str, bytes], None]]]:
        """Return the expressions that it subscribes to, by which link of the session the messages should come, and what
        handles them, with the lock."""

    @abstractmethod
    def find_peer(self, peer: str, owner: PeerId) -> None:
        """Take note that a token is there, which may have gone for a moment."""

    @abstractmethod
    def lose_peer(self, peer: str) -> None:
        """Take note that an endpoint is lost."""

    @abstractmethod
    def forget_peer(self, peer: str) -> None:
        """Drop what is kept for an endpoint that was lost, if it has not come back."""

    def note_disconnected(self, owner: PeerId) -> None:
        """Lose the endpoints of a transport whose host has closed its connection, if their tokens are gone."""
        for peer, since_s in list(self._missed.items()):
            if owner_of(peer) == owner:
                self._lose(peer, since_s)

    @abstractmethod
    def count_peers(self) -> int:
        """Return how many peers are matched now."""

    def lease_is_over(self, lost_s: float) -> bool:
        """Return whether a peer that was lost then is not expected back."""
        return self.schedule.now_s() >= lost_s + self.place.lease_s

    @property
    def is_settled(self) -> bool:
        """Return whether it can be closed without a loss."""
        return True

    @abstractmethod
    def use_room(self) -> None:
        """Send what waits until the link is not congested any more."""

    def open(self) -> None:
        """Come to be there for others. First what it receives by, then its token, then a look at those of others."""
        with self.schedule.lock:
            self.place.endpoints[self.id] = self
        session = self.place.session
        try:
            for expression, link, handle in self.subscriptions():
                self._declared.append(session.subscribe(expression, partial(self._received, handle), link=link))
            self._declared.append(session.declare_token(self.keys.token(self._side, self.id)))
            watched = self.keys.token(self._other_side)
            self._declared.append(session.watch_tokens(watched, self._token_reported))
        except BaseException:
            self.place.close_endpoints([self])
            raise

    def withdraw(self) -> None:
        """Undo :meth:`open`, the token first: others must not send to what does not listen."""
        declared, self._declared = self._declared, []
        for one in reversed(declared):
            one.undeclare()

    def close(self) -> None:
        """See :meth:`.api.Endpoint.close`."""
        self.place.close_endpoints([self])

    def refresh(self) -> bool:
        """See :meth:`.api.Endpoint.refresh`."""
        with self.schedule.lock:
            if not self.changes.is_on:
                return False
            self.changes.is_on = False
            self.matched = self.count_peers()
            return True

    def note_peers_changed(self) -> None:
        """Report that a peer has been found or lost."""
        self.changes.is_on = True
        self.place.wake_waiters()

    def check_open(self) -> None:
        """Raise BusClosed where it is closed."""
        if self.is_closed:
            raise BusClosed(f"channel {self.channel.name!r}: its outlet is closed, as its group or bus is")

    # Callbacks

    def _received(self, handle: Callable[[str, bytes], None], key: str, message: bytes) -> None:
        self.place.post(handle, last_part(key), message, num_bytes=len(message), may_drop=True)

    def _token_reported(self, key: str, is_there: bool) -> None:
        self.place.post(self._note_token, last_part(key), is_there)

    # Tokens, with the lock

    def _note_token(self, peer: str, is_there: bool) -> None:
        owner = owner_of(peer)
        if owner is None:
            raise BadMessage("token of no endpoint")
        is_own = owner == self.place.own
        if self.id not in self.place.endpoints or (is_own and (self.channel.ignore_local or self.channel.for_partners)):
            return
        if is_there:
            self._missed.pop(peer, None)
            if self.channel.for_partners and not self.place.is_partner(owner):
                _keep_token(self._strangers, peer, owner)
            else:
                self._find(peer, owner)
        elif self._refused.pop(peer, None) is not None or self._strangers.pop(peer, None) is not None:
            return
        elif not (is_own and peer in self.place.endpoints):  # else our link broke, which it does not need
            now_s = self._missed[peer] = self.schedule.now_s()
            self.place.after(GRACE_S, self._miss, peer, now_s)

    def _find(self, peer: str, owner: PeerId) -> None:
        """Find a peer, or where there is no room for it, keep its token, which is reported once, until there is."""
        try:
            self.find_peer(peer, owner)
        except BadMessage:
            _keep_token(self._refused, peer, owner)
            raise
        if not self.channel.for_partners:
            self.place.note_partner(owner)

    def find_partner(self, owner: PeerId) -> None:
        """Find the endpoints of a transport that has become a partner."""
        for peer in [one for one, whose in self._strangers.items() if whose == owner]:
            del self._strangers[peer]
            try:
                self._find(peer, owner)
            except BadMessage as error:
                self.place.rejected[str(error)] += 1

    def _forget_counted(self, peer: str) -> None:
        self.place.post(self._forget, peer)  # which may be refused again

    def _forget(self, peer: str) -> None:
        """Forget a peer that has not come back, and find one that there was no room for: a member first."""
        self.forget_peer(peer)
        if self._refused and self.id in self.place.endpoints:
            newest = list(reversed(self._refused.items()))
            found, owner = next((one for one in newest if not self.place.is_foreign(one[1])), newest[0])
            del self._refused[found]
            self._find(found, owner)

    def _miss(self, peer: str, since_s: float) -> None:
        """Lose a peer whose token has gone: at once, or where our own link has broken, when the lease is over."""
        if self._missed.get(peer) != since_s:
            return
        if self.place.link_broke_since(since_s - GRACE_S):
            self.schedule.at(since_s + self.place.lease_s, self._lose, peer, since_s)
        else:
            self._lose(peer, since_s)

    def _lose(self, peer: str, since_s: float) -> None:
        if self._missed.get(peer) == since_s:
            del self._missed[peer]
            self.lose_peer(peer)
            self.place.after(self.place.lease_s, self._forget_counted, peer)


def _keep_token(tokens: dict[str, PeerId], peer: str, owner: PeerId) -> None:
    """Keep a token, which is reported once. Where there are too many, the oldest goes."""
    if len(tokens) >= MAX_PEERS:
        del tokens[next(iter(tokens))]
    tokens[peer] = owner

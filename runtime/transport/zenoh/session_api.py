"""The interface of a session for outlets and inlets: a link to a relay that forwards, and reports who is there.

A message travels under a key; whoever has subscribed to an expression that matches it gets it. Messages of one urgency
arrive in the order in which they were published, as long as the link stands; those on their way when it breaks are
lost. A *token* is a key that others see as long as it is declared and the link of its session stands.

Callbacks may come on any thread, also within a call of these methods. They must only note what they are told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Declaration(Protocol):
    """A subscription, token or watch that is in force."""

    def undeclare(self) -> None:
        """Take it back. The caller holds no lock that a callback needs. A call that is under way may still come."""


class LinkSession(Protocol):
    """One session, of one transport.

    Attributes:
        is_linked: messages reach the relay now, or this process is one.
        side_links: how many further links messages may come over, numbered from 1; link 0 is that of the session.
    """

    @property
    def is_linked(self) -> bool:
        """See above."""

    @property
    def side_links(self) -> int:
        """See above."""

    def request_side_links(self, link: int) -> None:
        """Have a side link opened soon, if it is not."""

    def is_congested(self, *, urgent: bool) -> bool:
        """Return whether more messages of this urgency wait to leave than the link takes: a further one should wait."""

    def publish(self, key: str, message: bytes | bytearray, *, urgent: bool, apart: bool = False) -> bool:
        """Send a message, without waiting. ``urgent``: before all that is not. ``apart``: over the first side link
        while that stands.

        Returns:
            False: it was dropped, because too much is waiting to leave, or there is no link. What was accepted can be
            lost as well.
        """

    def subscribe(self, expression: str, received: Callable[[str, bytes], None], *, link: int = 0) -> Declaration:
        """Call ``received`` with key and content of each message that matches. Raises BusError. ``link``: by which they
        come while it stands, else by link 0. When that changes, some may be lost, and some come twice."""

    def declare_token(self, key: str) -> Declaration:
        """Show a token to all that watch for it, now and after each break of the link. Raises BusError."""

    def watch_tokens(self, expression: str, changed: Callable[[str, bool], None]) -> Declaration:
        """Call ``changed`` with the key of each token that matches, and whether it is there: at once for those that
        are, and when one comes or goes. When the link breaks all go, and come again after it. Raises BusError."""

    def start(self, link_changed: Callable[[bool], None], room_made: Callable[[], None]) -> None:
        """Report from now on whether the link stands, whenever that changes, and the end of congestion."""

    def close(self) -> None:
        """Send what is waiting, for a moment at most, and end the link. A second call does nothing."""

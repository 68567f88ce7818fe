"""Nodes that the controller has answered, and that have still to show that they hold their key."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from gradbus.runtime.security.identity.allow_list import Entry
from gradbus.runtime.security.identity.handshake import Secrets
from gradbus.runtime.security.identity.join_messages import JoinHello, SignedMessage

PENDING_S = 5.0  # so long a Welcome waits for its Confirm
MAX_PENDING = 1024
MAX_PENDING_EACH = 4  # of one name: recordings of its earlier starts may be among them


@dataclass(slots=True, eq=False)
class PendingHandshake:
    """A Hello that was answered."""

    entry: Entry
    signed: SignedMessage
    hello: JoinHello
    secrets: Secrets
    welcome_signature: bytes
    until_s: float
    was_checked: bool = False  # a Confirm with its tag has come, and its signature was looked at


class PendingHandshakes:
    """All of them. By name and session: a node chooses its session itself, and can choose that of another."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, bytes], PendingHandshake] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def attempt(self, name: str, session: bytes) -> int:
        """Number of the Hello that was answered last; 0: there is none."""
        pending = self._pending.get((name, session))
        return 0 if pending is None else pending.hello.attempt

    def add(self, pending: PendingHandshake, each: int = MAX_PENDING_EACH) -> None:
        """One more, of ``each`` at most with this name. Of those the earliest start makes room for it: it is not the
        one that lives."""
        key = pending.hello.name, pending.hello.session
        self._pending.pop(key, None)
        same = [one for one in self._pending if one[0] == key[0]]
        if len(same) >= each:
            del self._pending[min(same, key=lambda one: self._pending[one].hello.start)]
        elif len(self._pending) >= MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[key] = pending

    def of(self, session: bytes) -> list[PendingHandshake]:
        """Those that say that they are this session."""
        return [pending for (_, one), pending in self._pending.items() if one == session]

    def take(self, pending: PendingHandshake) -> None:
        """It is in."""
        self._pending.pop((pending.hello.name, pending.hello.session), None)

    def keep(self, wanted: Callable[[PendingHandshake], bool]) -> None:
        """Forget the others."""
        self._pending = {key: pending for key, pending in self._pending.items() if wanted(pending)}


def with_tag(waiting: list[PendingHandshake], tag: bytes) -> PendingHandshake | None:
    """The one whose exchange has this tag: only the node that was answered, and the controller, can make it."""
    return next((one for one in waiting if hmac.compare_digest(one.secrets.tag, tag)), None)

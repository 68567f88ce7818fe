"""The nodes that a controller knows: pending handshakes, and admitted nodes with their keys."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from gradbus.runtime.security.identity.allow_list import Entry
from gradbus.runtime.security.identity.handshake import Secrets
from gradbus.runtime.security.identity.join_messages import JoinHello, SignedMessage
from gradbus.runtime.security.streams import InboundStreams, OutboundStreams

PENDING_S = 5.0  # so long a Welcome waits for its Confirm
MAX_PENDING = 1024
MAX_PENDING_EACH = 4  # of one name: recordings of its earlier starts may be among them


@dataclass(slots=True, eq=False)
class PendingHandshake:
    """A Hello that the controller has answered with a Welcome; the Confirm is outstanding."""

    entry: Entry
    signed: SignedMessage
    hello: JoinHello
    secrets: Secrets
    welcome_signature: bytes
    until_s: float
    was_checked: bool = False  # a Confirm with its tag was received, and its signature checked


class PendingHandshakes:
    """The pending handshakes, by name and session: a node chooses its session id, and could choose that of another."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, bytes], PendingHandshake] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def attempt(self, name: str, session: bytes) -> int:
        """Return the attempt number of the last answered Hello; 0: there is none."""
        pending = self._pending.get((name, session))
        return 0 if pending is None else pending.hello.attempt

    def add(self, pending: PendingHandshake, each: int = MAX_PENDING_EACH) -> None:
        """Add a handshake, of ``each`` at most with one name. The earliest start of the name makes room: it is dead."""
        key = pending.hello.name, pending.hello.session
        self._pending.pop(key, None)
        same = [one for one in self._pending if one[0] == key[0]]
        if len(same) >= each:
            del self._pending[min(same, key=lambda one: self._pending[one].hello.start)]
        elif len(self._pending) >= MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[key] = pending

    def of(self, session: bytes) -> list[PendingHandshake]:
        """Return the handshakes that claim this session id."""
        return [pending for (_, one), pending in self._pending.items() if one == session]

    def take(self, pending: PendingHandshake) -> None:
        """Remove a handshake whose node is admitted."""
        self._pending.pop((pending.hello.name, pending.hello.session), None)

    def keep(self, wanted: Callable[[PendingHandshake], bool]) -> None:
        """Drop the handshakes that are not ``wanted``."""
        self._pending = {key: pending for key, pending in self._pending.items() if wanted(pending)}


def with_tag(waiting: list[PendingHandshake], tag: bytes) -> PendingHandshake | None:
    """Return the handshake with this tag, which only the answered node and the controller can compute."""
    return next((one for one in waiting if hmac.compare_digest(one.secrets.tag, tag)), None)


MAX_OWN_RANKS = 1024  # as many as a group has at most
STARTS_PER_RANK = 2  # processes of a worker's key at a time: after a crash those of before are not known to be dead


@dataclass(slots=True, eq=False)
class AdmittedNode:
    """A node that the controller has admitted."""

    entry: Entry
    hello: SignedMessage
    session: bytes
    start: int
    attempt: int
    incoming: InboundStreams
    outgoing: OutboundStreams
    last_seen_s: float
    former: InboundStreams | None = None
    former_until_s: float = 0.0
    participant: bytes = b""  # GUID prefix of its DDS participant, as announced by it

    @property
    def id(self) -> str:
        """Its member id, see :func:`member_id`."""
        return member_id(self.entry.role, self.entry.name, self.session)


def member_id(role: str, name: str, session: bytes) -> str:
    """Return the name of a node among the members. Processes that share the key of a worker are distinct members."""
    return f"{name}/{session.hex()}" if role == "worker" else name


def most_processes(entry: Entry) -> int:
    """Return how many processes may share the key of an entry: one per rank, and as many possibly dead ones."""
    if entry.role != "worker":
        return 1
    return STARTS_PER_RANK * min(MAX_OWN_RANKS, sum(last - first + 1 for first, last in entry.ids))

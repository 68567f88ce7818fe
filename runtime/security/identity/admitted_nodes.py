"""Nodes that the controller has let in."""

from __future__ import annotations

from dataclasses import dataclass

from gradbus.runtime.security.identity.allow_list import Entry
from gradbus.runtime.security.identity.join_messages import SignedMessage
from gradbus.runtime.security.identity.shared_keys import InboundStreams, OutboundStreams

MAX_OWN_RANKS = 1024  # as many as a group has at most
STARTS_PER_RANK = 2  # processes of a worker's key at a time: after a crash those of before are not known to be dead


@dataclass(slots=True, eq=False)
class AdmittedNode:
    """A node that has been let in."""

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
    participant: bytes = b""  # what the GUIDs of its DDS participant begin with, as it says itself

    @property
    def id(self) -> str:
        """Of workers each process is one of its own, of others only one is there."""
        return member_id(self.entry.role, self.entry.name, self.session)


def member_id(role: str, name: str, session: bytes) -> str:
    """Under what a node is known: several processes may share the key of a worker, and are told apart."""
    return f"{name}/{session.hex()}" if role == "worker" else name


def most_processes(entry: Entry) -> int:
    """Processes that may share its key: one for each rank, and as many that may be dead."""
    if entry.role != "worker":
        return 1
    return STARTS_PER_RANK * min(MAX_OWN_RANKS, sum(last - first + 1 for first, last in entry.ids))

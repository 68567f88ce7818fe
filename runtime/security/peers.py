"""Other processes, as their envelopes show them: what was opened of each, and whether it is alive or a recording.

A session is known as soon as one of its envelopes was opened, which needs the key. It is *authenticated* when it has
answered this process's challenge, random bytes that are not older than this process: so a recording of an earlier run
is never authenticated. And the answer says when the challenge was heard: what the session sealed before that may be a
recording, so it is not taken, but for what DDS still has of it. What comes before the proof is held, within bounds,
and handed over then. DDS delivers what it retains once and at once, so nothing of it may be dropped only because it
was faster.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security.envelope import EnvelopeHeader
from gradbus.runtime.security.inbound_stream import InboundStream

CHALLENGE_BYTES = 16
CHALLENGE_TOPIC = "train/session"
LEEWAY_S = 2  # what was sealed so shortly before a challenge was heard is taken: processes find each other in any order
MAX_PEERS = 4096
MAX_SOURCES = 1024  # of one session: it has one for each topic
MAX_HELD = 256  # samples of sessions that are not proven yet, all together
MAX_HELD_EACH = 64
MAX_HELD_BYTES = 64 << 20

Release = Callable[[Any, int], None]  # a sample and the handle of the DDS writer that it came from


class _Held(NamedTuple):
    release: Release
    sample: Any
    source: int
    topic: str
    header: EnvelopeHeader


@dataclass(slots=True, eq=False)
class Peer:
    """One session of another process."""

    session: bytes
    authenticated: bool = False
    label: str = ""  # host and process, as announced by it
    participant: bytes = b""  # GUID prefix of its DDS participant, as announced by it
    floor: int = 0  # moment of the session: what it sealed before is old
    retained: dict[str, int] = field(default_factory=dict)  # topic -> oldest counter that DDS may still have
    last_seen_s: float = 0.0
    # By topic and id of the key, with a window each: who was removed has the former key for a while, and one envelope
    # that he makes up with a high counter would keep out all that the session seals with the next one.
    streams: dict[tuple[str, bytes], InboundStream] = field(default_factory=dict)
    sources: set[int] = field(default_factory=set)  # handles of the DDS writers that it speaks through
    held: deque[_Held] = field(default_factory=deque)

    def is_old(self, topic: str, header: EnvelopeHeader) -> bool:
        """Whether an envelope is older than the answered challenge, and not retained by DDS."""
        if header.moment >= self.floor or topic == CHALLENGE_TOPIC:
            return False
        oldest = self.retained.get(topic)
        return oldest is None or header.counter < oldest


class Peers:
    """The sessions that a bus has received envelopes of. Only the receive thread uses it."""

    def __init__(self, own_session: bytes) -> None:
        self.challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self.own = Peer(own_session, authenticated=True)
        self.removed: dict[bytes, None] = {}  # sessions of which nothing is taken any more
        self._peers = {own_session: self.own}
        self._held = 0
        self._held_bytes = 0
        self.dropped: Callable[[str, int], None] = _count_nowhere  # gets why, and how many that were held in vain
        self.on_unauthenticated: Callable[[], None] = _nothing

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def participants(self) -> set[bytes]:
        """Of the sessions that are proven. Any thread may ask."""
        return {peer.participant for peer in list(self._peers.values()) if peer.authenticated and peer.participant}

    def get(self, session: bytes) -> Peer | None:
        """Return a known session; None: no envelope of it was decrypted."""
        return self._peers.get(session)

    def add(self, session: bytes) -> Peer:
        """Add the session of a decrypted envelope."""
        if len(self._peers) >= MAX_PEERS:
            self._forget_one()
        peer = self._peers[session] = Peer(session)
        return peer

    def _forget_one(self) -> None:
        """Make room. Who is forgotten has to prove itself again, and with a new challenge: to the one before there may
        be a recorded answer."""
        others = [peer for peer in self._peers.values() if peer is not self.own]
        oldest = min(others, key=lambda peer: (peer.authenticated, peer.last_seen_s))
        del self._peers[oldest.session]
        self._drop_held(oldest)
        if oldest.authenticated:
            self.challenge = secrets.token_bytes(CHALLENGE_BYTES)

    def remove(self, session: bytes) -> set[int]:
        """Reject a session from now on; returns the handles of the DDS writers that it has used."""
        while len(self.removed) >= MAX_PEERS:
            del self.removed[next(iter(self.removed))]
        self.removed[session] = None
        peer = self._peers.pop(session, None)
        if peer is None:
            return set()
        self._drop_held(peer)
        return peer.sources

    def hold(self, peer: Peer, topic: str, header: EnvelopeHeader, sample: Any, source: int, release: Release) -> None:
        """Keep a sample of a session until that is proven.

        Of recordings of earlier runs it is kept in vain. Where room is needed, the session goes first that was heard
        first: who is alive is proven within milliseconds.

        Raises:
            FrameError: ``unauthenticated``: too much of this session is held already.
        """
        self.on_unauthenticated()
        if len(peer.held) >= MAX_HELD_EACH:
            raise FrameError(
                "unauthenticated", f"a session has sent {MAX_HELD_EACH} samples and not answered the challenge"
            )
        while self._held and (self._held >= MAX_HELD or self._held_bytes + header.size > MAX_HELD_BYTES):
            self._drop_held(next(one for one in self._peers.values() if one.held))
        self._held += 1
        self._held_bytes += header.size
        peer.held.append(_Held(release, sample, source, topic, header))

    def _drop_held(self, peer: Peer) -> None:
        self.dropped("unauthenticated", len(peer.held))
        self._held -= len(peer.held)
        self._held_bytes -= sum(held.header.size for held in peer.held)
        peer.held.clear()

    def authenticate(self, peer: Peer) -> None:
        """Mark a session that has answered the challenge as authenticated, and hand over its held samples."""
        peer.authenticated = True
        while peer.held:
            held = peer.held.popleft()
            self._held -= 1
            self._held_bytes -= held.header.size
            if peer.is_old(held.topic, held.header):
                self.dropped("old", 1)
            else:
                held.release(held.sample, held.source)

    def note(self, peer: Peer) -> None:
        """Note that an envelope of a session was decrypted."""
        peer.last_seen_s = time.monotonic()


def _nothing() -> None:
    pass


def _count_nowhere(why: str, count: int) -> None:
    pass

"""The sessions of other processes, and whether each is alive or a recording.

A session is known as soon as one of its envelopes was decrypted, which needs the key. It is *authenticated* when it has
answered this process's challenge, random bytes that are not older than this process: a recording of an earlier run
never is. The answer tells when the challenge was received: what the session encrypted before that may be a recording,
and is accepted only if its transport still retains it. Samples that come before the answer are held, within bounds, and
handed over then: what is retained arrives once and at once, so none of it may be dropped for being faster.
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
from gradbus.runtime.security.streams import InboundStream
from gradbus.runtime.transport import api
from gradbus.runtime.transport.api import PeerId

CHALLENGE_BYTES = 16
CHALLENGE_TOPIC = "train/session"
LEEWAY_S = 2  # accepted although encrypted so shortly before the answer: processes find each other in any order
MAX_PEERS = 4096
MAX_SOURCES = 1024  # of one session: it has one for each topic
MAX_HELD = 256  # samples of all unauthenticated sessions together
MAX_HELD_EACH = 64
MAX_HELD_BYTES = 64 << 20

Release = Callable[[Any, api.Peer], None]  # a sample and the outlet that it came from


class _Held(NamedTuple):
    release: Release
    sample: Any
    source: api.Peer
    topic: str
    header: EnvelopeHeader


@dataclass(slots=True, eq=False)
class Peer:
    """One session of another process.

    Attributes:
        label: host and process, as announced by it. peer_id: what its transport calls itself, likewise.
        floor: second of the session before which its envelopes are old.
        retained: by topic, the oldest counter that its transport may still have.
        streams: by topic and key id. A removed process has the former key for a while: with a stream for each key, its
            envelope with a high counter cannot have those rejected that the session encrypts with the next key.
        sources: outlets that it sends through.
        held: its samples that wait until it is authenticated.
    """

    session: bytes
    authenticated: bool = False
    label: str = ""
    peer_id: PeerId = b""
    challenge: bytes = b""
    floor: int = 0
    retained: dict[str, int] = field(default_factory=dict)
    last_seen_s: float = 0.0
    streams: dict[tuple[str, bytes], InboundStream] = field(default_factory=dict)
    sources: set[api.Peer] = field(default_factory=set)
    held: deque[_Held] = field(default_factory=deque)

    def is_old(self, topic: str, header: EnvelopeHeader) -> bool:
        """Whether an envelope is older than the answered challenge, and not retained."""
        if header.moment >= self.floor or topic == CHALLENGE_TOPIC:
            return False
        oldest = self.retained.get(topic)
        return oldest is None or header.counter < oldest


class Peers:
    """The sessions that a bus has received envelopes of. Only the receive thread uses it.

    Attributes:
        challenge: random bytes that a session answers to be authenticated.
        removed: sessions whose envelopes are rejected, the newest last.
        dropped: called with a reason and the number of held samples that were dropped for it.
        on_unauthenticated: called for each sample of a session that is not authenticated.
        on_change: called when a session has been authenticated, or one that was is gone.
    """

    def __init__(self, own_session: bytes) -> None:
        self.challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self.own = Peer(own_session, authenticated=True)
        self.removed: dict[bytes, None] = {}
        self._peers = {own_session: self.own}
        self._held = 0
        self._held_bytes = 0
        self.dropped: Callable[[str, int], None] = lambda why, samples: None
        self.on_unauthenticated: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def peer_ids(self) -> set[PeerId]:
        """What the transports of the authenticated sessions call themselves. Thread-safe."""
        return {peer.peer_id for peer in list(self._peers.values()) if peer.authenticated and peer.peer_id}

    def authenticated(self) -> list[Peer]:
        """Return the sessions of other processes that are."""
        return [peer for peer in self._peers.values() if peer.authenticated and peer is not self.own]

    def get(self, session: bytes) -> Peer | None:
        """Return a known session; None: no envelope of it was decrypted."""
        return self._peers.get(session)

    def add(self, session: bytes) -> Peer:
        """Add the session of a decrypted envelope."""
        if len(self._peers) >= MAX_PEERS:
            self._evict_one()
        peer = self._peers[session] = Peer(session)
        return peer

    def _evict_one(self) -> None:
        """Evict the unauthenticated session, or else the authenticated one, that was seen longest ago. An evicted one
        must answer a new challenge: there may be a recorded answer to the one before."""
        others = [peer for peer in self._peers.values() if peer is not self.own]
        oldest = min(others, key=lambda peer: (peer.authenticated, peer.last_seen_s))
        del self._peers[oldest.session]
        self._drop_held(oldest)
        if oldest.authenticated:
            self.challenge = secrets.token_bytes(CHALLENGE_BYTES)
            self.on_change()

    def remove(self, session: bytes) -> set[api.Peer]:
        """Reject a session from now on; returns the outlets that it has used."""
        while len(self.removed) >= MAX_PEERS:
            del self.removed[next(iter(self.removed))]
        self.removed[session] = None
        peer = self._peers.pop(session, None)
        if peer is None:
            return set()
        self._drop_held(peer)
        if peer.authenticated:
            self.on_change()
        return peer.sources

    def hold(
        self, peer: Peer, topic: str, header: EnvelopeHeader, sample: Any, source: api.Peer, release: Release
    ) -> None:
        """Hold a sample of a session until that is authenticated.

        Where room is needed, the samples of the session that was seen first are dropped: a live one is authenticated
        within milliseconds.

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

    def _take_held(self, peer: Peer) -> list[_Held]:
        held = list(peer.held)
        peer.held.clear()
        self._held -= len(held)
        self._held_bytes -= sum(one.header.size for one in held)
        return held

    def _drop_held(self, peer: Peer) -> None:
        self.dropped("unauthenticated", len(self._take_held(peer)))

    def authenticate(self, peer: Peer) -> None:
        """Mark a session that has answered the challenge as authenticated, and hand over its held samples."""
        peer.authenticated = True
        self.on_change()
        for held in self._take_held(peer):
            if peer.is_old(held.topic, held.header):
                self.dropped("old", 1)
            else:
                held.release(held.sample, held.source)

    def mark_seen(self, peer: Peer) -> None:
        """Note that an envelope of a session was decrypted."""
        peer.last_seen_s = time.monotonic()

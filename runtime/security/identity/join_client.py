"""A node's side of joining: finds the controller whose key it knows, and takes in the keys that it is granted.

Pure state machine: bytes and the time come in, bytes go out.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.identity import handshake, key_messages
from gradbus.runtime.security.identity.allow_list import ROLES, Ids, Role
from gradbus.runtime.security.identity.handshake import Secrets, Stamps
from gradbus.runtime.security.identity.join_messages import (
    JOIN_TOPIC,
    MAGIC,
    Beacon,
    JoinHello,
    JoinRefusal,
    JoinWelcome,
    SignedMessage,
    parse,
)
from gradbus.runtime.security.identity.key import NodeKey, public_text
from gradbus.runtime.security.identity.key_epoch import MembershipKeys, RankKeys
from gradbus.runtime.security.streams import InboundStreams, OutboundEnvelope, OutboundStreams, SharedKey
from gradbus.runtime.token_buckets import TokenBucket, TokenBuckets
from gradbus.runtime.transport.api import PEER_ID_BYTES, Peer, PeerId
from gradbus.runtime.transport.channels import is_control_name
from gradbus.runtime.wire.messages import new_incarnation

# A Hello without result is repeated with exponential backoff. A late answer to the Hello before is void then, so the
# interval must come to exceed the time a controller takes to answer a thousand nodes at once.
FIRST_S, LONGEST_S = 0.125, 5.0
# Shortest interval at which a member that lacks a key joins again. Key ids are in clear, so anybody can provoke this:
# the interval doubles each time that it brings no new key, up to a limit.
ASK_S, LONGEST_ASK_S = 2.0, 16.0
OTHERS_S = 10.0  # shortest interval of Hellos to a controller with another key, for its log
SILENT_S = 3.0  # after this silence another start of the controller may have taken over
# While the transport still sees the controller before, a later one gets this time to find it and to stop: a node that
# joined the later one at once would have keys that no other node has.
LATER_S = 1.0
CHECKS_PER_S, CHECKS_AT_ONCE = 100, 200  # signatures of beacons, and as many of answers: 0.15 ms each
# Share of one outlet: a controller has one of its own, which sends one beacon.
WRITER_PER_S, WRITER_AT_ONCE = 2, 8
MAX_BEACONS = 8
MAX_SOURCES = 8
_MAX_WRITERS = 1024


def _always_alive(source: Peer) -> bool:
    return True


@dataclass(slots=True, eq=False)
class AnnouncedController:
    """One controller, with its verified beacon. It may be a recording.

    Attributes:
        sources: outlets that have sent it, the newest last. Anybody can replay a beacon with an outlet of its own and
            close that one: so no single outlet tells whether the controller is there.
        since_s: time of the first beacon. asked_s: time of the last Hello to it.
    """

    beacon: Beacon
    whole: bytes
    since_s: float
    sources: dict[Peer, None] = field(default_factory=dict)
    asked_s: float = float("-inf")

    def add_source(self, source: Peer) -> None:
        """Note one more outlet of this beacon."""
        self.sources.pop(source, None)
        if len(self.sources) >= MAX_SOURCES:
            del self.sources[next(iter(self.sources))]
        self.sources[source] = None

    def is_there(self, alive: Callable[[Peer], bool]) -> bool:
        """Whether the transport still sees one of its outlets."""
        return any(map(alive, self.sources))


class Beacons:
    """The announced controllers, at most :data:`MAX_BEACONS`. Some may have another key than the expected one."""

    def __init__(self, job: str, pinned: bytes) -> None:
        """``pinned``: public key that the controller must have."""
        self._job = job
        self._pinned = pinned
        # By session and key: everybody can read a session, and announce it with another key.
        self._announced: dict[tuple[bytes, bytes], AnnouncedController] = {}
        self._checks = TokenBucket(CHECKS_PER_S, CHECKS_AT_ONCE)
        self._writers = TokenBuckets(WRITER_PER_S, WRITER_AT_ONCE, _MAX_WRITERS)  # by outlet

    def __iter__(self) -> Iterator[AnnouncedController]:
        return iter(self._announced.values())

    def get(self, session: bytes) -> AnnouncedController | None:
        """Return the controller of a session that has the expected key."""
        return self._announced.get((session, self._pinned))

    def receive(self, data: memoryview, source: Peer, joined: bytes | None, now_s: float) -> AnnouncedController | None:
        """Verify and note a beacon. ``joined``: session of the node's current controller. None: it is a repetition.

        Raises:
            FrameError: the beacon is rejected; ``reason`` is the name to count it by.
        """
        signed = parse(data)
        beacon = signed.message
        if not isinstance(beacon, Beacon):
            raise FrameError("join", "no beacon on the topic of beacons")
        known = self._announced.get((beacon.session, beacon.public))
        if known is not None and known.whole == signed.whole:
            known.add_source(source)
            return None
        if not self._writers.of(source).take(now_s) or not self._checks.take(now_s):
            raise FrameError("busy", "more beacons came than are checked in a second")
        handshake.check(self._job, signed, beacon.public)
        if len(self._announced) >= MAX_BEACONS:
            self._make_room(joined)
        made = self._announced[beacon.session, beacon.public] = AnnouncedController(beacon, signed.whole, now_s)
        made.add_source(source)
        return made

    def _make_room(self, joined: bytes | None) -> None:
        """Drop one controller: another key before the expected one, an earlier start before a later one."""
        spare = [key for key in self._announced if key != (joined, self._pinned)]
        del self._announced[min(spare, key=lambda key: (key[1] == self._pinned, self._announced[key].beacon.start))]


@dataclass(slots=True, eq=False)
class _Handshake:
    """A pending Hello, or the one with which this node has joined.

    Attributes:
        private: ephemeral private key; dropped after use, for forward secrecy.
        controller, start: session and start number of the controller.
        secrets: result of the exchange, until the keys derived from it replace it.
        down: decrypts the key grant that concludes the handshake.
    """

    hello: SignedMessage
    private: X25519PrivateKey | None
    controller: bytes
    start: int
    at_s: float
    secrets: Secrets | None = None
    down: InboundStreams | None = None


class JoinClient:
    """The join state machine of one start of a node. Only the receive thread uses it, except for :meth:`seal`.

    Attributes:
        session: random id of this start. refusal: why the controller refuses this node; empty: it has not.
        misconfiguration: hint at controllers with another key than the expected one; empty: there are none.
        keys: the granted keys; None until the node was admitted for the first time.
        ranks: the keys of a job of ranks. ids: ranks that this node may take.
        lacks_key: an envelope was received under a key that this node does not have: it asks for it.
        own: what the transport of this process calls itself. controller_peer: what that of the controller does, as
            announced by it; empty until admission.
        on_removed: called with the sessions of removed processes.
        on_joined: called when a start of the controller has admitted or refused this node.
    """

    def __init__(self, job: str, key: NodeKey, pinned: bytes, role: Role) -> None:
        """``pinned``: public key that the controller must have."""
        self.job = job
        self.key = key
        self.pinned = pinned
        self.role: Role = role
        self.session = secrets.token_bytes(envelope.SESSION_BYTES)
        self.start = new_incarnation()
        self.own: PeerId = bytes(PEER_ID_BYTES)
        self.controller_peer: PeerId = b""
        self.refusal = ""
        self.misconfiguration = ""
        self.keys: MembershipKeys | None = None
        self.ranks = RankKeys(job)
        self.ranks.on_lack = self.note_lack
        self.ids: Ids = ()
        self.lacks_key = False
        self.on_removed: Callable[[set[bytes]], None] = lambda sessions: None
        self.on_joined: Callable[[], None] = lambda: None
        self._beacons = Beacons(job, pinned)
        self._stamps = Stamps(job, key)
        self._asked: _Handshake | None = None
        self._joined: _Handshake | None = None
        self._attempts = self._in_vain = 0
        self._jitter = 1.0  # spreads the Hellos of nodes that started together
        self._ask_s = ASK_S
        self._newest = (b"", -1)  # controller and epoch of the newest key
        self._last_seen_s = self._joined_s = 0.0
        self._checks = TokenBucket(CHECKS_PER_S, CHECKS_AT_ONCE)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is pending, so that :meth:`tick` should be called often."""
        return self._asked is not None

    @property
    def epoch(self) -> int:
        """Number of the newest granted key epoch; -1: there is none."""
        return self._newest[1]

    @property
    def _again_s(self) -> float:
        return self._jitter * min(LONGEST_S, FIRST_S * 2.0 ** min(self._in_vain, 8))

    def note_lack(self) -> None:
        """Note that an envelope was received under a key that this node does not have."""
        self.lacks_key = True

    # Encryption

    def seal(self, topic: str, parts: Sequence[Any]) -> OutboundEnvelope | None:
        """Return an envelope for the controller; None: this node has not joined, or is an observer."""
        keys = self.keys
        return None if keys is None or self.role == "observer" else keys.outgoing.envelope(topic, parts)

    def open(self, topic: str, data: Any, now_s: float) -> memoryview | None:
        """Decrypt an envelope of the controller to all or to this node. None: it is for another node.

        Raises:
            FrameError: with ``reason`` one of those of an envelope, ``no key``, ``signature``, ``level``.
        """
        view = memoryview(data).cast("B")
        header = envelope.parse(view)
        plain: memoryview | None = None
        if header.level == envelope.PSK:
            raise envelope.other_level()
        if header.level == envelope.MEMBER:
            if self.keys is not None and is_control_name(topic):
                plain = self.keys.open_own(topic, header, view)
        elif self.keys is None:
            raise FrameError("no key", "an envelope for members, and this node is none yet")
        elif not self.keys.has(header):
            self.note_lack()
            raise FrameError("no key", "an envelope for members under a key that this node does not have")
        else:
            plain = self.keys.open_group(topic, header, view)
        if plain is not None:
            self._last_seen_s = now_s
        return plain

    # Joining

    def receive_beacon(self, data: memoryview, source: Peer, now_s: float) -> list[bytes]:
        """Process a beacon; returns the messages to send. ``source``: the outlet that it came from.

        Raises:
            FrameError: the message is rejected; ``reason`` is the name to count it by.
        """
        joined = None if self._joined is None else self._joined.controller
        announced = self._beacons.receive(data, source, joined, now_s)
        if announced is None:
            return []
        asked = self._asked
        if announced.beacon.public != self.pinned:
            self.misconfiguration = (
                f"a controller of this job has the key {public_text(announced.beacon.public)}, and this node expects "
                f"{public_text(self.pinned)}: compare bus.controller_key with 'gradbus keys show' there"
            )
        elif joined is None and asked and asked.secrets is None and announced.beacon.start > asked.start:
            self._asked = None  # ask the newer one at once: the beacon before may be a recording
        return self._ask(now_s)

    def _take_check(self, now_s: float) -> None:
        if not self._checks.take(now_s):
            raise FrameError("busy", "more signatures came than are checked in a second")

    def _ask(self, now_s: float, alive: Callable[[Peer], bool] = _always_alive) -> list[bytes]:
        """Return a Hello to one announced controller, if one is due."""
        if self.refusal or (self._asked is not None and now_s - self._asked.at_s < self._again_s):
            return []
        joined = None if self._joined is None else self._beacons.get(self._joined.controller)
        candidates = [
            one
            for one in self._beacons
            if now_s - one.asked_s > (self._again_s if one.beacon.public == self.pinned else OTHERS_S)
            and (self._joined is None or self._may_be_next(one, joined, now_s, alive))
            and one.is_there(alive)
        ]
        if not candidates:
            return []
        # Every other Hello goes to the newest start: the others may be recordings, and a Hello can be lost.
        to_newest = self._in_vain % 2 == 0
        target = min(
            candidates,
            key=lambda one: (one.beacon.public != self.pinned, 0.0 if to_newest else one.asked_s, -one.beacon.start),
        )
        target.asked_s = now_s
        self._attempts += 1
        private = X25519PrivateKey.generate()
        hello = JoinHello(
            self.session,
            target.beacon.session,
            self.start,
            self._attempts,
            secrets.token_bytes(handshake.NONCE_BYTES),
            private.public_key().public_bytes_raw(),
            self.key.public,
            self.pinned,
            ROLES.index(self.role),
            self.key.name,
        )
        packed = self._stamps.stamped(handshake.signed(self.job, self.key, hello), self.pinned)
        if target.beacon.public == self.pinned:  # no answer is awaited from others
            self.lacks_key = False
            self._in_vain += 1
            self._jitter = 1.0 + secrets.randbelow(256) / 512
            beacon = target.beacon
            self._asked = _Handshake(parse(memoryview(packed)), private, beacon.session, beacon.start, now_s)
        return [packed]

    def _may_be_next(
        self, one: AnnouncedController, joined: AnnouncedController | None, now_s: float, alive: Callable[[Peer], bool]
    ) -> bool:
        """Whether a node that has joined may send a Hello to this controller."""
        if one is joined:
            return self.lacks_key and now_s - self._joined_s > self._ask_s
        is_silent = now_s - self._last_seen_s > SILENT_S
        if joined is not None and joined.is_there(alive):
            is_later = one.beacon.start > joined.beacon.start  # the others are earlier starts, or recordings of them
            return is_silent and is_later and now_s - one.since_s > LATER_S
        return is_silent or joined is not None

    def receive(self, data: memoryview, now_s: float) -> list[bytes]:
        """Process one message of the join topic; returns the answers to send.

        Raises:
            FrameError: the message is rejected; ``reason`` is the name to count it by.
        """
        if data[:4] != MAGIC:
            return self._receive_keys(data, now_s)
        signed = parse(data)
        match signed.message:
            case JoinWelcome(to=self.session, session=session) if self._asked and self._asked.controller == session:
                return self._receive_welcome(signed, self._asked, now_s)
            case JoinRefusal(to=self.session) as refusal:
                digests = {hashlib.sha256(one.hello.whole).digest() for one in (self._asked, self._joined) if one}
                if refusal.hello in digests:
                    self._stamps.check(signed, self.pinned)
                    self._take_check(now_s)
                    handshake.check(self.job, signed, self.pinned)
                    self.refusal, self._asked = refusal.why, None
                    self.on_joined()
            case _:
                pass  # for others
        return []

    def _receive_welcome(self, signed: SignedMessage, asked: _Handshake, now_s: float) -> list[bytes]:
        if asked.private is None:
            raise FrameError("replay", "a second welcome to one hello")
        self._stamps.check(signed, self.pinned, asked.hello)  # before the bucket: forgeries must not use it up
        self._take_check(now_s)
        confirm, asked.secrets = handshake.accept(self.job, self.key, asked.hello, asked.private, signed)
        asked.private = None
        asked.down = InboundStreams(SharedKey(self.job, envelope.MEMBER, 0, asked.secrets.down), asked.controller)
        asked.at_s = now_s
        return [confirm]

    def _receive_keys(self, data: memoryview, now_s: float) -> list[bytes]:
        """Process a key grant of the controller, encrypted with a key of this node; returns the acknowledgement."""
        view = memoryview(data).cast("B")
        header = envelope.parse(view)
        asked, keys = self._asked, self.keys
        is_conclusion = is_other = False
        if asked and asked.down and asked.secrets and header.key_id == asked.down.key.key_id:
            message = key_messages.parse(asked.down.open(JOIN_TOPIC, header, view))
            is_conclusion, is_other = True, keys is None or keys.controller != asked.controller
            keys = self._conclude(asked, asked.secrets, asked.down, now_s)
        elif keys is not None and (plain := keys.open_own(JOIN_TOPIC, header, view)) is not None:
            message = key_messages.parse(plain)
        else:
            return []  # for others
        self._last_seen_s = now_s
        newest, self._newest = self._newest, (keys.controller, message.epoch)
        if newest != self._newest:
            self._ask_s = ASK_S
        elif is_conclusion:
            self._ask_s = min(LONGEST_ASK_S, 2 * self._ask_s)
        if isinstance(message, key_messages.KeyGrant):
            keys.take(message, now_s)
            self.controller_peer = message.peer_id
        elif isinstance(message, key_messages.RankKeyGrant):
            self.ids = message.ids
            self.on_removed(set(message.removed) - {self.session})
            self.ranks.take(SharedKey(self.job, envelope.GROUP, message.epoch, message.secret), keys.controller, now_s)
        else:
            raise FrameError("join", "the controller acknowledges a key, which only members do")
        self.keys = keys
        if is_other:
            self.on_joined()
        ack = key_messages.KeyAck(message.epoch, self.own)
        return [keys.outgoing.seal(JOIN_TOPIC, (key_messages.pack(ack),))]

    def _conclude(self, asked: _Handshake, shared: Secrets, down: InboundStreams, now_s: float) -> MembershipKeys:
        """Return the keys of this node with the pairwise ones of a handshake."""
        keys = self.keys
        if keys is None or keys.controller != asked.controller:
            keys = MembershipKeys(self.job, self.pinned, asked.controller)
        up = SharedKey(self.job, envelope.MEMBER, 0, shared.up)
        keys.rekey(OutboundStreams(up, self.session), down, now_s)
        asked.secrets = asked.down = None
        self._joined, self._asked, self._in_vain, self._joined_s = asked, None, 0, now_s
        return keys

    def tick(self, now_s: float, alive: Callable[[Peer], bool] = _always_alive) -> list[bytes]:
        """Advance timers; returns the messages to send. ``alive``: whether the outlet of a beacon is still seen."""
        if self._asked is not None and now_s - self._asked.at_s >= self._again_s:
            self._asked = None
        if self.keys is not None:
            self.keys.tick(now_s)
            self.ranks.tick(now_s)
        return self._ask(now_s, alive)

"""The controller's side of joining: admits the nodes of the allow list and holds the keys shared with each.

Pure state machine: bytes and the time come in, bytes go out. Cheap checks come first, and a peer that cannot sign with
a key of the allow list leaves no state behind but a counter.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.envelope import EnvelopeHeader
from gradbus.runtime.security.identity import handshake, key_messages
from gradbus.runtime.security.identity.allow_list import ROLES, AllowList, Entry, ids_text
from gradbus.runtime.security.identity.controller_signatures import BroadcastSigner
from gradbus.runtime.security.identity.duplicate_controllers import EarlierControllers
from gradbus.runtime.security.identity.handshake import Secrets, Stamps
from gradbus.runtime.security.identity.join_messages import (
    JOIN_TOPIC,
    MAGIC,
    Beacon,
    JoinConfirm,
    JoinHello,
    JoinRefusal,
    SignedMessage,
    parse,
)
from gradbus.runtime.security.identity.key import NodeKey, public_text
from gradbus.runtime.security.identity.key_epoch import GRACE_S, KeyRotation, RankKeys
from gradbus.runtime.security.rate_limits import AuditEvents
from gradbus.runtime.security.streams import InboundStreams, OutboundEnvelope, OutboundStreams, SharedKey
from gradbus.runtime.token_buckets import TokenBucket, TokenBuckets
from gradbus.runtime.transport.api import PEER_ID_BYTES, PeerId
from gradbus.runtime.wire.messages import new_incarnation

MAX_RIVALS = 4  # processes with the key of a member that are remembered
SILENT_S = 5.0  # after this silence a member may be replaced by a process with an earlier start number
LEADS_S = 10.0  # after so long with members this controller keeps the job against earlier starts
CHECKS_PER_S, CHECKS_AT_ONCE = 500, 1000  # signatures of nodes on the list: 0.15 ms each
# Each key has a share of its own, per process that may use it: a compromised node, or recordings of its messages,
# cannot use up the checks of the others.
SHARE_PER_S, SHARE_AT_ONCE = 4, 16
OTHERS_PER_S, OTHERS_AT_ONCE = 50, 100  # signatures of keys that are not on the list
DUPLICATES_PER_S, DUPLICATES_AT_ONCE = 20, 50  # signatures of other controllers with this key
REFUSALS_PER_S, REFUSALS_AT_ONCE = 20, 50  # to unknown keys, and as many to known ones
_MAX_SHARES = 8192  # an allow list has up to 4096 nodes
PENDING_S = 5.0  # so long a Welcome waits for its Confirm
MAX_PENDING = 1024
MAX_PENDING_EACH = 4  # of one name: recordings of its earlier starts may be among them
MAX_OWN_RANKS = 1024  # as many as a group has at most
STARTS_PER_RANK = 2  # processes of a worker's key at a time: after a crash the earlier ones are not known to be dead


@dataclass(slots=True, eq=False)
class PendingHandshake:
    """A Hello that the controller has answered with a Welcome; the Confirm is outstanding.

    Attributes:
        was_checked: a Confirm with its tag was received, and its signature checked.
    """

    entry: Entry
    signed: SignedMessage
    hello: JoinHello
    secrets: Secrets
    welcome_signature: bytes
    until_s: float
    was_checked: bool = False


class PendingHandshakes(dict[tuple[str, bytes], PendingHandshake]):
    """The pending handshakes, by name and session: a node chooses its session id, and could choose that of another."""

    def add(self, pending: PendingHandshake, each: int) -> None:
        """Add a handshake, of ``each`` at most with one name. The earliest start of the name makes room: it is dead."""
        key = pending.hello.name, pending.hello.session
        self.pop(key, None)
        same = [one for one in self if one[0] == key[0]]
        if len(same) >= each:
            del self[min(same, key=lambda one: self[one].hello.start)]
        elif len(self) >= MAX_PENDING:
            del self[next(iter(self))]
        self[key] = pending


@dataclass(slots=True, eq=False)
class AdmittedNode:
    """A node that the controller has admitted.

    Attributes:
        incoming, outgoing: streams under its pairwise keys.
        peer_id: what its transport calls itself, as announced by it.
        rivals: sessions of other processes with its key and an earlier start number, and when each asked first.
    """

    entry: Entry
    hello: SignedMessage
    session: bytes
    start: int
    attempt: int
    incoming: InboundStreams
    outgoing: OutboundStreams
    last_seen_s: float
    peer_id: PeerId = b""
    rivals: dict[bytes, float] = field(default_factory=dict)

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


@dataclass(slots=True, eq=False)
class _Inbound:
    """The streams under one pairwise key of a member; ``until_s``: until when its envelopes are accepted."""

    member: AdmittedNode
    streams: InboundStreams
    until_s: float = float("inf")


class Admission:
    """The join state machine of one start of a controller. Only the receive thread uses it, except for :meth:`seal`.

    Attributes:
        session: random id of this start. refusal: why this controller must stop; empty: it may run.
        dropped: counts of rejected messages, by reason.
        ranks: in a job of ranks, the keys that this process itself encrypts with; None: a federated run.
        own: what the transport of this process calls itself.
        on_removed: called with the sessions of removed processes. on_refused: called when :attr:`refusal` is set.
    """

    def __init__(
        self,
        job: str,
        key: NodeKey,
        allowed: AllowList,
        *,
        now_s: float,
        label: str = "",
        ranks: RankKeys | None = None,
    ) -> None:
        """``now_s``: time of this start on the clock of all other calls. ``label``: host and process, as a duplicate
        controller reports them."""
        self.job = job
        self.key = key
        self.session = secrets.token_bytes(envelope.SESSION_BYTES)
        self.start = new_incarnation()
        self.own: PeerId = bytes(PEER_ID_BYTES)
        self.refusal = ""
        self.dropped: Counter[str] = Counter()
        self.events = AuditEvents()
        self.signer = BroadcastSigner(job, key, self.session)
        self.allowed = allowed
        self.members: dict[str, AdmittedNode] = {}  # by member id
        self._inbound: dict[bytes, _Inbound] = {}  # by key id
        self._label = label
        self._pending = PendingHandshakes()
        self._stamps = Stamps(job, key)
        self._checks = TokenBucket(CHECKS_PER_S, CHECKS_AT_ONCE)
        self._shares = TokenBuckets(SHARE_PER_S, SHARE_AT_ONCE, _MAX_SHARES)
        self._others = TokenBucket(OTHERS_PER_S, OTHERS_AT_ONCE)
        self._duplicate_checks = TokenBucket(DUPLICATES_PER_S, DUPLICATES_AT_ONCE)
        self._refusals = TokenBuckets(REFUSALS_PER_S, REFUSALS_AT_ONCE, 2)
        self._leads_since_s = now_s
        self._duplicates = EarlierControllers(job, key, self.session, self.start, self._stamps)
        self.rotation = KeyRotation(job, self.session, now_s)
        self.ranks = ranks
        self.on_removed: Callable[[set[bytes]], None] = lambda sessions: None
        self.on_refused: Callable[[], None] = lambda: None
        self._unsent: list[bytes] = []  # refusals that the next tick sends
        self._removed: deque[bytes] = deque(maxlen=key_messages.MAX_REMOVED)
        # Processes on the controller's own machine may share its key; all but one of them join like any node.
        self._own = Entry(key.name, "worker", key.public, ((0, MAX_OWN_RANKS - 1),))
        if ranks is not None:
            ranks.take(self.group.key, self.session, now_s)

    @property
    def peer_ids(self) -> set[PeerId]:
        """What the members' transports call themselves, as announced by them. Thread-safe."""
        return {member.peer_id for member in list(self.members.values()) if member.peer_id}

    @property
    def group(self) -> OutboundStreams:
        """The outbound streams under the group key of the current epoch."""
        return self.rotation.current

    @cached_property
    def beacon(self) -> bytes:
        """The signed beacon of this controller."""
        return handshake.signed(self.job, self.key, Beacon(self.session, self.start, self.key.public))

    @property
    def is_busy(self) -> bool:
        """Whether an answer is pending, so that :meth:`tick` should be called often."""
        return bool(self._pending) or self.rotation.next is not None or self._duplicates.is_busy

    # Encryption

    def seal(self, topic: str, parts: Sequence[Any], to: int | None) -> OutboundEnvelope | None:
        """Return an envelope for all members, or for the node of client ``to``; None: that node is no member.

        Ranks use ``SessionCipher`` alone: two counters under one key would repeat a nonce.
        """
        if self.ranks is not None:
            raise RuntimeError("a job of ranks encrypts with SessionCipher alone: a nonce would be used twice")
        if to is None:
            if topic != key_messages.MODELS:
                parts = self.signer.signed(topic, parts)
            return self.group.envelope(topic, parts)
        return self.seal_for(topic, parts, self.allowed.owner_of(to) or "")

    def seal_for(self, topic: str, parts: Sequence[Any], node: str) -> OutboundEnvelope | None:
        """Return an envelope for a node; None: it is no member."""
        member = self.members.get(node)
        return None if member is None else member.outgoing.envelope(topic, parts)

    def open(self, topic: str, data: Any, now_s: float) -> tuple[memoryview, Entry] | None:
        """Decrypt an envelope of a member; returns sample and member. None: the controller's own envelope.

        Raises:
            FrameError: see :meth:`.InboundStreams.open`, and ``other level``, ``no key``.
        """
        opened = self._open(topic, data, now_s)
        return None if opened is None else (opened[0], opened[1].entry)

    def _open(self, topic: str, data: Any, now_s: float) -> tuple[memoryview, AdmittedNode] | None:
        view = memoryview(data).cast("B")
        header = envelope.parse(view)
        if header.session == self.session:
            return None
        inbound = self._inbound_of(header, now_s)
        plain = inbound.streams.open(topic, header, view)
        inbound.member.last_seen_s = now_s
        return plain, inbound.member

    def _inbound_of(self, header: EnvelopeHeader, now_s: float) -> _Inbound:
        if header.level == envelope.PSK:
            raise envelope.other_level()
        known = self._inbound.get(header.key_id)
        if known is None or now_s > known.until_s:
            raise FrameError("no key", "an envelope of a process that has not joined, or was made before it rejoined")
        return known

    # The handshake

    def receive(self, data: memoryview, now_s: float) -> list[bytes]:
        """Process one message of the join topic; returns the answers to send.

        Raises:
            FrameError: the message is rejected; ``reason`` is the name to count it by.
        """
        if data[:4] != MAGIC:
            return self._receive_ack(data, now_s)
        if self.refusal:
            return []
        signed = parse(data)
        match signed.message:
            # Duplicate controllers always get an answer. Nodes wait, and repeat their Hello, while an earlier
            # controller may be alive.
            case JoinHello(controller=self.session) as hello if ROLES[
                hello.role
            ] == "controller" or not self._duplicates.holds_up(now_s):
                return self._receive_hello(signed, hello, now_s)
            case JoinConfirm(controller=self.session) as confirm if not self._duplicates.holds_up(now_s):
                return self._receive_confirm(signed, confirm, now_s)
            case JoinRefusal(to=self.session) as refusal if self._may_yield(now_s) and self._duplicates.is_answer(
                refusal
            ):
                self._stamps.check(signed, self.key.public)
                self._check(signed, self.key.public, self._duplicate_checks, now_s)
                self.refusal = refusal.why
                self._duplicates.stop()
                self.on_refused()
            case Beacon(public=self.key.public) as beacon if self._may_yield(now_s) and self._duplicates.is_news(
                beacon, now_s
            ):
                self._check(signed, self.key.public, self._duplicate_checks, now_s)
                return [self._duplicates.ask(beacon, now_s)]
            case _:
                pass  # for others
        return []

    def _receive_ack(self, data: memoryview, now_s: float) -> list[bytes]:
        opened = self._open(JOIN_TOPIC, data, now_s)
        if opened is not None:
            plain, member = opened
            message = key_messages.parse(plain)
            if isinstance(message, key_messages.KeyAck):
                self.rotation.acknowledge(member.id, message.epoch)
                member.peer_id = message.peer_id
        return self.tick(now_s)

    def _check(self, signed: SignedMessage, public: bytes, bucket: TokenBucket, now_s: float) -> None:
        self._take(bucket, now_s)
        handshake.check(self.job, signed, public)

    def _take(self, bucket: TokenBucket, now_s: float) -> None:
        if not bucket.take(now_s):
            raise FrameError("busy", "more signatures came than are checked in a second")

    def _share_of(self, public: bytes) -> TokenBucket:
        """Return the token bucket of a key of the allow list, or of this controller's own."""
        entry = self._own if public == self.key.public else self.allowed.of_key(public)
        return self._shares.of(public, 1 if entry is None else most_processes(entry))

    def _is_known(self, public: bytes) -> bool:
        return public == self.key.public or self.allowed.of_key(public) is not None

    def _check_hello(self, signed: SignedMessage, hello: JoinHello, now_s: float) -> None:
        """Check that the holder of the key in a Hello has sent it. A known key must show a stamp first, which is cheap:
        so only Hellos of its holder, and recordings of them, use up its share.

        Raises:
            FrameError: ``stamp``, ``signature``: it is forged. ``busy``: no check is left.
        """
        if not self._is_known(hello.public) or hello.pinned != self.key.public:
            # A node that expects another controller makes no stamp for this one.
            self._check(signed, hello.public, self._others, now_s)
            return
        self._stamps.check(signed, hello.public)
        self._take(self._share_of(hello.public), now_s)
        self._check(signed, hello.public, self._checks, now_s)

    def _may_yield(self, now_s: float) -> bool:
        """Whether an earlier live start may take the job. Not once this one has led it for a while: an earlier one that
        shows up then was suspended, and its members are here."""
        return not self.members or now_s - self._leads_since_s < LEADS_S

    def _receive_hello(self, signed: SignedMessage, hello: JoinHello, now_s: float) -> list[bytes]:
        known = self.members.get(member_id(ROLES[hello.role], hello.name, hello.session))
        waiting = self._pending.get((hello.name, hello.session))
        newest = 0 if waiting is None else waiting.hello.attempt
        if known is not None and known.session == hello.session:
            newest = max(newest, known.attempt)
        if hello.attempt <= newest:
            raise FrameError("replay", f"a hello of {hello.name} that was received before")
        self._check_hello(signed, hello, now_s)
        is_own = self.ranks is not None and ROLES[hello.role] == "worker" and hello.public == self.key.public
        entry = self._own if is_own else self.allowed.get(hello.name)
        why = self._refusal_reason(hello, entry, known, now_s)
        if entry is None or why:
            return self._refuse(signed, hello, why, now_s)
        if known is not None and self._may_be_gone(known, hello, now_s):
            return []  # it asks again
        nonce = secrets.token_bytes(handshake.NONCE_BYTES)
        welcome, shared = handshake.answer(
            self.job, self.key, signed, session=self.session, start=self.start, epoch=self.group.key.epoch, nonce=nonce
        )
        pending = PendingHandshake(entry, signed, hello, shared, welcome[-64:], now_s + PENDING_S)
        self._pending.add(pending, max(MAX_PENDING_EACH, most_processes(entry)))
        return [self._stamps.stamped(welcome, hello.public, signed)]

    def _refusal_reason(self, hello: JoinHello, entry: Entry | None, known: AdmittedNode | None, now_s: float) -> str:
        """Return why this node is refused; empty: it is admitted."""
        role = ROLES[hello.role]
        if role == "controller" and hello.public == self.key.public:
            return f"the job is held by the controller {self._label}"
        if entry is None:
            return f"{hello.name} is not on the allow list of the controller"
        if entry.public != hello.public:
            return f"the allow list of the controller has another key of {hello.name}, id {entry.public[:4].hex()}"
        if entry.role != role or role == "controller":
            return f"{hello.name} is on the allow list as {entry.role}, and wants to join as {role}"
        if role == ("worker" if self.ranks is None else "client"):
            jobs = ("a federated run, which has no ranks", "a job of ranks, which has no clients")
            return f"{hello.name} wants to join as {role}, and this is {jobs[self.ranks is not None]}"
        if hello.pinned != self.key.public:
            return f"{hello.name} expects another key of the controller, here it is {public_text(self.key.public)}"
        if (
            known is not None
            and known.session != hello.session
            and hello.start <= known.start
            and known.last_seen_s > known.rivals.get(hello.session, now_s)
            and now_s - known.last_seen_s < SILENT_S
        ):
            return f"{hello.name} has joined with a process that was started later: one process, one key"
        return ""

    @staticmethod
    def _may_be_gone(known: AdmittedNode, hello: JoinHello, now_s: float) -> bool:
        """Return whether a node waits for now: it has an earlier start number than the process that its key is in, of
        which nothing has come since it asked. A process that is started again a moment after it was killed, by a clock
        that was set back, is no second one: it is admitted when the other one has been silent for so long."""
        if known.session == hello.session or hello.start > known.start or now_s - known.last_seen_s >= SILENT_S:
            return False
        if hello.session not in known.rivals:
            known.rivals[hello.session] = now_s
            while len(known.rivals) > MAX_RIVALS:
                del known.rivals[next(iter(known.rivals))]
        return True

    def _refuse(self, signed: SignedMessage, hello: JoinHello, why: str, now_s: float) -> list[bytes]:
        self.dropped["refused"] += 1
        known = self._is_known(hello.public)
        self.events.refused_limited(hello.name, why, known=known, now_s=now_s)
        return [self._refusal_to(signed, why)] if self._refusals.of(known).take(now_s) else []

    def refuse_sender(self, entry: Entry, client_id: int, now_s: float) -> None:
        """Refuse a member that sends as a client that its line of the list does not have: else it would wait for ever
        for an answer. Within the limits of the audit events, as each of its messages comes here."""
        ids = ids_text(entry.ids) or "none"
        why = (
            f"{entry.name} sends as client {client_id}, and the allow list of the controller gives it "
            f"{ids if len(ids) <= 80 else f'{ids[:80]}...'}"
        )
        member = self.members.get(entry.name)
        if self.events.refused_limited(entry.name, why, known=True, now_s=now_s) and member is not None:
            self._unsent.append(self._refusal_to(member.hello, why))

    def _refusal_to(self, asked: SignedMessage, why: str) -> bytes:
        hello = asked.message
        assert isinstance(hello, JoinHello)
        refusal = JoinRefusal(hello.session, self.session, hashlib.sha256(asked.whole).digest(), why)
        return self._stamps.stamped(handshake.signed(self.job, self.key, refusal), hello.public)

    def _receive_confirm(self, signed: SignedMessage, confirm: JoinConfirm, now_s: float) -> list[bytes]:
        waiting = [one for (_, session), one in self._pending.items() if session == confirm.session]
        if not waiting:
            raise FrameError("replay", "a confirm that answers no pending handshake")
        # Before any costly check: only the answered node and the controller can compute the tag.
        pending = next((one for one in waiting if hmac.compare_digest(one.secrets.tag, confirm.tag)), None)
        if pending is None:
            raise FrameError("signature", "a confirm that was made without the keys of its exchange")
        # The tag can be read on the wire: forgeries that copy it use up the share of this node alone.
        if pending.was_checked:
            self._take(self._share_of(pending.hello.public), now_s)
        pending.was_checked = True
        handshake.check_confirm(self.job, signed, pending.signed, pending.secrets, pending.welcome_signature)
        del self._pending[pending.hello.name, pending.hello.session]
        return self._admit(pending, now_s)

    def _admit(self, pending: PendingHandshake, now_s: float) -> list[bytes]:
        hello, entry = pending.hello, pending.entry
        up = SharedKey(self.job, envelope.MEMBER, 0, pending.secrets.up)
        down = SharedKey(self.job, envelope.MEMBER, 0, pending.secrets.down)
        member = AdmittedNode(
            entry,
            pending.signed,
            hello.session,
            hello.start,
            hello.attempt,
            InboundStreams(up, hello.session),
            OutboundStreams(down, self.session),
            now_s,
        )
        known = self.members.get(member.id)
        is_same = known is not None and known.session == hello.session  # the same process with new keys
        if not self.members:
            self._leads_since_s = now_s
        answers = []
        if known is not None:
            self._drop_keys(known)
            if is_same:
                self._inbound[known.incoming.key.key_id] = _Inbound(member, known.incoming, now_s + GRACE_S)
            else:  # the replaced process may still run: it must stop
                why = f"{entry.name} has joined with another process: one process, one key"
                answers.append(self._refusal_to(known.hello, why))
        self._inbound[up.key_id] = _Inbound(member, member.incoming)
        self.members[member.id] = member
        if not is_same:
            self.events.joined(entry.name, entry.role)
        if entry.role == "worker" and known is None:
            answers += self._make_room(entry)
        return answers + [self._grant(member, streams) for streams in self.rotation.keys_for(member.id)]

    def _make_room(self, entry: Entry) -> list[bytes]:
        """Drop the earliest process of a node with too many: as a rule that one is dead."""
        same = [member for member in self.members.values() if member.entry.name == entry.name]
        if len(same) <= most_processes(entry):
            return []
        oldest = min(same, key=lambda member: member.start)
        self._drop(oldest)
        return [self._refusal_to(oldest.hello, f"{entry.name} has joined with more processes than it has ranks")]

    def _drop(self, member: AdmittedNode) -> None:
        del self.members[member.id]
        self._drop_keys(member)

    def _drop_keys(self, member: AdmittedNode) -> None:
        self._inbound = {key_id: one for key_id, one in self._inbound.items() if one.member is not member}

    def _grant(self, member: AdmittedNode, group: OutboundStreams) -> bytes:
        """Return the key grant of an epoch for one member, encrypted."""
        key = group.key
        message: key_messages.KeyMessage
        if self.ranks is not None:
            message = key_messages.RankKeyGrant(key.epoch, key.secret, member.entry.ids, tuple(self._removed))
        else:
            # Of a topic that is retained, all that the transport may still have counts: more than the newest ones by
            # counter, as a write that is refused has used one up.
            last, oldest = group.last, group.retained
            commands, models, controls = (
                oldest[topic] - 1 if topic in oldest else last.get(topic, 0) for topic in key_messages.TOPICS
            )
            signed = max(0, self.signer.last_of.get(key_messages.COMMANDS, 0) - 1), self.signer.last
            floors = commands, models, controls
            message = key_messages.KeyGrant(key.epoch, key.secret, floors, signed, self.own)
        return member.outgoing.seal(JOIN_TOPIC, (key_messages.pack(message),))

    # Changes of the allow list, and time

    def allow(self, allowed: AllowList, now_s: float) -> list[bytes]:
        """Apply a new allow list: members that are not on it as before are refused, and a new key epoch begins."""
        self.allowed = allowed
        self._shares.clear()
        gone = [member for member in self.members.values() if not self._is_allowed(member.entry)]
        for key in [key for key, one in self._pending.items() if not self._is_allowed(one.entry)]:
            del self._pending[key]
        answers = []
        for member in gone:
            self._drop(member)
            why = f"{member.entry.name} has been taken off the allow list of the controller, or is another there"
            self.events.refused(member.entry.name, why)
            answers.append(self._refusal_to(member.hello, why))
        if gone:
            # A node chooses its own session id, and could choose that of another in order to have it removed.
            spared = {member.session for member in self.members.values()} | {self.session}
            removed = {member.session for member in gone} - spared
            self._removed += removed
            self.on_removed(removed)
            names = dict.fromkeys(member.entry.name for member in gone)
            self.rotation.begin(set(self.members), now_s, f"{', '.join(names)} removed")
        return answers + self.tick(now_s)

    def _is_allowed(self, entry: Entry) -> bool:
        return entry is self._own or self.allowed.get(entry.name) == entry

    def tick(self, now_s: float) -> list[bytes]:
        """Advance timers; returns the messages to send."""
        messages, self._unsent = self._duplicates.tick(now_s) + self._unsent, []
        for key in [key for key, one in self._pending.items() if now_s > one.until_s]:
            del self._pending[key]
        for key_id in [key_id for key_id, one in self._inbound.items() if now_s > one.until_s]:
            del self._inbound[key_id]
        due = self.rotation.tick(set(self.members), now_s)
        if self.ranks is not None:  # this process takes in the keys that the others are granted, and switches with them
            for streams in (self.group, self.rotation.next):
                if streams is not None:
                    self.ranks.take(streams.key, self.session, now_s)
            self.ranks.use(self.group.key)
            self.ranks.tick(now_s)
        if self.rotation.switched:
            self.events.rotated(*self.rotation.switched)
            self.rotation.switched = None
        return messages + [self._grant(self.members[name], streams) for name, streams in due if name in self.members]

"""The controller's side of joining: admits the nodes of the allow list and holds the keys shared with each.

Pure state machine: bytes and the time come in, bytes go out. Cheap checks come first, and a peer that cannot sign with
a key of the allow list leaves no state behind but a counter.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.envelope import EnvelopeHeader
from gradbus.runtime.security.identity import handshake, key_epoch
from gradbus.runtime.security.identity.allow_list import ROLES, AllowList, Entry
from gradbus.runtime.security.identity.controller_signatures import BroadcastSigner
from gradbus.runtime.security.identity.duplicate_controllers import EarlierControllers
from gradbus.runtime.security.identity.handshake import Stamps
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
from gradbus.runtime.security.identity.joining_nodes import (
    MAX_OWN_RANKS,
    MAX_PENDING_EACH,
    PENDING_S,
    AdmittedNode,
    PendingHandshake,
    PendingHandshakes,
    member_id,
    most_processes,
    with_tag,
)
from gradbus.runtime.security.identity.key import NodeKey, public_text
from gradbus.runtime.security.identity.key_epoch import KeyRotation
from gradbus.runtime.security.identity.rank_keys import RankKeys
from gradbus.runtime.security.identity.rate_limits import AuditEvents, TokenBucket
from gradbus.runtime.security.streams import InboundStreams, OutboundEnvelope, OutboundStreams, SharedKey
from gradbus.runtime.wire.messages import new_incarnation

SILENT_S = 5.0  # after this silence a member may be replaced by a process with an earlier start number
LEADS_S = 10.0  # after so long with members this controller keeps the job against earlier starts
CHECKS_PER_S, CHECKS_AT_ONCE = 500, 1000  # signatures of nodes on the list: 0.15 ms each
# Each key has a share of its own, per process that may use it: a compromised node, or recordings of its messages,
# cannot use up the checks of the others.
SHARE_PER_S, SHARE_AT_ONCE = 4, 16
OTHERS_PER_S, OTHERS_AT_ONCE = 50, 100  # signatures of keys that are not on the list
DUPLICATES_PER_S, DUPLICATES_AT_ONCE = 20, 50  # signatures of other controllers with this key
REFUSALS_PER_S, REFUSALS_AT_ONCE = 20, 50  # to unknown keys, and as many to known ones


class Admission:
    """The join state machine of one start of a controller. Only the receive thread uses it, except for :meth:`seal`.

    Attributes:
        session: random id of this start. refusal: why this controller must stop; empty: it may run.
        dropped: counts of rejected messages, by reason.
        ranks: in a job of ranks, the keys that this process itself encrypts with; None: a federated run.
        on_removed: called with the sessions of removed processes.
        participant: GUID prefix of this process's DDS participant.
    """

    def __init__(
        self, job: str, key: NodeKey, allowed: AllowList, *, label: str = "", now_s: float = 0.0,
        ranks: RankKeys | None = None,
    ) -> None:  # fmt: skip
        """``label``: host and process, as a duplicate controller reports them."""
        self.job = job
        self.key = key
        self.session = secrets.token_bytes(envelope.SESSION_BYTES)
        self.start = new_incarnation()
        self.participant = bytes(key_epoch.PARTICIPANT_BYTES)
        self.refusal = ""
        self.dropped: Counter[str] = Counter()
        self.events = AuditEvents()
        self.speaker = BroadcastSigner(job, key, self.session)
        self.allowed = allowed
        self.retained: dict[str, int] = {}  # by topic, the number of newest envelopes that DDS retains
        self._label = label
        self._members: dict[str, AdmittedNode] = {}
        self._by_key: dict[bytes, tuple[AdmittedNode, InboundStreams]] = {}
        self._pending = PendingHandshakes()
        self._stamps = Stamps(job, key)
        self._checks = TokenBucket(CHECKS_PER_S, CHECKS_AT_ONCE)
        self._shares: dict[bytes, TokenBucket] = {}  # by public key
        self._others = TokenBucket(OTHERS_PER_S, OTHERS_AT_ONCE)
        self._duplicate_checks = TokenBucket(DUPLICATES_PER_S, DUPLICATES_AT_ONCE)
        self._refusals = {known: TokenBucket(REFUSALS_PER_S, REFUSALS_AT_ONCE) for known in (False, True)}
        self._leads_since_s = now_s
        self._duplicates = EarlierControllers(job, key, self.session, self.start, self._stamps)
        self.rotation = KeyRotation(job, self.session, now_s)
        self.ranks = ranks
        self.on_removed: Callable[[set[bytes]], None] = lambda sessions: None
        self.on_refused: Callable[[], None] = lambda: None
        self._removed: deque[bytes] = deque(maxlen=key_epoch.MAX_REMOVED)
        # Processes on the controller's own machine may share its key; all but one of them join like any node.
        self._own = Entry(key.name, "worker", key.public, ((0, MAX_OWN_RANKS - 1),))
        if ranks is not None:
            ranks.take(self.group.key, self.session, now_s)

    @property
    def members(self) -> dict[str, AdmittedNode]:
        """The admitted nodes, by member id."""
        return self._members

    @property
    def participants(self) -> set[bytes]:
        """GUID prefixes of the members' DDS participants, as announced by them. Thread-safe."""
        return {member.participant for member in list(self._members.values()) if member.participant}

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
        return bool(self._pending) or self.rotation.is_running or self._duplicates.is_busy

    # Encryption

    def seal(self, topic: str, parts: Sequence[Any], to: int | None) -> OutboundEnvelope | None:
        """Return an envelope for all members, or for the node of client ``to``; None: that node is no member.

        Ranks use ``SessionCipher`` alone: two counters under one key would repeat a nonce.
        """
        if self.ranks is not None:
            raise RuntimeError("a job of ranks encrypts with SessionCipher alone: a nonce would be used twice")
        if to is None:
            if topic != key_epoch.MODELS:
                parts = self.speaker.signed(topic, parts)
            return self.group.envelope(topic, parts)
        member = self._members.get(self.allowed.owner_of(to) or "")
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
        member, streams = self._streams(header, now_s)
        plain = streams.open(topic, header, view)
        member.last_seen_s = now_s
        return plain, member

    def _streams(self, header: EnvelopeHeader, now_s: float) -> tuple[AdmittedNode, InboundStreams]:
        if header.level == envelope.PSK:
            raise FrameError("other level", "an envelope of another level of security: all members must use the same")
        known = self._by_key.get(header.key_id)
        if known is None or (known[1] is known[0].former and now_s > known[0].former_until_s):
            raise FrameError(
                "no key", "an envelope of a process that has not joined, or was made before it had to anew"
            )
        return known

    # The handshake

    def receive(self, data: memoryview, now_s: float) -> list[bytes]:
        """Process one message of the join topic; returns the answers to send.

        Raises:
            FrameError: the message is rejected; ``reason`` is the name to count it by.
        """
        if data[:4] != MAGIC:
            opened = self._open(JOIN_TOPIC, data, now_s)
            word = None if opened is None else key_epoch.parse(opened[0])
            if opened is not None and isinstance(word, key_epoch.KeyAck):
                self.rotation.acknowledge(opened[1].id, word.epoch)
                opened[1].participant = word.participant
            return self.tick(now_s)
        if self.refusal:
            return []
        signed = parse(data)
        match signed.message:
            case JoinHello(controller=self.session) as hello if self._may_answer(hello, now_s):
                return self._receive_hello(signed, hello, now_s)
            case JoinConfirm(controller=self.session) as confirm if not self._duplicates.holds_up(now_s):
                return self._receive_confirm(signed, confirm, now_s)
            case JoinRefusal(to=self.session) as refusal if self._may_go(now_s) and self._duplicates.is_answer(refusal):
                self._stamps.check(signed, self.key.public)
                self._check(signed, self.key.public, self._duplicate_checks, now_s)
                self.refusal = refusal.why
                self._duplicates.stop()
                self.on_refused()
            case Beacon(public=self.key.public) as beacon if self._may_go(now_s) and self._duplicates.is_news(
                beacon, now_s
            ):
                self._check(signed, self.key.public, self._duplicate_checks, now_s)
                return [self._duplicates.ask(beacon, now_s)]
            case _:
                pass  # for others
        return []

    def _check(self, signed: SignedMessage, public: bytes, bucket: TokenBucket, now_s: float) -> None:
        self._take(bucket, now_s)
        handshake.check(self.job, signed, public)

    def _take(self, bucket: TokenBucket, now_s: float) -> None:
        if not bucket.take(now_s):
            raise FrameError("busy", "more signatures came than are checked in a second")

    def _share_of(self, public: bytes) -> TokenBucket:
        """Return the token bucket of a key of the allow list, or of this controller's own."""
        share = self._shares.get(public)
        if share is None:
            entry = self._own if public == self.key.public else self.allowed.of_key(public)
            count = 1 if entry is None else most_processes(entry)
            share = self._shares[public] = TokenBucket(SHARE_PER_S * count, SHARE_AT_ONCE * count)
        return share

    def _check_hello(self, signed: SignedMessage, hello: JoinHello, now_s: float) -> None:
        """Check that the holder of the key in a Hello has sent it. A known key must show a stamp first, which is cheap:
        so only Hellos of its holder, and recordings of them, use up its share.

        Raises:
            FrameError: ``stamp``, ``signature``: it is forged. ``busy``: no check is left.
        """
        is_known = hello.public == self.key.public or self.allowed.has_key(hello.public)
        if (
            not is_known or hello.pinned != self.key.public
        ):  # a node that expects another controller makes no stamp for this one
            self._check(signed, hello.public, self._others, now_s)
            return
        self._stamps.check(signed, hello.public)
        self._take(self._share_of(hello.public), now_s)
        self._check(signed, hello.public, self._checks, now_s)

    def _may_go(self, now_s: float) -> bool:
        """Whether an earlier live start may take the job. Not once this one has led it for a while: an earlier one that
        shows up then was suspended, and its members are here."""
        return not self._members or now_s - self._leads_since_s < LEADS_S

    def _may_answer(self, hello: JoinHello, now_s: float) -> bool:
        """Whether to answer a Hello now. Duplicate controllers always get an answer; nodes wait, and repeat their
        Hello, while an earlier controller may be alive."""
        return ROLES[hello.role] == "controller" or not self._duplicates.holds_up(now_s)

    def _receive_hello(self, signed: SignedMessage, hello: JoinHello, now_s: float) -> list[bytes]:
        known = self._members.get(member_id(ROLES[hello.role], hello.name, hello.session))
        newest = max(
            known.attempt if known is not None and known.session == hello.session else 0,
            self._pending.attempt(hello.name, hello.session),
        )
        if hello.attempt <= newest:
            raise FrameError("replay", f"a hello of {hello.name} that was received before")
        self._check_hello(signed, hello, now_s)
        entry = self._entry_of(hello)
        why = self._refusal_reason(hello, entry, known, now_s)
        if entry is None or why:
            return self._refuse(signed, hello, why, now_s)
        nonce = secrets.token_bytes(handshake.NONCE_BYTES)
        welcome, shared = handshake.answer(
            self.job, self.key, signed, session=self.session, start=self.start, epoch=self.group.key.epoch, nonce=nonce
        )
        pending = PendingHandshake(entry, signed, hello, shared, welcome[-64:], now_s + PENDING_S)
        self._pending.add(pending, max(MAX_PENDING_EACH, most_processes(entry)))
        return [self._stamps.stamped(welcome, hello.public, signed)]

    def _entry_of(self, hello: JoinHello) -> Entry | None:
        is_own = self.ranks is not None and ROLES[hello.role] == "worker" and hello.public == self.key.public
        return self._own if is_own else self.allowed.get(hello.name)

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
            known is not None and known.session != hello.session and hello.start <= known.start
            and now_s - known.last_seen_s < SILENT_S
        ):  # fmt: skip
            return f"{hello.name} has joined with a process that was started later: one process, one key"
        return ""

    def _refuse(self, signed: SignedMessage, hello: JoinHello, why: str, now_s: float) -> list[bytes]:
        self.dropped["refused"] += 1
        known = hello.public == self.key.public or self.allowed.has_key(hello.public)
        self.events.refused_limited(hello.name, why, known=known, now_s=now_s)
        if not self._refusals[known].take(now_s):
            return []
        return [self._refusal_to(signed, why)]

    def _refusal_to(self, asked: SignedMessage, why: str) -> bytes:
        hello = asked.message
        assert isinstance(hello, JoinHello)
        refusal = JoinRefusal(hello.session, self.session, hashlib.sha256(asked.whole).digest(), why)
        return self._stamps.stamped(handshake.signed(self.job, self.key, refusal), hello.public)

    def _receive_confirm(self, signed: SignedMessage, confirm: JoinConfirm, now_s: float) -> list[bytes]:
        waiting = self._pending.of(confirm.session)
        if not waiting:
            raise FrameError("replay", "a confirm that answers no pending handshake")
        pending = with_tag(waiting, confirm.tag)  # before any costly check: forgeries have no valid tag
        if pending is None:
            raise FrameError("signature", "a confirm that was made without the keys of its exchange")
        # The tag can be read on the wire: forgeries that copy it use up the share of this node alone.
        if pending.was_checked:
            self._take(self._share_of(pending.hello.public), now_s)
        pending.was_checked = True
        handshake.check_confirm(self.job, signed, pending.signed, pending.secrets, pending.welcome_signature)
        self._pending.take(pending)
        return self._admit(pending, now_s)

    def _admit(self, pending: PendingHandshake, now_s: float) -> list[bytes]:
        hello = pending.hello
        name, role = pending.entry.name, pending.entry.role
        up = SharedKey(self.job, envelope.MEMBER, 0, pending.secrets.up)
        down = SharedKey(self.job, envelope.MEMBER, 0, pending.secrets.down)
        member = AdmittedNode(
            pending.entry, pending.signed, hello.session, hello.start, hello.attempt,
            InboundStreams(up, hello.session), OutboundStreams(down, self.session), now_s,
        )  # fmt: skip
        known = self._members.get(member.id)
        if not self._members:
            self._leads_since_s = now_s
        said = []
        if known is not None:
            self._forget_keys(known)
            if known.session == hello.session:  # the same process with new keys
                member.former, member.former_until_s = known.incoming, now_s + key_epoch.GRACE_S
                self._by_key[known.incoming.key.key_id] = member, known.incoming
            else:  # the replaced process may still run: it must stop
                said.append(self._refusal_of(known, f"{name} has joined with another process: one process, one key"))
        self._by_key[up.key_id] = member, member.incoming
        self._members[member.id] = member
        if known is None or known.session != hello.session:
            self.events.joined(name, role)
        if role == "worker" and known is None:
            said += self._make_room(pending.entry)
        return said + [self._grant(member, streams) for streams in self.rotation.keys_for(member.id)]

    def _make_room(self, entry: Entry) -> list[bytes]:
        """Drop the earliest process of a node with too many: as a rule that one is dead."""
        same = [member for member in self._members.values() if member.entry.name == entry.name]
        if len(same) <= most_processes(entry):
            return []
        oldest = min(same, key=lambda member: member.start)
        del self._members[oldest.id]
        self._forget_keys(oldest)
        return [self._refusal_of(oldest, f"{entry.name} has joined with more processes than it has ranks")]

    def _refusal_of(self, member: AdmittedNode, why: str) -> bytes:
        """Return the refusal of a node that was a member until now."""
        return self._refusal_to(member.hello, why)

    def _forget_keys(self, member: AdmittedNode) -> None:
        for streams in (member.incoming, member.former):
            if streams is not None:
                self._by_key.pop(streams.key.key_id, None)

    def _grant(self, member: AdmittedNode, group: OutboundStreams) -> bytes:
        """Return the key grant of an epoch for one member, encrypted."""
        if self.ranks is not None:
            ids = member.entry.ids
            to_ranks = key_epoch.RankKeyGrant(group.key.epoch, group.key.secret, ids, tuple(self._removed))
            return member.outgoing.seal(JOIN_TOPIC, (key_epoch.pack(to_ranks),))
        floors = [max(0, group.last.get(topic, 0) - self.retained.get(topic, 0)) for topic in key_epoch.TOPICS]
        said = (max(0, self.speaker.last_of.get(key_epoch.COMMANDS, 0) - 1), self.speaker.last)
        word = key_epoch.KeyGrant(
            group.key.epoch, group.key.secret, (floors[0], floors[1], floors[2]), said, self.participant
        )  # fmt: skip
        return member.outgoing.seal(JOIN_TOPIC, (key_epoch.pack(word),))

    # Changes of the allow list, and time

    def allow(self, allowed: AllowList, now_s: float) -> list[bytes]:
        """Apply a new allow list: members that are not on it as before are refused, and a new key epoch begins."""
        self.allowed = allowed
        self._shares.clear()
        gone = [member for member in self._members.values() if not self._is_allowed(member.entry)]
        self._pending.keep(lambda one: self._is_allowed(one.entry))
        said = []
        for member in gone:
            del self._members[member.id]
            self._forget_keys(member)
            why = f"{member.entry.name} has been taken off the allow list of the controller, or is another there"
            self.events.refused(member.entry.name, why)
            said.append(self._refusal_of(member, why))
        if gone:
            # A node chooses its own session id, and could choose that of another in order to have it removed.
            removed = (
                {member.session for member in gone}
                - {member.session for member in self._members.values()}
                - {self.session}
            )
            self._removed += removed
            self.on_removed(removed)
            names = dict.fromkeys(member.entry.name for member in gone)
            self.rotation.begin(set(self._members), now_s, f"{', '.join(names)} removed")
        return said + self.tick(now_s)

    def _is_allowed(self, entry: Entry) -> bool:
        return entry is self._own or self.allowed.get(entry.name) == entry

    def tick(self, now_s: float) -> list[bytes]:
        """Advance timers; returns the messages to send."""
        said = self._duplicates.tick(now_s)
        self._pending.keep(lambda one: now_s <= one.until_s)
        for member in self._members.values():
            if member.former is not None and now_s > member.former_until_s:
                self._by_key.pop(member.former.key.key_id, None)
                member.former = None
        due = self.rotation.tick(set(self._members), now_s)
        if self.ranks is not None:
            self._keep_up(self.ranks, now_s)
        if self.rotation.switched:
            self.events.rotated(*self.rotation.switched)
            self.rotation.switched = None
        return said + [self._grant(self._members[name], streams) for name, streams in due if name in self._members]

    def _keep_up(self, ranks: RankKeys, now_s: float) -> None:
        """Apply the keys that the others are granted, and their switch, to this process as well."""
        for streams in (self.group, self.rotation.next):
            if streams is not None:
                ranks.take(streams.key, self.session, now_s)
        ranks.use(self.group.key)
        ranks.tick(now_s)

"""Key epochs: the life of the group key that the controller shares with all members.

Every epoch has a random key. A new one begins with every start of the controller, when a member is removed from the
allow list, after a day, and before the counters of the epoch could run out. Ranks use the next key of each stream
instead of a new epoch when their counters run out. :class:`KeyRotation` is the side of the controller,
:class:`MembershipKeys` that of a client, and :class:`RankKeys` that of a process in a job of ranks, which encrypts
with the group key, too. Pure: the caller passes the time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.encryption import Keys
from gradbus.runtime.security.envelope import EnvelopeHeader
from gradbus.runtime.security.identity.controller_signatures import BroadcastVerifier
from gradbus.runtime.security.identity.key_messages import COMMANDS, CONTROL, MODELS, TOPICS, KeyGrant
from gradbus.runtime.security.job_key import KEY_BYTES
from gradbus.runtime.security.streams import InboundStreams, OutboundStreams, SharedKey

EPOCH_S = 24 * 3600.0
EPOCH_FRAMES = 1 << 32
GRACE_S = 10.0  # envelopes under a member's former pairwise keys are accepted for so long
SWITCH_S = 2.0  # longest wait for the acknowledgements of a new key
REPEAT_S = 0.25  # interval of key grants to members that have not acknowledged
FORMER_S = 60.0  # a client keeps the key of the former epoch for so long at most, however long a round takes
FORMER_COMMANDS = 2  # it drops that key at so many commands of the new epoch: the round before is over then
FORMER_RANKS_S = 5.0  # a rank accepts envelopes under a former key for so long: they may still be on their way
LOOKS = 4  # least number of ticks in that time: envelopes that came while the process stood still count as in time
SETTLE_S = 1.0  # all ranks join a restarted key issuer within that time, as they notice its end together


class KeyRotation:
    """Rotates the group key of one start of a controller.

    Attributes:
        current: the streams to encrypt with. next: those under the key that is being distributed; None: there is none.
        switched: number and reason of an epoch that has just begun, until read.
    """

    def __init__(self, job: str, session: bytes, now_s: float) -> None:
        self._job = job
        self._session = session
        self._retained: dict[str, int] = {}  # by topic, the number of samples
        # From the clock, so that it grows with each start. Only people read it; keys are identified by their id.
        self.current = self._new_epoch(int(time.time()) & 0x7FFF_FFFF)
        self.next: OutboundStreams | None = None
        self.switched: tuple[int, str] | None = None
        self._began_s = now_s
        self._why = ""
        self._again = ""  # reason of another rotation that was requested meanwhile
        self._pending: set[str] = set()
        self._until_s = self._sent_s = 0.0

    def _new_epoch(self, epoch: int) -> OutboundStreams:
        key = SharedKey(self._job, envelope.GROUP, epoch, secrets.token_bytes(KEY_BYTES))
        return OutboundStreams(key, self._session)

    def retain(self, topic: str, samples: int) -> None:
        """Note, for all epochs, that a topic retains so many of its newest envelopes. Any thread may call it."""
        self._retained[topic] = samples
        # In this order: what is next now may be current then, and begin() looks for topics after it has set next.
        for streams in (self.next, self.current):
            if streams is not None:
                streams.encryptor(topic).track_retained(samples)

    def keys_for(self, name: str) -> list[OutboundStreams]:
        """Return the keys that a new member needs."""
        if self.next is None:
            return [self.current]
        self._pending.add(name)
        return [self.current, self.next]

    def begin(self, members: set[str], now_s: float, why: str) -> None:
        """Begin a new epoch. If a rotation is running, another one follows it, as removed nodes may have its key."""
        if self.next is not None:
            self._again = why
            return
        self.next = self._new_epoch(self.current.key.epoch + 1)
        for topic, samples in self._retained.copy().items():
            self.next.encryptor(topic).track_retained(samples)
        self._why, self._pending = why, set(members)
        self._until_s, self._sent_s = now_s + SWITCH_S, float("-inf")

    def acknowledge(self, name: str, epoch: int) -> None:
        """Note that a member has acknowledged the key of an epoch."""
        if self.next is not None and epoch == self.next.key.epoch:
            self._pending.discard(name)

    def tick(self, members: set[str], now_s: float) -> list[tuple[str, OutboundStreams]]:
        """Advance timers; returns the members to send a key grant to, with the key."""
        if self.next is None:
            if now_s - self._began_s > EPOCH_S:
                self.begin(members, now_s, "a day is over")
            elif max(self.current.last.values(), default=0) >= EPOCH_FRAMES:
                self.begin(members, now_s, "its counters are used up")
        if self.next is None:
            return []
        self._pending &= members
        if not self._pending or now_s > self._until_s:
            self.current, self.next = self.next, None
            self._began_s, self.switched = now_s, (self.current.key.epoch, self._why)
            if self._again:
                why, self._again = self._again, ""
                self.begin(members, now_s, why)
            return self.tick(members, now_s) if self.next is not None else []
        if now_s - self._sent_s < REPEAT_S:
            return []
        self._sent_s = now_s
        return [(name, self.next) for name in sorted(self._pending)]


class MembershipKeys:
    """The keys of one node with one start of the controller: the pairwise keys, and the group keys of the epochs.

    Attributes:
        controller: session of that start. outgoing: encrypts what this node sends to it.
    """

    outgoing: OutboundStreams

    def __init__(self, job: str, public: bytes, controller: bytes) -> None:
        """``public``: public key of the controller."""
        self.controller = controller
        self._job = job
        self._down: list[InboundStreams] = []  # the newest first
        self._down_until_s = 0.0
        self._epochs: dict[bytes, InboundStreams] = {}  # by key id
        self._newest: InboundStreams | None = None
        self._commands = 0  # received in the newest epoch
        self._former_until_s = 0.0
        self._verifier = BroadcastVerifier(job, public, controller)
        self._has_floors = False

    def rekey(self, outgoing: OutboundStreams, down: InboundStreams, now_s: float) -> None:
        """Take in the pairwise keys of another handshake; the former ones stay valid for a while."""
        self.outgoing = outgoing
        self._down = [down, *self._down[:1]]
        self._down_until_s = now_s + GRACE_S

    @property
    def epoch(self) -> int:
        """Number of the newest key epoch; 0: there is none."""
        return 0 if self._newest is None else self._newest.key.epoch

    def has(self, header: EnvelopeHeader) -> bool:
        """Whether an envelope is under the group key of an epoch that this node has."""
        return header.key_id in self._epochs

    def open_own(self, topic: str, header: EnvelopeHeader, view: memoryview) -> memoryview | None:
        """Decrypt an envelope to this node; None: it is for or from another one. Raises FrameError: it is invalid."""
        for streams in self._down:
            if streams.key.key_id == header.key_id:
                return streams.open(topic, header, view)
        return None

    def open_group(self, topic: str, header: EnvelopeHeader, view: memoryview) -> memoryview:
        """Decrypt an envelope of the controller to all, and verify its signature. Raises FrameError: it is invalid."""
        if topic not in TOPICS:
            raise FrameError("level", f"an envelope for all on {topic}, where the controller sends nothing")
        streams = self._epochs[header.key_id]
        plain = streams.open(topic, header, view)
        if topic != MODELS:  # those are signed as a whole
            plain = self._verifier.verify(topic, plain)
        if topic == COMMANDS and streams is self._newest:
            self._commands += 1
            if self._commands >= FORMER_COMMANDS:
                self._drop_former()
        return plain

    def take(self, grant: KeyGrant, now_s: float) -> None:
        """Take in the granted group key of an epoch."""
        if not self._has_floors:
            self._has_floors = True
            self._verifier.start_above(COMMANDS, grant.signed[0])
            self._verifier.start_above(CONTROL, grant.signed[1])
        key = SharedKey(self._job, envelope.GROUP, grant.epoch, grant.secret)
        if key.key_id in self._epochs or grant.epoch < self.epoch:
            return
        # All members have this key: replays are found by the signed numbers, and for models by those of the frames.
        streams = InboundStreams(key, self.controller, has_window=False)
        for topic, floor in zip(TOPICS, grant.floors, strict=True):
            streams.start_above(topic, floor)
        self._drop_former()
        self._epochs[key.key_id] = streams
        self._newest, self._commands = streams, 0
        self._former_until_s = now_s + FORMER_S

    def _drop_former(self) -> None:
        self._epochs = {key_id: streams for key_id, streams in self._epochs.items() if streams is self._newest}

    def tick(self, now_s: float) -> None:
        """Drop expired keys."""
        if now_s > self._former_until_s:
            self._drop_former()
        if now_s > self._down_until_s:
            del self._down[1:]


@dataclass(slots=True)
class _NextKey:
    """A key that is not used yet. ``on_use``: it is used as soon as its issuer is seen to use it, else at ``at_s``."""

    key: SharedKey
    issuer: bytes
    on_use: bool
    at_s: float


class RankKeys(Keys):
    """The group keys of one process in a job of ranks: the current one, and for a while those before and after it.

    All ranks encrypt with the key of the epoch, and frames of a collective are not repeated. So no rank may encrypt
    with a key that others lack: every rank takes in a new key first, and switches when it sees the key issuer use it,
    or after a time in which every rank has received it. Any thread reads the keys, the receive thread changes them.

    Attributes:
        on_change: called after a switch to another key, the first one included.
        on_lack: called on an envelope under an unknown key.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self._current: SharedKey | None = None
        self._issuer = b""
        self._next: _NextKey | None = None
        self._former: dict[bytes, tuple[SharedKey, float]] = {}  # by key id, with the seconds that it is still accepted
        self._ticked_s = 0.0
        self._is_next_in_use = self._is_shut = False
        self.on_change: Callable[[], None] = lambda: None
        self.on_lack: Callable[[], None] = lambda: None

    @property
    def has_key(self) -> bool:
        return self._current is not None and not self._is_shut

    def shut(self) -> None:
        """Stop encrypting: this process was refused or removed."""
        self._is_shut = True

    @property
    def current(self) -> SharedKey:
        """The key to encrypt with. Requires :attr:`has_key`."""
        key = self._current
        if key is None:
            raise RuntimeError("encrypted before this process was admitted, with a writer that is not matched yet")
        return key

    def of(self, header: EnvelopeHeader) -> SharedKey:
        """See :meth:`.Keys.of`. Raises FrameError: ``other level``, ``no key``, ``other key``."""
        key, following = self._current, self._next
        if key is None or key.key_id != header.key_id:
            if header.level != envelope.GROUP:
                raise envelope.other_level()
            if following is not None and following.key.key_id == header.key_id:
                key = following.key
            elif header.key_id in self._former:
                key = self._former[header.key_id][0]
            else:
                if key is not None:
                    self.on_lack()
                raise FrameError("no key", "an envelope under a key that this process does not have, or not any more")
        key.check(header)
        return key

    def accepts(self, key_id: bytes) -> bool:
        known = (self._current, None if self._next is None else self._next.key)
        return key_id in self._former or any(key is not None and key.key_id == key_id for key in known)

    def accepts_new_session(self, key: SharedKey) -> bool:
        """Only with the newest key, as soon as it is here: a removed process has the one before, and could come as a
        new session."""
        return key is (self._current if self._next is None else self._next.key)

    def note_use(self, key: SharedKey, session: bytes) -> None:
        """If the key issuer uses the next key, so does this process."""
        following = self._next
        if following is not None and following.on_use and key is following.key and session == following.issuer:
            self._is_next_in_use = True

    def take(self, key: SharedKey, issuer: bytes, now_s: float) -> None:
        """Take in a granted key. ``issuer``: session of the key issuer. The first key is used at once."""
        following = self._next
        if self._current is not None and key.key_id == self._current.key_id:
            if following is not None and issuer != following.issuer:
                self._set_aside(following)  # back to the issuer of this key: the other ranks have it, too
            return
        if issuer == self._issuer and key.key_id in self._former:
            return
        if following is not None:
            if key.key_id == following.key.key_id:
                return
            if issuer == following.issuer and key.epoch < following.key.epoch:
                return
            if following.on_use or issuer == following.issuer:
                self._switch(following)  # two in a row: all ranks were granted the one between
            else:
                self._set_aside(following)
        is_other = self._current is not None and issuer != self._issuer
        following = _NextKey(key, issuer, not is_other, now_s + (SETTLE_S if is_other else SWITCH_S))
        if self._current is None:
            self._switch(following)
        else:
            self._next, self._is_next_in_use = following, False

    def use(self, key: SharedKey) -> None:
        """Switch to a key: called in the process of the key issuer."""
        if self._next is not None and self._next.key is key:
            self._switch(self._next)

    def tick(self, now_s: float) -> None:
        """Advance timers: switch to the next key when due, and drop expired ones."""
        passed_s, self._ticked_s = min(now_s - self._ticked_s, FORMER_RANKS_S / LOOKS), now_s
        if self._former:
            left = {key_id: (key, left_s - passed_s) for key_id, (key, left_s) in self._former.items()}
            self._former = {key_id: one for key_id, one in left.items() if one[1] > 0}
        following = self._next
        if following is not None and (self._is_next_in_use or now_s >= following.at_s):
            self._switch(following)

    def _set_aside(self, following: _NextKey) -> None:
        """Abandon the next key. Other ranks may have switched to it, so its envelopes are accepted for a while."""
        self._former = {**self._former, following.key.key_id: (following.key, FORMER_RANKS_S)}
        self._next, self._is_next_in_use = None, False

    def _switch(self, following: _NextKey) -> None:
        former = {key_id: one for key_id, one in self._former.items() if key_id != following.key.key_id}
        if self._current is not None:
            former[self._current.key_id] = (self._current, FORMER_RANKS_S)
        self._former = former
        self._current, self._issuer, self._next, self._is_next_in_use = following.key, following.issuer, None, False
        self.on_change()

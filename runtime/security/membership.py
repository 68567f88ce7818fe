"""Membership in a job whose members share a key: encryption with that key, and proof that each sender is alive.

The proof are liveness challenges. Each process announces a random challenge of its own on a common topic, and with it
the challenges that it has received from others, and when. The announcements are encrypted, so only a holder of the key
can make one, and one that answers this process's challenge is no recording: it is no older than this process. They are
state: the newest is retained for late readers, and each repeats all that is still valid.

A process need prove nothing to one that it shares no channel with. A transport that can tell, as one over a relay can,
does not carry the announcements of one to the other (:attr:`.Channel.for_partners`): with two hundred clients of one
controller, two hundred pairs prove to each other that they are alive, not twenty thousand. Nothing is accepted for it:
samples of a session that has not answered are held, whatever channel they come by.

In a crowd, each announcement is work for all others. So there a process pauses after one, and the next answers all who
have come meanwhile; and it hurries only for those that receive what it sends: clients of one controller have nothing to
prove to each other.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security.encryption import Opened, PskKeys, SessionCipher
from gradbus.runtime.security.job_membership import Decrypt, Encrypt, JobMembership
from gradbus.runtime.security.peers import CHALLENGE_TOPIC, LEEWAY_S, MAX_SOURCES, Peer, Release
from gradbus.runtime.security.streams import OutboundEnvelope
from gradbus.runtime.transport import api
from gradbus.runtime.transport.api import PERIOD_S, IoThread, Outlet, PeerId, Periodic, Transport
from gradbus.runtime.transport.channels import CHANNELS, Channel, is_inbox_name
from gradbus.runtime.wire.frames import Frame
from gradbus.runtime.wire.messages import Message, ModelBlob, TrainCmd

MAX_ANSWERS = 4096  # as many as known sessions: one without an answer would announce again, and displace another
MAX_LABEL_BYTES = 128
REPEAT_S = 0.5  # shortest interval of announcements caused by samples of unauthenticated sessions
ACKNOWLEDGED_S = 0.5  # for readers to acknowledge an announcement; one that never does must not keep members apart
# Least interval of announcements, for each pair of processes: what all of them announce grows with the square of their
# number, and they may start together on two processors, which take some 0.2 ms for each announcement at each receiver.
_PAIR_S = 0.000_4
_MAX_PACE_S = 1.0
UNHURRIED_S = 10.0  # in a crowd, until those are answered that no outlet of this process writes to
CROWD = 8  # more peers than these are one
# version, reserved, answers, bytes of the label, challenge, id of the transport, oldest retained command, oldest
# retained frame of a model
_HEAD = struct.Struct("<BBHH16s12sQQ")
_ANSWER = struct.Struct("<16sI")
_VERSION = 2
_RETAINED = (CHANNELS[TrainCmd].name, CHANNELS[ModelBlob].name)


class SharedKeyMembership(JobMembership):
    """Membership of every process that has the shared key.

    Attributes:
        cipher: encrypts and decrypts for this process.
    """

    def __init__(self, cipher: SessionCipher) -> None:
        self.cipher = cipher
        self.liveness: LivenessChallenge | None = None

    @property
    def has_key(self) -> bool:
        return self.cipher.keys.has_key

    def known(self) -> Collection[PeerId] | None:
        return self.cipher.peers.peer_ids if self.has_key else None

    def authenticated(self) -> Collection[PeerId]:
        return () if self.liveness is None else self.liveness.proven

    def start(self, below: Transport, sealed: Transport, thread: IoThread) -> None:
        inlet, outlet = sealed.inlet(SESSION_TOPIC), sealed.outlet(SESSION_TOPIC)
        self.liveness = LivenessChallenge(self.cipher, sealed.own, outlet, thread)
        thread.add_reader(inlet)

    def encrypt(self, topic: str, sample: tuple[Any, ...]) -> OutboundEnvelope | None:
        return self.cipher.encryptor(topic).envelope(sample) if self.has_key else None

    def encryptor(self, topic: str) -> Encrypt:
        if isinstance(self.cipher.keys, PskKeys):  # its key is there from the start
            return self.cipher.encryptor(topic).envelope
        return super().encryptor(topic)

    def decryptor(self, channel: Channel) -> Decrypt:
        return self.cipher.decryptor(channel.name, ignores_own=channel.ignore_local).open

    def accepts(self, channel: Channel, opened: Opened, sample: Any, source: api.Peer, release: Release) -> bool:
        """Accept the samples of authenticated sessions; hold those of others until they are authenticated."""
        peer = opened.peer
        if len(peer.sources) < MAX_SOURCES:
            peer.sources.add(source)
        if channel is SESSION_TOPIC:
            if self.liveness is not None:
                self.liveness.receive(peer, sample.data)
            return False
        if not peer.authenticated:
            self.cipher.peers.hold(peer, channel.name, opened.header, sample, source, release)
        return peer.authenticated

    def retain(self, topic: str, samples: int) -> None:
        if not is_inbox_name(topic):  # its stream may be made again, and no announcement says what is retained there
            self.cipher.encryptor(topic).track_retained(samples)


class ChallengeMessage(NamedTuple):
    """The announcement of one process.

    Attributes:
        challenge: its own.
        answers: challenges that it has received, and in which second of its session.
        retained: of the topics that are retained, command and model: the oldest counter that its transport may have.
        label: host and process, for log events.
        peer_id: what its transport calls itself.
    """

    challenge: bytes
    answers: dict[bytes, int]
    retained: tuple[int, int]
    label: str
    peer_id: PeerId


def pack_challenge(message: ChallengeMessage) -> bytes:
    """Return the bytes of an announcement, with the newest ``MAX_ANSWERS`` answers."""
    answers = list(message.answers.items())[-MAX_ANSWERS:]
    name = message.label.encode()[:MAX_LABEL_BYTES]
    numbers = message.challenge, message.peer_id, *message.retained
    head = _HEAD.pack(_VERSION, 0, len(answers), len(name), *numbers)
    return b"".join((head, *(_ANSWER.pack(*answer) for answer in answers), name))


def parse_challenge(data: memoryview) -> ChallengeMessage:
    """Parse an announcement. Raises FrameError: ``greeting``."""
    if len(data) < _HEAD.size:
        raise FrameError("greeting", f"challenge of {len(data)} bytes, at least {_HEAD.size}")
    version, reserved, count, label_bytes, challenge, own, command, model = _HEAD.unpack_from(data)
    answers_end = _HEAD.size + count * _ANSWER.size
    is_within = count <= MAX_ANSWERS and label_bytes <= MAX_LABEL_BYTES
    if version != _VERSION or reserved or not is_within or len(data) != answers_end + label_bytes:
        raise FrameError("greeting", f"challenge of {len(data)} bytes, version {version}, with {count} answers")
    answers = dict(_ANSWER.iter_unpack(data[_HEAD.size : answers_end]))
    label = str(data[answers_end:], "utf-8", "replace")
    return ChallengeMessage(challenge, answers, (command, model), label, own)


def _none(sample: Any) -> Message | Frame:
    raise FrameError("greeting", "challenges are not messages")


SESSION_TOPIC = Channel(
    CHALLENGE_TOPIC,
    "Frame",
    retained=True,
    keep_last=False,
    reader_samples=4096,
    inbox=0,
    block_s=0.01,
    may_drop=False,
    to_message=_none,
    for_partners=True,
)


class LivenessChallenge:
    """Announces challenges and answers for one bus, on its receive thread.

    Attributes:
        proven: ids of the transports of processes that have proved to be alive, and have acknowledged the same proof of
            this one; replaced when it changes.
    """

    def __init__(self, cipher: SessionCipher, own: PeerId, writer: Outlet, thread: IoThread) -> None:
        """Announce soon for the first time.

        Args:
            own: what the transport of this process calls itself. writer: of :data:`SESSION_TOPIC`.
        """
        self._cipher = cipher
        self._peers = cipher.peers
        self._thread = thread
        self._answers: dict[bytes, int] = {}
        self._sent: frozenset[bytes] = frozenset()  # the challenges that are answered in the last announcement
        self._acknowledged: frozenset[bytes] = frozenset()  # of one that all readers have, or have had time for
        self._acknowledged_by_s = 0.0
        self._is_waiting = False  # for that
        self.proven: frozenset[PeerId] = frozenset()
        self._label = f"{socket.gethostname()} (process {os.getpid()})"
        self._own = own
        self._announcing = Periodic(self._announce)
        self._looking = Periodic(self._look_for_acknowledgements)
        self._announced_s = -REPEAT_S
        self._unanswered: set[PeerId] = set()  # in the last announcement, and nothing else asks for another one
        self._writer = writer
        self._peers.on_unauthenticated = self._ask
        self._peers.dropped = self._count
        self._peers.on_change = self._look_who_is_proven
        self.announce_again()

    def receive(self, peer: Peer, data: memoryview) -> None:
        """Process the announcement of a session. Raises FrameError: it is invalid."""
        if peer is self._peers.own:
            return
        message = parse_challenge(data)
        peer.label, peer.peer_id, peer.challenge = message.label, message.peer_id, message.challenge
        answered_at = message.answers.get(self._peers.challenge)
        if answered_at is not None and not peer.authenticated:
            peer.floor = max(0, answered_at - LEEWAY_S)
            peer.retained = dict(zip(_RETAINED, message.retained, strict=True))
            self._peers.authenticate(peer)
            self._thread.take_again()
        if message.challenge not in self._answers:
            self._answers[message.challenge] = self._cipher.moment
            while len(self._answers) > MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
            if len(self._peers) <= CROWD:
                self.announce_again()
            else:
                self._unanswered.add(message.peer_id)
                self._thread.add_periodic(self._announcing)

    def announce_again(self) -> None:
        """Announce again, as after a change of keys: later members cannot decrypt earlier announcements."""
        self._is_due = True
        self._thread.add_periodic(self._announcing)

    def _must_hurry(self, now_s: float) -> bool:
        """Return whether one that is not answered yet receives what this process sends, or has waited for long."""
        if not self._unanswered or now_s > self._announced_s + UNHURRIED_S:
            return bool(self._unanswered)
        receivers = self._thread.receivers()
        return receivers is None or not self._unanswered.isdisjoint(receivers)

    @property
    def _pace_s(self) -> float:
        peers = len(self._peers)
        return min(_MAX_PACE_S, _PAIR_S * peers**2) if peers > CROWD else 0.0

    def _look_for_acknowledgements(self) -> bool:
        """Return whether to look again soon. A lost sample is sent again, but only once the loss is noticed."""
        if not self._writer.is_acknowledged and time.monotonic() < self._acknowledged_by_s:
            self._looking.every_s = max(PERIOD_S, self._pace_s / 4)  # a look takes longer with more of them
            return True
        self._is_waiting, self._acknowledged = False, self._sent
        self._look_who_is_proven()
        return False

    def _look_who_is_proven(self) -> None:
        proven = frozenset(
            one.peer_id for one in self._peers.authenticated() if one.peer_id and one.challenge in self._acknowledged
        )
        if proven != self.proven:
            self.proven = proven
            self._thread.rematched()

    def _ask(self) -> None:
        """Announce again, as an unauthenticated session sends samples and may have missed this process."""
        if time.monotonic() > self._announced_s + REPEAT_S:
            self.announce_again()

    def _count(self, why: str, samples: int) -> None:
        self._thread.rejected[why] += samples

    def _announce(self) -> bool:
        """Announce if due; returns whether to try again soon."""
        now_s, pace_s = time.monotonic(), self._pace_s
        self._announcing.every_s = max(PERIOD_S, pace_s / 4)
        if now_s > self._announced_s + pace_s and (self._is_due or self._must_hurry(now_s)):
            oldest = self._cipher.retained
            retained = oldest.get(_RETAINED[0], 1), oldest.get(_RETAINED[1], 1)
            message = ChallengeMessage(self._peers.challenge, self._answers, retained, self._label, self._own)
            self._is_due = not self._writer.write((), (pack_challenge(message),))
            if not self._is_due:
                self._unanswered.clear()
                self._sent = frozenset(self._answers)
                if not self._is_waiting:
                    self._is_waiting, self._acknowledged_by_s = True, now_s + ACKNOWLEDGED_S
                    self._thread.add_periodic(self._looking)
            # A write that is refused has held up this thread for 10 ms: others need it more.
            self._announced_s = now_s + REPEAT_S * self._is_due
        return self._is_due or bool(self._unanswered)

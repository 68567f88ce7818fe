"""Liveness challenges: processes prove to each other that they are alive, and no recordings.

Each process announces its own challenge on a common topic, and with it the challenges that it has received from others,
and when. The announcements are encrypted, so only a holder of the key can make one, and one that answers this process's
challenge is no older than this process. They are state: DDS retains the newest for late readers, and each repeats all
that is still valid.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any, NamedTuple

from gradbus.runtime.dds.participant import IoThread, Periodic
from gradbus.runtime.dds.topics import TOPICS, Topic
from gradbus.runtime.errors import FrameError
from gradbus.runtime.security.encryption import Opened, SessionCipher
from gradbus.runtime.security.endpoints import SealedReader, SealedWriter
from gradbus.runtime.security.peers import CHALLENGE_TOPIC, LEEWAY_S, Peer
from gradbus.runtime.wire.frames import Frame
from gradbus.runtime.wire.messages import Message, ModelBlob, TrainCmd

MAX_ANSWERS = 4096  # as many as sessions are known: who is left out would greet again, and push out another
MAX_LABEL_BYTES = 128
REPEAT_S = 0.5  # how often at most to greet because of data from a session that is not proven
_PACE_S = 0.004  # greetings of one process are so far apart, and further with more peers: many may start together
_PACE_PEERS = 16
# version, reserved, answers, bytes of the label, challenge, prefix of the participant's GUID, oldest retained command,
# oldest retained frame of a model
_HEAD = struct.Struct("<BBHH16s12sQQ")
_ANSWER = struct.Struct("<16sI")
_VERSION = 2
_RETAINED = (TOPICS[TrainCmd].name, TOPICS[ModelBlob].name)


class ChallengeMessage(NamedTuple):
    """What a process says.

    Attributes:
        challenge: its own.
        answers: challenges that it has heard, and in which second of its session.
        retained: of the topics that DDS retains, command and model: the oldest counter that it may still have.
        label: host and process, for people.
        participant: what the GUIDs of its DDS participant begin with: whose readers are a member's.
    """

    challenge: bytes
    answers: dict[bytes, int]
    retained: tuple[int, int]
    label: str
    participant: bytes


def pack_challenge(said: ChallengeMessage) -> bytes:
    """Bytes of a greeting, of which the newest ``MAX_ANSWERS`` answers are told."""
    told = list(said.answers.items())[-MAX_ANSWERS:]
    name = said.label.encode()[:MAX_LABEL_BYTES]
    head = _HEAD.pack(_VERSION, 0, len(told), len(name), said.challenge, said.participant, *said.retained)
    return b"".join((head, *(_ANSWER.pack(*answer) for answer in told), name))


def parse_challenge(data: memoryview) -> ChallengeMessage:
    """What a greeting says. Raises FrameError: ``greeting``."""
    if len(data) < _HEAD.size:
        raise FrameError("greeting", f"greeting of {len(data)} bytes, at least {_HEAD.size}")
    version, reserved, count, label_bytes, challenge, participant, command, model = _HEAD.unpack_from(data)
    answers_end = _HEAD.size + count * _ANSWER.size
    if (
        version != _VERSION or reserved or count > MAX_ANSWERS or label_bytes > MAX_LABEL_BYTES
        or len(data) != answers_end + label_bytes
    ):  # fmt: skip
        raise FrameError("greeting", f"greeting of {len(data)} bytes, version {version}, says {count} answers")
    answers = dict(_ANSWER.iter_unpack(data[_HEAD.size : answers_end]))
    return ChallengeMessage(
        challenge, answers, (command, model), str(data[answers_end:], "utf-8", "replace"), participant
    )


def _none(sample: Any) -> Message | Frame:
    raise FrameError("greeting", "greetings are not messages")


SESSION_TOPIC = Topic(CHALLENGE_TOPIC, "Frame", True, False, 4096, 0, 0.01, False, _none)


class ChallengeReader(SealedReader):
    """Gives what it opens to the greeter, and nothing to anybody else."""

    liveness: LivenessChallenge

    def _accept(self, opened: Opened, sample: Any, source: int) -> bool:
        self.liveness.receive(opened.peer, sample.data)
        return False


class LivenessChallenge:
    """Announces challenges and answers for one bus, on its receive thread."""

    def __init__(
        self, seal: SessionCipher, participant: bytes, reader: ChallengeReader, writer: SealedWriter, thread: IoThread
    ) -> None:
        """Announce soon for the first time. ``participant``: prefix of this one's GUIDs. ``reader``, ``writer``: of
        :data:`SESSION_TOPIC`."""
        self._seal = seal
        self._thread = thread
        self._answers: dict[bytes, int] = {}
        self._label = f"{socket.gethostname()} (process {os.getpid()})"
        self._participant = participant
        self._is_due = True
        self._announced_s = -REPEAT_S
        reader.liveness = self
        self._writer = writer
        self._seal.peers.on_unauthenticated = self._ask
        self._seal.peers.dropped = self._count
        thread.add_reader(reader)
        thread.add_periodic(Periodic(self._announce))

    def receive(self, peer: Peer, data: memoryview) -> None:
        """Process the announcement of a session. Raises FrameError: it is invalid."""
        if peer is self._seal.peers.own:
            return
        said = parse_challenge(data)
        peer.label, peer.participant = said.label, said.participant
        heard_at = said.answers.get(self._seal.peers.challenge)
        if heard_at is not None and not peer.authenticated:
            peer.floor = max(0, heard_at - LEEWAY_S)
            peer.retained = dict(zip(_RETAINED, said.retained, strict=True))
            self._seal.peers.authenticate(peer)
            self._thread.take_again()
        if said.challenge not in self._answers:
            self._answers[said.challenge] = self._seal.moment
            while len(self._answers) > MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
            self._is_due = True
            self._thread.add_periodic(Periodic(self._announce))

    def announce_again(self) -> None:
        """Announce again, under the new key: later members can read nothing else."""
        self._is_due = True
        self._thread.add_periodic(Periodic(self._announce))

    def _ask(self) -> None:
        """Announce again, as an unauthenticated session sends data and may have missed this process."""
        if time.monotonic() > self._announced_s + REPEAT_S:
            self._is_due = True
            self._thread.add_periodic(Periodic(self._announce))

    def _count(self, why: str, samples: int) -> None:
        self._thread.rejected[why] += samples

    def _announce(self) -> bool:
        """Announce if due; returns whether to try again soon."""
        now_s = time.monotonic()
        if self._is_due and now_s > self._announced_s + _PACE_S * (len(self._seal.peers) // _PACE_PEERS):
            kept = self._seal.retained
            retained = (kept.get(_RETAINED[0], 1), kept.get(_RETAINED[1], 1))
            said = ChallengeMessage(self._seal.peers.challenge, self._answers, retained, self._label, self._participant)
            body = pack_challenge(said)
            self._is_due = not self._writer.write((), (body,))
            # A write that DDS does not take has held up this thread for 10 ms: others need it more.
            self._announced_s = now_s + REPEAT_S * self._is_due
        return self._is_due

"""DDS writers and readers of a bus whose members have keys of their own.

What a sample may say is bound here to who has sealed it: a node speaks for the clients that the allow list gives it,
and for nobody else.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from gradbus.runtime.dds.access_policy import job_taken
from gradbus.runtime.dds.participant import Reader, Writer
from gradbus.runtime.dds.topics import TOPICS, Topic
from gradbus.runtime.errors import FrameError, JoinRefused
from gradbus.runtime.security.encryption import Envelope, Opener, Seal
from gradbus.runtime.security.endpoints import CLEAR, MatchedWhileIn
from gradbus.runtime.security.identity.admission import Door
from gradbus.runtime.security.identity.allow_list import Entry
from gradbus.runtime.security.identity.join_client import Applicant
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.messages import ClientUpdate, Control, TrainCmd

_CONTROL, _COMMANDS = TOPICS[Control].name, TOPICS[TrainCmd].name
_FROM_MEMBERS = frozenset({_CONTROL, TOPICS[ClientUpdate].name})


class Side(Protocol):
    """The controller's side of a bus, or a member's."""

    @property
    def is_in(self) -> bool:
        """Whether this process can talk to others."""

    def seal(self, topic: str, parts: Sequence[Any]) -> Envelope | None:
        """The envelope of a sample; None: there is nobody to say it to.

        Raises:
            JoinRefused: the controller does not let this process in, or not any more.
            JobTaken: this process is a controller, and another one holds the job.
        """

    def open(self, topic: str, data: Any) -> memoryview | None:
        """The sample in an envelope; None: it is not for this process. Raises FrameError."""

    def check(self, topic: str, sample: Any) -> None:
        """Raise FrameError: ``identity``: who has sealed the sample opened last may not say what it says."""


class ControllerSide:
    """Of the controller."""

    is_in = True

    def __init__(self, door: Door) -> None:
        self._door = door
        self._entry: Entry | None = None

    def seal(self, topic: str, parts: Sequence[Any]) -> Envelope | None:
        """What is for one client goes to that one alone."""
        if self._door.refusal:
            raise job_taken(self._door.refusal)
        # Of a control message the last part is its body, which this process has made.
        to = control.addressee(parts[-1]) if topic == _CONTROL else None
        return self._door.seal(topic, parts, to)

    def open(self, topic: str, data: Any) -> memoryview | None:
        opened = self._door.open(topic, data, time.monotonic())
        if opened is None:
            return None
        plain, self._entry = opened
        if topic not in _FROM_MEMBERS:
            raise FrameError("identity", f"{self._entry.name}, a {self._entry.role}, speaks on {topic}")
        return plain

    def check(self, topic: str, sample: Any) -> None:
        sender = frames.sender_of(sample.data)
        if self._entry is None or not self._entry.may_be(sender):
            name = self._entry and self._entry.name
            raise FrameError("identity", f"{name} speaks for client {sender}, which the allow list does not give it")


class MemberSide:
    """Of everybody else."""

    def __init__(self, applicant: Applicant) -> None:
        self._applicant = applicant
        self._seal = Seal(applicant.job, applicant.ranks, applicant.session)
        self._openers: dict[str, Opener] = {}  # by topic
        applicant.on_removed = self._remove

    def _remove(self, sessions: Collection[bytes]) -> None:
        for session in sessions:
            self._seal.peers.remove(session)

    @property
    def is_in(self) -> bool:
        return self._applicant.keys is not None

    def seal(self, topic: str, parts: Sequence[Any]) -> Envelope | None:
        if self._applicant.refusal:
            raise JoinRefused(self._applicant.refusal)
        return self._applicant.seal(topic, parts) if topic in _FROM_MEMBERS else None

    def open(self, topic: str, data: Any) -> memoryview | None:
        if not self._applicant.ranks.is_in:
            return self._applicant.open(topic, data, time.monotonic())
        opener = self._openers.get(topic)  # an observer of ranks: nobody has to prove to it that he is alive
        if opener is None:
            opener = self._openers[topic] = self._seal.opener(topic, ignores_own=True)
        return opener.open(data).data

    def check(self, topic: str, sample: Any) -> None:
        if self._applicant.ranks.is_in:
            return
        if topic != _COMMANDS and frames.sender_of(sample.data) != frames.CONTROLLER:
            raise FrameError("identity", "the controller speaks for somebody else")


class IdentityWriter(MatchedWhileIn, Writer):
    """Seals every sample for whom it is for. While there is nobody that it could be for, it counts as not matched."""

    def __init__(self, topic: Topic, wire: Writer, fast: bool, side: Side) -> None:
        super().__init__(topic, wire.entity, fast)
        self._wire = wire
        self._clear = CLEAR[wire.topic.idl_type]
        self._entrance = self._side = side
        self.unsaid = 0  # samples that nobody could be told

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        """See :meth:`.dds.Writer.write`. What nobody can be told is gone: actors say it again when they are in."""
        if parts:
            sample: tuple[Any, ...] = (self.idl_type.prefix(*fields, sum(map(len, parts))), *parts)
        else:
            sample = (self.idl_type(*fields).serialize(),)
        sealed = self._side.seal(self.topic.name, sample)
        if sealed is None:
            self.unsaid += 1
            return True
        return self._wire.write_sealed(self._clear, fields, parts, lambda fields, parts: sealed)

    @property
    def refused_since_s(self) -> float:
        """See :attr:`.dds.Writer.refused_since_s`."""
        return self._wire.refused_since_s

    def delete(self) -> None:
        """See :meth:`.endpoints.SealedWriter.delete`."""
        self._wire.delete()


class IdentityReader(MatchedWhileIn, Reader):
    """Opens what is for this process."""

    def __init__(self, topic: Topic, wire: Reader, side: Side) -> None:
        super().__init__(topic, wire.entity, fast=False)
        self._wire = wire
        self._entrance = self._side = side

    def delete(self) -> None:
        """See :meth:`.endpoints.SealedReader.delete`."""
        self._wire.delete()

    def take(self, limit: int) -> list[tuple[Any, int]]:
        """See :meth:`.dds.Reader.take`: envelopes as they came."""
        return self._wire.take(limit)

    def typed(self, raw: Any) -> Any:
        """See :meth:`.dds.Reader.typed`. Opened one by one, so that each is used while it is in the processor's caches.

        Raises:
            FrameError: as :meth:`Side.open` and :meth:`Side.check`.
        """
        plain = self._side.open(self.topic.name, self._wire.octets(raw))
        if plain is None:
            return None
        sample = self.idl_type.deserialize(plain)
        self._side.check(self.topic.name, sample)
        return sample

"""What the network in memory is made of: nodes, and pairs of an outlet and an inlet that may know each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from gradbus.runtime.transport.api import PeerId
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.kept_samples import KeptSamples


class Node(Protocol):
    """A process.

    Attributes:
        dead: it has ended, at ``ended_s``; killed: without closing what it had opened. paused: it stands still, and
            sends no sign of life.
    """

    @property
    def name(self) -> str:
        """Return its name, for people."""

    @property
    def machine(self) -> int:
        """Return the number of its machine, within which all reach each other whatever is cut."""

    dead: bool
    killed: bool
    paused: bool
    ended_s: float


@dataclass(slots=True, eq=False)
class MemoryNode:
    """A process that exists in name only: see :class:`Node`."""

    name: str
    machine: int = 0
    dead: bool = False
    killed: bool = False
    paused: bool = False
    ended_s: float = 0.0


class PairOwner(Protocol):
    """A transport, as its pairs see it.

    Attributes:
        own: what it calls itself.
    """

    own: PeerId


class PairEnd(Protocol):
    """An outlet or an inlet, as the network sees it.

    Attributes:
        pairs: those it is part of. job: the network joins ends of one job only. owner: its transport.
    """

    channel: Channel
    pairs: list[EndpointPair]
    is_closed: bool

    @property
    def node(self) -> Node:
        """Return its process."""

    @property
    def job(self) -> str:
        """Return the job of its transport."""

    @property
    def owner(self) -> PairOwner:
        """Return its transport."""

    def note_peers_changed(self) -> None:
        """Take note that the other side of a pair has been found or lost."""


class OutletEnd(PairEnd, Protocol):
    """An outlet.

    Attributes:
        kept: the samples that it may have to send.
    """

    kept: KeptSamples

    def note_acknowledged(self, pair: EndpointPair, number: int) -> None:
        """Take note that an inlet has all samples up to this number."""

    def forget_acknowledged(self) -> None:
        """Forget the samples that no inlet lacks."""


class InletEnd(PairEnd, Protocol):
    """An inlet."""

    @property
    def has_room(self) -> bool:
        """Return whether a sample finds room."""

    def put(self, sample: Any, handle: int) -> None:
        """Queue a sample of the outlet with this handle."""


class EndpointPair:
    """An outlet and an inlet of one channel.

    Attributes:
        writer_knows, reader_knows: whether that side has matched the other one.
        handle: by which the reader knows the writer; a new one at each match. reader_handle: the other way round.
        epoch: raised when the writer loses the reader, and when the reader asks for retained samples again: what is on
            its way then is lost, in both directions.
        acknowledged: the reader has all samples up to this number, as far as the writer knows.
        attempts: to send the oldest of the others again. resends: the next one is due.
        wanted: the number of the next sample that the reader hands over. early: those behind it, by number.
        is_telling: an acknowledgement is on its way.
    """

    __slots__ = (
        "acknowledged", "attempts", "early", "epoch", "handle", "is_telling", "reader", "reader_handle", "reader_knows",
        "resends", "wanted", "was_known", "writer", "writer_knows",
    )  # fmt: skip

    def __init__(self, writer: OutletEnd, reader: InletEnd) -> None:
        self.writer, self.reader = writer, reader
        self.writer_knows = self.reader_knows = self.was_known = self.resends = self.is_telling = False
        self.epoch = self.handle = self.reader_handle = self.acknowledged = self.attempts = 0
        self.wanted = 1
        self.early: dict[int, Any] = {}

    def begin_at(self, number: int) -> None:
        """Have the writer send, and the reader want, the samples from this number on."""
        self.acknowledged, self.wanted, self.attempts = number - 1, number, 0
        self.early.clear()
        if self.is_reliable:
            self.writer.kept.keep_since(number)

    @property
    def source(self) -> Node:
        """Return the process of the writer."""
        return self.writer.node

    @property
    def target(self) -> Node:
        """Return the process of the reader."""
        return self.reader.node

    @property
    def is_gone(self) -> bool:
        """Return whether one side does not exist any more."""
        return self.source.dead or self.target.dead or self.writer.is_closed or self.reader.is_closed

    @property
    def is_sending(self) -> bool:
        """Return whether the writer sends again what is lost: its process lives, or has closed it, and waits."""
        return not self.source.dead or (self.writer.is_closed and not self.source.killed)

    @property
    def is_reliable(self) -> bool:
        """Return whether the writer keeps samples for the reader until it has them."""
        return self.reader.channel.reliable

    @property
    def skips_gaps(self) -> bool:
        """Return whether the reader does without samples that a later one overtakes: it wants the last one only, or the
        writer keeps no other, which may have become the last one before the others arrived."""
        return self.reader.channel.keep_last or self.writer.channel.keep_last or not self.is_reliable

    @property
    def lacks_samples(self) -> bool:
        """Return whether the writer keeps samples for the reader, as far as it knows."""
        return self.writer_knows and self.is_reliable and self.acknowledged < self.writer.kept.last

    def side_of(self, node: Node) -> tuple[bool, bool]:
        """Return whether the writer, and the reader, is of this process."""
        return self.source is node, self.target is node

"""What the network in memory is made of: nodes, and pairs of an outlet and an inlet that may know each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from gradbus.runtime.transport.api import PeerId
from gradbus.runtime.transport.channels import Channel


class Node(Protocol):
    """A process.

    Attributes:
        dead: it has ended, at ``ended_s``. paused: it stands still, and sends no sign of life.
    """

    @property
    def name(self) -> str:
        """Return its name, for people."""

    @property
    def machine(self) -> int:
        """Return the number of its machine, within which all reach each other whatever is cut."""

    dead: bool
    paused: bool
    ended_s: float


@dataclass(slots=True, eq=False)
class MemoryNode:
    """A process that exists in name only: see :class:`Node`."""

    name: str
    machine: int = 0
    dead: bool = False
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

    def note_match(self) -> None:
        """Take note that the other side of a pair has been found or lost."""


class OutletEnd(PairEnd, Protocol):
    """An outlet."""

    @property
    def retained(self) -> Iterable[Any]:
        """Return the samples that it keeps for inlets that match later."""


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
        epoch: raised when the writer loses the reader: what is on its way then is lost.
        last_s: arrival of the newest sample, which no later one overtakes.
        held: samples that cannot arrive yet. in_flight: number of those that are on their way.
        handle: by which the reader knows the writer; a new one at each match. reader_handle: the other way round.
    """

    __slots__ = (
        "epoch", "handle", "held", "in_flight", "last_s", "reader", "reader_handle", "reader_knows", "was_known",
        "writer", "writer_knows",
    )  # fmt: skip

    def __init__(self, writer: OutletEnd, reader: InletEnd) -> None:
        self.writer, self.reader = writer, reader
        self.writer_knows = self.reader_knows = self.was_known = False
        self.epoch = self.handle = self.reader_handle = self.in_flight = 0
        self.last_s = 0.0
        self.held: deque[Any] = deque()

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
    def unacknowledged(self) -> int:
        """Return the number of samples that the writer has to keep for the reader: it waits for reliable ones only."""
        return len(self.held) + self.in_flight if self.writer_knows and self.reader.channel.reliable else 0

    def side_of(self, node: Node) -> tuple[bool, bool]:
        """Return whether the writer, and the reader, is of this process."""
        return self.source is node, self.target is node

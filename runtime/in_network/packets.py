"""What workers and aggregators of in-network aggregation send to each other, and when they send it again.

A gradient is cut into blocks of int32 entries. N consecutive blocks, N being the number of workers, are a group: block
``b`` of a group starts its way around the ring at rank ``b``. Groups are numbered over the whole run, so that no packet
of one step can be taken for another step's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[np.int32]
"""int32, shape (E,): integers of a block, never changed once they are in a packet."""

AGGREGATOR: Final = -1
"""As a source or destination: the aggregator."""
WORKERS: Final = -2
"""As a destination: all workers."""


class PacketKind(enum.Enum):
    """Kinds of packets."""

    REDUCE = "reduce"
    """A partial sum on its way around the ring (reduce-scatter)."""
    GATHER = "gather"
    """A full sum on its way around the ring (all-gather)."""
    CONTRIBUTION = "contribution"
    """A partial sum for the aggregator."""
    RESULT = "result"
    """A full sum from the aggregator."""
    RESERVE = "reserve"
    """A worker asks for slots for a group."""
    START = "start"
    """The aggregator has slots for a group: contributions go to it from now on."""
    RING_ACK = "ring ack"
    """A worker has got a packet of the ring."""
    AGGREGATOR_ACK = "aggregator ack"
    """The aggregator has added the packet, or has it already."""
    RESULT_ACK = "result ack"
    """A worker knows these sums; the bitmap is of blocks."""
    PROBE = "probe"
    """A worker asks whether the aggregator is there. It is acknowledged as a contribution is."""
    STALE = "stale"
    """The packet is of another epoch of the job; ``epoch`` is the present one."""

    __hash__ = object.__hash__  # each kind is one object; what Enum has hashes its name, in Python


RING_KINDS: Final = frozenset({PacketKind.REDUCE, PacketKind.GATHER})
CARRIERS: Final = frozenset({PacketKind.REDUCE, PacketKind.GATHER, PacketKind.CONTRIBUTION})


@dataclass(frozen=True, slots=True, eq=False)
class Packet:
    """One packet.

    Attributes:
        job: the run it belongs to. epoch: counts the times that the run had to begin again at a common group.
        group, block: which sum. step: hops of a packet of the ring before this one.
        source, destination: a rank, or :data:`AGGREGATOR`; destination may be :data:`WORKERS`.
        bitmap: bit r: the sum has the block of rank r. Of a RESULT_ACK: bit b: block b is known.
        values: the sum; None where a packet has none.
        acked: of an acknowledgement: the kind of packet that it is for.
        is_repeated: whether it was sent before. has_overflowed: a sum in it has left the range of int32.
    """

    kind: PacketKind
    job: int
    epoch: int
    group: int
    source: int
    destination: int
    block: int = 0
    step: int = 0
    bitmap: int = 0
    values: Block | None = None
    acked: PacketKind | None = None
    is_repeated: bool = False
    has_overflowed: bool = False

    @property
    def carrier(self) -> CarrierId:
        """Which carrier it is, or acknowledges. The bitmap is a part of that: a worker may have two contributions to
        one block on their way, its own, and a partial sum that came around the ring."""
        return (self.acked or self.kind, self.group, self.block, self.step, self.bitmap)

    def acknowledgement(self, kind: PacketKind, source: int) -> Packet:
        """Return the packet of this kind by which ``source`` tells the sender that it has got this one."""
        way = self.job, self.epoch, self.group, source, self.source, self.block, self.step
        return Packet(kind, *way, bitmap=self.bitmap, acked=self.kind)


class Sum(NamedTuple):
    """A sum of blocks, full or not. ``has_overflowed``: an entry has left the range of int32, and means nothing."""

    values: Block
    has_overflowed: bool = False


CarrierId = tuple[PacketKind, int, int, int, int]


_INT32 = np.iinfo(np.int32)


def add_checked(sum_: Block, values: Block) -> bool:
    """Add to a sum, in place. Returns whether an entry has overflowed: both had one sign, and the sum has the other."""
    low = int(sum_.min(initial=0)) + int(values.min(initial=0))
    high = int(sum_.max(initial=0)) + int(values.max(initial=0))
    if _INT32.min <= low and high <= _INT32.max:  # as a rule: what codecs.fixed_point makes has room for all ranks
        np.add(sum_, values, out=sum_)
        return False
    before = sum_.copy()
    np.add(sum_, values, out=sum_)
    before ^= sum_
    return bool(((sum_ ^ values) & before).min(initial=0) < 0)


@dataclass(frozen=True, slots=True)
class RetransmissionTimes:
    """When a packet that is not acknowledged is sent again.

    Attributes:
        first_s: after the first time. It has to be longer than any packet stays in the network, unless packets between
            two nodes stay in order. Doubles with each time. max_s: upper bound.
        max_tries: so often a packet is sent, before its sender gives up.
    """

    first_s: float = 0.02
    max_s: float = 1.0
    max_tries: int = 20


@dataclass(slots=True)
class Outstanding:
    """A packet that is sent until it is acknowledged."""

    packet: Packet
    due_s: float
    wait_s: float
    tries: int = 1

    def again(self, now_s: float, times: RetransmissionTimes) -> Packet:
        """The packet, to be sent once more now."""
        self.tries += 1
        self.wait_s = min(2 * self.wait_s, times.max_s)
        self.due_s = now_s + self.wait_s
        return replace(self.packet, is_repeated=True)


class Unacknowledged:
    """All packets of a sender that wait for an acknowledgement, by the block that they are of."""

    def __init__(self, times: RetransmissionTimes) -> None:
        self._times = times
        self._by_block: dict[tuple[int, int], dict[CarrierId, Outstanding]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_block)

    @property
    def deadline_s(self) -> float | None:
        """When the first of them is to be sent again."""
        return min((one.due_s for block in self._by_block.values() for one in block.values()), default=None)

    def add(self, packet: Packet, now_s: float) -> None:
        """A packet is sent for the first time."""
        wait_s, carrier = self._times.first_s, packet.carrier
        self._by_block.setdefault(carrier[1:3], {})[carrier] = Outstanding(packet, now_s + wait_s, wait_s)

    def acknowledge(self, carrier: CarrierId) -> None:
        """This one has arrived. There may be none: an acknowledgement comes twice, too."""
        block = self._by_block.get(carrier[1:3])
        if block is not None:
            block.pop(carrier, None)
            if not block:
                del self._by_block[carrier[1:3]]

    def settle(self, group: int, block: int) -> None:
        """The sum of this block is known: none of its packets is needed any more."""
        self._by_block.pop((group, block), None)

    def due(self, now_s: float) -> list[Outstanding]:
        """Those that are to be sent again now."""
        return [one for block in self._by_block.values() for one in block.values() if one.due_s <= now_s]

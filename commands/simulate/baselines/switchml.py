"""SwitchML: a fixed pool of slots for each job, and a shadow copy of each.

Sapio et al., "Scaling Distributed Machine Learning with In-Network Aggregation", NSDI 2021, algorithms 3 and 4. A
worker has one block in each slot of its job's pool. A result frees the slot for the block that is one pool further on,
which goes into the other copy; the copy before keeps its sum, so that a worker that has lost the result gets it again.
A block of a worker in one copy proves that it has the result of the other one, whose memory is then free. So there are
no acknowledgements; packets of one worker have to stay in order, as on a switch without other ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from gradbus.commands.simulate.baselines.sender import BlockSender
from gradbus.runtime.in_network.packets import AGGREGATOR, WORKERS, Block, Packet, PacketKind, RetransmissionTimes


class PoolWorker(BlockSender):
    """A worker. In a packet ``block`` is the slot, and ``step`` is which copy of it."""

    def __init__(self, rank: int, job: int, pool: int, times: RetransmissionTimes) -> None:
        """``pool``: slots of the job, without the copies."""
        super().__init__(rank, job, times)
        self._pool = pool

    def startable(self, new: range | None, known: int = -1) -> list[int]:
        """Return those whose slot is free: the sum of the block before in it is known."""
        if new is None:
            return [known + self._pool] if known + self._pool < self.end else []
        return [at for at in new if at < self._pool or self.is_known(at - self._pool)]

    def place(self, number: int) -> tuple[int, int]:
        """The slot, and which copy of it."""
        return number % self._pool, number // self._pool % 2


@dataclass(slots=True, eq=False)
class _Copy:
    """One copy of a slot. ``count``: workers in the sum, modulo all of them. ``seen``: bits of those since it began."""

    count: int = 0
    seen: int = 0
    values: Block = field(default_factory=lambda: np.zeros(1, dtype=np.int32))


class PoolSwitch:
    """The switch. It has no timers: workers send again."""

    deadline_s: None = None

    def __init__(self, worlds: Mapping[int, int], pool: int) -> None:
        """``worlds``: workers of each job. ``pool``: slots of a job, of which each has two copies."""
        self._worlds = dict(worlds)
        self._slots = {job: [(_Copy(), _Copy()) for _ in range(pool)] for job in worlds}

    @property
    def taken(self) -> int:
        """Copies that hold blocks of workers who may need the sum: those that have sent nothing in the other copy."""
        return sum(copy.seen > 0 for slots in self._slots.values() for slot in slots for copy in slot)

    @property
    def unfinished(self) -> int:
        """Copies with a sum that is not full."""
        return sum(copy.count > 0 for slots in self._slots.values() for slot in slots for copy in slot)

    def advance(self, now_s: float) -> list[Packet]:
        """Nothing."""
        return []

    def receive(self, packet: Packet, now_s: float) -> list[Packet]:
        """Algorithm 3 of the paper; its ``ver`` is ``step``, its ``idx`` is ``block``."""
        slot = self._slots[packet.job][packet.block]
        copy, other = slot[packet.step], slot[1 - packet.step]
        assert packet.values is not None
        if copy.seen & packet.bitmap:
            return [self._result(packet, copy, packet.source)] if copy.count == 0 else []
        copy.seen |= packet.bitmap
        other.seen &= ~packet.bitmap
        copy.values = packet.values.copy() if copy.count == 0 else copy.values + packet.values
        copy.count = (copy.count + 1) % self._worlds[packet.job]
        return [self._result(packet, copy, WORKERS)] if copy.count == 0 else []

    def _result(self, packet: Packet, copy: _Copy, to: int) -> Packet:
        return replace(
            packet,
            kind=PacketKind.RESULT,
            source=AGGREGATOR,
            destination=to,
            values=copy.values,
            bitmap=(1 << self._worlds[packet.job]) - 1,
            is_repeated=False,
        )

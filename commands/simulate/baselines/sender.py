"""What workers of all baselines have in common: blocks in order, each sent until its sum comes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from gradbus.runtime.in_network.packets import AGGREGATOR, Packet, PacketKind, RetransmissionTimes, Unacknowledged


class BlockSender(ABC):
    """A worker that sends each of its blocks to the switch, and again until it has the sum.

    Blocks are numbered over the whole run, and a group is one block.

    Attributes:
        first_unfinished: the sums of all blocks before it are known. end: blocks that were submitted.
    """

    def __init__(self, rank: int, job: int, times: RetransmissionTimes) -> None:
        self.rank = rank
        self.job = job
        self.first_unfinished = 0
        self.end = 0
        self._times = times
        self._unacknowledged = Unacknowledged(times)
        self._blocks: dict[int, npt.NDArray[np.int32]] = {}  # not known yet
        self._sums: dict[int, npt.NDArray[np.int32]] = {}  # where they go

    @property
    def deadline_s(self) -> float | None:
        """When :meth:`advance` has something to do."""
        return self._unacknowledged.deadline_s

    def submit(self, blocks: npt.NDArray[np.int32], out: npt.NDArray[np.int32], now_s: float) -> list[Packet]:
        """Have the next blocks summed: int32, shape (blocks, 1, E), as is ``out``."""
        first = self.end
        for values, sum_ in zip(blocks[:, 0], out[:, 0], strict=True):
            self._blocks[self.end], self._sums[self.end] = values, sum_
            self.end += 1
        return [self._packet_of(at, now_s) for at in self.startable(range(first, self.end))]

    def receive(self, packet: Packet, now_s: float) -> list[Packet]:
        """Take a result. One that is known comes again where another worker had lost it."""
        if packet.kind is not PacketKind.RESULT or packet.group not in self._blocks:
            return []
        assert packet.values is not None
        self._sums.pop(packet.group)[:] = packet.values
        del self._blocks[packet.group]
        self._unacknowledged.settle(packet.group, packet.block)
        while self.first_unfinished < self.end and self.first_unfinished not in self._blocks:
            self.first_unfinished += 1
        return [self._packet_of(at, now_s) for at in self.startable(None, known=packet.group)]

    def advance(self, now_s: float) -> list[Packet]:
        """Send again what is due."""
        return [one.again(now_s, self._times) for one in self._unacknowledged.due(now_s)]

    @abstractmethod
    def startable(self, new: range | None, known: int = -1) -> list[int]:
        """Blocks that are to be sent now: ``new`` ones were submitted, or the sum of block ``known`` has come."""

    def place(self, number: int) -> tuple[int, int]:
        """Return what stands in the packets of a block as ``block`` and ``step``."""
        return 0, 0

    def is_known(self, number: int) -> bool:
        """Whether the sum of a block that was submitted is known."""
        return number not in self._blocks

    def _packet_of(self, number: int, now_s: float) -> Packet:
        slot, step = self.place(number)
        packet = Packet(
            PacketKind.CONTRIBUTION,
            self.job,
            0,
            number,
            self.rank,
            AGGREGATOR,
            slot,
            step,
            1 << self.rank,
            self._blocks[number],
        )
        self._unacknowledged.add(packet, now_s)
        return packet

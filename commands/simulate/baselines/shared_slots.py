"""ATP and ESA: slots that all jobs share, found by a hash, and a parameter server for what finds none.

- ATP: Lao et al., "ATP: In-network Aggregation for Multi-tenant Learning", NSDI 2021. The first packet of a block takes
  the slot that the hash of job and block gives; if another block has it, the packet goes on to the job's parameter
  server. A full sum goes there, too; the slot is free when the server's result comes back through the switch. A packet
  that was sent before makes the switch give up a sum that is not full: the server gets it, and adds the rest.
- ESA: Wang et al., "Efficient Data-Plane Memory Scheduling for In-Network Aggregation", 2022 (arXiv:2201.06398). A
  packet of higher priority takes a slot from a block of lower priority, whose sum, as far as it has come, goes to the
  server.

What is simpler here than in the papers: the window is fixed, without congestion control, and a block has one place by
its hash. In ESA the priority is that of the job's progress, so that the job goes first that has least left, and it
halves with each packet that had to give way, so that a sum that will never be full does not keep its slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gradbus.commands.simulate.baselines.sender import BlockSender
from gradbus.runtime.in_network.packets import AGGREGATOR, WORKERS, Block, Packet, PacketKind, RetransmissionTimes

MAX_PRIORITY = 255


class WindowWorker(BlockSender):
    """A worker of either. In a packet ``step`` is its priority."""

    def __init__(self, rank: int, job: int, window: int, times: RetransmissionTimes) -> None:
        """``window``: blocks under way."""
        super().__init__(rank, job, times)
        self._window = window
        self._next = 0
        self._began = 0  # first block of what was submitted last

    def startable(self, new: range | None, known: int = -1) -> list[int]:
        """As many as the window has room for."""
        if new is not None:
            self._began = new.start
        first, self._next = self._next, max(self._next, min(self.end, self.first_unfinished + self._window))
        return list(range(first, self._next))

    def place(self, number: int) -> tuple[int, int]:
        """The priority rises as the gradient that was submitted last is sent."""
        return 0, 1 + (MAX_PRIORITY - 1) * (number - self._began) // max(1, self.end - self._began)


@dataclass(slots=True, eq=False)
class _Slot:
    """A block in the switch: the sum of the workers in ``bitmap``."""

    key: tuple[int, int]
    bitmap: int
    values: Block
    priority: int


class SharedSwitch:
    """The switch. It has no timers: workers send again."""

    deadline_s: None = None

    def __init__(self, worlds: Mapping[int, int], slots: int, *, preempts: bool) -> None:
        """
        Args:
            worlds: workers of each job; its parameter server is the node with this number.
            slots: of all jobs. preempts: ESA, else ATP.
        """
        self._worlds = dict(worlds)
        self._slots: list[_Slot | None] = [None] * slots
        self._preempts = preempts

    @property
    def taken(self) -> int:
        """Slots with a sum, full or not."""
        return sum(slot is not None for slot in self._slots)

    def advance(self, now_s: float) -> list[Packet]:
        """Nothing."""
        return []

    def receive(self, packet: Packet, now_s: float) -> list[Packet]:
        """A block of a worker, or a result of a server."""
        key = packet.job, packet.group
        at = hash(key) % len(self._slots) if self._slots else -1
        slot = self._slots[at] if self._slots else None
        if packet.kind is PacketKind.RESULT:
            if slot is not None and slot.key == key:
                self._slots[at] = None
            return [packet]
        if slot is not None and slot.key == key:
            return self._add(at, slot, packet)
        answers: list[Packet] = []
        # What was sent before may be at the server: it does not take a slot, where it would wait for others in vain.
        may_take = bool(self._slots) and not packet.is_repeated
        if slot is not None and may_take:
            may_take = self._preempts and packet.step > slot.priority
            if may_take:
                answers = self._give_up(at, slot)
            else:
                slot.priority //= 2
        if not may_take:
            return [replace(packet, destination=self._worlds[packet.job])]
        assert packet.values is not None
        self._slots[at] = _Slot(key, packet.bitmap, packet.values.copy(), packet.step)
        return answers

    def _add(self, at: int, slot: _Slot, packet: Packet) -> list[Packet]:
        assert packet.values is not None
        if not packet.bitmap & slot.bitmap:
            slot.bitmap |= packet.bitmap
            slot.values += packet.values
            if self._is_full(slot):
                return [self._partial(slot)]
        if not packet.is_repeated:
            return []
        # A full sum stays until its result comes: the one that was sent to the server may be lost.
        return [self._partial(slot)] if self._is_full(slot) else self._give_up(at, slot)

    def _give_up(self, at: int, slot: _Slot) -> list[Packet]:
        """A full sum was sent to the server when it was full."""
        self._slots[at] = None
        return [] if self._is_full(slot) else [self._partial(slot)]

    def _is_full(self, slot: _Slot) -> bool:
        return slot.bitmap == (1 << self._worlds[slot.key[0]]) - 1

    def _partial(self, slot: _Slot) -> Packet:
        job, group = slot.key
        return Packet(
            PacketKind.CONTRIBUTION,
            job,
            0,
            group,
            AGGREGATOR,
            self._worlds[job],
            bitmap=slot.bitmap,
            values=slot.values.copy(),
        )


class FallbackServer:
    """The parameter server of a job: adds what the switch had no slot for to what it has summed.

    Attributes:
        overlaps: sums that had only some workers in common with what was here. They are dropped: workers send again.
    """

    deadline_s: None = None

    def __init__(self, world: int) -> None:
        self._world = world
        self._sums: dict[int, tuple[int, Block]] = {}  # by block: bits of workers
        self.overlaps = 0

    def advance(self, now_s: float) -> list[Packet]:
        """Nothing: workers send again."""
        return []

    def receive(self, packet: Packet, now_s: float) -> list[Packet]:
        """A block of a worker, or the sum of several."""
        full = (1 << self._world) - 1
        present, values = self._sums.get(packet.group, (0, None))
        if present == full:  # who sends has not got the result
            alone = packet.bitmap.bit_count() == 1
            return [self._result(packet, packet.bitmap.bit_length() - 1 if alone else WORKERS)]
        assert packet.values is not None
        if packet.bitmap & present == present:
            self._sums[packet.group] = packet.bitmap, packet.values.copy()
        elif not packet.bitmap & present:
            assert values is not None
            self._sums[packet.group] = present | packet.bitmap, values + packet.values
        else:
            self.overlaps += packet.bitmap & present != packet.bitmap
            return []
        return [self._result(packet, WORKERS)] if self._sums[packet.group][0] == full else []

    def _result(self, packet: Packet, to: int) -> Packet:
        return Packet(
            PacketKind.RESULT,
            packet.job,
            0,
            packet.group,
            self._world,
            to,
            bitmap=(1 << self._world) - 1,
            values=self._sums[packet.group][1],
        )

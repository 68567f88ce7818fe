"""The aggregator of RA-INA: adds what workers send for a group while it has slots for that, and tells all the sums.

It may lie in the way of the ring's packets, as a switch does, and then takes a partial sum that passes if it has slots
for its group; or workers ask it for slots (RESERVE), and their ring goes past it. It does not know which groups are
finished: a packet that comes late makes it announce the group once more, all workers answer that they know the sums,
and the slots are free again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_

from gradbus.runtime.in_network.packets import (
    AGGREGATOR,
    CARRIERS,
    WORKERS,
    Packet,
    PacketKind,
    RetransmissionTimes,
    add_checked,
)
from gradbus.runtime.in_network.slots import Slots

GroupKey = tuple[int, int]  # job, group


@dataclass(slots=True)
class JobState:
    """A job on the aggregator.

    Attributes:
        world: its workers. epoch: the present one. groups: how many hold slots.
        reserved: by rank, those of them that it has asked for.
    """

    world: int
    epoch: int
    groups: int = 0
    reserved: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class _Held:
    """A group that has slots.

    Attributes:
        base: its first slot. contributors: by block, bits of the ranks in the sum. overflowed: bits of blocks.
        known: by rank, bits of the blocks that it has acknowledged.
        progress_s: when something came that was new. due_s, wait_s: when workers are to be reminded.
        reserved_by: the rank that has asked for the slots; None: a packet on its way has taken them.
    """

    base: int
    contributors: list[int]
    known: list[int]
    progress_s: float
    due_s: float
    wait_s: float
    reserved_by: int | None = None
    overflowed: int = 0


class Aggregator:
    """The protocol of an aggregator of several jobs, without I/O.

    Packets whose destination is a rank are to be delivered to it; those for :data:`WORKERS` to all of the job.

    Attributes:
        violations: packets that contradict what is there: a worker that breaks the protocol, or is hostile.
        dropped: packets of no job here, or that could not be of one.
        held: what is known of each group that has slots, by job and group.
    """

    def __init__(
        self,
        slots: Slots,
        *,
        block_elems: int,
        max_groups_per_job: int = 1 << 20,
        times: RetransmissionTimes | None = None,
        grabs_late: bool = True,
    ) -> None:
        """
        Args:
            max_groups_per_job: so many groups of one job may hold slots. Of these each worker may ask for its part
                (RESERVE), rounded up, so that one that asks and never sends holds no more until its lease ends.
            grabs_late: whether a group that goes around the ring through this aggregator gets slots that come free on
                its way. False: only when it begins, so that each block goes one of the two ways as a whole.
        """
        self._slots = slots
        self._block_elems = block_elems
        self._max_groups = max_groups_per_job
        self._times = times or RetransmissionTimes()
        self._grabs_late = grabs_late
        self._jobs: dict[int, JobState] = {}
        self.held: dict[GroupKey, _Held] = {}
        self.violations = 0
        self.dropped = 0

    @property
    def deadline_s(self) -> float | None:
        """When :meth:`advance` has something to do."""
        return min((held.due_s for held in self.held.values()), default=None)

    def open_job(self, job: int, world: int, *, epoch: int = 0) -> None:
        """Serve a job. Raises ValueError: it is served already, or its world is none."""
        if job in self._jobs or world < 1:
            raise ValueError(f"job {job}: expected a job that is not served yet, of at least 1 worker, got {world}")
        self._jobs[job] = JobState(world, epoch)

    def close_job(self, job: int) -> None:
        """Serve it no more: all of its slots are free."""
        for key in [key for key in self.held if key[0] == job]:
            self._release(key)
        self._jobs.pop(job, None)

    def stalled_groups(self, now_s: float, lease_s: float) -> dict[int, list[int]]:
        """Groups that hold slots and got nothing new for this long, and the ranks that they wait for. Whether a worker
        is gone, or only slow, is for the membership to say."""
        return {
            group: self._waits_for(held) for (_, group), held in self.held.items() if now_s - held.progress_s >= lease_s
        }

    def receive(self, packet: Packet, now_s: float) -> list[Packet]:
        """Take a packet that has reached the aggregator, for it or for a worker."""
        state = self._jobs.get(packet.job)
        if state is None or not self._is_possible(packet, state.world):
            self.dropped += 1
            return []
        if packet.epoch != state.epoch:
            return [Packet(PacketKind.STALE, packet.job, state.epoch, packet.group, AGGREGATOR, packet.source)]
        key = packet.job, packet.group
        held = self.held.get(key)
        match packet.kind:
            case PacketKind.REDUCE:
                return list(self._reduce(packet, key, held, state, now_s))
            case PacketKind.GATHER:
                return [packet] if held is None else list(self._take(packet, key, held, now_s))
            case PacketKind.CONTRIBUTION if held is not None:
                return list(self._take(packet, key, held, now_s))
            case PacketKind.CONTRIBUTION | PacketKind.PROBE:
                # Only a group that has had slots gets contributions. It gave them back when all workers knew its sums.
                return [packet.acknowledgement(PacketKind.AGGREGATOR_ACK, AGGREGATOR)]
            case PacketKind.RESERVE:
                return self._reserve(packet, key, state, now_s) if held is None else []
            case PacketKind.RESULT_ACK:
                if held is not None:
                    self._acknowledged(packet, key, held, state, now_s)
                return []
            case PacketKind.RING_ACK:
                return [packet]
            case _:
                self.dropped += 1
                return []

    def advance(self, now_s: float) -> list[Packet]:
        """Remind workers that have not acknowledged: of the sums that are there, or else that the group is here."""
        packets: list[Packet] = []
        for key, held in self.held.items():
            if held.due_s <= now_s:
                held.wait_s = min(2 * held.wait_s, self._times.max_s)
                held.due_s = now_s + held.wait_s
                for rank in range(self._jobs[key[0]].world):
                    packets += (replace(one, is_repeated=True) for one in self._reminders(key, held, rank))
        return packets

    @staticmethod
    def _waits_for(held: _Held) -> list[int]:
        full = (1 << len(held.known)) - 1
        missing = reduce(or_, (full & ~bits for bits in held.contributors))
        return [rank for rank, known in enumerate(held.known) if (missing >> rank & 1 if missing else known != full)]

    def _is_possible(self, packet: Packet, world: int) -> bool:
        full = (1 << world) - 1
        values = None if packet.values is None else packet.values.shape
        return (
            0 <= packet.source < world
            and AGGREGATOR <= packet.destination < world
            and 0 <= packet.block < world
            and packet.group >= 0
            and 0 <= packet.bitmap <= full
            and values == ((self._block_elems,) if packet.kind in CARRIERS else None)
            and (packet.bitmap != 0) >= (packet.kind in CARRIERS)
        )

    # Slots

    def _reserve(self, packet: Packet, key: GroupKey, state: JobState, now_s: float) -> list[Packet]:
        rank = packet.source
        if packet.group % state.world != rank:
            self.violations += 1  # each group has one worker that asks for it
            return []
        if state.reserved[rank] >= -(-self._max_groups // state.world):
            return []
        held = self._grab(key, state, now_s)
        if held is None:
            return []
        held.reserved_by = rank
        state.reserved[rank] += 1
        return [self._announce(key, state.epoch)]

    def _grab(self, key: GroupKey, state: JobState, now_s: float) -> _Held | None:
        """Slots for all blocks of a group, or none: half a group would wait for others that hold the other half."""
        if state.groups >= self._max_groups:
            return None
        base = self._slots.allocate((*key, state.epoch), state.world)
        if base is None:
            return None
        state.groups += 1
        wait_s = self._times.first_s
        held = _Held(base, [0] * state.world, [0] * state.world, now_s, now_s + wait_s, wait_s)
        self.held[key] = held
        return held

    def _release(self, key: GroupKey) -> None:
        held, state = self.held.pop(key), self._jobs[key[0]]
        self._slots.release(held.base, len(held.contributors))
        state.groups -= 1
        if held.reserved_by is not None:
            state.reserved[held.reserved_by] -= 1

    # Sums

    def _reduce(
        self, packet: Packet, key: GroupKey, held: _Held | None, state: JobState, now_s: float
    ) -> Iterator[Packet]:
        if held is None and packet.step and not self._grabs_late:
            yield packet
            return
        if held is None:
            # Sent again: its first copy may have gone on along the ring, when there were no slots yet.
            held = None if packet.is_repeated else self._grab(key, state, now_s)
            if held is None:
                yield packet
                return
            yield self._announce(key, state.epoch)
        elif packet.is_repeated and packet.bitmap & ~held.contributors[packet.block]:
            yield packet  # for the same reason: it is added by whoever gets it next
            return
        yield from self._take(packet, key, held, now_s)

    def _take(self, packet: Packet, key: GroupKey, held: _Held, now_s: float) -> Iterator[Packet]:
        """Add a carrier, unless its contributors are in the sum already."""
        block, bitmap, full = packet.block, packet.bitmap, (1 << len(held.contributors)) - 1
        assert packet.values is not None
        if bitmap & held.contributors[block] not in (0, bitmap):
            self.violations += 1
            return
        is_new = not bitmap & held.contributors[block]
        if is_new:
            overflows = False
            if held.contributors[block]:
                overflows = add_checked(self._slots[held.base + block], packet.values)
            else:  # what the slot had before is of another group
                self._slots[held.base + block][:] = packet.values
            held.overflowed |= (overflows or packet.has_overflowed) << block
            held.contributors[block] |= bitmap
            self._has_progressed(held, now_s)
        yield packet.acknowledgement(PacketKind.AGGREGATOR_ACK, AGGREGATOR)
        if is_new and held.contributors[block] == full:
            yield self._sum(key, packet.epoch, held, block, WORKERS)

    def _has_progressed(self, held: _Held, now_s: float) -> None:
        """Begin the wait anew: what has doubled it was another lack, and a lost sum would be late by all of that."""
        held.progress_s, held.wait_s = now_s, self._times.first_s
        held.due_s = min(held.due_s, now_s + held.wait_s)

    def _acknowledged(self, packet: Packet, key: GroupKey, held: _Held, state: JobState, now_s: float) -> None:
        full = (1 << state.world) - 1
        if packet.bitmap & ~held.known[packet.source]:
            held.known[packet.source] |= packet.bitmap
            self._has_progressed(held, now_s)
        if all(known == full for known in held.known):
            self._release(key)

    def _reminders(self, key: GroupKey, held: _Held, rank: int) -> Iterator[Packet]:
        epoch, full = self._jobs[key[0]].epoch, (1 << len(held.contributors)) - 1
        if held.known[rank] == full:
            return
        missing = [
            block
            for block, contributors in enumerate(held.contributors)
            if contributors == full and not held.known[rank] >> block & 1
        ]
        for block in missing:
            yield self._sum(key, epoch, held, block, rank)
        if not missing:
            yield Packet(PacketKind.START, key[0], epoch, key[1], AGGREGATOR, rank)

    def _announce(self, key: GroupKey, epoch: int) -> Packet:
        return Packet(PacketKind.START, key[0], epoch, key[1], AGGREGATOR, WORKERS)

    def _sum(self, key: GroupKey, epoch: int, held: _Held, block: int, to: int) -> Packet:
        return Packet(
            PacketKind.RESULT,
            key[0],
            epoch,
            key[1],
            AGGREGATOR,
            to,
            block,
            bitmap=held.contributors[block],
            # Not a copy: before the slot gets another group every worker has told that it knows this sum, and so
            # ignores a packet that is sent, or sent again, after that.
            values=self._slots[held.base + block],
            has_overflowed=bool(held.overflowed >> block & 1),
        )

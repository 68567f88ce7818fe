"""Participants, writers, readers and wait sets of the network in memory: they stand in for ``gradbus.runtime.dds``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fault_simulation.kernel import now_s, running
from fault_simulation.network import WINDOW, Pair
from gradbus.runtime.dds.missing_peers import Reach
from gradbus.runtime.dds.participant import IDL_TYPES, Writer, delete_together
from gradbus.runtime.errors import BusClosed
from gradbus.runtime.transport.access_policy import AccessPolicy
from gradbus.runtime.transport.api import IoThread, Traits
from gradbus.runtime.transport.channels import Channel


class Trigger:
    """What a wait set waits for: on from a change until somebody has looked."""

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = False


class MemoryWriter(Writer):
    """A writer. It is a :class:`Writer` by name only: the receiver of a bus asks for the class."""

    def __init__(self, participant: MemoryParticipant, channel: Channel, retained_samples: int) -> None:
        self.channel = channel
        self.participant = participant
        self.idl_type = IDL_TYPES[channel.sample_type]
        self.changes = Trigger()
        self.pairs: list[Pair] = []
        self.matched = 0
        self.has_new_readers = False
        self.retained: deque[Any] = deque(maxlen=retained_samples if channel.retained else 0)
        self._refused_since_s = self._awaited_since_s = 0.0
        self._sertype = None
        self.is_deleted = False

    # mypy: the real one has a callback of this name, which only its participant sets
    @property
    def deleted(self) -> bool:  # type: ignore[override]
        """Return whether it has been deleted."""
        return self.is_deleted

    def note_match(self) -> None:
        """Report that a reader has been found or lost."""
        self.changes.is_on = True
        self.participant.report_news()

    def refresh(self) -> bool:
        """See :meth:`Writer.refresh`."""
        if not self.changes.is_on:
            return False
        self.changes.is_on, self.has_new_readers = False, True
        self.matched = sum(pair.writer_knows for pair in self.pairs)
        return True

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        """See :meth:`Writer.write`."""
        process, net = self.participant.process, self.participant.network
        if process.dead:
            return True
        if self.is_deleted:
            raise BusClosed(f"topic {self.channel.name!r}: its writer is deleted")
        is_full = not self.channel.keep_last and any(
            pair.writer_knows and len(pair.held) >= WINDOW for pair in self.pairs
        )
        if is_full or net.chance(net.refused):
            process.blocked_s += self.channel.block_s
            self._refused_since_s = self._refused_since_s or now_s()
            return False
        self._refused_since_s = 0.0
        sample = self.idl_type(*fields, b"".join(parts)) if parts else self.idl_type(*fields)
        self.retained.append(sample)
        for pair in self.pairs:
            if pair.writer_knows:
                net.send(pair, sample)
        return True

    @property
    def is_writing(self) -> bool:
        """Return False: a write is over when it returns."""
        return False

    @property
    def throttled_s(self) -> float:
        """Return 0: no write waits."""
        return 0.0

    @property
    def is_acknowledged(self) -> bool:
        """Return whether nothing waits for a reader."""
        return not any(pair.held for pair in self.pairs)

    def wait_for_acks(self, timeout_s: float) -> bool:
        """Return whether nothing waits for a reader."""
        return self.is_acknowledged

    @property
    def is_taken_over(self) -> bool:
        """Return whether nothing is on its way to a reader, either, as far as the writer knows its readers."""
        return not any(
            pair.writer_knows and (pair.held or pair.target.dead or pair.last_s > now_s()) for pair in self.pairs
        )

    def readers(self, known: Mapping[int, Any]) -> dict[int, Any]:
        """Return nothing: only encrypted participants ask."""
        return {}

    def close(self) -> None:
        """Take it out of the network."""
        if not self.is_deleted:
            self.is_deleted = True
            self.participant.network.removed(self)


class MemoryReader:
    """A reader with a queue of the size that its topic says."""

    def __init__(self, participant: MemoryParticipant, channel: Channel) -> None:
        self.channel = channel
        self.participant = participant
        self.changes, self.arrivals = Trigger(), Trigger()
        self.pairs: list[Pair] = []
        self.matched = 0
        self.queue: deque[tuple[Any, int]] = deque()
        self.deleted = False

    def note_match(self) -> None:
        """Report that a writer has been found or lost."""
        self.changes.is_on = True
        self.participant.report_news()

    @property
    def has_room(self) -> bool:
        """Return whether a sample finds room."""
        held, bound = len(self.queue), self.channel.reader_samples
        return self.channel.overwrites or self.channel.keep_last or not bound or held < bound

    def put(self, sample: Any, handle: int) -> None:
        """Queue a sample of the writer with this handle."""
        if self.channel.keep_last:
            self.queue.clear()
        elif self.channel.overwrites and len(self.queue) >= self.channel.reader_samples:
            self.queue.popleft()
        self.queue.append((sample, handle))
        if not self.arrivals.is_on:
            self.arrivals.is_on = True
            self.participant.report_news()

    def refresh(self) -> bool:
        """See ``Reader.refresh``."""
        if not self.changes.is_on:
            return False
        self.changes.is_on = False
        self.matched = sum(pair.reader_knows for pair in self.pairs)
        return True

    def peers(self) -> set[int]:
        """Return the handles of the writers that it knows."""
        return {pair.handle for pair in self.pairs if pair.reader_knows}

    def take(self, limit: int) -> list[tuple[Any, int]]:
        """See ``Reader.take``."""
        queue = self.queue
        taken = [queue.popleft() for _ in range(min(limit, len(queue)))]
        self.arrivals.is_on = bool(queue)
        if taken and self.channel.reader_samples and not self.channel.overwrites:
            for pair in self.pairs:
                if pair.held:
                    self.participant.network.flush(pair)
        return taken

    def decode(self, raw: Any) -> Any:
        """Return the sample, which is an object of its type."""
        return raw

    def octets(self, raw: Any) -> Any:
        """Return the octets of a sample."""
        return raw.data

    def close(self) -> None:
        """Take it out of the network."""
        if not self.deleted:
            self.deleted = True
            self.participant.network.removed(self)


class MemoryWaitSet:
    """Reports which triggers are on. ``on_news`` is called when a wait would end; the driver of its loop sets it."""

    WOKEN = 0

    def __init__(self, participant: MemoryParticipant) -> None:
        self._attached: dict[int, Trigger] = {}
        self._is_woken = False
        self.on_news: Callable[[], None] = lambda: None
        participant.wait_sets.append(self)

    def attach(self, entity: Trigger, number: int) -> None:
        """Wait for a trigger."""
        self._attached[number] = entity
        if entity.is_on:
            self.on_news()

    def detach(self, entity: Trigger) -> None:
        """Wait for a trigger no more."""
        self._attached = {number: one for number, one in self._attached.items() if one is not entity}

    def wait(self, timeout_s: float) -> list[int]:
        """Return the numbers of the triggers that are on, without waiting."""
        numbers = [self.WOKEN] if self._is_woken else []
        self._is_woken = False
        return numbers + [number for number, one in self._attached.items() if one.is_on]

    def wake(self) -> None:
        """End a wait."""
        self._is_woken = True
        self.on_news()


class MemoryParticipant:
    """Stands in for ``Participant``: the endpoints of one bus."""

    def __init__(self, *, partition: str = "", **_: Any) -> None:
        self.partition = partition
        self.process = running()
        self.network = self.process.world.network
        self.lease_s = self.network.lease_s
        self.reach = Reach(domain=0, interface="lo", peers=(), multicast=False, leaves_machine=True)
        self.access_policy = AccessPolicy()
        self.traits = Traits(leaves_machine=True, has_default_lease=False)
        self.writers: list[MemoryWriter] = []
        self.readers: list[MemoryReader] = []
        self.wait_sets: list[MemoryWaitSet] = []
        self.is_open = True
        self.network.participants.append(self)

    def look_around(self) -> bool:
        """Do nothing: there is no discovery to look at."""
        return True

    def start(self, thread: IoThread) -> None:
        """Do nothing: there is no protocol beside the bus."""

    def waiter(self) -> MemoryWaitSet:
        """Make a wait set."""
        return MemoryWaitSet(self)

    def close_endpoints(self, inlets: Sequence[Any], outlets: Sequence[Any]) -> None:
        """Delete readers and writers."""
        delete_together(inlets, outlets)

    def outlet(self, channel: Channel, *, retained_samples: int = 1) -> MemoryWriter:
        """Make a writer."""
        writer = MemoryWriter(self, channel, retained_samples)
        self.writers.append(writer)
        self.network.announce_writer(writer)
        return writer

    def inlet(self, channel: Channel) -> MemoryReader:
        """Make a reader."""
        reader = MemoryReader(self, channel)
        self.readers.append(reader)
        self.network.announce_reader(reader)
        return reader

    def report_news(self) -> None:
        """End the waits of the wait sets."""
        for wait_set in self.wait_sets:
            wait_set.on_news()

    def close(self) -> None:
        """Delete all endpoints."""
        self.is_open = False
        for reader in self.readers:
            reader.close()
        for writer in self.writers:
            writer.close()

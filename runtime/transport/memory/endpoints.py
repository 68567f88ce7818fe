"""Outlets and inlets of the network in memory. :mod:`gradbus.runtime.transport.api` says what they promise."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from gradbus.runtime.errors import BusClosed
from gradbus.runtime.transport.api import Envelope, PeerId
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.flags import ChangeFlag, FlagWaiter
from gradbus.runtime.transport.kept_samples import KeptSamples
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import EndpointPair, Node
from gradbus.runtime.transport.samples import SAMPLES


class MemoryPlace:
    """Where the endpoints of one transport are: what they share.

    Attributes:
        network, node, job: see :class:`~.transport.MemoryTransport`. own: what the transport calls itself.
        outlets, inlets, waiters: of the transport.
    """

    def __init__(self, network: MemoryNetwork, node: Node, job: str) -> None:
        self.network = network
        self.node = node
        self.job = job
        self.own = network.new_peer_id()
        self.outlets: list[MemoryOutlet] = []
        self.inlets: list[MemoryInlet] = []
        self.waiters: list[FlagWaiter] = []

    def forget(self, endpoint: _MemoryEndpoint) -> None:
        """Drop an endpoint that is closed. The caller holds the lock."""
        self.outlets = [one for one in self.outlets if one is not endpoint]
        self.inlets = [one for one in self.inlets if one is not endpoint]

    def wake_waiters(self) -> None:
        """End the waits of the waiters. The caller holds the lock."""
        for waiter in self.waiters:
            waiter.on_news()


class _MemoryEndpoint:
    """What outlets and inlets have in common."""

    def __init__(self, place: MemoryPlace, channel: Channel) -> None:
        self.place = place
        self.channel = channel
        self.changes = ChangeFlag()
        self.pairs: list[EndpointPair] = []
        self.matched = 0
        self.is_closed = False
        self._schedule = place.network.schedule

    @property
    def node(self) -> Node:
        """Return its process."""
        return self.place.node

    @property
    def job(self) -> str:
        """Return the job of its transport."""
        return self.place.job

    @property
    def owner(self) -> MemoryPlace:
        """Return what the endpoints of its transport share."""
        return self.place

    def note_peers_changed(self) -> None:
        """Report that the other side of a pair has been found or lost."""
        self.changes.is_on = True
        self.place.wake_waiters()

    def close(self) -> None:
        """Leave the channel."""
        with self._schedule.lock:
            if not self.is_closed:
                self.is_closed = True
                self.place.forget(self)
                self.place.network.removed(self)
                self._schedule.notify()


class MemoryOutlet(_MemoryEndpoint):
    """Sends samples as records of :mod:`~gradbus.runtime.transport.samples`.

    Attributes:
        kept: the samples that it may have to send.
    """

    def __init__(self, place: MemoryPlace, channel: Channel, retained_samples: int) -> None:
        super().__init__(place, channel)
        self._record = SAMPLES[channel.sample_type]
        kept = 1 if channel.keep_last else retained_samples
        self.kept = KeptSamples(kept if channel.retained else 0, keeps_last=channel.keep_last)
        self._receivers: Sequence[PeerId] = ()
        self._refused_since_s = 0.0
        self._writes = 0  # that are in progress

    def refresh(self) -> bool:
        """See :meth:`.api.Endpoint.refresh`."""
        with self._schedule.lock:
            if not self.changes.is_on:
                return False
            self.changes.is_on = False
            self._receivers = [pair.reader.owner.own for pair in self.pairs if pair.writer_knows]
            self.matched = len(self._receivers)
            return True

    def receivers(self) -> Sequence[PeerId]:
        """See :meth:`.api.Outlet.receivers`."""
        return self._receivers

    def peers(self) -> set[int]:
        """See :meth:`.api.Endpoint.peers`."""
        with self._schedule.lock:
            return {pair.reader_handle for pair in self.pairs if pair.writer_knows}

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        """See :meth:`.api.Outlet.write`."""
        network = self.place.network
        if self.node.dead:
            return True
        data = b"".join(parts)
        sample = self._record(*fields, data) if parts else self._record(*fields)
        with self._schedule.lock:
            if not self._waits_for_room():
                self._refused_since_s = self._refused_since_s or self._schedule.now_s()
                return False
            self._refused_since_s = 0.0
            numbered = self.kept.append(sample, len(data))
            for pair in self.pairs:
                if pair.writer_knows:
                    network.delivery.send(pair, numbered)
            self.forget_acknowledged()  # where no inlet is reliable, it is already
        return True

    def write_made(self, fields: tuple[Any, ...], envelope: Envelope) -> bool:
        """See :meth:`.api.Outlet.write_made`."""
        return self.write(fields, (envelope.octets(),))

    def _waits_for_room(self) -> bool:
        self._check_open()
        self._schedule.check()
        has_room = self._has_room
        if has_room():
            if not self.place.network.chance(self.place.network.refused):
                return True
            has_room = _never
        self._writes += 1
        self._schedule.notify()
        try:
            self._schedule.wait(self.node, lambda: self.is_closed or has_room(), self.channel.block_s)
        finally:
            self._writes -= 1
        self._check_open()
        return has_room()

    def _check_open(self) -> None:
        if self.is_closed:
            raise BusClosed(f"channel {self.channel.name!r}: its outlet is closed, as its group or bus is")

    def _has_room(self) -> bool:
        return self.channel.keep_last or self.kept.num_bytes < self.place.network.window_bytes

    def note_acknowledged(self, pair: EndpointPair, number: int) -> None:
        """Take note that an inlet has all samples up to this number."""
        if number > pair.acknowledged:
            pair.acknowledged, pair.attempts = number, 0
            self.forget_acknowledged()

    def forget_acknowledged(self) -> None:
        """Forget the samples that no inlet lacks."""
        lacking = [pair.acknowledged for pair in self.pairs if pair.lacks_samples]
        self.kept.acknowledge(min(lacking, default=self.kept.last))

    @property
    def is_writing(self) -> bool:
        """See :attr:`.api.Outlet.is_writing`."""
        return self._writes > 0

    @property
    def refused_since_s(self) -> float:
        """See :attr:`.api.Outlet.refused_since_s`."""
        return self._refused_since_s

    @property
    def is_acknowledged(self) -> bool:
        """See :attr:`.api.Outlet.is_acknowledged`."""
        with self._schedule.lock:
            return self._has_acks()

    @property
    def acknowledged_samples(self) -> int:
        """See :attr:`.api.Outlet.acknowledged_samples`: they are not counted, as with DDS."""
        return 0

    def wait_for_acks(self, timeout_s: float) -> bool:
        """See :meth:`.api.Outlet.wait_for_acks`."""
        with self._schedule.lock:
            return self._has_acks() or self._schedule.wait(self.node, self._has_acks, timeout_s)

    def _has_acks(self) -> bool:
        return not any(pair.lacks_samples for pair in self.pairs)


class MemoryInlet(_MemoryEndpoint):
    """Queues samples, as many as its channel says."""

    def __init__(self, place: MemoryPlace, channel: Channel) -> None:
        super().__init__(place, channel)
        self.arrivals = ChangeFlag()
        self.queue: deque[tuple[Any, int]] = deque()

    @property
    def has_room(self) -> bool:
        """Return whether a sample finds room."""
        held, bound = len(self.queue), self.channel.reader_samples
        return self.channel.overwrites or self.channel.keep_last or not bound or held < bound

    def put(self, sample: Any, handle: int) -> None:
        """Queue a sample of the outlet with this handle."""
        if self.channel.keep_last:
            self.queue.clear()
        elif self.channel.overwrites and len(self.queue) >= self.channel.reader_samples:
            self.queue.popleft()
        self.queue.append((sample, handle))
        if not self.arrivals.is_on:
            self.arrivals.is_on = True
            self.place.wake_waiters()

    def refresh(self) -> bool:
        """See :meth:`.api.Endpoint.refresh`."""
        with self._schedule.lock:
            if not self.changes.is_on:
                return False
            self.changes.is_on = False
            self.matched = sum(pair.reader_knows for pair in self.pairs)
            return True

    def peers(self) -> set[int]:
        """See :meth:`.api.Endpoint.peers`."""
        with self._schedule.lock:
            return {pair.handle for pair in self.pairs if pair.reader_knows}

    def take_disconnected(self) -> frozenset[int]:
        """See :meth:`.api.Inlet.take_disconnected`: in memory there are no connections."""
        return frozenset()

    def take(self, limit: int) -> list[tuple[Any, int]]:
        """See :meth:`.api.Inlet.take`."""
        queue, channel = self.queue, self.channel
        with self._schedule.lock:
            taken = [queue.popleft() for _ in range(min(limit, len(queue)))]
            self.arrivals.is_on = bool(queue)
            if taken and channel.reader_samples and not channel.overwrites:
                for pair in self.pairs:
                    if pair.early:
                        self.place.network.delivery.hand_over(pair)
                self.pairs[:] = self.pairs[1:] + self.pairs[:1]  # so that no outlet has the free room each time
                self._schedule.notify()
        return taken

    def decode(self, raw: Any) -> Any:
        """Return the sample, which is a record already."""
        return raw

    def octets(self, raw: Any) -> Any:
        """See :meth:`.api.Inlet.octets`."""
        return raw.data


def _never() -> bool:
    return False

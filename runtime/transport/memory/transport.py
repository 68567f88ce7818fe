"""The transport in memory, for one process that may exist in name only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradbus.runtime import forks
from gradbus.runtime.errors import BusClosed
from gradbus.runtime.transport.access_policy import AccessPolicy
from gradbus.runtime.transport.api import IoThread, JobMembers, Traits
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.flags import FlagWaiter
from gradbus.runtime.transport.memory.endpoints import MemoryInlet, MemoryOutlet, MemoryPlace
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import Node


@dataclass(frozen=True, slots=True)
class MemoryReach:
    """Describes who can be met on a network in memory."""

    leaves_machine: bool = True
    is_exposed: bool = False
    meeting_place: str = "the network in memory"
    attachment: str = "memory"

    def hint(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        """See :meth:`.api.Reachable.hint`."""
        return f"Start {'it' if one else 'them'} in this process, with the same network in memory and the same job"

    def advice(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        """See :meth:`.api.Reachable.advice`."""
        return self.hint(elsewhere=elsewhere, one=one)


class MemoryTransport(MemoryPlace):
    """One participant of one job on a network in memory."""

    def __init__(self, network: MemoryNetwork, node: Node, job: str) -> None:
        """``node``: the process that it belongs to, which others may share."""
        super().__init__(network, node, job)
        self.lease_s = network.lease_s
        self.reach = MemoryReach()
        self.traits = Traits(leaves_machine=True, has_default_lease=False)
        self.access_policy = AccessPolicy()
        self._is_open = True
        self._made_in = forks.generation
        with network.schedule.lock:
            network.participants.append(self)

    def start(self, thread: IoThread, members: JobMembers | None = None) -> None:
        """Do nothing: there is no protocol beside the bus, and here nobody comes who does not belong to the job."""

    def look_around(self) -> bool:
        """Do nothing: there is no discovery to look at."""
        return True

    def waiter(self) -> FlagWaiter:
        """See :meth:`.api.Transport.waiter`."""
        waiter = FlagWaiter(self.network.schedule, self.node)
        self.waiters.append(waiter)
        return waiter

    def outlet(self, channel: Channel, *, retained_samples: int = 1) -> MemoryOutlet:
        """See :meth:`.api.Transport.outlet`."""
        outlet = MemoryOutlet(self, channel, retained_samples)
        with self.network.schedule.lock:
            self._check_open(channel)
            self.outlets.append(outlet)
            self.network.announce_writer(outlet)
        return outlet

    def inlet(self, channel: Channel) -> MemoryInlet:
        """See :meth:`.api.Transport.inlet`."""
        inlet = MemoryInlet(self, channel)
        with self.network.schedule.lock:
            self._check_open(channel)
            self.inlets.append(inlet)
            self.network.announce_reader(inlet)
        return inlet

    def _check_open(self, channel: Channel) -> None:
        if not self._is_open:
            raise BusClosed(f"channel {channel.name!r}: its transport is closed, as its bus is")

    def close_endpoints(self, inlets: Sequence[MemoryInlet], outlets: Sequence[MemoryOutlet]) -> None:
        """See :meth:`.api.Transport.close_endpoints`."""
        for one in (*inlets, *outlets):
            one.close()

    def close(self) -> None:
        """See :meth:`.api.Transport.close`."""
        if self._made_in != forks.generation or not self._is_open:
            return
        with self.network.schedule.lock:
            self._is_open = False
        self.close_endpoints(list(self.inlets), list(self.outlets))
        with self.network.schedule.lock:
            self.network.participants = [one for one in self.network.participants if one is not self]

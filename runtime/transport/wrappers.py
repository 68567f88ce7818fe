"""Pass all calls of a transport on to another one below it: what changes some of them inherits from these.

Encryption (:mod:`gradbus.runtime.security.sealed`) and the faults of tests
(:mod:`gradbus.runtime.testing.fault_injection`) stand in this way between a bus and whatever carries its bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from gradbus.runtime.transport.api import (
    Endpoint,
    Envelope,
    Inlet,
    IoThread,
    JobMembers,
    Outlet,
    Peer,
    PeerId,
    Transport,
    Waiter,
)
from gradbus.runtime.transport.channels import Channel


class _EndpointWrapper:
    def __init__(self, channel: Channel, below: Endpoint) -> None:
        self.channel = channel
        self.changes = below.changes
        self._endpoint = below

    @property
    def matched(self) -> int:
        """See :attr:`.api.Endpoint.matched`."""
        return self._endpoint.matched

    def refresh(self) -> bool:
        """See :meth:`.api.Endpoint.refresh`."""
        return self._endpoint.refresh()

    def peers(self) -> AbstractSet[Peer]:
        """See :meth:`.api.Endpoint.peers`."""
        return self._endpoint.peers()

    def close(self) -> None:
        """See :meth:`.api.Endpoint.close`."""
        self._endpoint.close()


class OutletWrapper(_EndpointWrapper):
    """An outlet that has another one below it.

    Attributes:
        below: that one, which may have another channel.
    """

    def __init__(self, channel: Channel, below: Outlet) -> None:
        super().__init__(channel, below)
        self.below = below

    def receivers(self) -> Collection[PeerId] | None:
        """See :meth:`.api.Outlet.receivers`."""
        return self.below.receivers()

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        """See :meth:`.api.Outlet.write`."""
        return self.below.write(fields, parts)

    def write_made(self, fields: tuple[Any, ...], envelope: Envelope) -> bool:
        """See :meth:`.api.Outlet.write_made`. By way of :meth:`write`, which is what is changed here."""
        return self.write(fields, (envelope.octets(),))

    @property
    def is_acknowledged(self) -> bool:
        """See :attr:`.api.Outlet.is_acknowledged`."""
        return self.below.is_acknowledged

    @property
    def acknowledged_samples(self) -> int:
        """See :attr:`.api.Outlet.acknowledged_samples`."""
        return self.below.acknowledged_samples

    def wait_for_acks(self, timeout_s: float) -> bool:
        """See :meth:`.api.Outlet.wait_for_acks`."""
        return self.below.wait_for_acks(timeout_s)

    @property
    def refused_since_s(self) -> float:
        """See :attr:`.api.Outlet.refused_since_s`."""
        return self.below.refused_since_s

    @property
    def is_writing(self) -> bool:
        """See :attr:`.api.Outlet.is_writing`."""
        return self.below.is_writing


class InletWrapper(_EndpointWrapper):
    """An inlet that has another one below it.

    Attributes:
        below: that one, which may have another channel.
    """

    def __init__(self, channel: Channel, below: Inlet) -> None:
        super().__init__(channel, below)
        self.arrivals = below.arrivals
        self.below = below

    def take_disconnected(self) -> AbstractSet[Peer]:
        """See :meth:`.api.Inlet.take_disconnected`."""
        return self.below.take_disconnected()

    def take(self, limit: int) -> Sequence[tuple[Any, Peer]]:
        """See :meth:`.api.Inlet.take`."""
        return self.below.take(limit)

    def decode(self, raw: Any) -> Any:
        """See :meth:`.api.Inlet.decode`."""
        return self.below.decode(raw)

    def octets(self, raw: Any) -> Any:
        """See :meth:`.api.Inlet.octets`."""
        return self.below.octets(raw)


class TransportWrapper:
    """A transport that has another one below it, and closes it.

    Attributes:
        below: that one.
    """

    def __init__(self, below: Transport) -> None:
        self.below = below
        self.own = below.own
        self.traits = below.traits
        self.access_policy = below.access_policy
        self.lease_s = below.lease_s

    @property
    def reach(self) -> Any:
        """See :attr:`.api.Transport.reach`."""
        return self.below.reach

    def start(self, thread: IoThread, members: JobMembers | None = None) -> None:
        """See :meth:`.api.Transport.start`."""
        self.below.start(thread, members)

    def look_around(self) -> bool:
        """See :meth:`.api.Transport.look_around`."""
        return self.below.look_around()

    def waiter(self) -> Waiter:
        """See :meth:`.api.Transport.waiter`."""
        return self.below.waiter()

    def outlet(self, channel: Channel, *, retained_samples: int = 1) -> Outlet:
        """See :meth:`.api.Transport.outlet`."""
        return self.below.outlet(channel, retained_samples=retained_samples)

    def inlet(self, channel: Channel) -> Inlet:
        """See :meth:`.api.Transport.inlet`."""
        return self.below.inlet(channel)

    def close_endpoints(self, inlets: Sequence[Any], outlets: Sequence[Any]) -> None:
        """See :meth:`.api.Transport.close_endpoints`. It closes the endpoints that it has opened below those."""
        self.below.close_endpoints([_below(one) for one in inlets], [_below(one) for one in outlets])

    def close(self) -> None:
        """See :meth:`.api.Transport.close`."""
        self.below.close()


def _below(endpoint: Any) -> Any:
    """Return what an endpoint wraps, whichever layer has wrapped it; itself where none has. There are at least as many
    layers as wrappers of an endpoint, so the lowest transport gets what it has opened. A layer that did more at the end
    of an endpoint than the one below would have to know its own."""
    return endpoint.below if isinstance(endpoint, OutletWrapper | InletWrapper) else endpoint

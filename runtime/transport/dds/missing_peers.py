"""Why processes may be missing on DDS, and what to do about it: the one place for that text, whoever waits for whom.

Mostly they were not started, or the bus cannot reach them: it is on ``lo`` unless configured otherwise.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from gradbus.runtime.fast_paths import LOOPBACK
from gradbus.runtime.network.addresses import FAMILIES, address_of, interfaces
from gradbus.runtime.network.host_names import LOOKUPS, describe_missing
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.dds.examination import port_range
from gradbus.runtime.transport.dds.network import build_xml, is_exposed, leaves_machine, names_in, uses_ipv6

_OTHER_TRANSPORT = "A process with bus.connect or bus.listen uses Zenoh, and cannot be met here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Describes how far a bus on DDS reaches: the :class:`~gradbus.runtime.transport.api.Reachable` of DDS.

    Attributes:
        domain: of DDS. interface, peers, multicast: as it is set.
        leaves_machine: whether other machines can be reached at all. is_exposed: whether they can, or peers are named
            that are not this machine.
        by_document: whether ``CYCLONEDDS_URI`` has a say in that.
        names: host names among the peers of both. ipv6: whether it uses IPv6, else IPv4.
    """

    domain: int
    interface: str
    peers: tuple[str, ...]
    multicast: bool
    leaves_machine: bool
    is_exposed: bool = False
    by_document: bool = False
    names: tuple[str, ...] = ()
    ipv6: bool = False

    @classmethod
    def of(cls, domain: int, network: NetworkConfig) -> Reach:
        """Return the reach of a bus with this network. Raises ConfigError: that is wrong."""
        document = os.environ.get("CYCLONEDDS_URI")
        merged = build_xml(network, user_document=document)
        return cls(
            domain=domain,
            interface=network.interface,
            peers=network.peers,
            multicast=network.multicast,
            leaves_machine=leaves_machine(merged),
            is_exposed=is_exposed(merged),
            by_document=bool(document),
            names=tuple(names_in(merged)),
            ipv6=uses_ipv6(merged),
        )

    @property
    def meeting_place(self) -> str:
        """Return the domain, in words."""
        return f"DDS domain {self.domain}"

    @property
    def attachment(self) -> str:
        """Return the network interface."""
        return self.interface

    @property
    def unresolved(self) -> str:
        """Return a sentence about peers whose host names have no address yet; empty: none is known to have none."""
        return describe_missing(LOOKUPS.reasons(self.names, FAMILIES[self.ipv6]))

    def hint(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        """Return what to look at first while processes do not come, in a few words for a line that is repeated.

        Args:
            elsewhere: as for :meth:`advice`. one: it is one process that is missing.
        """
        return _joined(self._hint(elsewhere, one), self.unresolved)

    def _hint(self, elsewhere: bool | None, one: bool) -> str:
        start = "Start it" if one else "Start them"
        if elsewhere is False:
            return f"{start} on this machine, with the same job and domain {self.domain}"
        if not self.leaves_machine:
            others = "this bus reaches only this machine (lo): see docs/operations.md, bus.interface"
            return others[0].upper() + others[1:] if elsewhere else f"{start}. If on another machine: {others}"
        if not self.peers and not self.multicast:
            return f"This bus ({self.interface}) has no peers: set bus.peers to the addresses of all machines"
        return (
            f"{start}, with the same job, domain {self.domain} and key; 'gradbus doctor' on both sides checks the way"
        )

    def advice(self, *, elsewhere: bool | None = None, one: bool = False) -> str:
        """Return what to do about processes that have not come, with every setting to look at: for an error.

        Args:
            elsewhere: whether they are on other machines; None: nobody knows. one: it is one process that is missing.
        """
        others = "" if elsewhere is False else _OTHER_TRANSPORT
        return _joined(self._advice(elsewhere, one), self.unresolved, others)

    def _advice(self, elsewhere: bool | None, one: bool) -> str:
        document = ", and CYCLONEDDS_URI" if self.by_document else ""
        start, they, theirs = ("Start it", "it is", "its") if one else ("Start them", "they are", "theirs")
        if elsewhere is False:
            return f"{start}, with the same job and domain {self.domain}{document}; {they} on this machine"
        if not self.leaves_machine:
            others = [name for name in interfaces() if name != LOOPBACK and address_of(name)]
            here = f"here: {', '.join(others[:6])}" if others else "as ip -brief address shows it"
            place = "on another machine" if one else "on other machines"
            when = f"{they} {place}".capitalize() if elsewhere else f"{start}. If {they} {place}"
            return (
                f"{when}: this bus is on lo, which reaches this machine alone. Set on all of them "
                f"GRADBUS_BUS__INTERFACE=NAME ({here}), GRADBUS_BUS__NETWORK=network, "
                f"GRADBUS_BUS__PEERS='[\"ADDRESS\", ...]' with the addresses of all, and a key: "
                f"GRADBUS_BUS__SECURITY=psk and GRADBUS_BUS__KEY_FILE=FILE ('gradbus keys new FILE' makes one)"
            )
        own = address_of(self.interface, ipv6=True) if self.ipv6 else address_of(self.interface)
        at = f"{own} on {self.interface}" if own else self.interface
        if not self.peers and not self.multicast:
            return (
                f"This bus ({at}) has no peers: set GRADBUS_BUS__PEERS='[\"ADDRESS\", ...]' with the addresses of all "
                f"machines, on all of them"
            )
        return (
            f"{start}, with the same job, domain {self.domain}{document} and key. Check that bus.peers there has "
            f"this machine ({at}), that bus.peers here has {theirs} ({', '.join(self.peers) or 'multicast'}), and that "
            f"UDP ports {port_range(self.domain)} pass the firewalls: 'gradbus doctor' on both sides finds it out"
        )


def _joined(*sentences: str) -> str:
    return ". ".join(sentence for sentence in sentences if sentence)

"""What a transport asks of a machine and its network, as the doctor checks it."""

from __future__ import annotations

from dataclasses import dataclass
from socket import AddressFamily

from gradbus.runtime.network.addresses import FAMILIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """Says what a bus with these settings needs to be let through, and what it asks of the kernel.

    Attributes:
        ports: the UDP ports that all processes of a machine may use, in words for a firewall: ``7410-7649``.
        spare_ports: the last two of them, which a doctor takes for its own datagrams.
        spare_ports_elsewhere: one such port of each other range that a machine with other settings may use.
        receive_buffer_bytes, send_buffer_bytes: of its sockets. The latter is None where the kernel's default will do.
    """

    ports: str
    spare_ports: tuple[int, int]
    spare_ports_elsewhere: tuple[int, ...]
    receive_buffer_bytes: int
    send_buffer_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkReport:
    """Says what was found at one endpoint of links, or in one certificate.

    Attributes:
        name: the endpoint, or the setting. value: what is there. cure: what to do; empty: it is well. is_fault: no bus
            opens with it; else it is a warning.
    """

    name: str
    value: str
    cure: str = ""
    is_fault: bool = False


@dataclass(frozen=True, slots=True)
class PeerNames:
    """Holds the host names among the peers of a bus, and the version of IP that it uses.

    Attributes:
        names: to be looked up, each once. ipv6: whether it uses IPv6, else IPv4.
    """

    names: tuple[str, ...]
    ipv6: bool

    @property
    def family(self) -> AddressFamily:
        """Return the family of the addresses that the names are looked up for."""
        return FAMILIES[self.ipv6]

"""IP addresses, of either version: those of this machine's interfaces, sockets for them, and their text with a port.

A DDS domain uses one version: Cyclone has one transport, ``udp`` or ``udp6``.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from xml.etree import ElementTree as ET

from gradbus.runtime.fast_paths import LOOPBACK

FAMILIES = (socket.AF_INET, socket.AF_INET6)  # by whether it is IPv6
_SIOCGIFADDR = 0x8915
_GLOBAL_SCOPE, _HOST_SCOPE = "00", "10"  # as the kernel has it; a link's own addresses need a zone besides


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of sockets that reach an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def udp_socket(address: str) -> socket.socket:
    """Make a UDP socket, which does not block, for an address of this machine or another."""
    return socket.socket(family_of(address), socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)


def with_port(address: str, port: int) -> str:
    """Return address and port as one text, as Cyclone takes it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def address_of(interface: str, *, ipv6: bool = False) -> str | None:
    """Return the address of an interface of this machine; None: it has none, or the system does not say.

    ``ipv6``: of that version, and one that others can use as it is, without a zone.
    """
    if ipv6:
        return _ipv6_address_of(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_address_of(interface: str) -> str | None:
    try:
        lines = Path("/proc/thread-self/net/if_inet6").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # a kernel without IPv6, or another system
        return None
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope in (_GLOBAL_SCOPE, _HOST_SCOPE):
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None


def uses_ipv6(document: str) -> bool:
    """Whether the domain of a configuration of Cyclone uses IPv6."""
    transport = ET.fromstring(document).find("Domain/General/Transport")
    return transport is not None and (transport.text or "").strip().casefold() == "udp6"


def own_address(document: str) -> str:
    """Return the address of this machine on the first interface of a configuration of Cyclone.

    Raises:
        OSError: it has none, or a document of the user gives it one that is none.
    """
    interface = next(ET.fromstring(document).iter("NetworkInterface"), None)
    given = {} if interface is None else interface.attrib
    if given.get("address"):
        try:
            return str(ipaddress.ip_address(given["address"]))
        except ValueError:
            raise OSError(f"the interface address {given['address']!r} is no IP address") from None
    name, ipv6 = given.get("name", LOOPBACK), uses_ipv6(document)
    address = "127.0.0.1" if name == LOOPBACK and not ipv6 else address_of(name, ipv6=ipv6)
    if address is None:
        raise OSError(f"interface {name} has no {'IPv6' if ipv6 else 'IPv4'} address")
    return address

"""IP addresses of either version: those of this machine's interfaces, sockets for them, and their text with a port. And
the addresses of peers: what a setting may name, an IP address or a host name, with or without a port.

Host names are looked up by :mod:`.host_names`; a transport gets numbers alone.
"""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.nearest import nearest

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
    """Return address and port as one text; an IPv6 address gets brackets."""
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


def interfaces() -> list[str]:
    """Return the names of the network interfaces of this machine."""
    return [name for _, name in socket.if_nameindex()]


def check_interface(name: str) -> None:
    """Raise ConfigError if there is no such interface; the text lists those that there are."""
    known = interfaces()
    if name not in known:
        near = nearest(name, known)
        hint = f"; did you mean {near!r}?" if near else "."
        raise ConfigError(f"network interface {name!r} does not exist here{hint} This machine has: {', '.join(known)}")


MAX_PEERS = 1_024  # Cyclone DDS announces a process to 121 ports of each, and takes seconds to start with 5,000
MAX_NAME = 253  # RFC 1035
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)
_DIGITS_ALONE = re.compile(r"[0-9.]+|0[xX][0-9a-fA-F]*", re.ASCII)  # such a "name" is a mistyped address
_BRACKETED = re.compile(r"(?:udp6/)?\[([^\]]*)\](?::(.*))?")  # IPv6, with or without a port
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_BROADCAST = ipaddress.IPv4Address(0xFFFF_FFFF)


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Names a machine, or one port of it.

    Attributes:
        host: an IP address, or a host name. port: the only one that is tried; None: those of all its processes.
    """

    host: str
    port: int | None = None

    @property
    def is_name(self) -> bool:
        """Return whether the host must be looked up."""
        return ip_address_of(self.host) is None

    @property
    def is_ipv6(self) -> bool:
        """Return whether the host is an IPv6 address."""
        return ":" in self.host

    def at(self, address: str) -> str:
        """Return this peer as a text, with an address of the host in place of its name."""
        return address if self.port is None else with_port(address, self.port)


def parse_peer(text: object, where: str) -> PeerAddress:
    """Return the peer that a setting names. ``where``: the setting, for the error.

    Raises:
        ConfigError: it is no IP address that stands for a machine and no host name, or its port is none.
    """
    if not isinstance(text, str) or not (text.isascii() and text.isprintable()):
        raise _refused(text, where, "expected printable ASCII characters")
    bracketed = _BRACKETED.fullmatch(text)
    if bracketed is not None:
        host, port = bracketed[1], bracketed[2]
    elif text.count(":") > 1:  # no port without brackets
        host, port = text.removeprefix("udp6/"), None
    else:
        host, colon, digits = text.removeprefix("udp/").partition(":")
        port = digits if colon else None
    if port is not None and not (_PORT.fullmatch(port) and int(port) <= 0xFFFF):
        raise _refused(text, where, "expected a port of 1 to 65535 behind the colon")
    address = ip_address_of(host)
    if address is not None:
        if fault := address_fault(host):
            raise _refused(text, where, fault)
        host = str(address)  # IPv6 has several texts for one
    elif bracketed is not None or ":" in host or not is_host_name(host):
        raise _refused(text, where, "expected an IP address or a host name, which may have a port (robot-7:7410)")
    return PeerAddress(host, None if port is None else int(port))


def _refused(text: object, where: str, why: str) -> ConfigError:
    shown = repr(text) if len(repr(text)) <= 80 else f"{repr(text)[:77]}..."
    return ConfigError(f"{where}: {shown} is no address: {why}. Name the machine by its IP address")


def ip_address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a text is; None: it is none."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def address_fault(text: str) -> str:
    """Return why an IP address cannot be that of a peer; empty: it can."""
    address = ip_address_of(text)
    if address is None:
        return "that is no IP address"
    if address.is_unspecified or address == _BROADCAST:
        return "it stands for no single machine"
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_link_local or address.scope_id is not None:
            return "an address of one link needs a zone, which Cyclone DDS does not take"
        if address.ipv4_mapped is not None:
            return "expected the IPv4 address itself"
    return ""


def is_host_name(host: str) -> bool:
    """Return whether a text can be a host name; a mistyped IP address cannot."""
    labels = host.removesuffix(".").split(".")
    return len(host) <= MAX_NAME and not _DIGITS_ALONE.fullmatch(host) and all(map(_LABEL.fullmatch, labels))


def check_peers(addresses: Sequence[str]) -> None:
    """Raise ConfigError: one of the addresses of ``bus.peers`` is none, or there are too many of them."""
    where = "peers (bus.peers)"
    if isinstance(addresses, str):  # its characters would be taken for addresses
        raise ConfigError(f"{where}: expected a list of addresses, got the text {addresses!r}. Write [{addresses!r}]")
    if not isinstance(addresses, Sequence):
        raise ConfigError(f"{where}: expected a list of addresses, got {addresses!r}")
    if len(addresses) > MAX_PEERS:
        raise ConfigError(f"{where}: at most {MAX_PEERS} addresses, got {len(addresses)}. Use bus.multicast instead")
    peers = [parse_peer(address, where) for address in addresses]
    if len({peer.is_ipv6 for peer in peers if not peer.is_name}) > 1:
        raise ConfigError(f"{where}: a bus uses IPv4 or IPv6, and there are addresses of both: {', '.join(addresses)}")

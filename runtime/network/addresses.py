"""IP addresses of either version: those of this machine's interfaces, sockets for them, and their text with a port."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
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

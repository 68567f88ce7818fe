"""The TCP connections of this process, found among its descriptors, and what the kernel counts of each.

Zenoh's wheel counts no bytes, has no call that ends one session, and does not report which end has closed one. All
this can be had from the kernel: a second descriptor of the same connection reads its state and counters (TCP_INFO), and
shuts it down. Without these (they are Linux's) a relay works as well, reports no bytes, and leaves it to the lease to
find out who is gone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

_DESCRIPTORS = Path("/proc/self/fd")
_NOT_CONNECTED = frozenset({"06", "0A"})  # TCP_TIME_WAIT, TCP_LISTEN, as the tables have them
_TABLES = Path("/proc/thread-self/net/tcp"), Path("/proc/thread-self/net/tcp6")  # of all connections, also of others
_TCP_INFO_BYTES = 232  # of struct tcp_info; an older kernel returns less
_ACKED_AND_RECEIVED = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
_OFFSET = 120
_STATE, _RETRANSMITS = 0, 2  # tcpi_state, tcpi_retransmits: a byte each
_NUMBER = struct.Struct("=I")
_LAST_SENT_MS, _LAST_ACK_MS, _ROUND_TRIP_US = 44, 56, 68  # tcpi_last_data_sent, tcpi_last_ack_recv, tcpi_rtt
# States of a connection whose other end has closed it: by RST; by FIN, and this end not yet; and this end, too.
_CLOSED_THERE = frozenset({7, 8, 9})  # TCP_CLOSE, TCP_CLOSE_WAIT, TCP_LAST_ACK
_SILENT_SHARE = 0.75  # of the time after which the other end gives up; keep-alives are sent four times in it


class CarriedBytes(NamedTuple):
    """Bytes that a connection has carried so far, TLS included."""

    received_bytes: int = 0
    sent_bytes: int = 0


class Connection(Protocol):
    """The TCP connection of a session."""

    def traffic(self) -> CarriedBytes:
        """Return what it has carried so far; of one that is closed, what was read last."""

    def closed_by_peer(self, patience_s: float) -> bool:
        """Return whether the other end has closed it while it worked, as when its process ends. ``patience_s``: after
        so long a silence of this end it gives up a link."""

    @property
    def round_trip_s(self) -> float:
        """Return the time for a packet there and back; 0: unknown."""

    def hang_up(self) -> None:
        """End the connection in both directions."""

    def close(self) -> None:
        """Give the descriptor back."""


class TcpConnection:
    """A descriptor of our own of a connection that Zenoh holds, from :func:`find_connections` until :meth:`close`.

    While it is open, the connection does not end by Zenoh's closing its own: it must be closed when the session is.
    """

    def __init__(self, own: socket.socket) -> None:
        self._socket = own
        self._last = CarriedBytes()

    def traffic(self) -> CarriedBytes:
        """Return the bytes received, and those sent and acknowledged, so far. Any thread may call it."""
        info = self._info()
        if len(info) >= _OFFSET + _ACKED_AND_RECEIVED.size:
            acked, received = _ACKED_AND_RECEIVED.unpack_from(info, _OFFSET)
            self._last = CarriedBytes(received_bytes=received, sent_bytes=acked)
        return self._last

    def closed_by_peer(self, patience_s: float) -> bool:
        """Return whether the other end has closed the connection while it worked, as a kernel does when a process ends.

        False, too: this end has closed it first, after a lease without a sign of life; what this end has sent is being
        repeated, so that the link was broken before; or this end had sent nothing for about ``patience_s``, after which
        the other one gives a link up: then this process stood still.
        """
        info = self._info()
        if len(info) < _ROUND_TRIP_US or info[_STATE] not in _CLOSED_THERE or info[_RETRANSMITS]:
            return False
        # The end of a connection comes with an acknowledgement, so by that it is known when it came.
        sent_ms, ended_ms = (_NUMBER.unpack_from(info, offset)[0] for offset in (_LAST_SENT_MS, _LAST_ACK_MS))
        return bool(sent_ms - ended_ms < 1e3 * _SILENT_SHARE * patience_s)

    @property
    def round_trip_s(self) -> float:
        """Return the round trip as the kernel has measured it; 0: it has not."""
        info = self._info()
        has_it = len(info) >= _ROUND_TRIP_US + _NUMBER.size
        return 1e-6 * _NUMBER.unpack_from(info, _ROUND_TRIP_US)[0] if has_it else 0.0

    def _info(self) -> bytes:
        """Return the kernel's struct tcp_info; empty: the descriptor is closed, or the system has none."""
        try:
            return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except (OSError, AttributeError):
            return b""

    def hang_up(self) -> None:
        """End the connection in both directions: Zenoh finds it ended, and closes the session."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back. The counters keep the values that were read last."""
        self._socket.close()


def find_connections(addresses: Iterable[str], *, ports: Collection[int] = ()) -> dict[str, TcpConnection]:
    """Return the connections of this process to these addresses, each ``HOST:PORT``, with brackets around IPv6.

    Only their descriptors are duplicated, for a moment or for long: of others' sockets, as of those of a host program,
    a duplicate would keep a port in use that is closed meanwhile. A connection that has a second descriptor of our own
    is returned once. The result is empty where the system has no list of descriptors.

    Args:
        ports: of this end, where others dial; empty: any.
    """
    wanted = set(addresses)
    sockets = {name: address for name, address in _connected_sockets(ports) if address in wanted} if wanted else {}
    found = dict[str, TcpConnection]()
    try:
        numbers = [int(name) for name in os.listdir(_DESCRIPTORS)] if sockets else []
    except OSError:
        return found
    for number in numbers:
        address = sockets.get(_name_of(number))
        if address is None or address in found:
            continue
        own = _second_descriptor(number)
        if own is not None and _address_of(own) == address:  # else the number is another socket's by now
            found[address] = TcpConnection(own)
        elif own is not None:
            own.close()
    return found


def most_second_descriptors() -> int:
    """Return how many descriptors a watch of connections may take of those that this process may have: a quarter."""
    try:
        import resource
    except ImportError:  # a system without it has no list of descriptors either
        return 0
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


def _connected_sockets(ports: Collection[int]) -> Iterator[tuple[str, str]]:
    """Yield the connections of this network namespace: the name of the socket, and the address of the other end."""
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            _, _, port = columns[1].rpartition(":")
            if columns[3] not in _NOT_CONNECTED and (not ports or int(port, 16) in ports):
                yield f"socket:[{columns[9]}]", _from_table(columns[2])


def _from_table(text: str) -> str:
    """Return the address that the kernel writes as hexadecimal words in the order of its bytes, and a port."""
    words, _, port = text.partition(":")
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    host = ipaddress.ip_address(packed)
    return canonical(f"[{host}]:{int(port, 16)}" if host.version == 6 else f"{host}:{int(port, 16)}")


def _name_of(number: int) -> str:
    """Return what a descriptor is, such as ``socket:[123]``; empty: it is closed."""
    try:
        return os.readlink(_DESCRIPTORS / str(number))
    except OSError:
        return ""


def _second_descriptor(number: int) -> socket.socket | None:
    """Return a descriptor of our own of the socket with this number; None: it is no socket, or gone."""
    try:
        own = os.dup(number)
    except OSError:
        return None
    try:
        return socket.socket(fileno=own)  # of our copy, so that nothing else can take its number meanwhile
    except OSError:
        os.close(own)
        return None


def _address_of(connected: socket.socket) -> str:
    """Return the address of the other end; empty: it is no connection over TCP/IP."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6) or connected.type != socket.SOCK_STREAM:
        return ""
    try:
        host, port = connected.getpeername()[:2]
    except OSError:
        return ""
    return canonical(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def canonical(address: str) -> str:
    """Return an address as the kernel and Zenoh may both write it: an IPv4 address within IPv6 as plain IPv4."""
    host, _, port = address.rpartition(":")
    try:
        found = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return address
    plain = getattr(found, "ipv4_mapped", None) or found
    return f"[{plain}]:{port}" if plain.version == 6 else f"{plain}:{port}"

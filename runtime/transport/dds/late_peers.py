"""Peers whose host names have no address yet when a domain opens: a robot may start before its DNS does.

Cyclone DDS 11.0 takes peers when a domain is made, and none later. So a domain with such names has one peer more: a
socket of this process, the relay, to which Cyclone sends the same announcements (SPDP) of its participants as to every
peer, as often. When a name has got an address, the relay sends the newest announcement of each participant on to it,
as it is: the ports, and for how long, are those that Cyclone has for a peer that it knows from the start. Whoever gets
one discovers this process and answers it, whether or not its own peers name this machine.

Nothing is forwarded but what comes from this machine's own address and begins as an announcement of a participant of
this process; and of each of these one datagram goes to each port, however many come.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradbus.runtime.logs import get_logger
from gradbus.runtime.network.addresses import family_of, udp_socket, with_port
from gradbus.runtime.network.host_names import LOOKUPS
from gradbus.runtime.transport.dds.network import PORTS_OF_A_DOMAIN, SEARCH_S, discovery_ports, first_port
from gradbus.runtime.transport.dds.spdp import prefix_of

ANNOUNCE_S = 2.0  # from one round of announcements to the next, as Cyclone's are; buses look once a second
MAX_ANNOUNCEMENT = 4_096  # bytes; Cyclone's have about 440
_PORT_TRIES = 64
_MOST_LINES = 10  # of the log
_MOST_READ = 256  # datagrams in one go
# Datagrams in one go: a millisecond or two of the thread of a bus. Of many late peers the rest is sent a second later.
_MOST_SENT = 512

log = get_logger("dds")


@dataclass(slots=True)
class _Target:
    """Holds an address that a name has got. ``since_s``: when, by ``time.monotonic``."""

    address: str
    ports: Sequence[int | None]
    since_s: float


class LatePeers:
    """Announces this process to the late peers of one domain. Threads of several buses call :meth:`look`, once a second
    each."""

    def __init__(self, domain_id: int, names: Mapping[str, Sequence[int | None]], own_address: str) -> None:
        """Args:
        names: without an address, and the ports to try of each; None: those of all processes.
        own_address: of this machine on the interface of the bus. The relay is bound to it, so that with ``lo`` nothing
            can leave the machine.

        Raises:
            OSError: no socket can be bound there.
        """
        self._domain_id = domain_id
        self._waiting = dict(names)
        self._targets: list[_Target] = []
        self._own: set[bytes] = set()
        self._announcements: dict[bytes, bytes] = {}  # the newest of each participant of this process
        self._sending: Iterator[tuple[bytes, tuple[str, int]]] = iter(())  # what is left of a round of announcements
        self._due_s = 0.0  # the next round
        self._lock = threading.Lock()
        self._family = family_of(own_address)
        self._address = own_address
        self._socket = _bound_socket(own_address, domain_id)
        self._is_open = True
        self._has_warned = False

    @property
    def relay(self) -> str:
        """Return the address and port of the relay, as a peer of Cyclone."""
        return with_port(self._address, self._socket.getsockname()[1])

    def add_participant(self, prefix: bytes) -> None:
        """Forward the announcements of one more participant of this process. ``prefix``: of its GUID."""
        with self._lock:
            self._own.add(prefix)

    def warn_once(self) -> None:
        """Log which names have no address yet."""
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
            reasons = LOOKUPS.reasons(self._waiting, self._family)
        for name, reason in list(reasons.items())[:_MOST_LINES]:
            with contextlib.suppress(Exception):  # its stream is the host's
                log.warning("peer not resolved", peer=name, reason=reason, effect="starts without it, and looks again")

    def look(self) -> None:
        """Take up names that have got an address, and announce this process to those that have. Does not wait."""
        with self._lock:
            if not self._is_open:
                return
            now_s = time.monotonic()
            found = LOOKUPS.retry(self._waiting, self._family)
            for name, addresses in found.items():
                ports = self._waiting.pop(name)
                self._targets += [_Target(address, ports, now_s) for address in addresses]
                self._due_s = 0.0
            self._read()
            self._announce(now_s)
        for name, addresses in found.items():
            with contextlib.suppress(Exception):  # its stream is the host's
                log.info("peer resolved", peer=name, addresses=list(addresses))

    def _read(self) -> None:
        for _ in range(_MOST_READ):
            try:
                message, source = self._socket.recvfrom(MAX_ANNOUNCEMENT + 1)
            except OSError:  # nothing is there; or a machine has refused what was sent to it before
                return
            prefix = prefix_of(message)
            if source[0] == self._address and prefix in self._own and len(message) <= MAX_ANNOUNCEMENT:
                self._announcements[prefix] = message

    def _announce(self, now_s: float) -> None:
        sent = 0
        while sent < _MOST_SENT:
            for message, place in self._sending:
                try:
                    self._socket.sendto(message, place)
                except BlockingIOError:  # the queue of the interface is full: the rest follows
                    return
                except OSError:  # no route: it is repeated
                    pass
                sent += 1
                if sent == _MOST_SENT:
                    return
            if now_s < self._due_s or not (self._targets and self._announcements):
                return
            self._due_s = now_s + ANNOUNCE_S
            messages = list(self._announcements.values())
            places = [(one.address, port) for one in self._targets for port in self._ports(one, now_s)]
            self._sending = iter([(message, place) for place in places for message in messages])

    def _ports(self, target: _Target, now_s: float) -> Sequence[int]:
        """Return the ports to try now, as Cyclone has it, see ``network.SEARCH_S``: those given, and without any all of
        the processes of a machine, and later the first one."""
        ports = [port for port in target.ports if port is not None]
        if None in target.ports:
            every = discovery_ports(self._domain_id)
            ports += every if now_s < target.since_s + SEARCH_S else every[:1]
        return [port for port in dict.fromkeys(ports) if port <= 0xFFFF]

    def close(self) -> None:
        """Before the participants of the domain go: what they say at their end is not announced again."""
        with self._lock:
            self._is_open = False
            self._socket.close()


def _bound_socket(own_address: str, domain_id: int) -> socket.socket:
    """Bind a socket to a port that is none of those of the domain, which its processes need. Raises OSError."""
    made: list[socket.socket] = []
    try:
        for _ in range(_PORT_TRIES):  # each keeps its port, so that the next one gets another
            made.append(udp_socket(own_address))
            if ipaddress.ip_address(own_address).is_loopback:
                with contextlib.suppress(OSError, AttributeError):  # Linux alone has it, and some sandboxes do not
                    made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
            made[-1].bind((own_address, 0))
            if not 0 <= made[-1].getsockname()[1] - first_port(domain_id) < PORTS_OF_A_DOMAIN:
                return made.pop()
        raise OSError("no port is free outside those of the domain")
    finally:
        for one in made:
            one.close()

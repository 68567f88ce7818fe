"""Plain UDP datagrams between two doctors, past the bus: which pass which way, up to which size, and the other's
settings.

Each sends its identity and those that it has received several times a second, to the last pair of ports of the bus,
which the firewall rule for the bus lets through. Whatever arrives affects nothing but lines of the report.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradbus.runtime.json_text import parse_json
from gradbus.runtime.network.addresses import udp_socket
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.transport.examination import Examination

_MAGIC = b"gradbus doctor 2 "
_MAX_TEXT = 128
_MAX_DOCTORS = 32
_EVERY_S = 0.25
_SWEEP_S = 2.0  # how often to look for doctors with other settings
_REASONS = {
    errno.ECONNREFUSED: "the machine answers that nothing listens there: no doctor runs in this domain",
    errno.EHOSTUNREACH: "no machine has that address, or the link is down",
    errno.ENETUNREACH: "this machine has no route to it: is the interface up?",
}


@dataclass(frozen=True, slots=True)
class DoctorIdentity:
    """The settings of a doctor, as it sends them.

    ``name`` is random, and new at each start; ``security`` is level and id of the key.
    """

    name: str
    host: str
    address: str
    domain: int
    job: str
    profile: str
    security: str


@dataclass(slots=True)
class RemoteDoctor:
    """Another doctor, whose datagrams arrive here.

    ``receives_us``: our datagrams arrive there; bytes of the largest that has arrived there, and here.
    """

    identity: DoctorIdentity
    source: tuple[str, int]
    receives_us: bool = False
    largest_there: int = 0
    largest_here: int = 0


@dataclass(slots=True)
class Datagrams:
    """Sends and receives while :meth:`run` does.

    Attributes:
        peers: IP addresses; the owner may add some. needed: has the ports.
        others: doctors by name. unreachable: why datagrams to an address cannot be sent, or are refused.
    """

    identity: DoctorIdentity
    peers: Sequence[str]
    size_bytes: int
    needed: Examination
    others: dict[str, RemoteDoctor] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)
    _swept_s: float = 0.0

    async def run(self) -> None:
        """Run until cancelled. Raises OSError: no port is free."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            listening = undo.enter_context(self._bound())
            loop.add_reader(listening, self._read, listening)
            undo.callback(loop.remove_reader, listening)
            asking: dict[str, socket.socket] = {}
            while True:
                for peer in self.peers:  # some are added as their names resolve
                    if peer not in asking:
                        asking[peer] = undo.enter_context(_connected(peer, self.needed.spare_ports[0]))
                self._announce(listening)
                for peer, probe in asking.items():  # a connected socket gets an error when it is refused
                    self._ask(peer, probe)
                await asyncio.sleep(_EVERY_S)

    def of(self, address: str) -> RemoteDoctor | None:
        """The doctor at an address."""
        return next((one for one in self.others.values() if address in (one.identity.address, one.source[0])), None)

    def _bound(self) -> socket.socket:
        for port in self.needed.spare_ports:
            bound = udp_socket(self.identity.address)
            try:
                bound.bind(("", port))
            except OSError as error:
                bound.close()
                last = error
            else:
                return bound
        raise last

    def _announce(self, sock: socket.socket) -> None:
        targets = {(peer, port) for peer in self.peers for port in self.needed.spare_ports}
        targets |= {one.source for one in self.others.values()}
        for target in targets:
            self._send(sock, target)
            self._send(sock, target, self.size_bytes)
        if time.monotonic() - self._swept_s > _SWEEP_S:
            self._swept_s = time.monotonic()
            for peer in self.peers:
                for port in self.needed.spare_ports_elsewhere:
                    self._send(sock, (peer, port))

    def _send(self, sock: socket.socket, target: tuple[str, int], size: int = 0) -> None:
        received = {name: one.largest_here for name, one in self.others.items()}
        fields = {**{name: getattr(self.identity, name) for name in DoctorIdentity.__slots__}, "received": received}
        try:
            sock.sendto(self.packet_of(fields).ljust(size), target)
        except OSError as error:
            self._note(target[0], error)

    def _ask(self, peer: str, probe: socket.socket) -> None:
        try:
            with contextlib.suppress(BlockingIOError):
                probe.recv(1)
            probe.send(_MAGIC)
        except OSError as error:
            self._note(peer, error)

    def _note(self, address: str, error: OSError) -> None:
        if error.errno != errno.EMSGSIZE:
            reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
            self.unreachable[address] = reason

    def _read(self, sock: socket.socket) -> None:
        while True:
            try:
                data, source = sock.recvfrom(65_536)
            except BlockingIOError:
                return
            except OSError:  # a datagram sent before was refused
                continue
            self.take(data, source)

    @staticmethod
    def packet_of(fields: dict[str, Any]) -> bytes:
        """The bytes of a datagram."""
        return _MAGIC + json.dumps(fields).encode()

    def take(self, data: bytes, source: tuple[str, int]) -> None:
        """Take a datagram from any source; those that no doctor has sent are ignored."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, ArithmeticError):  # not from a doctor
            self._on_packet(data, source)

    def _on_packet(self, data: bytes, source: tuple[str, int]) -> None:
        if not data.startswith(_MAGIC) or len(data) <= len(_MAGIC):
            return
        fields: dict[str, Any] = parse_json(data[len(_MAGIC) : len(_MAGIC) + 8192].decode().rstrip())
        received = fields.pop("received")
        texts = {
            name: plain_line(str(fields[name]))[:_MAX_TEXT] for name in DoctorIdentity.__slots__ if name != "domain"
        }
        identity, own = DoctorIdentity(**texts, domain=int(fields["domain"])), self.identity.name
        if identity.name == own or (identity.name not in self.others and len(self.others) >= _MAX_DOCTORS):
            return
        one = self.others.setdefault(identity.name, RemoteDoctor(identity, source))
        one.identity, one.source = identity, source
        one.largest_here = max(one.largest_here, len(data))
        one.receives_us = own in received
        one.largest_there = max(one.largest_there, int(received.get(own, 0)))


@contextlib.contextmanager
def _connected(peer: str, port: int) -> Iterator[socket.socket]:
    with udp_socket(peer) as probe:
        with contextlib.suppress(OSError):  # sending raises the reason
            probe.connect((peer, port))
        yield probe

"""The relay between Cyclone DDS and peers whose names have got an address: what it forwards, where to, how much."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from patience import PATIENT_S

from gradbus.runtime.network.host_names import HostNames
from gradbus.runtime.transport.dds import late_peers
from gradbus.runtime.transport.dds.late_peers import LatePeers
from gradbus.runtime.transport.dds.network import discovery_ports
from gradbus.runtime.transport.dds.spdp import PREFIX_BYTES

OWN, OTHER = (bytes([value]) * PREFIX_BYTES for value in (1, 2))


def announcement(prefix: bytes, text: bytes = b"") -> bytes:
    return b"RTPS\x02\x05\x01\x10" + prefix + text


class Scene:
    """A relay, what Cyclone would send to it, and machines that it sends to; they are ports of this one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        self.now_s = 1_000.0
        self.resolves = False
        self.lookups = HostNames()
        self._stack = stack
        monkeypatch.setattr(late_peers.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(late_peers, "LOOKUPS", self.lookups)
        monkeypatch.setattr(socket, "getaddrinfo", self._addresses)
        self._cyclone = self.socket()

    def _addresses(self, name: str, port: None, family: int, kind: int) -> list[Any]:
        if not self.resolves:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, kind, 17, "", ("127.0.0.1", 0))]

    def socket(self) -> socket.socket:
        made = self._stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        made.bind(("127.0.0.1", 0))
        made.setblocking(False)
        return made

    def relay(self, *ports: int | None, domain: int = 0) -> LatePeers:
        self.lookups.look_up(["late"], PATIENT_S)
        made = LatePeers(domain, {"late": ports}, "127.0.0.1")
        self._stack.callback(made.close)
        made.add_participant(OWN)
        return made

    def resolve(self) -> None:
        self.resolves = True
        self.lookups.look_up(["late"], PATIENT_S)

    def announce(self, relay: LatePeers, *messages: bytes) -> None:
        host, port = relay.relay.split(":")
        for message in messages:
            self._cyclone.sendto(message, (host, int(port)))
        select.select([relay._socket], [], [], PATIENT_S)  # noqa: SLF001 - nothing else says that they have arrived


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(monkeypatch, stack)


def received(machine: socket.socket, count: int = 0) -> list[bytes]:
    """What has arrived; waits for so many."""
    found: list[bytes] = []
    while True:
        if len(found) < count:
            select.select([machine], [], [], PATIENT_S)
        try:
            found.append(machine.recv(65_536))
        except BlockingIOError:
            return found


def test_the_newest_announcement_of_each_own_participant_is_forwarded_when_the_name_resolves(scene: Scene) -> None:
    machine = scene.socket()
    relay = scene.relay(machine.getsockname()[1])
    relay.add_participant(b"three" + bytes(7))
    third = announcement(b"three" + bytes(7))
    scene.announce(relay, announcement(OWN, b"old"), third, announcement(OWN, b"new"))
    relay.look()
    assert received(machine) == []
    scene.resolve()
    relay.look()
    assert sorted(received(machine, 2)) == sorted([announcement(OWN, b"new"), third])


def test_nothing_else_is_forwarded(scene: Scene) -> None:
    """Anybody of this machine could send to the relay."""
    machine = scene.socket()
    relay = scene.relay(machine.getsockname()[1])
    scene.resolve()
    too_long = announcement(OWN, bytes(late_peers.MAX_ANNOUNCEMENT))
    scene.announce(relay, b"", b"RTPS", b"any" * 50, announcement(OTHER), too_long, announcement(OWN)[1:])
    relay.look()
    assert received(machine) == []
    scene.announce(relay, *[announcement(OWN)] * 100)
    relay.look()
    assert received(machine, 1) == [announcement(OWN)]


def test_it_is_repeated_every_two_seconds_however_many_buses_look(scene: Scene) -> None:
    machine = scene.socket()
    relay = scene.relay(machine.getsockname()[1])
    scene.resolve()
    scene.announce(relay, announcement(OWN))
    for _ in range(41):
        for _ in range(3):
            relay.look()
        scene.now_s += 0.5
    assert len(received(machine, 11)) == 11


def test_all_ports_are_tried_at_first_and_then_the_first_one(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = scene.relay(None, discovery_ports(7)[0], 5, domain=7)
    scene.resolve()
    relay.look()
    (target,) = relay._targets  # noqa: SLF001 - the ports of a domain are for its processes alone
    assert relay._ports(target, scene.now_s) == [9160, 5, *range(9162, 9402, 2)]  # noqa: SLF001 - as above
    assert relay._ports(target, scene.now_s + late_peers.SEARCH_S) == [9160, 5]  # noqa: SLF001 - as above


def test_so_many_datagrams_go_out_at_a_time_and_the_rest_follows(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = [scene.socket() for _ in range(5)]
    monkeypatch.setattr(late_peers, "_MOST_SENT", 2)
    relay = scene.relay(*(machine.getsockname()[1] for machine in machines))
    scene.resolve()
    scene.announce(relay, announcement(OWN))
    for turn in ((0, 1), (2, 3), (4,), ()):
        relay.look()
        expected = [int(number in turn) for number in range(len(machines))]
        found = [len(received(machine, count)) for machine, count in zip(machines, expected, strict=True)]
        assert found == expected


def test_a_closed_relay_does_nothing(scene: Scene) -> None:
    relay = scene.relay(None)
    relay.close()
    scene.resolve()
    relay.look()

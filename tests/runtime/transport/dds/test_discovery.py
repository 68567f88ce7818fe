"""What anybody announces, of whom there may be thousands, costs discovery little."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from dds_domains import new_domain
from patience import until

from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport import peer_processes
from gradbus.runtime.transport.dds import discovery, network
from gradbus.runtime.transport.dds.network import discovery_ports
from gradbus.runtime.transport.dds.participant import Participant

COUNT = 60


def announcement(prefix: bytes, user_data: str, *hosts: str | bytes) -> bytes:
    """The RTPS message with which a participant appears, that takes part in nothing. ``hosts``: what it says of its
    host, as often as it says it."""

    def text(value: str | bytes) -> bytes:
        data = (value.encode() if isinstance(value, str) else value) + b"\0"
        return struct.pack("<I", len(data)) + data + bytes(-len(data) % 4)

    def parameter(number: int, value: bytes) -> bytes:
        value += bytes(-len(value) % 4)
        return struct.pack("<HH", number, len(value)) + value

    said = user_data.encode()
    properties = struct.pack("<I", len(hosts)) + b"".join(text("__Hostname") + text(host) for host in hosts)
    locator = struct.pack("<iI", 1, 9) + bytes(12) + socket.inet_aton("127.0.0.1")
    body = b"".join(
        (
            struct.pack("<HH", 0, 16),
            bytes.fromhex("000100c7"),
            bytes.fromhex("000100c2"),
            struct.pack("<iI", 0, 1),
            b"\0\3\0\0",
            parameter(0x15, b"\2\5\0\0"),
            parameter(0x16, b"\1\x10\0\0"),
            parameter(0x50, prefix + bytes.fromhex("000001c1")),
            parameter(0x58, bytes(4)),
            parameter(0x31, locator),
            parameter(0x32, locator),
            parameter(0x2C, struct.pack("<I", len(said)) + said),
            parameter(0x59, properties + struct.pack("<I", 0)),
            parameter(0x02, struct.pack("<iI", 600, 0)),
            struct.pack("<HH", 1, 0),
        )
    )
    return b"RTPS\2\5\1\x10" + prefix + struct.pack("<BBH", 0x15, 5, len(body)) + body


@contextmanager
def node(**settings: Any) -> Iterator[tuple[Participant, int]]:
    domain = new_domain()
    made = Participant(domain_id=domain, partition=f"crowd-{os.getpid()}", network=NetworkConfig(**settings))
    try:
        yield made, domain
    finally:
        made.close()


def test_of_a_process_that_has_announced_many_participants_each_is_taken_leave_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dismissed: list[bytes] = []
    goodbye = discovery.goodbye
    monkeypatch.setattr(discovery, "goodbye", lambda prefix: dismissed.append(prefix) or goodbye(prefix))
    with node() as (made, domain), subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        claim = peer_processes.claim_of(child.pid)
        addresses = discovery.own_addresses(domain)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaker:
            for number in range(COUNT):
                speaker.sendto(announcement(os.urandom(12), f"{claim}\n0", f"host {number}"), addresses[0])
        until(lambda: made.look_around() and len(made.others) == COUNT)
        known = set(made.others)
        assert {made.claims()[prefix].host for prefix in known} == {f"host {number}" for number in range(COUNT)}
        child.kill()
        child.wait()
        until(lambda: made.look_around() and not made.others)
        assert sorted(dismissed) == sorted([*known] * len(addresses))
        assert not known & set(made.claims())


def test_announcements_without_end_do_not_hold_up_who_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "BATCH", 4)
    monkeypatch.setattr(discovery, "MOST_BATCHES", 2)
    with node() as (made, domain):
        address = discovery.own_addresses(domain)[0]
        known = set(made.claims())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaker:
            for number in range(COUNT):
                speaker.sendto(announcement(os.urandom(12), "", f"host {number}"), address)
        time.sleep(0.2)
        made.look_around()
        assert len(set(made.claims()) - known) <= 16
        until(lambda: len(set(made.claims()) - known) == COUNT)


def test_what_a_stranger_announces_that_cannot_be_read_hides_nobody_else() -> None:
    with node() as (made, domain):
        address = discovery.own_addresses(domain)[0]
        prefixes = [os.urandom(12) for _ in range(4)]
        says: list[tuple[str | bytes, ...]] = [(b"\xff",), ("one", "another"), (), ("good",)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaker:
            for prefix, hosts in zip(prefixes, says, strict=True):
                speaker.sendto(announcement(prefix, "", *hosts), address)
        time.sleep(0.2)  # so that one look takes all of them
        until(lambda: made.look_around() and set(prefixes) <= set(made.claims()))
        assert [made.claims()[prefix].host for prefix in prefixes] == ["", "", "", "good"]


def test_after_a_while_only_the_first_port_and_those_of_known_participants_get_announcements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "SEARCH_S", 1.0)
    monkeypatch.setattr(discovery, "ANNOUNCE_S", ())
    with node(lease_s=1.0) as (made, domain), ExitStack() as stack:
        ports = discovery_ports(domain)
        heard = {index: stack.enter_context(_port(ports[index])) for index in (1, 100, 120)}
        assert all(one.recv(2_000)[8:20] == made.own for one in heard.values())
        known = announcement(os.urandom(12), "").replace(_locator(9), _locator(ports[100]))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaker:
            speaker.sendto(known, discovery.own_addresses(domain)[0])
        until(lambda: made.look_around() and len(made.claims()) == 2)
        for index in (1, 120):
            heard[index].settimeout(2.0)  # ten times as long as from one announcement to the next
            with suppress(TimeoutError):
                while heard[index].recv(2_000):
                    pass
        _drop_what_has_come(heard[100])
        assert heard[100].recv(2_000)[8:20] == made.own


def _port(number: int) -> socket.socket:
    """A socket at which no process of the domain listens yet."""
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind(("127.0.0.1", number))
    one.settimeout(10.0)
    return one


def _locator(port: int) -> bytes:
    return struct.pack("<iI", 1, port) + bytes(12) + socket.inet_aton("127.0.0.1")


def _drop_what_has_come(one: socket.socket) -> None:
    one.setblocking(False)
    with suppress(BlockingIOError):
        while one.recv(2_000):
            pass
    one.settimeout(10.0)

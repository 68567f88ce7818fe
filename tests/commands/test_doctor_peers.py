"""Doctors of two machines find each other, measure both ways, and say what they do not see."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import doctor_node
import pytest
import warm
from host_files import add_ipv6_addresses

from gradbus.commands.buses import examination_of
from gradbus.commands.doctor.datagrams import Datagrams, DoctorIdentity, RemoteDoctor
from gradbus.commands.doctor.machine import Finding, Severity
from gradbus.commands.doctor.peers import PeerContact, judge_peer
from gradbus.commands.doctor.remote_bus import BusPeer, PeerMeasurements
from gradbus.commands.lab.namespaces import Host, set_link
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.security.job_key import new_job_key, write_secret_file

PATIENT_S = 60.0  # for what comes; a doctor that has found all ends at once
Found = list[tuple[str, str, str, str]]
CARD = DoctorIdentity("1", "one", "192.0.2.1", 0, "gradbus-doctor", "network", "key 01")
THEIRS = replace(CARD, name="2", host="two", address="192.0.2.2")
SETTINGS = BusSettings(interface="eth0", network="network", peers=("192.0.2.2",))


def look(hosts: tuple[Host, Host], *specs: dict[str, Any], wait_s: float = PATIENT_S) -> list[Found]:
    """What a doctor on each host finds with these settings."""
    running = []
    for host, settings in zip(hosts, specs, strict=True):
        spec = {"namespace": host.name, "wait_s": wait_s, "settings": {"interface": host.interface, **settings}}
        running.append(warm.fork_that_tells(doctor_node.run_forked, spec))
    try:
        return [next(iter(events))["found"] for _, _, events in running]
    finally:
        for process, pipe, _ in running:
            process.join(10.0)
            process.kill()
            pipe.close()


@pytest.fixture
def keys(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    def make(name: str) -> dict[str, Any]:
        path = tmp_path / name
        if not path.exists():
            write_secret_file(path, new_job_key().text)
        return {"security": "psk", "key_file": path}

    return make


@pytest.mark.slow
@pytest.mark.netns
def test_two_doctors_measure_the_way_between_them_and_agree_on_it(hosts: tuple[Host, Host], keys) -> None:
    """The second one has no peers: it is found by the first one, and told to name it."""
    first, second = look(hosts, {"peers": [hosts[1].address], **keys("job.key")}, keys("job.key"))
    ((name, value, verdict, _),) = first
    assert (name, verdict) == (f"peer {hosts[1].address}", "ok"), first
    there = re.search(r"round trip (\d+) us, (\d+) MB/s to it, (\d+) MB/s from it", value)
    assert there, value
    assert min(map(int, there.groups())) > 0
    ((name, value, verdict, cure),) = second
    assert (name, verdict) == (f"doctor at {hosts[0].address}", "advice"), second
    assert "looks for this machine, and is found" in value
    assert f"it is not in --peers here: put {hosts[0].address} there" in cure


@pytest.mark.slow
@pytest.mark.netns
def test_two_doctors_find_each_other_over_ipv6(hosts: tuple[Host, Host], keys) -> None:
    addresses = add_ipv6_addresses(hosts)
    found = look(hosts, *({"peers": addresses, **keys("job.key")} for _ in hosts))
    for ((name, value, verdict, _),), other in zip(found, reversed(addresses), strict=True):
        assert (name, verdict) == (f"peer {other}", "ok"), found
        assert re.search(r"round trip \d+ us", value), value


@pytest.mark.slow
@pytest.mark.netns
def test_doctors_with_other_keys_and_domains_say_so(hosts: tuple[Host, Host], keys) -> None:
    peers = [{"peers": [hosts[1].address]}, {"peers": [hosts[0].address], "domain": 3}]
    began_s = time.monotonic()
    found = look(hosts, {**peers[0], **keys("one.key")}, {**peers[1], **keys("other.key")})
    assert time.monotonic() - began_s < PATIENT_S  # nothing is left to be found out
    for ((_, value, verdict, cure),) in found:
        assert (value.endswith("is set up differently"), verdict) == (True, "bad")
        assert "DDS domain (--domain) is " in cure
        assert "protection is key " in cure
        assert "Copy one key file to both" in cure


@pytest.mark.slow
@pytest.mark.netns
def test_a_doctor_without_an_answer_names_what_to_check(hosts: tuple[Host, Host], keys) -> None:
    """The cable is out; and then packets go only one way."""
    key = keys("job.key")
    set_link(hosts[1], up=False)
    (found,) = look(hosts[:1], {"peers": [hosts[1].address], **key}, wait_s=3.0)  # type: ignore[arg-type]
    ((_, value, verdict, cure),) = found
    assert (value, verdict) == ("no answer within 3 s", "bad")
    for text in ("Does 'gradbus doctor' run there", f"--peers has {hosts[0].address}", "UDP ports 7410-7649"):
        assert text in cure
    set_link(hosts[1], up=True)
    command = ["ip", "-n", hosts[1].name, "route", "add", "blackhole", f"{hosts[0].address}/32"]
    subprocess.run(command, check=True, timeout=10)
    first, second = look(hosts, {"peers": [hosts[1].address], **key}, {"peers": [hosts[0].address], **key}, wait_s=8.0)
    assert first[0][1:3] == ("no answer within 8 s", "bad"), first
    assert second[0][2] == "bad"
    assert "sends to this machine, and does not receive from it" in second[0][1]


def judged(remote: RemoteDoctor | None, met: BusPeer | None, **more: Any) -> Finding:
    seen = PeerContact("192.0.2.2", remote, met, more.pop("unreachable", ""))
    return judge_peer(CARD, seen, wait_s=5.0, misconfiguration=more.pop("misconfiguration", ""), settings=SETTINGS)


def test_what_is_known_of_a_peer_decides_what_is_said() -> None:
    remote = RemoteDoctor(THEIRS, ("192.0.2.2", 7648), receives_us=True, largest_there=1400, largest_here=1400)
    refused = judged(None, None, unreachable="the machine answers that nothing listens there")
    assert "nothing came from 192.0.2.2 (the machine answers that nothing listens there)" in refused.cure
    assert "and does not receive from it" in judged(replace(remote, receives_us=False), None).value
    lost = judged(replace(remote, largest_there=60), None)
    assert "large datagrams are lost" in lost.value
    assert "1400 B do not get through: 60 B there" in lost.cure
    broken_off = BusPeer("two", "192.0.2.2", sees_us=True, fault="no answer")
    assert "large datagrams are lost" in judged(replace(remote, largest_there=60), broken_off).value
    passed = judged(remote, None, misconfiguration="two has another key")
    assert passed.value == "two: DDS does not get through"
    assert "Received samples show that two has another key" in passed.cure
    one_way = judged(None, BusPeer("two", "192.0.2.2"))
    assert one_way.value == "two is seen here, and does not see this machine"
    broken = judged(remote, broken_off)
    assert broken.value == "two: broken off"
    well = judged(None, BusPeer("two", "192.0.2.2", sees_us=True, round_trip_s=1e-4, there=2e8, back=1e8))
    assert (well.severity, well.value) == (Severity.OK, "two: round trip 100 us, 200 MB/s to it, 100 MB/s from it")


def test_what_others_send_is_read_with_care() -> None:
    packets = Datagrams(CARD, [], 1400, examination_of(SETTINGS))
    good = {name: getattr(THEIRS, name) for name in DoctorIdentity.__slots__} | {"received": {"1": 1400}}
    for bad in (b"", b"x" * 100, b"gradbus doctor 2 {", b"gradbus doctor 2 []", b"gradbus doctor 2 {}"):
        packets.take(bad, ("192.0.2.9", 1))
    packets.take(packets.packet_of(good | {"domain": "x"}), ("192.0.2.9", 1))
    packets.take(packets.packet_of(good | {"domain": float("inf")}), ("192.0.2.9", 1))
    packets.take(packets.packet_of(good | {"name": CARD.name}), ("192.0.2.9", 1))  # its own
    assert packets.others == {}
    packets.take(packets.packet_of(good | {"host": "\x1b[2J" + "h" * 500}), ("192.0.2.2", 7648))
    (remote,) = packets.others.values()
    assert (remote.receives_us, remote.largest_there) == (True, 1400)
    assert "\x1b" not in remote.identity.host
    assert len(remote.identity.host) <= 128
    for number in range(100):
        packets.take(packets.packet_of(good | {"name": f"n{number}"}), ("192.0.2.3", 7648))
    assert len(packets.others) == 32


@pytest.mark.parametrize(
    "word", ["5", "null", "[]", "{}", '{"word": "here", "host": "h", "address": "a", "opened_ns": 1e999, "sees": []}']
)
def test_a_word_that_no_doctor_sends_changes_nothing(word: str) -> None:
    measurements = PeerMeasurements(1, "one", "192.0.2.1")
    assert measurements.on_word(2, word, None) is None  # type: ignore[arg-type]
    assert measurements.found == {}

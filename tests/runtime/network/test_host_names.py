"""Host names are looked up off the loop, side by side, and nobody waits for a name server that does not answer."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from patience import PATIENT_S

from gradbus.runtime.network import host_names
from gradbus.runtime.network.host_names import MAX_ADDRESSES, MAX_LOOKUPS, HostNames, describe_missing


class NameServer:
    """Stands in for the system's look-up: answers by a table, or does not answer until it is let go."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.silent: set[str] = set()
        self.let_go = threading.Event()
        self.asked: Counter[str] = Counter()
        self.running = self.most_running = 0
        self._lock = threading.Lock()

    def __call__(self, name: str, port: None, family: int, kind: int) -> list[Any]:
        assert family == socket.AF_INET
        with self._lock:
            self.asked[name] += 1
            self.running += 1
            self.most_running = max(self.running, self.most_running)
        try:
            if name in self.silent:
                assert self.let_go.wait(PATIENT_S)
            if name not in self.addresses:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(family, kind, 17, "", (address, 0)) for address in self.addresses[name]]
        finally:
            with self._lock:
                self.running -= 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    made = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.let_go.set()


@pytest.fixture
def names(server: NameServer) -> HostNames:
    return HostNames()


def test_what_has_an_address_is_returned_and_the_rest_has_a_reason(server: NameServer, names: HostNames) -> None:
    server.addresses = {"a": ["192.0.2.1", "192.0.2.1", "192.0.2.2"], "many": [f"192.0.2.{n}" for n in range(1, 20)]}
    found = names.look_up(["a", "many", "none"], PATIENT_S)
    assert found == {
        "a": ("192.0.2.1", "192.0.2.2"),
        "many": tuple(f"192.0.2.{n}" for n in range(1, MAX_ADDRESSES + 1)),
    }
    assert names.reasons(["a", "many", "none", "never asked"]) == {"none": "name or service not known"}


def test_addresses_that_end_cyclone_are_none(server: NameServer, names: HostNames) -> None:
    server.addresses = {"blocked": ["0.0.0.0"], "mixed": ["0.0.0.0", "192.0.2.1", "255.255.255.255"], "empty": []}
    assert names.look_up(["blocked", "mixed", "empty"], PATIENT_S) == {"mixed": ("192.0.2.1",)}
    assert names.reasons(["blocked", "empty"]) == {
        "blocked": "it is 0.0.0.0: it stands for no single machine",
        "empty": "it has no address",
    }


def test_a_name_server_that_does_not_answer_is_waited_for_a_bounded_time_and_what_it_says_later_counts(
    server: NameServer, names: HostNames
) -> None:
    server.silent, server.addresses = {"slow"}, {"slow": ["192.0.2.1"], "quick": ["192.0.2.2"]}
    began_s = time.monotonic()
    assert names.look_up(["slow", "quick"], 0.2) == {"quick": ("192.0.2.2",)}
    assert time.monotonic() - began_s < PATIENT_S / 2
    assert names.reasons(["slow"]) == {"slow": "no answer yet"}
    for _ in range(20):  # one look-up at a time for a name, however often it is asked for
        assert names.retry(["slow"]) == {}
        assert names.look_up(["slow"], 0.0) == {}
    assert server.asked["slow"] == 1
    server.let_go.set()
    assert names.look_up(["slow"], PATIENT_S) == {"slow": ("192.0.2.1",)}
    assert names.retry(["slow"]) == {"slow": ("192.0.2.1",)}


def test_names_are_looked_up_side_by_side_and_only_so_many(server: NameServer, names: HostNames) -> None:
    all_names = [f"n{number}" for number in range(3 * MAX_LOOKUPS)]
    server.silent, server.addresses = set(all_names), {name: ["192.0.2.1"] for name in all_names}
    assert names.look_up(all_names, 0.1) == {}
    server.let_go.set()
    assert len(names.look_up(all_names, PATIENT_S)) == len(all_names)
    assert 1 < server.most_running <= MAX_LOOKUPS


def test_a_name_without_an_address_is_looked_up_again_after_a_quarter_of_the_time_it_had_none(
    server: NameServer, names: HostNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1_000.0]
    monkeypatch.setattr(host_names.time, "monotonic", lambda: now_s[0])
    names.look_up(["late"], PATIENT_S)
    lookups = []
    for _ in range(600):  # a minute
        before = server.asked["late"]
        names.retry(["late"])
        with names._ended:  # noqa: SLF001 - nothing else says that a look-up has ended
            names._ended.wait_for(lambda: not names._names["late", socket.AF_INET].is_asked, PATIENT_S)  # noqa: SLF001 - as above
        if server.asked["late"] > before:
            lookups.append(now_s[0] - 1_000.0)
        now_s[0] += 0.1
    gaps = [after - before for before, after in zip([0.0, *lookups], lookups, strict=False)]
    assert 10 <= len(lookups) <= 20, lookups
    assert all(
        gap + 0.11 >= 1.0 and gap <= max(1.2, before / 4 + 0.3) for gap, before in zip(gaps, lookups, strict=True)
    )
    server.addresses["late"] = ["192.0.2.1"]
    now_s[0] += host_names.RETRY_S[1]
    names.retry(["late"])
    assert names.look_up(["late"], PATIENT_S) == {"late": ("192.0.2.1",)}


FORKING = """
import os, socket, sys, threading
from gradbus.runtime.network.host_names import LOOKUPS

let_go = threading.Event()

def look_up(name, port, family, kind):
    if name == "slow":
        let_go.wait()
    return [(family, kind, 17, "", ("192.0.2.1", 0))]

socket.getaddrinfo = look_up
LOOKUPS.look_up(["slow"], 0.05)  # a thread that the child does not have is in the call
child = os.fork()
if child == 0:
    os._exit(0 if LOOKUPS.look_up(["quick"], 20) and LOOKUPS.reasons(["slow"]) == {} else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_by_fork_looks_names_up_itself() -> None:
    """And the parent ends although one of its threads is in a look-up that does not."""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING], timeout=2 * PATIENT_S).returncode == 0


def test_a_sentence_names_a_few_and_what_to_do() -> None:
    assert describe_missing({}) == ""
    text = describe_missing({f"robot-{number}": "no answer yet" for number in range(5)})
    assert text.startswith(
        "No address yet for robot-0 (no answer yet), robot-1 (no answer yet), robot-2 (no answer yet)"
    )
    assert text.endswith("and 2 more of bus.peers: check DNS or /etc/hosts here, or give IP addresses")

"""The doctor and peers with host names: one without an address is a finding with what to do, not the end of it."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from typing import Any

import pytest
from host_files import name_service

from gradbus.commands.doctor import peer_names
from gradbus.commands.doctor.machine import Severity
from gradbus.commands.doctor.peer_names import OtherMachines, unresolved
from gradbus.commands.exit_codes import ExitCode
from gradbus.commands.lab.namespaces import Host
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.network import host_names
from gradbus.runtime.network.host_names import HostNames


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The name service: what is put there resolves from then on."""
    known: dict[str, list[str]] = {}

    def look_up(name: str, port: None, family: int, kind: int) -> list[Any]:
        if name not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, kind, 17, "", (address, 0)) for address in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(host_names, "RETRY_S", (0.0, 0.0))
    monkeypatch.setattr(peer_names, "LOOKUPS", HostNames())
    return known


def test_a_name_without_an_address_is_a_finding_with_the_next_step(addresses: dict[str, list[str]]) -> None:
    addresses["robot-8"] = ["192.0.2.8"]
    (found,) = unresolved(BusSettings(peers=("192.0.2.1", "robot-7:7410", "robot-8")))
    assert (found.name, found.value) == ("peer robot-7", "its name has no address on this machine")
    assert found.severity is Severity.BAD
    assert found.cure == (
        "name or service not known: check DNS or /etc/hosts here ('getent ahostsv4 robot-7' shows what they say), or "
        "name the machine by its IP address. A job starts without it, and finds it when the name resolves"
    )


def test_names_that_resolve_while_the_doctor_waits_are_taken_up_and_this_machine_is_left_out(
    addresses: dict[str, list[str]],
) -> None:
    async def resolve(machines: OtherMachines) -> None:
        async with asyncio.timeout(20.0):
            while not machines.all_resolved:
                machines.look()
                await asyncio.sleep(0.005)

    addresses["robot-8"] = ["192.0.2.8"]
    machines = OtherMachines(["192.0.2.1", "robot-8", "robot-7", "127.0.0.1", "192.0.2.9:7410"], "192.0.2.1")
    asyncio.run(machines.resolve())
    assert machines.addresses == ["192.0.2.9", "192.0.2.8"]
    assert str(machines) == "192.0.2.9, 192.0.2.8, robot-7"
    addresses["robot-7"] = ["192.0.2.1", "192.0.2.7"]
    asyncio.run(resolve(machines))
    assert machines.addresses == ["192.0.2.9", "192.0.2.8", "192.0.2.7"]


@pytest.mark.slow
@pytest.mark.netns
def test_the_command_measures_this_machine_and_names_the_peer_that_does_not_resolve(hosts: tuple[Host, Host]) -> None:
    host = hosts[0]
    options = ("--network", "network", "--interface", host.interface, "--peers", f"robot-7,{host.address}")
    with name_service(hosts):
        doctor = subprocess.run(
            [*host.prefix, sys.executable, "-m", "gradbus", "doctor", *options, "--wait-s", "2", "--insecure"],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "COLUMNS": "120"},
        )
    assert doctor.returncode == ExitCode.BUS, doctor.stdout + doctor.stderr
    assert re.search(r"^looking for the doctor on robot-7 for up to 2 s", doctor.stdout, re.M), doctor.stdout
    assert re.search(r"^peer robot-7 +its name has no address on this machine +bad", doctor.stdout, re.M), doctor.stdout
    assert re.search(r"^peer robot-7: .*: check DNS or /etc/hosts here", doctor.stdout, re.M)
    assert re.search(r"^round trip, 64 B +\d+ us", doctor.stdout, re.M)  # the rest was measured all the same

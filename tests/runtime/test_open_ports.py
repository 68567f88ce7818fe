"""What others can do to the UDP ports of a bus by sending there: they reach one of ``lo`` from this machine alone, and
what they make Cyclone say does not fill anybody's log."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import loopback_bus
import pytest
import warm
from bus_helpers import Run
from dds_domains import new_domain
from patience import eventually
from structlog.testing import capture_logs

import gradbus
from gradbus.commands.lab.namespaces import Host, enter_namespace
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.transport.dds import discovery, log_sink
from gradbus.runtime.wire.messages import Control

# A DATA submessage that ends before its header does.
MALFORMED = b"RTPS\x02\x05\x01\x10" + bytes(range(12)) + bytes((0x15, 1, 4, 0)) + bytes(4)


@pytest.mark.parametrize("peers", [(), ("::1",)])
def test_sockets_of_a_bus_on_loopback_take_nothing_from_other_interfaces(
    run: Run, place: dict[str, Any], peers: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with gradbus.connect(**place, peers=peers):
            first = 7400 + 250 * place["domain"]
            devices = [
                one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")
                for one in discovery.own_sockets(range(first, first + 250))
            ]
            assert set(devices) == {b"lo"}

    run(main)


@contextmanager
def listening(host: Host, *, bound: bool) -> Iterator[tuple[list[int], Iterator[dict[str, Any]]]]:
    """A bus on ``lo`` of a host: its ports, and the lines that Cyclone writes there."""
    spec = {"namespace": host.name, "domain": new_domain(), "bound": bound}
    process, pipe, events = warm.fork_that_tells(loopback_bus.run_forked, spec, both_ways=True)
    try:
        news = iter(events)
        yield next(news)["ports"], news
        pipe.send("end")
        process.join(10.0)
        assert process.exitcode == 0
    finally:
        process.kill()
        pipe.close()


def refuses(sender: Host, address: str, ports: list[int]) -> list[bool]:
    """Send RTPS from a host to ports of another one, again and again, until it answers that nobody listens there, for
    2 s at most."""
    refused = []

    def attack() -> None:
        enter_namespace(sender.name)
        for port in ports:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
                one.connect((address, port))
                one.settimeout(0.1)
                refused.append(_is_refused(one))

    thread = threading.Thread(target=attack)  # which alone is in that network
    thread.start()
    thread.join(30.0)
    return refused


def _is_refused(one: socket.socket) -> bool:
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s:
        try:
            for packet in (MALFORMED, discovery.goodbye(bytes(12))):
                one.send(packet)
            one.recv(1)
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            continue
    return False


@pytest.mark.slow
@pytest.mark.netns
def test_packets_of_another_machine_do_not_reach_a_bus_on_loopback(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    with listening(here, bound=True) as (ports, _):
        assert len(ports) > 1
        assert all(refuses(there, here.address, ports))  # as where nobody listens
        assert not any(refuses(here, "127.0.0.1", ports[:1]))  # from within they come


@pytest.mark.slow
@pytest.mark.netns
def test_without_that_they_would(hosts: tuple[Host, Host]) -> None:
    """Else the test above would show nothing."""
    here, there = hosts
    with listening(here, bound=False) as (ports, lines):
        assert not any(refuses(there, here.address, ports[:1]))
        assert "malformed packet" in next(lines)["text"]


def test_malformed_packets_write_some_lines_in_the_log_and_their_number_and_nothing_to_stderr(
    run: Run, place: dict[str, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_sink, "WINDOW_S", 1.5)

    async def main() -> None:
        async with gradbus.connect(**place) as bus:
            bus.open_writer(Control)
            (address, *_) = discovery.own_addresses(place["domain"])
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anybody, capture_logs() as logs:
                for _ in range(2_000):
                    anybody.sendto(MALFORMED, address)
                    await asyncio.sleep(0)
                await eventually(lambda: any("lines" in line for line in logs))
            told = [line["text"] for line in logs if line["event"] == "Cyclone DDS says"]
            assert len(told) <= 3 * log_sink.LINES
            assert "malformed packet" in told[0]
            assert sum(line.get("lines", 0) for line in logs) > 10

    run(main)
    assert "malformed" not in capfd.readouterr().err


def test_discovery_does_not_tell_the_name_of_the_program(run: Run, place: dict[str, Any]) -> None:
    heard = []
    port = 7410 + 250 * place["domain"] + 2 * 90  # of a process that is not there, where anybody may listen

    async def main() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anybody:
            anybody.bind(("127.0.0.1", port))
            anybody.setblocking(False)
            async with gradbus.connect(**place):
                told = await asyncio.get_running_loop().sock_recv(anybody, 65_536)
        heard.append(told)

    run(main)
    assert b"__ProcessName" in heard[0]
    for name in (Path("/proc/self/comm").read_text().strip(), Path(sys.executable).name):
        assert name.encode() not in heard[0]


def test_a_configuration_that_cyclone_refuses_is_refused_and_its_reason_told(
    run: Run, place: dict[str, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = "<Domain><Discovery><LeaseDuration>3 parrots</LeaseDuration></Discovery></Domain>"
    monkeypatch.setenv("CYCLONEDDS_URI", document)
    told = []

    async def main() -> None:
        with pytest.raises(ConfigError) as refused:
            async with gradbus.connect(**place):
                raise AssertionError("it opened")
        told.append(str(refused.value))

    run(main)
    assert "3 parrots: invalid value" in told[0] + capfd.readouterr().err

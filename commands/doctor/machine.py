"""Findings about this machine that need no bus: versions, interface, buffers, ports."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gradbus.commands.buses import examination_of, place_of, reach_of, uses_links
from gradbus.commands.run.cores import read_topology
from gradbus.commands.rundir.versions import versions
from gradbus.runtime import fast_paths
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.cores import usable_cpus
from gradbus.runtime.needs import fault_of, is_core_alone
from gradbus.runtime.transport.examination import Examination

_JUMBO_MTU = 9000


class Severity(Enum):
    """Tells how good a finding is. Only BAD makes the doctor's exit code other than 0."""

    OK = "ok"
    ADVICE = "advice"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``cure``: advice that is printed below it."""

    name: str
    value: str
    severity: Severity = Severity.OK
    cure: str = ""


def packages(settings: BusSettings) -> list[Finding]:
    """Return findings about torch, which ``gradbus-core`` alone does not need, and the library of the transport where
    they cannot be loaded. Raises ConfigError: the settings of the transport are wrong."""
    needed = {} if is_core_alone() else {"torch": "torch"}
    name, module = ("eclipse-zenoh", "zenoh") if uses_links(settings) else ("cyclonedds", "cyclonedds.domain")
    faults = {name: fault_of(module) for name, module in {**needed, name: module}.items()}
    return [Finding(name, "cannot be used", Severity.BAD, fault) for name, fault in faults.items() if fault]


def machine(settings: BusSettings) -> list[Finding]:
    """Findings about versions, interface, buffers and ports."""
    more = ("eclipse-zenoh",) if uses_links(settings) else ()
    found = [Finding("versions", ", ".join(f"{name} {text}" for name, text in versions(*more).items()))]
    if uses_links(settings):
        why = "bus.connect" if settings.connect else "bus.listen"
        transport = Finding("transport", f"{place_of(settings)}, because {why} is set")
        return [*found, transport, _fast_paths(), _cores(settings)]
    needed = examination_of(settings)
    ports = Finding("UDP ports", f"{needed.ports} (domain {settings.domain})")
    transport = Finding("transport", f"{place_of(settings)}: neither bus.connect nor bus.listen is set")
    found += [transport, _network(settings), *_buffers(needed), ports, _fast_paths(), _cores(settings)]
    document = os.environ.get("CYCLONEDDS_URI", "").strip()
    if document:
        shown = document if len(document) <= 60 else f"{document[:57]}..."
        cure = "CYCLONEDDS_URI changes the network settings of every job; unset it if that is not meant"
        found.append(Finding("CYCLONEDDS_URI", f"{shown} (merged over gradbus's settings)", Severity.ADVICE, cure))
    return found


def _network(settings: BusSettings) -> Finding:
    name, profile = settings.interface, settings.network
    mtu = mtu_of(name)
    value = f"profile {profile}, interface {name}" + (f", MTU {mtu}" if mtu else "")
    if settings.peers:
        value += f", peers {', '.join(settings.peers)}"
    if profile == "loopback" and mtu is not None and mtu < _JUMBO_MTU:
        return Finding(
            "network",
            value,
            Severity.ADVICE,
            f"profile loopback sends datagrams of 65,500 bytes, too large for MTU {mtu}: use --network network",
        )
    if profile == "network" and not reach_of(settings).leaves_machine:
        return Finding(
            "network",
            value,
            Severity.ADVICE,
            f"interface {name} reaches this machine only: name the one that leads to the others (--interface)",
        )
    return Finding("network", value)


def _buffers(needed: Examination) -> Iterator[Finding]:
    yield _buffer("receive", socket.SO_RCVBUF, needed.receive_buffer_bytes, "bursts may be lost and sent again")
    if needed.send_buffer_bytes is not None:
        yield _buffer("send", socket.SO_SNDBUF, needed.send_buffer_bytes, "on a thin link much may be sent twice")


def _buffer(name: str, option: int, wanted_bytes: int, consequence: str) -> Finding:
    """Return whether the kernel grants sockets a buffer of this size. ``consequence``: of a smaller one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, option, wanted_bytes)
        granted = probe.getsockopt(socket.SOL_SOCKET, option) // 2  # Linux counts its own overhead in
    value = f"{granted / (1 << 20):.3g} MiB granted of {wanted_bytes >> 20} MiB"
    if granted >= wanted_bytes:
        return Finding(f"{name} buffer", value)
    setting = "net.core.rmem_max" if name == "receive" else "net.core.wmem_max"
    limit = _read(Path("/proc/sys") / setting.replace(".", "/"))
    return Finding(
        f"{name} buffer",
        value,
        Severity.ADVICE,
        f"{consequence} ({setting} is {limit or 'unknown'}): sudo sysctl -w {setting}={wanted_bytes}",
    )


def _fast_paths() -> Finding:
    known = fast_paths.fast_paths()
    used = ", ".join(path.name for path in known if path.is_used) or "none"
    missing = "; ".join(f"without {path.name}, {path.purpose} {path.instead}" for path in known if not path.is_used)
    if not missing:
        return Finding("fast paths", used)
    why = f"{fast_paths.SWITCH} is set; " if fast_paths.PORTABLE else ""
    return Finding("fast paths", used, Severity.ADVICE, f"{why}{missing}")


def _cores(settings: BusSettings) -> Finding:
    by_card = settings.interface if reach_of(settings).leaves_machine and not uses_links(settings) else None
    found = read_topology(usable_cpus(), interface=by_card)
    nodes, most = len(found.nodes), found.most_ranks
    quota = "" if found.quota == float("inf") else f", time for {found.quota:g}"
    bound = f"up to {most} rank{'s' * (most > 1)}" if most else "no rank"
    cards = "".join(f", {name} at node {node}" for name, node in found.card_nodes.items())
    value = (
        f"{len(found.cores)} in {nodes} NUMA node{'s' * (nodes > 1)}{cards}{quota}; "
        f"--bind auto gives {bound} some of its own"
    )
    return Finding("cores", value)


def mtu_of(interface: str) -> int | None:
    """The MTU of an interface of this machine; None: the system has no file for it."""
    text = _read(Path("/sys/class/net", interface, "mtu"))
    return int(text) if text else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""

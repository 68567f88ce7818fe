"""How soon a lost peer is known over Zenoh: PYTHONPATH=tests/tools:tests/support .venv/bin/python -P -m lost_links.

A relay, a peer and a process that watches it, on loopback, with TLS. The peer is killed (its connection closes), or
stopped (its connection stands, and nothing comes: as when a cable is pulled). Printed are seconds from the signal on:
``session``, until the watcher's session reports the end of the link; ``bus``, until its bus reports PeerGone, which is
what users of gradbus get. On the bus the peer counts as one of another machine (GRADBUS_PORTABLE), and is killed right
after its last message, or when it has sent none for longer than the lease.

With ``--cable`` the relay and the watcher are on one host and the peer on another, which are network namespaces. Then
only the bus is measured, from when the link of the peer's host is down.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zenoh
from bus_helpers import CLIENT, reads
from ports import free_port
from tls_scene import HOST, TlsFiles

from gradbus.commands.lab.namespaces import Host, set_link, two_hosts
from gradbus.runtime.bus.bus import Bus, PeerGone, connect
from gradbus.runtime.fast_paths import SWITCH
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security import Security
from gradbus.runtime.transport.channels import ToController
from gradbus.runtime.transport.zenoh.session import open_session
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.messages import Control

_TOKEN, _JOB = "lost-links/peer", "lost-links"
_OPEN = Security(level="none", insecure=True)  # hosts that are namespaces are another machine's
_PATIENCE_S = 30.0  # beyond the lease


def _serve(endpoint: str, files: TlsFiles, host: str, *, lease_s: float | None) -> None:
    """Be a relay on a host, or with a lease a peer, until this process is ended."""
    if lease_s is None:
        session = open_session(LinkConfig(listen=(endpoint,), **files.server(host)))
        token = None
    else:
        session = open_session(LinkConfig(connect=(endpoint,), ca=files.ca, lease_s=lease_s))
        token = session.liveliness().declare_token(_TOKEN)
    print("ready", flush=True)
    signal.pause()
    del token  # without a reference it is withdrawn


async def _serve_bus(links: LinkConfig) -> None:
    """Be a peer on the bus that sends one message, until this process is ended."""
    async with connect(_JOB, network=NetworkConfig(links=links), security=_OPEN) as bus:
        await reads(bus, ToController)
        await bus.publish(CLIENT, Leave("done"))
        print("ready", flush=True)
        await asyncio.Event().wait()


def _started(*arguments: str, prefix: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*prefix, sys.executable, "-P", "-m", "lost_links", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"process {arguments} did not start")
    return process


def _known_after_s(watcher: zenoh.Session, arguments: tuple[str, ...], number: signal.Signals) -> float:
    """Seconds from a signal to a peer until its token is withdrawn at the watcher."""
    came, went = threading.Event(), threading.Event()

    def note(sample: zenoh.Sample) -> None:
        (came if sample.kind == zenoh.SampleKind.PUT else went).set()

    watch = watcher.liveliness().declare_subscriber(_TOKEN, note, history=True)
    peer = _started(*arguments)
    try:
        if not came.wait(20):
            raise RuntimeError("the peer was never seen")
        began_s = time.monotonic()
        peer.send_signal(number)
        if not went.wait(60):
            raise RuntimeError("the peer was not reported as lost within 60 s")
        return time.monotonic() - began_s
    finally:
        peer.kill()
        peer.wait()
        watch.undeclare()


async def _gone_after_s(
    bus: Bus,
    arguments: tuple[str, ...],
    lose: Callable[[subprocess.Popen[str]], None],
    *,
    host: Host | None,
    silent_s: float,
) -> float:
    """Seconds from when a peer is lost until PeerGone. ``silent_s``: since its last message, before that. ``host``: of
    the peer, else this one."""
    with bus.subscribe(ToController) as inbox:
        prefix = () if host is None else host.machine_prefix
        peer = await asyncio.to_thread(_started, *arguments, prefix=prefix, **{SWITCH: "1"})
        try:
            async with asyncio.timeout(_PATIENCE_S):
                assert isinstance(await inbox.get(), Control)
            await asyncio.sleep(silent_s)
            began_s = time.monotonic()
            lose(peer)
            async with asyncio.timeout(bus.lease_s + _PATIENCE_S):
                assert isinstance(await inbox.get(), PeerGone)
            return time.monotonic() - began_s
        finally:
            peer.kill()
            peer.wait()


async def _measure_bus(
    links: LinkConfig, arguments: tuple[str, ...], lease_s: float, repeats: int, far: Host | None = None
) -> None:
    """Measure and print what a bus with a lease reports of a peer that is killed, or that is on a host ``far`` whose
    link is cut."""

    def lose(peer: subprocess.Popen[str]) -> None:
        if far is None:
            peer.kill()
        else:
            set_link(far, up=False)

    how = "SIGKILL" if far is None else "link down"
    async with connect(_JOB, network=NetworkConfig(links=links), security=_OPEN) as bus:
        for what, silent_s in (("right after a message", 0.0), (f"silent for {1.5 * lease_s:g} s", 1.5 * lease_s)):
            taken_s = []
            for _ in range(repeats):
                taken_s.append(await _gone_after_s(bus, arguments, lose, host=far, silent_s=silent_s))
                if far is not None:
                    set_link(far, up=True)
            _show(f"bus, lease {lease_s:g} s, {how}, {what}", taken_s)


def _show(what: str, taken_s: list[float]) -> None:
    shown = f"median {statistics.median(taken_s):.3f} s, {min(taken_s):.3f} to {max(taken_s):.3f} s"
    print(f"{what}: {shown} of {len(taken_s)}", flush=True)


def _measure_cable(leases_s: Sequence[float], repeats: int) -> int:
    """Measure a bus that loses a peer on another host by its cable, in a process on the host of the relay, as what is
    left on a host is killed with it. Return its exit code."""
    with two_hosts() as (near, far):
        leases = [word for lease_s in leases_s for word in ("--lease", f"{lease_s:g}")]
        command = [*near.machine_prefix, sys.executable, "-P", "-m", "lost_links", "--host", near.address]
        return subprocess.call([*command, "--far", *far.__dict__.values(), "--repeats", str(repeats), *leases])


def _measure_far(folder: Path, host: str, far: Host, leases_s: Sequence[float], repeats: int) -> None:
    """Measure a bus on this host, of address ``host``, that loses a peer on a host ``far`` by its cable."""
    files, endpoint = TlsFiles(folder), f"tls/{host}:{free_port()}"
    place = ("--folder", str(folder), "--host", host, "--serve", endpoint)
    relay = _started(*place)
    try:
        for lease_s in leases_s:
            links = LinkConfig(connect=(endpoint,), ca=files.ca, lease_s=lease_s)
            arguments = (*place, "--lease", f"{lease_s:g}", "--bus")
            asyncio.run(_measure_bus(links, arguments, lease_s, repeats, far))
    finally:
        relay.kill()
        relay.wait()


def main() -> None:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lease", type=float, action="append", help="may be repeated; by default 2 and 10")
    parser.add_argument("--cable", action="store_true", help="cut the link of the peer's host instead")
    parser.add_argument("--host", default=HOST, help=argparse.SUPPRESS)
    parser.add_argument("--far", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--bus", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve and asked.bus:
        ca = TlsFiles(Path(asked.folder)).ca
        asyncio.run(_serve_bus(LinkConfig(connect=(asked.serve,), ca=ca, lease_s=asked.lease[0])))
        return
    if asked.serve:
        _serve(asked.serve, TlsFiles(Path(asked.folder)), asked.host, lease_s=asked.lease[0] if asked.lease else None)
        return
    leases_s = asked.lease or (2.0, 10.0)
    with tempfile.TemporaryDirectory() as folder:
        if asked.cable:
            sys.exit(_measure_cable(leases_s, asked.repeats))
        if asked.far is not None:
            _measure_far(Path(folder), asked.host, Host(*asked.far), leases_s, asked.repeats)
            return
        files, endpoint = TlsFiles(Path(folder)), f"tls/{HOST}:{free_port()}"
        place = ("--folder", folder, "--serve", endpoint)
        relay = _started(*place)
        watcher = open_session(LinkConfig(connect=(endpoint,), ca=files.ca))
        try:
            for lease_s in leases_s:
                arguments = (*place, "--lease", f"{lease_s:g}")
                for number in (signal.SIGKILL, signal.SIGSTOP):
                    taken_s = [_known_after_s(watcher, arguments, number) for _ in range(asked.repeats)]
                    _show(f"session, lease {lease_s:g} s, {number.name}", taken_s)
                links = LinkConfig(connect=(endpoint,), ca=files.ca, lease_s=lease_s)
                asyncio.run(_measure_bus(links, (*arguments, "--bus"), lease_s, asked.repeats))
        finally:
            watcher.close()
            relay.kill()
            relay.wait()


if __name__ == "__main__":
    main()

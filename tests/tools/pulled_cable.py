"""How soon a peer is known to be lost whose cable was pulled.

    PYTHONPATH=tests/tools:tests/support .venv/bin/python -P -m pulled_cable

It needs the right to make network namespaces.

A relay and a process that watches are on one host, a peer on another, over TLS. Printed are seconds from when the link
of the peer's host is down until the watcher's bus reports PeerGone: where the peer has just sent a message, and where
it has sent none for longer than the lease.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bus_helpers import CLIENT, reads
from ports import free_port
from tls_scene import HOST, TlsFiles

from gradbus.commands.lab.namespaces import Host, set_link, two_hosts
from gradbus.runtime.bus.bus import Bus, PeerGone, connect
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security import Security
from gradbus.runtime.transport.channels import ToController
from gradbus.runtime.transport.zenoh.session import open_session
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.messages import Control

_JOB = "pulled-cable"
_OPEN = Security(level="none", insecure=True)  # hosts that are namespaces are another machine's
_PATIENCE_S = 30.0  # beyond the lease


def _serve_relay(endpoint: str, files: TlsFiles, host: str) -> None:
    """Be a relay on a host until this process is ended."""
    session = open_session(LinkConfig(listen=(endpoint,), **files.server(host)))
    print("ready", flush=True)
    signal.pause()
    session.close()


async def _serve_bus(links: LinkConfig) -> None:
    """Be a peer on the bus that sends one message, until this process is ended."""
    async with connect(_JOB, network=NetworkConfig(links=links), security=_OPEN) as bus:
        await reads(bus, ToController)
        await bus.publish(CLIENT, Leave("done"))
        print("ready", flush=True)
        await asyncio.Event().wait()


def _started(*arguments: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*prefix, sys.executable, "-P", "-m", "pulled_cable", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"process {arguments} did not start")
    return process


async def _gone_after_s(bus: Bus, arguments: tuple[str, ...], host: Host, *, silent_s: float) -> float:
    """Seconds from when the link of a peer's host is down until PeerGone. ``silent_s``: since its last message."""
    with bus.subscribe(ToController) as inbox:
        peer = await asyncio.to_thread(_started, *arguments, prefix=host.machine_prefix)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                assert isinstance(await inbox.get(), Control)
            await asyncio.sleep(silent_s)
            began_s = time.monotonic()
            set_link(host, up=False)
            async with asyncio.timeout(bus.lease_s + _PATIENCE_S):
                assert isinstance(await inbox.get(), PeerGone)
            return time.monotonic() - began_s
        finally:
            peer.kill()
            peer.wait()
            set_link(host, up=True)


async def _measure_bus(links: LinkConfig, arguments: tuple[str, ...], lease_s: float, repeats: int, far: Host) -> None:
    """Measure and print what a bus with a lease reports of a peer on a host ``far``."""
    async with connect(_JOB, network=NetworkConfig(links=links), security=_OPEN) as bus:
        for what, silent_s in (("right after a message", 0.0), (f"silent for {1.5 * lease_s:g} s", 1.5 * lease_s)):
            taken_s = [await _gone_after_s(bus, arguments, far, silent_s=silent_s) for _ in range(repeats)]
            _show(f"lease {lease_s:g} s, {what}", taken_s)


def _show(what: str, taken_s: list[float]) -> None:
    shown = f"median {statistics.median(taken_s):.3f} s, {min(taken_s):.3f} to {max(taken_s):.3f} s"
    print(f"{what}: {shown} of {len(taken_s)}", flush=True)


def _measure_cable(leases_s: Sequence[float], repeats: int) -> int:
    """Measure a bus that loses a peer on another host by its cable, in a process on the host of the relay, as what is
    left on a host is killed with it. Return its exit code."""
    with two_hosts() as (near, far):
        leases = [word for lease_s in leases_s for word in ("--lease", f"{lease_s:g}")]
        command = [*near.machine_prefix, sys.executable, "-P", "-m", "pulled_cable", "--host", near.address]
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
    parser.add_argument("--host", default=HOST, help=argparse.SUPPRESS)
    parser.add_argument("--far", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--bus", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve and asked.bus:
        ca = TlsFiles(Path(asked.folder)).ca
        asyncio.run(_serve_bus(LinkConfig(connect=(asked.serve,), ca=ca, lease_s=asked.lease[0])))
    elif asked.serve:
        _serve_relay(asked.serve, TlsFiles(Path(asked.folder)), asked.host)
    elif asked.far is None:
        sys.exit(_measure_cable(asked.lease or (2.0, 10.0), asked.repeats))
    else:
        with tempfile.TemporaryDirectory() as folder:
            _measure_far(Path(folder), asked.host, Host(*asked.far), asked.lease, asked.repeats)


if __name__ == "__main__":
    main()

"""How soon a lost peer is known over Zenoh: PYTHONPATH=tests/tools:tests/support .venv/bin/python -P -m lost_links.

A relay (``gradbus relay``), a peer and a process that watches it, on loopback, with TLS; with ``--listen`` no relay,
and the bus of the process that watches listens itself. The peer is killed (its
connection closes), or stopped (its connection stands, and nothing comes: as when a cable is pulled). Printed are the
seconds since the signal: ``session``, until the watcher's session reports the end of the link; ``bus``, until its bus
reports PeerDisconnected, upon which a controller stops waiting for it, or PeerGone, upon which groups go on without it.
On the bus the peer counts as one of another machine (GRADBUS_PORTABLE), and is killed soon after its last message. With
``--gone`` PeerGone is waited for as well, which takes the lease each time.
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
from pathlib import Path

import zenoh
from bus_helpers import CLIENT, reads
from ports import free_port
from relay_scene import RelayProcess, tls_arguments
from tls_scene import HOST, TlsFiles

from gradbus.runtime.bus.bus import Bus, connect
from gradbus.runtime.fast_paths import SWITCH
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.channels import ToController
from gradbus.runtime.transport.zenoh.session import open_session
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.messages import Control, PeerDisconnected, PeerGone

_JOB = "lost-links"
_TOKEN = f"gradbus/1/{_JOB}/a/out/peer"  # a relay passes on what is of a job
_AGE_S = 0.5  # of a session that is killed: a relay looks for its connection soon after it has opened
_PATIENCE_S = 30.0  # beyond the lease


def _serve(endpoint: str, files: TlsFiles, *, lease_s: float) -> None:
    """Be a peer until this process is ended."""
    session = open_session(LinkConfig(connect=(endpoint,), ca=files.ca, lease_s=lease_s))
    token = session.liveliness().declare_token(_TOKEN)
    print("ready", flush=True)
    signal.pause()
    del token  # without a reference it is withdrawn


async def _serve_bus(links: LinkConfig) -> None:
    """Be a peer on the bus that sends one message, until this process is ended."""
    async with connect(_JOB, network=NetworkConfig(links=links), security="none") as bus:
        await reads(bus, ToController)
        await bus.publish(CLIENT, Leave("done"))
        print("ready", flush=True)
        await asyncio.Event().wait()


def _started(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "lost_links", *arguments],
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


async def _known_to_bus_s(bus: Bus, arguments: tuple[str, ...], *, gone: bool) -> tuple[float, float | None]:
    """Seconds from the kill of a peer until PeerDisconnected, and until PeerGone (None: not waited for)."""
    with bus.subscribe(ToController) as inbox:
        peer = await asyncio.to_thread(_started, *arguments, **{SWITCH: "1"})
        try:
            async with asyncio.timeout(_PATIENCE_S):
                assert isinstance(await inbox.get(), Control)
            await asyncio.sleep(_AGE_S)
            began_s = time.monotonic()
            peer.kill()
            async with asyncio.timeout(bus.lease_s + _PATIENCE_S):
                assert isinstance(await inbox.get(), PeerDisconnected)
                disconnected_s = time.monotonic() - began_s
                if not gone:
                    return disconnected_s, None
                assert isinstance(await inbox.get(), PeerGone)
                return disconnected_s, time.monotonic() - began_s
        finally:
            peer.kill()
            peer.wait()


async def _measure_bus(
    links: LinkConfig, arguments: tuple[str, ...], lease_s: float, repeats: int, *, gone: bool
) -> None:
    """Measure and print what a bus with a lease reports of a peer that is killed."""
    async with connect(_JOB, network=NetworkConfig(links=links), security="none") as bus:
        taken = [await _known_to_bus_s(bus, arguments, gone=gone) for _ in range(repeats)]
        _show(f"bus, lease {lease_s:g} s, SIGKILL, PeerDisconnected", [one for one, _ in taken])
        if gone:
            _show(f"bus, lease {lease_s:g} s, SIGKILL, PeerGone", [one for _, one in taken if one is not None])


def _show(what: str, taken_s: list[float]) -> None:
    shown = f"median {statistics.median(taken_s):.3f} s, {min(taken_s):.3f} to {max(taken_s):.3f} s"
    print(f"{what}: {shown} of {len(taken_s)}", flush=True)


def main() -> None:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lease", type=float, action="append", help="may be repeated; by default 2 and 10")
    parser.add_argument("--listen", action="store_true", help="measure a bus that listens itself, without a relay")
    parser.add_argument("--gone", action="store_true", help="wait for PeerGone, too")
    parser.add_argument("--bus-only", action="store_true", help="leave out what the session reports")
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--bus", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve and asked.bus:
        ca = TlsFiles(Path(asked.folder)).ca
        asyncio.run(_serve_bus(LinkConfig(connect=(asked.serve,), ca=ca, lease_s=asked.lease[0])))
        return
    if asked.serve:
        _serve(asked.serve, TlsFiles(Path(asked.folder)), lease_s=asked.lease[0])
        return
    with tempfile.TemporaryDirectory() as folder:
        files, endpoint = TlsFiles(Path(folder)), f"tls/{HOST}:{free_port()}"
        place = ("--folder", folder, "--serve", endpoint)
        if asked.listen:
            for lease_s in asked.lease or (2.0, 10.0):
                links = LinkConfig(listen=(endpoint,), **files.server(HOST), lease_s=lease_s)
                arguments = (*place, "--lease", f"{lease_s:g}", "--bus")
                asyncio.run(_measure_bus(links, arguments, lease_s, asked.repeats, gone=asked.gone))
            return
        with RelayProcess("--listen", endpoint, *tls_arguments(files, clients=False)) as relay:
            relay.ready()
            watcher = open_session(LinkConfig(connect=(endpoint,), ca=files.ca))
            try:
                for lease_s in asked.lease or (2.0, 10.0):
                    arguments = (*place, "--lease", f"{lease_s:g}")
                    for number in () if asked.bus_only else (signal.SIGKILL, signal.SIGSTOP):
                        taken_s = [_known_after_s(watcher, arguments, number) for _ in range(asked.repeats)]
                        _show(f"session, lease {lease_s:g} s, {number.name}", taken_s)
                    links = LinkConfig(connect=(endpoint,), ca=files.ca, lease_s=lease_s)
                    measuring = _measure_bus(links, (*arguments, "--bus"), lease_s, asked.repeats, gone=asked.gone)
                    asyncio.run(measuring)
            finally:
                watcher.close()


if __name__ == "__main__":
    main()

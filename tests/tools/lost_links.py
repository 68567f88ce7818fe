"""How soon a lost peer is known over Zenoh: PYTHONPATH=tests/tools:tests/support .venv/bin/python -P -m lost_links.

A relay, a peer and a process that watches it, on loopback, with TLS. The peer is killed (its connection closes), or
stopped (its connection stands, and nothing comes: as when a cable is pulled). Printed are seconds until the watcher's
session reports it, from the signal on.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import zenoh
from ports import free_port
from tls_scene import HOST, TlsFiles

from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.zenoh.session import open_session

_TOKEN = "lost-links/peer"


def _serve(endpoint: str, files: TlsFiles, *, lease_s: float | None) -> None:
    """Be a relay, or with a lease a peer, until this process is ended."""
    if lease_s is None:
        session = open_session(LinkConfig(listen=(endpoint,), **files.server()))
        token = None
    else:
        session = open_session(LinkConfig(connect=(endpoint,), ca=files.ca, lease_s=lease_s))
        token = session.liveliness().declare_token(_TOKEN)
    print("ready", flush=True)
    signal.pause()
    del token  # without a reference it is withdrawn


def _started(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "lost_links", *arguments], stdout=subprocess.PIPE, text=True
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


def main() -> None:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lease", type=float, action="append", help="may be repeated; by default 2 and 10")
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        _serve(asked.serve, TlsFiles(Path(asked.folder)), lease_s=asked.lease[0] if asked.lease else None)
        return
    with tempfile.TemporaryDirectory() as folder:
        files, endpoint = TlsFiles(Path(folder)), f"tls/{HOST}:{free_port()}"
        files.server()
        place = ("--folder", folder, "--serve", endpoint)
        relay = _started(*place)
        watcher = open_session(LinkConfig(connect=(endpoint,), ca=files.ca))
        try:
            for lease_s in asked.lease or (2.0, 10.0):
                for number in (signal.SIGKILL, signal.SIGSTOP):
                    arguments = (*place, "--lease", f"{lease_s:g}")
                    taken_s = [_known_after_s(watcher, arguments, number) for _ in range(asked.repeats)]
                    shown = f"median {statistics.median(taken_s):.3f} s, {min(taken_s):.3f} to {max(taken_s):.3f} s"
                    print(f"lease {lease_s:g} s, {number.name}: {shown} of {asked.repeats}", flush=True)
        finally:
            watcher.close()
            relay.kill()
            relay.wait()


if __name__ == "__main__":
    main()

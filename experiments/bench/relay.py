"""What a relay takes: memory without peers and for each session, and processor time for each gigabyte that it forwards.

The processor time is that of the relay alone, next to that of a process which copies the same bytes from one TLS
connection to another, block by block in turns. That one is a loop over Python's ``ssl``, which reads a record of 16 KiB
at a time and writes 256 KiB at once. Senders and receivers are in this process, for both.

    make bench PART=relay
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import gradbus
from gradbus.experiments.bench.command import Benchmark, Part, add_effort
from gradbus.experiments.bench.federation import OpenBus, RoleWork, note_rounds, run_federation, take_part
from gradbus.experiments.bench.processes import Processes
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.timing import MIB
from gradbus.models import NoopTask
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.security import Security
from gradbus.runtime.security.job_key import new_job_key, write_secret_file
from gradbus.runtime.security.tls_authority import authority_in
from gradbus.runtime.transport.zenoh.session import open_session

MAX_RESIDENT_MIB = 60.0
MAX_CPU_RATIO = 1.5
SESSIONS = 100
RECEIVERS = CLIENTS = 8
AHEAD = 8  # messages that are under way: a relay drops those for which it has no room for a second
_HOST = "127.0.0.1"
_GB = 1e9
_TIMEOUT_S = 120.0
_ROUNDS_S = 1_800.0
_SETTLE_S = 0.3  # for the log and counters of the last session
_KEY = "gradbus/1/bench/data/all/0"


class RelayEffort(NamedTuple):
    """How much is measured: starts of a relay, blocks of each side, messages of 1 MiB in a block; rounds of a federated
    run, and parameters of its model."""

    starts: int
    blocks: int
    messages: int
    rounds: int
    dim: int


_EFFORTS = {
    "full": RelayEffort(5, 9, 500, 20, 25_000_000),
    "quick": RelayEffort(3, 5, 200, 10, 1_199_882),
    "tiny": RelayEffort(1, 1, 8, 2, 10_000),
}


class TlsFolder:
    """Certificates in a folder: of an authority, and of a host that listens, which is this machine by default."""

    def __init__(self, folder: Path, host: str = _HOST) -> None:
        authority, _ = authority_in(folder)
        self.host = host
        self.ca, self.certificate, self.key = folder / "ca.pem", folder / "relay.pem", folder / "relay.key"
        authority.server(list(dict.fromkeys((host, _HOST)))).write(self.certificate, self.key)

    def link(self, port: int) -> LinkConfig:
        """Return the link of a client."""
        return LinkConfig(connect=(f"tls/{self.host}:{port}",), ca=self.ca)

    def context(self, purpose: int) -> ssl.SSLContext:
        """Return the settings of a server's or a client's end of a plain TLS connection."""
        context = ssl.SSLContext(purpose)
        if purpose == ssl.PROTOCOL_TLS_SERVER:
            context.load_cert_chain(self.certificate, self.key)
        else:
            context.load_verify_locations(self.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context


@contextlib.contextmanager
def relay_process(files: TlsFolder) -> Iterator[tuple[int, int]]:
    """Start ``gradbus relay``, and return its process id and its port once it listens."""
    with socket.socket() as free:
        free.bind((_HOST, 0))
        port = int(free.getsockname()[1])
    with relay_on(files, port) as pid:
        yield pid, port


@contextlib.contextmanager
def relay_on(files: TlsFolder, port: int, prefix: Sequence[str] = ()) -> Iterator[int]:
    """Start ``gradbus relay`` on a port, and return its process id once it listens. ``prefix``: of its command."""
    options = ["--listen", f"tls/{files.host}:{port}", "--tls-certificate", files.certificate, "--tls-key", files.key]
    process = subprocess.Popen(
        [*prefix, sys.executable, "-P", "-m", "gradbus", "relay", "--log-style", "json", *map(str, options)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        if json.loads(line)["event"] != "relay listens":
            raise RuntimeError(f"the relay did not start: {line}")
        reader = threading.Thread(target=process.stderr.read, daemon=True)  # its log must not fill the pipe
        reader.start()
        yield process.pid
    finally:
        process.terminate()
        process.wait(_TIMEOUT_S)
        process.stderr.close()


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    found = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def cpu_s(pid: int) -> float:
    """Return the processor seconds of another process so far, by the number that Linux gives its clock."""
    return time.clock_gettime(~pid << 3 | 2)


def measure_memory(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the memory of a relay, without peers and for each session."""
    effort = _EFFORTS[chosen.effort]
    alone: list[float] = []
    each: list[float] = []
    with tempfile.TemporaryDirectory(prefix="gradbus-relay-") as folder:
        files = TlsFolder(Path(folder) / "tls")
        for _ in range(effort.starts):
            with relay_process(files) as (pid, port), ExitStack() as opened:
                time.sleep(_SETTLE_S)
                alone.append(resident_mib(pid))
                for _ in range(SESSIONS):
                    opened.callback(open_session(files.link(port)).close)
                time.sleep(_SETTLE_S)
                each.append(1024 * (resident_mib(pid) - alone[-1]) / SESSIONS)
    yield measurement("relay without peers: resident memory", "MiB", alone, at_most=MAX_RESIDENT_MIB)
    yield measurement(f"relay with {SESSIONS} sessions over TLS: memory of each", "KiB", each)


def measure_cpu(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the processor time of a relay for each gigabyte, against that of a process that copies."""
    effort = _EFFORTS[chosen.effort]
    relayed: list[float] = []
    copied: list[float] = []
    before_mib = 0.0
    with tempfile.TemporaryDirectory(prefix="gradbus-relay-") as folder, ExitStack() as opened:
        files = TlsFolder(Path(folder) / "tls")
        pid, port = opened.enter_context(relay_process(files))
        send_by_relay = opened.enter_context(_through_relay(files, port))
        copier, send_by_copier = opened.enter_context(_through_copier(files))
        for block in range(effort.blocks + 1):
            for process, send, found in ((pid, send_by_relay, relayed), (copier, send_by_copier, copied)):
                began_s = cpu_s(process)
                send(effort.messages)
                if block:  # the first one warms up
                    found.append((cpu_s(process) - began_s) * _GB / (effort.messages * MIB))
            before_mib = resident_mib(pid) if not block else before_mib
        growth_mib = resident_mib(pid) - before_mib
    yield measurement(
        "relay: processor time for 1 GB forwarded over TLS, messages of 1 MiB",
        "s",
        relayed,
        against=("copied between two TLS connections", copied),
        at_most=MAX_CPU_RATIO,
    )
    yield measurement(
        f"relay: growth of its memory after the first of {effort.blocks + 1} blocks",
        "MiB",
        [growth_mib],
        note=f"blocks of {effort.messages} MiB",
    )


def measure_fan_out(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the processor time for each gigabyte that a relay delivers, and its memory, where all of many receive."""
    effort = _EFFORTS[chosen.effort]
    found: list[float] = []
    memory: list[float] = []
    with tempfile.TemporaryDirectory(prefix="gradbus-relay-") as folder, ExitStack() as opened:
        files = TlsFolder(Path(folder) / "tls")
        pid, port = opened.enter_context(relay_process(files))
        send = opened.enter_context(_through_relay(files, port, receivers=RECEIVERS))
        messages = max(1, effort.messages // RECEIVERS)
        for block in range(effort.blocks + 1):
            began_s = cpu_s(pid)
            send(messages)
            if block:
                found.append((cpu_s(pid) - began_s) * _GB / (messages * RECEIVERS * MIB))
                memory.append(resident_mib(pid))
    yield measurement(f"relay, to {RECEIVERS} receivers: processor time for 1 GB delivered over TLS", "s", found)
    yield measurement(f"relay, to {RECEIVERS} receivers: resident memory after each block", "MiB", memory)


def measure_rounds(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the memory of a relay after each round of a federated run, and its processor time for a round."""
    effort = _EFFORTS[chosen.effort]
    with tempfile.TemporaryDirectory(prefix="gradbus-relay-") as folder:
        files = TlsFolder(Path(folder) / "tls")
        key = Path(folder) / "job.key"
        write_secret_file(key, new_job_key().text)
        with relay_process(files) as (pid, port):
            place = RelayPlace(port, files.ca, key)
            controller = RoleWork(control_rounds, (place, effort, CLIENTS, pid))
            clients = {
                f"client-{number}": RoleWork(join_rounds, (place, effort.dim, number)) for number in range(CLIENTS)
            }
            states, _ = run_federation(controller, clients, timeout_s=_ROUNDS_S)
    title = f"relay, rounds of {CLIENTS} clients and {4 * effort.dim / 1e6:.1f} MB"
    yield measurement(f"{title}: resident memory after each round", "MiB", [state.resident_mib for state in states])
    if taken := [after.cpu_s - before.cpu_s for before, after in pairwise(states)]:
        yield measurement(f"{title}: processor time of a round", "s", taken)


class RelayPlace(NamedTuple):
    """Where the members of a run meet. ``ca``, ``key_file``: files. ``host``: of the relay."""

    port: int
    ca: Path
    key_file: Path
    host: str = _HOST

    def connect(self, job: str = "rounds") -> OpenBus:
        """Return a bus over the relay, which passes nothing through shared memory."""
        links = LinkConfig(connect=(f"tls/{self.host}:{self.port}",), ca=self.ca)
        network = gradbus.NetworkConfig(links=links, shared_memory=False)
        return gradbus.connect(job, network=network, security=Security(level="psk", key_file=self.key_file))


class RelayState(NamedTuple):
    """A relay at the end of a round."""

    resident_mib: float
    cpu_s: float


async def control_rounds(place: RelayPlace, effort: RelayEffort, clients: int, relay: int) -> list[RelayState]:
    """Run rounds of a task that does nothing. Return what the relay, a process id, has taken after each."""
    rules = {"rounds": effort.rounds, "clients": {"num": clients, "min": clients}, "eval_every": 0}

    def note(_: gradbus.RoundReport) -> RelayState:
        return RelayState(resident_mib(relay), cpu_s(relay))

    return (await note_rounds(place.connect(), NoopTask(effort.dim), rules, note)).rounds


async def join_rounds(place: RelayPlace, dim: int, client_id: int) -> None:
    """Be a client of these rounds."""
    await take_part(place.connect(), NoopTask(dim), client_id)


@contextlib.contextmanager
def _through_relay(files: TlsFolder, port: int, receivers: int = 1) -> Iterator[Callable[[int], None]]:
    """Return a function that sends so many messages through a relay, and returns when all receivers have them."""
    import zenoh

    arrived = threading.Semaphore(0)
    content = bytes(MIB)
    with ExitStack() as opened:
        sender = open_session(files.link(port))
        opened.callback(sender.close)
        for _ in range(receivers):
            receiver = open_session(files.link(port))
            opened.callback(receiver.close)
            receiver.declare_subscriber(_KEY, lambda _: arrived.release())
        publisher: Any = sender.declare_publisher(_KEY, congestion_control=zenoh.CongestionControl.BLOCK)
        until_s = time.monotonic() + _TIMEOUT_S
        got = 0
        while got != receivers:  # until the relay knows all subscriptions
            if time.monotonic() > until_s:
                raise TimeoutError("no message passes the relay")
            publisher.put(content)
            got = 0
            while arrived.acquire(timeout=_SETTLE_S):
                got += 1

        def send(messages: int) -> None:
            for number in range(messages + AHEAD):
                if number < messages:
                    publisher.put(content)
                for _ in range(receivers if number >= AHEAD else 0):
                    if not arrived.acquire(timeout=_TIMEOUT_S):
                        raise TimeoutError("messages are missing")

        yield send


@contextlib.contextmanager
def _through_copier(files: TlsFolder) -> Iterator[tuple[int, Callable[[int], None]]]:
    """Return a process that copies from one TLS connection to another, and a function that sends through it."""
    with ExitStack() as opened:
        listening = opened.enter_context(socket.create_server((_HOST, 0)))
        listening.settimeout(_TIMEOUT_S)
        processes = opened.enter_context(Processes())
        pid = processes.start("copier", copy_streams, files, listening.getsockname()[1])
        ends = []
        for _ in range(2):
            accepted, _ = listening.accept()
            ends.append(files.context(ssl.PROTOCOL_TLS_SERVER).wrap_socket(accepted, server_side=True))
            opened.enter_context(ends[-1])
        source, sink = ends
        content, buffer = bytes(MIB), bytearray(MIB)

        def send(messages: int) -> None:
            def write() -> None:
                for _ in range(messages):
                    source.sendall(content)

            thread = threading.Thread(target=write)
            thread.start()
            left = messages * MIB
            while left:
                left -= sink.recv_into(buffer)
            thread.join(_TIMEOUT_S)

        yield pid, send


def copy_streams(files: TlsFolder, port: int) -> None:
    """Copy from one TLS connection to another until the first ends."""
    ends = []
    for _ in range(2):
        connected = socket.create_connection((_HOST, port), _TIMEOUT_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends.append(files.context(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(connected, server_hostname=_HOST))
    source, sink = ends
    buffer = memoryview(bytearray(256 << 10))
    filled = 0
    with source, sink, contextlib.suppress(ConnectionError, ssl.SSLError):
        while got := source.recv_into(buffer[filled:]):
            filled += got
            if filled == len(buffer) or not source.pending():
                sink.sendall(buffer[:filled])
                filled = 0


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "relay-memory": Part(measure_memory, "Memory of a relay", 30, 15),
        "relay-cpu": Part(measure_cpu, "Processor time of a relay", 60, 20),
        "relay-fan-out": Part(measure_fan_out, "A relay with one sender and many receivers", 30, 10),
        "relay-rounds": Part(measure_rounds, "A relay in federated rounds", 300, 40),
    },
    lambda parser: add_effort(parser, "fewer and smaller blocks"),
)

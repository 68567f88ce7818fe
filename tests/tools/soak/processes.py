"""The processes of a soak: a controller, clients and ranks, watched, and started again when they have ended.

Each runs a command of ``gradbus``, in a process that is forked from one which has loaded torch and nothing else: else a
dozen processes would spend the soak with loading it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from gradbus.commands.lab.namespaces import Host, enter_namespace
from gradbus.experiments.bench.relay import TlsFolder
from gradbus.runtime.security.job_key import new_job_key, write_secret_file

Transport = Literal["dds", "zenoh"]
DOMAIN = 24
LEASE_S = 1.0  # of those on a link that can be cut
_CALM_LEASE_S = 60.0
_LOOPBACK, _RELAY_PORT = "127.0.0.1", 7448
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ESTABLISHED = "01"  # in /proc/net/tcp
_JUST_S = 3.0  # several rounds, and less than the pause after a fault that ends them
_TAIL_BYTES = 64 << 10  # of the journal of rounds: one line, and many more
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["soak.task", "gradbus.commands.cli.main", "torch._dynamo"])


def _run(arguments: Sequence[str], log: str, namespace: str | None, faults: str) -> None:
    """What a forked process does: be that command."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    if namespace is not None:
        enter_namespace(namespace)
    for name in [name for name in os.environ if name.startswith("GRADBUS_BUS__")]:
        del os.environ[name]
    if faults:
        os.environ["GRADBUS_BUS__FAULTS"] = faults
    from gradbus.commands.cli.main import app

    app(list(arguments))


@dataclass(slots=True)
class SoakProcess:
    """One process of the soak, over all its starts.

    Attributes:
        name: controller, client-3, rank-1. arguments: of ``gradbus``. host: the namespace it lives in; None: this one.
        faults: what goes wrong with what it sends, from its next start on.
        down: it is not to run now.
        port: where it listens; None: nowhere.
    """

    name: str
    arguments: Sequence[str]
    log: Path
    host: Host | None = None
    faults: str = ""
    process: Any = None  # multiprocessing's
    down: bool = False
    port: int | None = None
    starts: int = 0

    def start(self) -> None:
        """A new process, if none runs."""
        if self.down or self.running:
            return
        namespace = None if self.host is None else self.host.name
        self.process = _context.Process(target=_run, args=(self.arguments, str(self.log), namespace, self.faults))
        self.process.start()
        self.starts += 1

    @property
    def running(self) -> bool:
        return self.process is not None and bool(self.process.is_alive())

    def send(self, number: signal.Signals) -> None:
        """A signal, if it runs."""
        if self.process is not None and self.running:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def end(self, timeout_s: float) -> None:
        """In order, or by force."""
        self.down = True
        if self.process is None:
            return
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        self.process.join(timeout_s)
        self.send(signal.SIGKILL)
        self.process.join(10.0)

    def sample(self) -> dict[str, Any] | None:
        """Memory, descriptors, threads and the names of their pools now."""
        if self.process is None or not self.running:
            return None
        folder = Path("/proc", str(self.process.pid))
        try:
            rss = int((folder / "statm").read_text().split()[1]) * _PAGE
            fds = len(os.listdir(folder / "fd"))
            threads = os.listdir(folder / "task")
            links = {} if self.port is None else {"links": links_of(folder, self.port)}
        except (OSError, IndexError):
            return None
        return {
            "event": "sample",
            "at_s": time.monotonic(),
            "process": self.name,
            "pid": self.process.pid,
            "rss_bytes": rss,
            "fds": fds,
            "threads": len(threads),
            "pools": pools_of(folder, threads),
            **links,
        }


def pools_of(folder: Path, threads: Sequence[str]) -> list[str]:
    """Return the names of the pools that threads of a process belong to. ``folder``: of the process in ``/proc``.

    A pool numbers its threads: ``rx-0`` and ``rx-1`` are of the pool ``rx``.
    """
    names = set()
    for thread in threads:
        with suppress(OSError):  # it has ended
            names.add((folder / "task" / thread / "comm").read_text(errors="replace").strip())
    return sorted({name.rstrip("0123456789").rstrip("-_") for name in names})


def links_of(folder: Path, port: int) -> int:
    """Return the number of connections that are open at a port. ``folder``: in ``/proc``, of who listens there."""
    lines = (folder / "net" / "tcp").read_text().splitlines()[1:]
    rows = (line.split() for line in lines)
    return sum(local.endswith(f":{port:04X}") and state == _ESTABLISHED for _, local, _, state, *_ in rows)


@dataclass(slots=True)
class SoakProcesses:
    """All of them, and where they leave what they did.

    Attributes:
        path: the folder of the soak: ``federated/``, ``parallel/``, logs, ``nemesis.jsonl``.
        spared: clients that nothing is done to, so that their memory can be watched.
        relay: what all of them dial; None: they are on DDS.
    """

    path: Path
    controller: SoakProcess
    clients: list[SoakProcess]
    ranks: list[SoakProcess]
    spared: int = 2
    relay: SoakProcess | None = None
    _resources: TextIO = field(init=False)

    def __post_init__(self) -> None:
        history = self.path / "federated" / "history"
        history.mkdir(parents=True, exist_ok=True)
        self._resources = (history / "resources.jsonl").open("a", encoding="utf-8")

    @property
    def all(self) -> list[SoakProcess]:
        relays = [self.relay] if self.relay is not None else []
        return [*relays, self.controller, *self.clients, *self.ranks]

    def keep_running(self) -> None:
        """Start what has ended. Ranks only together: a run of ranks is as one."""
        for member in self.all:
            if member not in self.ranks:
                member.start()
        if not any(rank.running for rank in self.ranks):
            for rank in self.ranks:
                rank.start()

    def is_calm(self) -> bool:
        """Return whether a round was just committed with all clients, and all ranks run: a fault now meets no other."""
        with (self.path / "federated" / "rounds.jsonl").open("rb") as file:
            age_s = time.time() - os.fstat(file.fileno()).st_mtime
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        is_complete = len(json.loads(whole)["clients"]) == len(self.clients)
        return age_s < _JUST_S and is_complete and all(rank.running for rank in self.ranks)

    def sample(self) -> None:
        """Note what each process takes."""
        for member in self.all:
            if (sample := member.sample()) is not None:
                self._resources.write(json.dumps(sample) + "\n")
        self._resources.flush()

    def end(self) -> None:
        """All processes: the clients after the controller, so that they hear of the end, and last the relay."""
        for member in (*self.ranks, self.controller, *self.clients):
            member.end(20.0)
        if self.relay is not None:
            self.relay.end(20.0)
        self._resources.close()


def make_processes(
    path: Path, *, clients: int, ranks: int, hosts: tuple[Host, Host] | None, transport: Transport = "dds"
) -> SoakProcesses:
    """Configurations, and members that have not started.

    Args:
        transport: on Zenoh everybody dials a relay, with TLS, which lives on the first host.
        hosts: two namespaces with a link that can be cut: the last quarter of the clients lives in the second one. What
            is federated is sealed, as it has to be where it leaves a machine.
    """
    job = f"soak-{os.getpid()}"
    federated, parallel = path / "federated", path / "parallel"
    task = {"task": "soak.task:PacedTask"}
    rules = {
        # A killed client's lease takes a second, as long as the others may wait for it: the grace has to end earlier.
        "rounds": 1_000_000, "codec": "sq8", "downlink_codec": "s4", "eval_every": 0, "history": {"payloads": True},
        "clients": {"num": clients, "min": 1, "start_timeout_s": 600.0, "start_grace_s": 15.0, "heartbeat_s": 0.3,
                    "dead_after_s": 1.5},
        "round": {"quorum": 0.5, "grace_s": 0.8, "timeout_s": 20.0, "max_attempts": 1000},
    }  # fmt: skip

    key_file = path / "job.key"
    if hosts is not None:
        write_secret_file(key_file, new_job_key().text)

    relay, link = _make_relay(path, hosts[0] if hosts else None) if transport == "zenoh" else (None, {})

    def bus(host: Host | None, name: str) -> dict[str, Any]:
        own: dict[str, Any] = {"job": f"{job}-{name}"}
        if relay is not None:
            own |= link
            if hosts is None:
                return {**own, "security": "none"}
            return {**own, "security": "psk", "key_file": str(key_file), "lease_s": LEASE_S}
        own["domain"] = DOMAIN
        if hosts is None or host is None:
            return {**own, "security": "none"}  # so that doubled and damaged messages come as far as the actors
        peers = [one.address for one in hosts]
        own |= {"security": "psk", "key_file": str(key_file)}
        return {**own, "network": "network", "interface": host.interface, "peers": peers, "lease_s": LEASE_S}

    def write(name: str, values: dict[str, Any]) -> str:
        file = path / f"{name}.json"
        file.write_text(json.dumps(values, indent=1), encoding="utf-8")
        return str(file)

    here, there = hosts or (None, None)
    quiet = ("--log-level", "warning", "--log-style", "json")
    config = write("controller", {"bus": bus(here, "f"), "task": task, "federated": rules})
    controller = SoakProcess(
        "controller",
        ("controller", config, "--run-dir", str(federated), "--no-live", *quiet),
        path / "controller.log",
        here,
    )
    members = []
    for number in range(clients):
        host = there if number >= clients - clients // 4 else here
        config = write(
            f"client-{number}",
            {
                "bus": bus(host, "f"),
                "task": task,
                "client": {"history": {"dir": str(federated / "history")}, "state_dir": str(path / "clients")},
            },
        )
        members.append(
            SoakProcess(
                f"client-{number}", ("client", config, "--id", str(number), *quiet), path / f"client-{number}.log", host
            )
        )
    ranks_bus: dict[str, Any] = {"job": f"{job}-p", "domain": DOMAIN + 1}
    if relay is not None:  # on the relay's host, where no link is cut: nothing but its death disturbs them
        ranks_bus = {**bus(here, "p"), "lease_s": _CALM_LEASE_S}
    config = write(
        "worker",
        {
            "bus": ranks_bus,
            "task": {"task": "soak.task:PacedShards", "threads": 1},
            "parallel": {
                "epochs": 100_000,
                "eval_every_epochs": 0,
                "hash_every": 1,
                "checkpoint": {"every_steps": 10},
                "timeouts": {"collective_s": 30.0},
            },
        },
    )
    workers = [
        SoakProcess(
            f"rank-{rank}",
            (
                "worker",
                config,
                "--rank",
                str(rank),
                "--world",
                str(ranks),
                "--run-dir",
                str(parallel),
                "--no-live",
                *quiet,
            ),
            path / f"rank-{rank}.log",
            here if relay is not None else None,
        )
        for rank in range(ranks)
    ]
    return SoakProcesses(path, controller, members, workers, relay=relay)


def _make_relay(path: Path, host: Host | None) -> tuple[SoakProcess, dict[str, Any]]:
    """Return a relay on a host, and the settings of a bus that dials it."""
    files = TlsFolder(path / "tls", host.address if host is not None else _LOOPBACK)
    endpoint = f"tls/{files.host}:{_RELAY_PORT}"
    options = ("--listen", endpoint, "--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    relay = SoakProcess("relay", ("relay", *options, "--log-style", "json"), path / "relay.log", host, port=_RELAY_PORT)
    return relay, {"connect": [endpoint], "tls_ca": str(files.ca)}

"""Real processes of a federated run, for tests: started here, ended by their ids.

They are forked from a server that has torch loaded and nothing else running (DDS starts only after the fork), because
loading torch takes seconds. In another network namespace, too: each enters it before it starts DDS.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import warm
from patience import PATIENT_S
from settings import nested

from gradbus.commands.history.invariants import InvariantResult, check
from gradbus.commands.history.reader import read_history

DIM = 200_000
# Where no death is tested: on a busy machine processes stand still for seconds, and are not taken for dead then.
NOBODY_DIES_S = PATIENT_S


@dataclass
class Node:
    """One process and the events it told of."""

    process: Any  # subprocess.Popen or multiprocessing.Process
    source: Iterable[dict[str, Any]]
    events: list[dict[str, Any]] = field(default_factory=list)
    incoming: queue.Queue[dict[str, Any] | None] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for event in self.source:
            self.incoming.put(event)
        self.incoming.put(None)

    def wait_for(self, name: str, timeout_s: float = 30.0, **match: Any) -> dict[str, Any]:
        """The next event of this name and these values; fails when the process ends or the time is over."""
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                event = self.incoming.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no event {name} {match} within {timeout_s} s; seen: {self.events}") from None
            if event is None:
                raise AssertionError(f"the process ended without event {name} {match}; seen: {self.events}")
            self.events.append(event)
            if event["event"] == name and all(event.get(key) == value for key, value in match.items()):
                return event

    def wait(self, timeout_s: float = 30.0) -> int:
        """The exit code, negative for a signal; all events are read by then."""
        if isinstance(self.process, subprocess.Popen):
            code = self.process.wait(timeout_s)
        else:
            self.process.join(timeout_s)
            assert self.process.exitcode is not None, f"still running after {timeout_s} s; seen: {self.events}"
            code = self.process.exitcode
        while (event := self.incoming.get(timeout=5.0)) is not None:
            self.events.append(event)
        self.incoming.put(None)
        return int(code)

    @property
    def is_running(self) -> bool:
        """Whether its process is running."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll() is None
        return bool(self.process.is_alive())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process."""
        os.kill(self.process.pid, number)

    def all(self, name: str) -> list[dict[str, Any]]:
        """Events of this name that were read so far."""
        return [event for event in self.events if event["event"] == name]

    def end(self) -> None:
        """Kill it if it runs, and give back what it held."""
        if isinstance(self.process, subprocess.Popen):
            if self.is_running:
                self.process.kill()
            self.process.wait(10.0)
            assert self.process.stdout is not None
            self.process.stdout.close()
        else:
            if self.is_running:
                self.process.kill()
            self.process.join(10.0)
            self.process.close()


def named_by(pids: Iterable[int]) -> list[str]:
    """What processes have in ``/dev/shm`` that gradbus or torch could have made: other programs of this machine come
    and go."""
    ours = tuple(f"torch_{pid}_" for pid in pids)
    return [name for name in os.listdir("/dev/shm") if "gradbus" in name or name.startswith(ours)]


class Federation(AbstractContextManager["Federation"]):
    """Starts controllers and clients of one job, and ends those that are left. What they have noted must then hold.

    Attributes:
        history: where they note it. may_break: invariants that this test breaks on purpose.
    """

    def __init__(self, *, domain: int, silence_s: float = 1.0, **common: Any) -> None:
        """``silence_s``: who says nothing for so long is taken for dead, by DDS and by the controller. With
        ``NOBODY_DIES_S`` there is no haste either in asking for what is on its way, nor in ending. ``common``: of all
        nodes; ``is_remote``: each counts as a process of another machine."""
        self._common = {
            "job": f"test-{os.getpid()}-{time.monotonic_ns()}", "domain": domain, "dim": DIM,
            "patient": silence_s >= NOBODY_DIES_S, **common,
        }  # fmt: skip
        self.job = str(self._common["job"])
        self._silence_s = silence_s
        self._nodes: list[Node] = []
        self._controllers: dict[str, list[Node]] = {}  # by job
        self._folder = tempfile.TemporaryDirectory(prefix="gradbus-history-")
        self.history = Path(self._folder.name)
        self.may_break: set[str] = set()

    def _start(self, prefix: tuple[str, ...], spec: dict[str, Any]) -> Node:
        spec = {**self._common, **spec}
        shared = self._common.get("network", {})
        spec["network"] = {"lease_s": self._silence_s, **shared, **spec.get("network", {})}
        if prefix[:3] == ("ip", "netns", "exec"):  # a fork may enter it as well, and has torch loaded
            prefix, spec = (), {**spec, "namespace": prefix[3]}
        node = Node(*(_spawn(prefix, spec) if prefix else _fork(spec)))
        self._nodes.append(node)
        return node

    def controller(self, *, prefix: tuple[str, ...] = (), **federated: Any) -> Node:
        """A controller; the settings are those of FederatedConfig, and ``fail_at``, ``faults``, ``network``,
        ``security``, ``refuse_memory``: it cannot open that of others; ``max_file_bytes``: no file grows beyond
        ``bytes`` after ``round``; ``jump``: the clock jumps by ``seconds`` after ``round``; ``duplicate_after_s``: so
        long is waited whether a client's id is in use already; ``upstream``: it is a site, with the settings of
        UpstreamConfig and ``job``, ``domain``, ``network`` of the level above; ``job``, ``domain``: of its own."""
        fail_at = federated.pop("fail_at", None)
        own = (
            "network", "faults", "clock_offset_s", "refuse_memory", "max_file_bytes", "jump", "security",
            "duplicate_after_s", "upstream", "job", "domain",
        )  # fmt: skip
        elsewhere = {name: federated.pop(name) for name in own if name in federated}
        rules = {
            "eval_every": 0, "clients__heartbeat_s": 0.2, "clients__dead_after_s": self._silence_s,
            "round__timeout_s": 30.0, "history__dir": str(self.history), **federated,
        }  # fmt: skip
        job = elsewhere.get("job", self.job)
        before = self._controllers.setdefault(job, [])
        is_lone = not any(node.is_running for node in before)  # then it need not look for another one
        spec = {"role": "controller", "federated": nested(rules), "fail_at": fail_at, "is_lone": is_lone, **elsewhere}
        before.append(self._start(prefix, spec))
        return before[-1]

    def client(self, client_id: int | None = None, *, prefix: tuple[str, ...] = (), **spec: Any) -> Node:
        """A client, with an id, a ``name``, or both. ``prefix``: a command that starts it elsewhere. ``hold``: {round:
        path}: in that round it trains until the path exists, or until it is called off. ``die_after_offer``: when it
        has offered an update. ``refuse_memory``, ``fail_at``, ``faults``: as of the controller. ``read_delay_s``:
        models in memory are read so much later. ``train_s``: how long training takes, ``gil_s``: and how long it holds
        the interpreter then. ``packets``: its update comes in so many. ``jump``: the clock jumps by ``seconds`` in
        ``round``."""
        spec["client"] = {"history": {"dir": str(self.history)}, **spec.get("client", {})}
        return self._start(prefix, {"role": "client", "client_id": client_id, **spec})

    def findings(self) -> dict[str, InvariantResult]:
        """What the checker of histories says so far, by invariant."""
        return {finding.name: finding for finding in check(read_history(self.history))}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._folder:
            for node in self._nodes:
                node.end()
            if error is None and any(self.history.glob("controller.jsonl")):
                findings = self.findings()
                broken = {name: found.violations for name, found in findings.items() if found.violations}
                assert broken.keys() <= self.may_break, broken


def _fork(spec: dict[str, Any]) -> tuple[Any, Iterable[dict[str, Any]]]:
    import federation_node

    process, _, events = warm.fork_that_tells(federation_node.run_forked, spec)
    return process, events


def _spawn(prefix: tuple[str, ...], spec: dict[str, Any]) -> tuple[Any, Iterable[dict[str, Any]]]:
    script = Path(__file__).with_name("federation_node.py")
    process = subprocess.Popen(
        [*prefix, sys.executable, str(script), json.dumps(spec)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, (json.loads(line) for line in process.stdout if line.startswith("{"))


def finish(controller: Node, *clients: Node) -> list[dict[str, Any]]:
    """The reports of a run, when all of it has ended well."""
    done = controller.wait_for("done", timeout_s=60.0)
    assert controller.wait() == 0
    assert [client.wait() for client in clients] == [0] * len(clients)
    reports: list[dict[str, Any]] = done["reports"]
    return reports

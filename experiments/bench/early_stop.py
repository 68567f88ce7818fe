"""How soon all clients have ended, with exit code 0, after a run that ends before its last round.

Controller and clients are the commands of ``gradbus``, each a process of its own. The time is from the commit of the
last model, as the controller's journal has it, to the end of the last client's process: its evaluation, the decision,
the message, and the end of each process are in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gradbus.experiments.bench.processes import ProcessFailed
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.runtime.json_text import parse_json

CLIENTS, MOST_S = 4, 2.0
_RUN_S = 300.0


def _files(folder: Path, clients: int) -> None:
    """Configurations of a run that no evaluation improves on, so that it ends with the second one."""
    bus = {"job": f"bench-early-stop-{os.getpid()}"}
    task = {"model": "gradbus.models:mnist_mlp", "data": "glyphs", "threads": 1}
    rules = {
        "rounds": 50, "clients": {"num": clients, "min": clients}, "training": {"subset_size": 64},
        "early_stop": {"patience": 1, "min_delta": 1e9},
    }  # fmt: skip
    (folder / "controller.json").write_text(json.dumps({"bus": bus, "task": task, "federated": rules}))
    (folder / "client.json").write_text(json.dumps({"bus": bus, "task": task}))


def _command(folder: Path, *words: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "gradbus", *map(str, words)]
    with (folder / f"{'-'.join(map(str, words[::3]))}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def _ended_at_s(process: subprocess.Popen[bytes]) -> float:
    process.wait(_RUN_S)
    return time.time()


def ends_s(folder: Path, clients: int = CLIENTS) -> Sequence[float]:
    """Seconds from the last commit of one run to the end of each client.

    Raises:
        ProcessFailed: a process has not ended with exit code 0.
    """
    _files(folder, clients)
    controller = _command(folder, "controller", "controller.json", "--no-live", "--run-dir", "run")
    running = [_command(folder, "client", "client.json", "--id", number) for number in range(clients)]
    try:
        with ThreadPoolExecutor(clients) as waiting:
            ended = list(waiting.map(_ended_at_s, running))
        controller.wait(_RUN_S)
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"a client has not ended after {_RUN_S:g} s: {_logs(folder)}") from None
    finally:
        for process in (controller, *running):
            process.kill()
    codes = [process.returncode for process in (controller, *running)]
    if any(codes):
        raise ProcessFailed(f"exit codes of the controller and its clients: {codes}: {_logs(folder)}")
    journal = (folder / "run" / "history" / "controller.jsonl").read_text(encoding="utf-8").splitlines()
    committed = [one["time"] for one in map(parse_json, journal) if one["event"] == "committed"]
    return [one - committed[-1] for one in ended]


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-500:] for path in sorted(folder.glob("*.log")))


def measure(launches: int = 3) -> Iterator[Measurement]:
    """The last client's end. A sample is a run."""
    found = []
    for _ in range(launches):
        with tempfile.TemporaryDirectory(prefix="gradbus-bench-") as folder:
            found.append(max(ends_s(Path(folder))))
    yield measurement(
        f"early stop, from the last model to the end of the last of {CLIENTS} clients",
        "s",
        found,
        at_most=MOST_S,
        note="all processes end with exit code 0",
    )

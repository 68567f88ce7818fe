"""Virtual clients: memory with ten thousand of them, and trainings for each second beside Flower's simulation.

Both train the same clients on MNIST: the same network, samples, order, steps and number of training processes, with one
thread of torch each. Each run is a process of its own, by turns, and gives the median of its rounds after the first. A
round of Flower's goes from the choice of its clients to the new model, as here. It runs in the environment that
``make setup-flower FLOWER=simulation`` makes, or another one that has ``flwr[simulation]`` and gradbus, whose Python
``--flower`` names; without one it is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.timing import by_turns
from gradbus.runtime.json_text import parse_json

MOST_BYTES = 4e9  # of 10,000 clients
TIMES_FLOWER = 3.0
PROCESSES = 2
_RUN_S = 300.0
_MANY = {"clients": 10_000, "share": 0.01, "rounds": 5}
_CASES: tuple[dict[str, Any], ...] = (
    {"clients": 1000, "share": 0.1, "rounds": 5},
    {"clients": 1000, "share": 1.0, "rounds": 3},
)
_LAUNCHES = 3
FLOWER = Path(".venv-flower-simulation/bin/python")
_FLOWER = "gradbus.experiments.bench.flower_simulation"


class SimulatedRounds(NamedTuple):
    """Holds what one run has come to. ``seconds``: of each round. ``memory_bytes``: most of all its processes."""

    seconds: list[float]
    memory_bytes: float = 0.0

    def rate(self, asked: int) -> float:
        """Trainings for each second, in the median of the rounds after the first."""
        return asked / statistics.median(self.seconds[1:])


def memory_of(root: int) -> int:
    """Bytes of a process and its descendants: of what several share, each has its part (PSS)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="latin-1")
            except OSError:
                continue  # it has ended just now
            parents[int(entry.name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
    found, total = [root], 0
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def run_here(spec: Mapping[str, Any]) -> None:
    """A run with virtual clients, in this process. Prints a :class:`SimulatedRounds` as JSON."""
    import gradbus
    from gradbus.experiments.bench.flower_simulation import task_of

    seconds, memory = [], []

    def done(report: gradbus.RoundReport) -> None:
        seconds.append(report.seconds)
        memory.append(memory_of(os.getpid()))

    gradbus.simulate(
        task_of(spec["clients"], spec["batch_size"]),
        spec["clients"],
        fraction=spec["share"],
        config=gradbus.FederatedConfig(rounds=spec["rounds"], eval_every=0, training={"lr": spec["lr"]}),
        options=gradbus.SimulationOptions(processes=spec["processes"]),
        on_report=done,
    )
    sys.stdout.write("\n" + json.dumps({"seconds": seconds, "memory_bytes": max(memory)}) + "\n")


def launch(python: str, module: str, function: str, case: Mapping[str, Any]) -> SimulatedRounds:
    """One run in a process of its own. Raises ChildProcessError: it has failed; the text has the end of its output."""
    spec = json.dumps({**case, "processes": PROCESSES, "batch_size": 32, "lr": 0.05})
    program = f"import sys, json; from {module} import {function} as run; run(json.loads(sys.argv[1]))"
    with tempfile.TemporaryDirectory(prefix="gradbus-bench-") as folder:  # nothing of the checkout is in its way
        done = subprocess.run(
            [python, "-c", program, spec], capture_output=True, text=True, timeout=_RUN_S, cwd=folder, check=False
        )
    if done.returncode:
        raise ChildProcessError(f"{module} ended with {done.returncode}: {done.stderr[-2000:]}")
    found = parse_json(done.stdout.rstrip().splitlines()[-1])
    return SimulatedRounds(found["seconds"], found.get("memory_bytes", 0.0))


def measure(flower: str) -> Iterator[Measurement]:
    """``flower``: the Python of its environment; empty: there is none."""
    ours = partial(launch, sys.executable, __name__, "run_here")
    many = ours(_MANY)
    what = f"{_MANY['clients']:,} clients, {_MANY['share']:.0%} in a round"
    yield measurement(
        f"memory of all processes, {what}",
        "GB",
        [many.memory_bytes / 1e9],
        at_most=MOST_BYTES / 1e9,
        note=f"PSS, {PROCESSES} training processes",
    )
    for case in _CASES:
        asked = round(case["share"] * case["clients"])
        ways = {"ours": partial(ours, case)}
        if flower:
            program = Path(shutil.which(flower) or flower).absolute()  # runs are in a folder of their own
            ways["flower"] = partial(launch, str(program), _FLOWER, "main", case)
        taken = {name: [run.rate(asked) for run in runs] for name, runs in by_turns(ways, _LAUNCHES).items()}
        name = f"trainings, {asked:,} of {case['clients']:,} clients in a round"
        if flower:
            against = ("Flower's simulation", taken["flower"])
            yield measurement(name, "1/s", taken["ours"], against=against, at_least=TIMES_FLOWER)
        else:
            yield measurement(name, "1/s", taken["ours"], note="Flower skipped: make setup-flower FLOWER=simulation")

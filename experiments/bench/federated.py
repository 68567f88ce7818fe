"""What a federated round costs beside training, by payload and number of clients, and the accuracy that codecs reach.

In the suite the reference is bare TCP: the model to each client and an update from each, one after the other, over one
connection. TCP carries every byte, so it compares with the way between machines ("DDS only"); that within one host,
through shared memory, stands beside it.

``make bench-federated`` or ``python -m gradbus.experiments.bench.federated`` compares with limits; the exit code is 1
if a figure falls short. MNIST as ``GRADBUS_DATA`` says. About 25 minutes on 2 cores. ``--dds-only`` measures overhead,
durable and memory with no memory shared between the processes, as between machines.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gradbus.experiments.bench import codecs, limits, sealing
from gradbus.experiments.bench.limits import Part, Row, Taken, at_least, at_most, shown
from gradbus.experiments.bench.results import Effort, Measurement, measurement
from gradbus.experiments.bench.rounds import WAYS, run_rounds
from gradbus.experiments.bench.tcp import Echo

_MODEL_1_MB, MODEL_4_8_MB, MODEL_100_MB = 250_000, 1_199_882, 25_000_000  # parameters, of 4 bytes each
_DEMO = ["--rounds", "10", "--clients", "2", "--samples", "6000", "--data", "mnist", "--no-live"]


@dataclass(frozen=True, slots=True)
class Case:
    """``dim``: parameters. ``ways``: some of the WAYS."""

    dim: int
    clients: int
    rounds: int
    ways: tuple[str, ...] = tuple(WAYS)

    @property
    def name(self) -> str:
        return f"{4 * self.dim / 1e6:.3g} MB, {self.clients} clients"


PLANS: dict[Effort, tuple[int, Sequence[Case]]] = {  # launches, cases
    "tiny": (1, [Case(1000, 2, 5)]),
    "quick": (3, [Case(_MODEL_1_MB, 8, 12), Case(MODEL_4_8_MB, 2, 16)]),
    "full": (
        3,
        [Case(dim, clients, rounds) for dim, many in ((_MODEL_1_MB, 40), (MODEL_4_8_MB, 30))
         for clients, rounds in ((2, many), (8, many // 2), (32, many // 4))]
        # 32 clients over DDS alone would take as long as all others together.
        + [Case(MODEL_100_MB, 2, 5), Case(MODEL_100_MB, 8, 4), Case(MODEL_100_MB, 32, 4, ("one host",))],
    ),
}  # fmt: skip


def measure(effort: Effort) -> list[Measurement]:
    """Each case both ways, by turns, in each launch."""
    launches, cases = PLANS[effort]
    turns = [(case, way) for case in cases for way in case.ways]
    taken: dict[tuple[Case, str], list[tuple[float, float, float]]] = {turn: [] for turn in turns}
    with Echo() as echo:
        for number in range(launches):
            for case, way in turns[::-1] if number % 2 else turns:
                taken[case, way].append(launch(case, way, echo))
    figures = []
    for (case, way), values in taken.items():
        overhead, cpu, bare = ([1e3 * one for one in column] for column in zip(*values, strict=True))
        name, note = f"{case.name}, {way}", f"median of {case.rounds} rounds in each launch"
        figures += [
            measurement(f"round overhead, {name}", "ms", overhead, against=("TCP", bare), note=note),
            measurement(f"processor time of a round, {name}", "ms", cpu, note="all processes"),
        ]
    return figures


def launch(case: Case, way: str, echo: Echo) -> tuple[float, float, float]:
    """Seconds of overhead of a round, of processor time, and of bare TCP before and after. ``way``: one of the WAYS."""
    size = 4 * case.dim
    trips = [echo.round_trip_s(size) for _ in range(4)][1:]
    found = run_rounds(
        case.dim, clients=case.clients, rounds=case.rounds, timeout_s=400.0, dead_after_s=20.0, shared_memory=WAYS[way]
    )
    trips += [echo.round_trip_s(size) for _ in range(3)]
    cpu_s = found.controller_cpu_s + found.clients_cpu_s
    return statistics.median(found.overheads_s), cpu_s, case.clients * statistics.median(trips)


# Beside limits


def overhead_rows(repeats: int = 3, *, shared_memory: bool = True) -> Taken:
    """Round overhead with 4.8 MB and 100 MB, and how late the event loops are with 100 MB."""
    way = "" if shared_memory else ", DDS only"
    run = partial(run_rounds, clients=2, shared_memory=shared_memory)
    small = [run(MODEL_4_8_MB, rounds=40) for _ in range(repeats)]
    large = [run(MODEL_100_MB, rounds=6, gaps=True) for _ in range(repeats)]
    samples = {
        "overhead_4_8_mb_s": [one for found in small for one in found.overheads_s],
        "cpu_s": [found.controller_cpu_s + found.clients_cpu_s for found in small],
        "overhead_100_mb_s": [one for found in large for one in found.overheads_s],
        "gap_p99_s": [found.gap_p99_s for found in large],
        "start_s": [found.start_s for found in small],
    }
    asked = (
        ("round overhead, 4.8 MB fp32, 2 client processes", 60, "ms"),
        ("processor time of a round, all processes", 90, "ms"),
        ("round overhead, 100 MB", 1.5, "s"),
        ("event loop late, p99, worst process, 100 MB", 20, "ms"),
        ("start to the first command", 1.5, "s"),
    )
    rows = []
    for (name, limit, unit), values in zip(asked, samples.values(), strict=True):
        measured = statistics.median(values) * (1e3 if unit == "ms" else 1.0)
        note = f"{len(values)} samples, {1e3 * min(values):.4g} .. {1e3 * max(values):.4g} ms"
        rows.append(at_most(name + way, measured, limit, unit, note))
    return rows, {f"{name}{way}": values for name, values in samples.items()}


def durable_rows(*, shared_memory: bool = True) -> Taken:
    """Round overhead with a durable checkpoint in every round."""
    rows: list[Row] = []
    samples: dict[str, Any] = {}
    for name, dim, rounds in (("4.8 MB", MODEL_4_8_MB, 30), ("100 MB", MODEL_100_MB, 6)):
        with tempfile.TemporaryDirectory() as directory:
            found = run_rounds(dim, clients=2, rounds=rounds, state_dir=directory, shared_memory=shared_memory)
        name += "" if shared_memory else ", DDS only"
        samples[f"durable_{name}"] = taken = found.overheads_s
        rows.append(shown(f"round overhead with a checkpoint (fsync), {name}", 1e3 * statistics.median(taken), "ms"))
    return rows, samples


def memory_rows(counts: Sequence[int] = (2, 8, 32), *, shared_memory: bool = True) -> Taken:
    """Peak memory of the controller above its idle memory, in models of 100 MB.

    Of what lies in shared memory, the update that it reads is part of that. Its model, which the clients read, is not:
    the controller does not look at it. There is one of it on the machine, in place of one in each client.
    """
    rows: list[Row] = []
    samples: dict[str, Any] = {}
    size = 4.0 * MODEL_100_MB
    for count in counts:
        found = run_rounds(
            MODEL_100_MB, clients=count, rounds=3, timeout_s=580.0, round_timeout_s=300.0, dead_after_s=20.0,
            shared_memory=shared_memory,
        ).controller  # fmt: skip
        samples[f"memory_{count}"] = {key: found[key] for key in ("empty_bytes", "idle_bytes", "peak_bytes")}
        note = f"{(found['peak_bytes'] - found['empty_bytes']) / size:.2f} above the process before it had a model"
        name = f"controller's peak above idle, 100 MB, {count} clients" + ("" if shared_memory else ", DDS only")
        rows.append(at_most(name, (found["peak_bytes"] - found["idle_bytes"]) / size, 4, "models", note))
    return rows, samples


def accuracy(codec: str, downlink: str, partition: str, seed: int, *, timeout_s: float = 600.0) -> float:
    """Test accuracy in percent after one run of ``gradbus demo`` on MNIST."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "gradbus", "demo", *_DEMO, "--run-dir", str(run_dir)]
        command += ["--codec", codec, "--downlink-codec", downlink, "--partition", partition, "--seed", str(seed)]
        command += ["--set", "federated.eval_every=10"]  # after the last round: evaluation takes as long as a round
        subprocess.run(command, check=True, timeout=timeout_s, stdout=subprocess.DEVNULL, env=os.environ)
        reports = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    return 100.0 * float(reports[-1]["accuracy"])


def accuracy_rows(seeds: int = 3) -> Taken:
    """All codecs against fp32, uplink alone and both directions; and fp32 on unequal shares."""
    taken: dict[str, list[float]] = {}
    reference, *directions = [("fp32", "fp32")] + [(up, down) for up in ("q8", "s4", "sq8") for down in ("fp32", up)]
    for seed in range(seeds):
        for up, down in (reference, *directions):
            taken.setdefault(f"{up} up, {down} down", []).append(accuracy(up, down, "iid", seed))
        taken.setdefault("dirichlet", []).append(accuracy("fp32", "fp32", '{"kind":"dirichlet","alpha":0.5}', seed))
    means = {name: statistics.mean(values) for name, values in taken.items()}
    notes = {
        name: f"mean of {len(values)} seeds: " + " ".join(f"{value:.2f}" for value in values)
        for name, values in taken.items()
    }
    fp32 = "fp32 up, fp32 down"
    rows = [at_least("MNIST, 2 clients IID, fp32", means[fp32], 98.0, "%", notes[fp32])]
    for up, down in directions:
        key = f"{up} up, {down} down"
        name = f"points below fp32: {up} up" + (f", {down} down" if down != "fp32" else "")
        rows.append(at_most(name, means[fp32] - means[key], 0.3, "points", notes[key]))
    rows.append(at_least("MNIST, Dirichlet 0.5, fp32", means["dirichlet"], 97.4, "%", notes["dirichlet"]))
    return rows, {"accuracy": taken}


def _codecs() -> Taken:
    return [row for row in codecs.rows() if row.asked], {}


PARTS: dict[str, Part] = {
    "codecs": Part(_codecs, "bytes and speed of each: 10 s"),
    "overhead": Part(overhead_rows, "time of a round beside training: 2 min"),
    "durable": Part(durable_rows, "the same with a checkpoint in every round: 20 s"),
    "memory": Part(memory_rows, "of the controller, 2 to 32 clients: 2 min"),
    "sealing": Part(partial(sealing.part_rows, sealing.PARTS["round"], 3), "with a key and without: 20 s"),
    "accuracy": Part(accuracy_rows, "24 runs of 10 rounds on MNIST: 20 min", needs_mnist=True),
}


def parts(*, shared_memory: bool) -> dict[str, Part]:
    """All parts; without shared memory those that depend on it measure as between machines."""
    if shared_memory:
        return PARTS
    over_dds = {"overhead": overhead_rows, "durable": durable_rows, "memory": memory_rows}
    return PARTS | {
        name: PARTS[name]._replace(measure=partial(measure, shared_memory=False)) for name, measure in over_dds.items()
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure the parts that are asked for, all by default, and compare them with the limits."""
    parser = limits.parser_of(__doc__, "runs/bench-federated.json", PARTS)
    parser.add_argument("--dds-only", action="store_true", help="everything over DDS, as between machines")
    chosen = parser.parse_args(arguments)
    title = "Federated runs: asked and measured"
    return limits.main(title, chosen.part, parts(shared_memory=not chosen.dds_only), chosen.out)


if __name__ == "__main__":
    raise SystemExit(main())

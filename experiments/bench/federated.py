"""What a federated round costs beside training, by payload and number of clients, and the accuracy that codecs reach.

In the suite the reference is bare TCP: the model to each client and an update from each, one after the other, over one
connection. TCP carries every byte, so it compares with the way between machines ("DDS only"); that within one host,
through shared memory, stands beside it.

``make bench PART=federated`` compares with limits. MNIST as ``GRADBUS_DATA`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gradbus.experiments.bench import (
    asynchronous,
    codecs,
    drift,
    early_stop,
    personal,
    sealing,
    secure,
    selection,
    virtual,
)
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.rounds import WAYS, run_rounds
from gradbus.experiments.bench.tcp import Echo
from gradbus.experiments.bench.timing import by_turns

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


PLANS: dict[str, tuple[int, Sequence[Case]]] = {  # launches, cases
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


def measure(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Each case both ways, by turns, in each launch."""
    launches, cases = PLANS[chosen.effort]
    with Echo() as echo:
        named = {f"{case.name}, {way}": (case, way) for case in cases for way in case.ways}
        taken = by_turns({name: partial(launch, case, way, echo) for name, (case, way) in named.items()}, launches)
    for name, values in taken.items():
        overhead, cpu, bare = ([1e3 * one for one in column] for column in zip(*values, strict=True))
        note = f"median of {named[name][0].rounds} rounds in each launch"
        yield measurement(f"round overhead, {name}", "ms", overhead, against=("TCP", bare), note=note)
        yield measurement(f"processor time of a round, {name}", "ms", cpu, note="all processes")


def launch(case: Case, way: str, echo: Echo) -> tuple[float, float, float]:
    """Seconds of overhead of a round, of processor time, and of bare TCP before and after. ``way``: one of the WAYS."""
    size = 4 * case.dim
    trips = [echo.round_trip_s(size) for _ in range(4)][1:]
    found = run_rounds(case.dim, clients=case.clients, rounds=case.rounds, timeout_s=400.0, shared_memory=WAYS[way])
    trips += [echo.round_trip_s(size) for _ in range(3)]
    return statistics.median(found.overheads_s), found.cpu_s, case.clients * statistics.median(trips)


# Beside limits


def measure_overhead(way: str, repeats: int = 3) -> Iterator[Measurement]:
    """Round overhead with 4.8 MB and 100 MB, and how late the event loops are with 100 MB."""
    run = partial(run_rounds, clients=2, shared_memory=WAYS[way])
    small = [run(MODEL_4_8_MB, rounds=40) for _ in range(repeats)]
    large = [run(MODEL_100_MB, rounds=6, gaps=True) for _ in range(repeats)]
    most_ms, most_s = (25, 0.5) if WAYS[way] else (38, 0.75)
    for name, seconds, limit, unit in (
        ("round overhead, 4.8 MB fp32, 2 client processes", [s for it in small for s in it.overheads_s], most_ms, "ms"),
        ("processor time of a round, all processes", [it.cpu_s for it in small], 90, "ms"),
        ("round overhead, 100 MB", [s for it in large for s in it.overheads_s], most_s, "s"),
        ("event loop late, p99, worst process, 100 MB", [it.gap_p99_s for it in large], 20, "ms"),
        ("start to the first command", [it.start_s for it in small], 1.5, "s"),
    ):
        samples = [1e3 * one for one in seconds] if unit == "ms" else seconds
        yield measurement(f"{name}, {way}", unit, samples, at_most=limit)


def measure_durable(way: str) -> Iterator[Measurement]:
    """Round overhead with a durable checkpoint in every round."""
    for name, dim, rounds in (("4.8 MB", MODEL_4_8_MB, 30), ("100 MB", MODEL_100_MB, 6)):
        with tempfile.TemporaryDirectory() as directory:
            found = run_rounds(dim, clients=2, rounds=rounds, checkpoint={"dir": directory}, shared_memory=WAYS[way])
        ms = [1e3 * one for one in found.overheads_s]
        yield measurement(f"round overhead with a checkpoint (fsync), {name}, {way}", "ms", ms)


def measure_memory(way: str, counts: Sequence[int] = (2, 8, 32)) -> Iterator[Measurement]:
    """Peak memory of the controller above its idle memory, in models of 100 MB.

    Of what lies in shared memory, the update that it reads is part of that. Its model, which the clients read, is not:
    the controller does not look at it. There is one of it on the machine, in place of one in each client.
    """
    size = 4.0 * MODEL_100_MB
    for count in counts:
        found = run_rounds(
            MODEL_100_MB,
            clients=count,
            rounds=3,
            timeout_s=580.0,
            round={"timeout_s": 300.0},
            shared_memory=WAYS[way],
        ).controller
        note = f"{(found['peak_bytes'] - found['empty_bytes']) / size:.2f} above the process before it had a model"
        models = (found["peak_bytes"] - found["idle_bytes"]) / size
        name = f"controller's peak above idle, 100 MB, {count} clients, {way}"
        yield measurement(name, "models", [models], at_most=4, note=note)


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


def measure_accuracy(seeds: int = 3) -> Iterator[Measurement]:
    """All codecs against fp32, uplink alone and both directions; and fp32 on unequal shares. A sample is a seed."""
    fp32 = [accuracy("fp32", "fp32", "iid", seed) for seed in range(seeds)]
    yield measurement("MNIST, 2 clients IID, fp32", "%", fp32, at_least=98.0)
    for up in ("q8", "s4", "sq8"):
        for down in ("fp32", up):
            name = f"points below fp32: {up} up" + (f", {down} down" if down != "fp32" else "")
            found = [accuracy(up, down, "iid", seed) for seed in range(seeds)]
            note = f"accuracy: {' '.join(f'{one:.2f}' for one in found)} %"
            below = [statistics.mean(fp32) - statistics.mean(found)]
            yield measurement(name, "points", below, at_most=0.3, note=note)
    unequal = [accuracy("fp32", "fp32", '{"kind":"dirichlet","alpha":0.5}', seed) for seed in range(seeds)]
    yield measurement("MNIST, Dirichlet 0.5, fp32", "%", unequal, at_least=97.4)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dds-only",
        dest="way",
        action="store_const",
        const="DDS only",
        default="one host",
        help="everything over DDS, as between machines",
    )
    parser.add_argument(
        "--clients", type=int, default=selection.CLIENTS, help="of part selection, each a process; one of 20 takes part"
    )
    parser.add_argument(
        "--flower",
        metavar="PYTHON",
        default=str(virtual.FLOWER) if virtual.FLOWER.exists() else "",
        help="of part virtual: one with flwr[simulation] and gradbus, by default that of make setup-flower "
        "FLOWER=simulation",
    )


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "codecs": Part(lambda _: codecs.measure_rates(), "bytes and speed of each", 10),
        "overhead": Part(lambda chosen: measure_overhead(chosen.way), "time of a round beside training", 120),
        "durable": Part(lambda chosen: measure_durable(chosen.way), "the same with a checkpoint in every round", 20),
        "memory": Part(lambda chosen: measure_memory(chosen.way), "of the controller, 2 to 32 clients", 120),
        "sealing": Part(lambda _: sealing.measure(sealing.CASES["round"], 3), "with a key and without", 20),
        "secure": Part(lambda _: secure.measure(), "with secure aggregation and without", 120),
        "secure-accuracy": Part(
            lambda _: secure.measure_accuracy(), "q8 and sq8 masked, beside plain ones", 360, needs_mnist=True
        ),
        "accuracy": Part(lambda _: measure_accuracy(), "24 runs of 10 rounds on MNIST", 1200, needs_mnist=True),
        "asynchronous": Part(
            lambda _: asynchronous.measure(), "time to 97 % beside a slow client", 420, needs_mnist=True
        ),
        "selection": Part(
            lambda chosen: selection.measure(chosen.clients), "bytes of a round with a part of the clients", 60
        ),
        "personal": Part(lambda _: personal.measure(), "adapters alone, beside the whole model; personal models", 90),
        "virtual": Part(
            lambda chosen: virtual.measure(chosen.flower), "many clients in a few processes", 300, needs_mnist=True
        ),
        "early-stop": Part(lambda _: early_stop.measure(), "all clients end with a run that ends early", 40),
        "drift": Part(
            drift.measure, "rounds to an accuracy on very unequal shares, by strategy", 2700, needs_mnist=True
        ),
        "drift-tuning": Part(drift.measure_tuning, "what mu of FedProx was chosen by", 900, needs_mnist=True),
    },
    _options,
)

"""What a federated round costs beside the training: time, processor time, memory, and how long the loop stands still.

Training returns at once, so that the period from command to command, less the slowest client's training, is overhead.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from gradbus.experiments.bench_children import Processes
from gradbus.experiments.bench_process import WARM_UP_ROUNDS, run_clients, run_controller
from gradbus.experiments.bench_rows import Row, at_most, shown

_DOMAIN = 20
MODEL_4_8_MB = 1_199_882
MODEL_100_MB = 25_000_000
WAYS = {"one host": True, "DDS only": False}  # shared_memory, of all processes: by itself, and as between machines


def federated(
    dim: int, *, clients: int, processes: int, rounds: int, timeout_s: float = 300.0, **settings: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One run: a controller process and some client processes. Returns what each of them reported."""
    common = {"job": f"bench-{os.getpid()}", "domain": _DOMAIN, "dim": dim}
    extra: dict[str, Any] = {
        key: settings.pop(key) for key in ("delta", "delay_s", "gaps", "shared_memory") if key in settings
    }
    rules = {"rounds": rounds, "num_clients": clients, "eval_every": 0, "start_timeout_s": 120.0, **settings}
    with Processes() as running:
        running.start("controller", run_controller, {**common, **extra, "federated": rules})
        for index in range(processes):
            share = list(range(index, clients, processes))
            running.start(f"clients {index}", run_clients, {**common, **extra, "clients": share})
        controller, *others = running.results(timeout_s)
    return controller, others


def periods_s(controller: dict[str, Any]) -> list[float]:
    """Seconds from the end of a round to the end of the next, less the slowest training, after the warm-up."""
    ends = controller["ends_s"][WARM_UP_ROUNDS - 1 :]
    trained = [report["train_s"] for report in controller["reports"][WARM_UP_ROUNDS:]]
    return [b - a - t for a, b, t in zip(ends, ends[1:], trained, strict=False)]


def cpu_per_round_s(controller: dict[str, Any], clients: list[dict[str, Any]], rounds: int) -> float:
    """Processor seconds of a round, over all processes, after the warm-up."""
    first = WARM_UP_ROUNDS + 1
    used = controller["cpu_s"][-1] - controller["cpu_s"][WARM_UP_ROUNDS - 1]
    total = used / (rounds - WARM_UP_ROUNDS)
    for client in clients:
        total += (client["cpu_s"][str(rounds)] - client["cpu_s"][str(first)]) / (rounds - first)
    return float(total)


def overhead_rows(repeats: int = 3, *, shared_memory: bool = True) -> tuple[list[Row], dict[str, Any]]:
    """Round overhead with 4.8 MB and 100 MB, and the loop's gaps with 100 MB.

    Args:
        shared_memory: as it is by itself on one machine; False: everything goes over DDS, as between machines.
    """
    way = _way(shared_memory)
    small, cpu, start, samples = [], [], [], {}
    for _ in range(repeats):
        controller, clients = federated(
            MODEL_4_8_MB, clients=2, processes=2, rounds=40, shared_memory=shared_memory
        )  # fmt: skip
        small += periods_s(controller)
        cpu.append(cpu_per_round_s(controller, clients, 40))
        opened = max(controller["opened_s"], *(client["opened_s"] for client in clients))
        start.append(max(client["first_command_s"] for client in clients) - opened)
    large, gaps = [], []
    for _ in range(repeats):
        controller, clients = federated(
            MODEL_100_MB, clients=2, processes=2, rounds=6, gaps=True, shared_memory=shared_memory
        )  # fmt: skip
        large += periods_s(controller)
        gaps.append(max(controller["gap_p99_s"], *(client["gap_p99_s"] for client in clients)))
    samples = {
        f"overhead_4_8_mb_s{way}": small,
        f"cpu_s{way}": cpu,
        f"overhead_100_mb_s{way}": large,
        f"gap_p99_s{way}": gaps,
        f"start_s{way}": start,
    }
    rows = [
        at_most(
            f"round overhead, 4.8 MB fp32, 2 client processes{way}", 1e3 * statistics.median(small), 60, "ms",
            _spread(small),
        ),
        at_most(f"processor time of a round, all processes{way}", 1e3 * statistics.median(cpu), 90, "ms", _spread(cpu)),
        at_most(f"round overhead, 100 MB{way}", statistics.median(large), 1.5, "s", _spread(large)),
        at_most(
            f"event loop late, p99, worst process, 100 MB{way}", 1e3 * statistics.median(gaps), 20, "ms", _spread(gaps)
        ),
        at_most(f"start to the first command{way}", statistics.median(start), 1.5, "s", _spread(start)),
    ]  # fmt: skip
    return rows, samples


def durable_rows(*, shared_memory: bool = True) -> tuple[list[Row], dict[str, Any]]:
    """The same with a durable checkpoint in every round."""
    import tempfile

    rows, samples = [], {}
    for name, dim, rounds in (("4.8 MB", MODEL_4_8_MB, 30), ("100 MB", MODEL_100_MB, 6)):
        with tempfile.TemporaryDirectory() as directory:
            controller, _ = federated(
                dim, clients=2, processes=2, rounds=rounds, state_dir=directory, shared_memory=shared_memory
            )
        taken = periods_s(controller)
        name += _way(shared_memory)
        samples[f"durable_{name}"] = taken
        rows.append(shown(f"round overhead with a checkpoint (fsync), {name}", 1e3 * statistics.median(taken), "ms"))
    return rows, samples


def memory_rows(
    counts: tuple[int, ...] = (2, 8, 32), *, shared_memory: bool = True
) -> tuple[list[Row], dict[str, Any]]:
    """Peak memory of the controller above its idle memory, in models of 100 MB.

    Of what lies in shared memory, the update that it reads is part of that. Its model, which the clients read, is not:
    the controller does not look at it. There is one of it on the machine, in place of one in each client.
    """
    rows, samples = [], {}
    for count in counts:
        controller, _ = federated(
            MODEL_100_MB,
            clients=count,
            processes=2,
            rounds=3,
            timeout_s=580.0,
            round_timeout_s=300.0,
            dead_after_s=20.0,
            shared_memory=shared_memory,
        )
        size = 4.0 * MODEL_100_MB
        above_idle = (controller["peak_bytes"] - controller["idle_bytes"]) / size
        above_empty = (controller["peak_bytes"] - controller["empty_bytes"]) / size
        samples[f"memory_{count}"] = {key: controller[key] for key in ("empty_bytes", "idle_bytes", "peak_bytes")}
        note = f"{above_empty:.2f} above the process before it had a model"
        what = f"controller's peak above idle, 100 MB, {count} clients{_way(shared_memory)}"
        rows.append(at_most(what, above_idle, 4, "models", note))
    return rows, samples


def determinism_rows() -> tuple[list[Row], dict[str, Any]]:
    """Two runs with the same seeds and the opposite order of arrival give the same weights."""
    weights = []
    for delays in ({"0": 0.05}, {"1": 0.05}):
        controller, _ = federated(
            MODEL_4_8_MB,
            clients=2,
            processes=2,
            rounds=4,
            delta="seeded",
            delay_s=delays,
            codec="sq8",
            downlink_codec="s4",
        )
        weights.append([report["weights_crc32"] for report in controller["reports"]])
    same = weights[0] == weights[1] and len(set(weights[0])) > 1
    return [Row("weights after each round, other order of arrival", "equal", float(same), "", same)], {"crc32": weights}


def _way(shared_memory: bool) -> str:
    return "" if shared_memory else ", DDS only"


def _spread(values: list[float]) -> str:
    return f"{len(values)} samples, {1e3 * min(values):.4g} .. {1e3 * max(values):.4g} ms"

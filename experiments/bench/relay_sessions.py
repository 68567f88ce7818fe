"""Many sessions on one relay: nodes of a Flower app over TLS, until all are there, and in rounds; what the relay takes.

The app's clients return the model at once, so a round is the model to each node and a reply of its size from each, all
of it through the relay. Nodes are spread over a few processes without torch (:mod:`.flower_nodes`), and the ServerApp
is in one more. All are on this machine, and share its cores with the relay.

    make bench PART=sessions
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gradbus.experiments.bench.command import Benchmark, Part, add_effort
from gradbus.experiments.bench.flower import need_flower, process, write_app
from gradbus.experiments.bench.relay import TlsFolder, cpu_s, relay_process, resident_mib
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.runtime.security.job_key import new_job_key, write_secret_file

_POLL_S = 0.02
_ENDS_S = 60.0
_ROUND_LINE = "round "  # what the app prints at the start, and after each round


class SessionsPlan(NamedTuple):
    """How much is measured. ``form_s``, ``round_s``: limits of the time until all nodes are there, and of a round."""

    nodes: int
    processes: int
    rounds: int
    num_bytes: int
    security: str = "psk"
    form_s: float = 900.0
    round_s: float = 300.0


PLANS = {
    "full": SessionsPlan(200, 8, 20, 1_000_000),
    "quick": SessionsPlan(50, 2, 10, 1_000_000),
    "tiny": SessionsPlan(4, 2, 2, 10_000),
}


class RelayMoment(NamedTuple):
    """What a relay has taken until now: seconds of its processor, and its resident memory. ``at_s``: on a clock."""

    at_s: float
    cpu_s: float
    resident_mib: float


def moment_of(relay: int) -> RelayMoment:
    """Return what a relay, a process id, has taken."""
    return RelayMoment(time.monotonic(), cpu_s(relay), resident_mib(relay))


def measure(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Yield times of the run, and processor time and memory of the relay for each session.

    Raises:
        NoData: Flower is not set up. RuntimeError: a process failed, or the run took too long.
    """
    need_flower()
    plan = PLANS[chosen.effort]
    plan = plan._replace(
        nodes=chosen.nodes or plan.nodes, rounds=chosen.rounds or plan.rounds, security=chosen.security
    )
    with tempfile.TemporaryDirectory(prefix="gradbus-sessions-") as folder, ExitStack() as stack:
        files = TlsFolder(Path(folder) / "tls")
        relay, port = stack.enter_context(relay_process(files))
        moments = run_crowd(plan, Path(folder), files, relay, port)
    yield from figures_of(plan, moments)


def run_crowd(plan: SessionsPlan, folder: Path, files: TlsFolder, relay: int, port: int) -> list[RelayMoment]:
    """Run the app. Return the relay before it began, when all nodes were there, and after each round.

    Raises:
        RuntimeError: a process failed, or they took too long.
    """
    key, config, environment = folder / "job.key", folder / "bus.json", {**os.environ, "OMP_NUM_THREADS": "1"}
    write_secret_file(key, new_job_key().text)
    bus = {
        "job": "sessions",
        "security": plan.security,
        "connect": [f"tls/{files.host}:{port}"],
        "tls_ca": str(files.ca),
    }
    if plan.security != "none":
        bus["key_file"] = str(key)
    settings = {"bus": {**bus, "shared_memory": False}, "flower": {"controller_timeout_s": plan.form_s}}
    config.write_text(json.dumps(settings), encoding="utf-8")
    app, logs = write_app(folder), [folder / f"{name}.txt" for name in ("run", *range(plan.processes))]
    values = f"values={plan.num_bytes // 4} rounds={plan.rounds} nodes={plan.nodes}"
    server = ["gradbus", "flower", "run", str(app), "--run-config", values, "--config", str(config)]
    with ExitStack() as stack:
        moments = [moment_of(relay)]
        running = [stack.enter_context(process(server, logs[0], environment))]
        for number, log in enumerate(logs[1:]):
            first, end = (plan.nodes * at // plan.processes for at in (number, number + 1))
            nodes = ["python", "-P", "-m", "gradbus.experiments.bench.flower_nodes", str(app), "--config", str(config)]
            nodes += ["--first", str(first), "--count", str(end - first), "--of", str(plan.nodes)]
            running.append(stack.enter_context(process(nodes, log, environment)))
        for number in range(plan.rounds + 1):
            limit_s = plan.round_s if number else plan.form_s
            _until_round(number, logs, running, limit_s)
            moments.append(moment_of(relay))
            print(f"  round {number} after {moments[-1].at_s - moments[0].at_s:.1f} s", file=sys.stderr, flush=True)
        _check_ends(plan, logs, running)
    return moments


def _until_round(number: int, logs: Sequence[Path], running: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Wait until the app has printed the end of a round; 0: all nodes are there. Raises RuntimeError."""
    until_s = time.monotonic() + limit_s
    while f"{_ROUND_LINE}{number} at" not in logs[0].read_text(encoding="utf-8", errors="replace"):
        ended = [log for log, one in zip(logs, running, strict=True) if one.poll() is not None]
        if ended or time.monotonic() > until_s:
            why = f"{ended[0].stem} has ended" if ended else f"not after {limit_s:g} s"
            raise RuntimeError(f"round {number}: {why}: {_last_lines(ended or logs[:1])}")
        time.sleep(_POLL_S)


def _check_ends(plan: SessionsPlan, logs: Sequence[Path], running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all processes. Raises RuntimeError: one has failed, has imported torch, or a reply is missing."""
    until_s, answered = time.monotonic() + _ENDS_S, 0
    for log, one in zip(logs, running, strict=True):
        if one.wait(max(0.0, until_s - time.monotonic())) != 0:
            raise RuntimeError(f"{log.stem} failed: {_last_lines([log])}")
        if log is not logs[0]:
            found = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
            answered += found["answered"]
            if found["torch"]:
                raise RuntimeError(f"the nodes of process {log.stem} have imported torch")
    if answered != plan.nodes * plan.rounds:
        raise RuntimeError(f"expected {plan.nodes * plan.rounds} replies, got {answered}")


def _last_lines(logs: Sequence[Path]) -> str:
    return "".join(log.read_text(encoding="utf-8", errors="replace")[-2000:] for log in logs)


def figures_of(plan: SessionsPlan, moments: Sequence[RelayMoment]) -> Iterator[Measurement]:
    """Yield the figures of a run. ``moments``: as :func:`run_crowd` returns them."""
    start, formed, *_ = moments
    sessions = plan.nodes + 1  # and that of the ServerApp
    key = {"psk": "one key", "none": "no key"}[plan.security]
    title = f"{plan.nodes} Flower nodes with {key} in {plan.processes} processes"
    rounds = f"{title}, rounds of {plan.num_bytes / 1e6:.3g} MB"
    between = list(pairwise(moments[1:]))
    cpu = [after.cpu_s - before.cpu_s for before, after in between]
    delivered_gb = 2 * plan.nodes * plan.num_bytes / 1e9
    yield measurement(
        f"{title}: until all are there", "s", [formed.at_s - start.at_s], note="with the start of all processes"
    )
    yield measurement(f"{rounds}: a round", "s", [after.at_s - before.at_s for before, after in between])
    yield measurement(
        f"{title}: processor time of the relay for each session until all are there",
        "ms",
        [1e3 * (formed.cpu_s - start.cpu_s) / sessions],
    )
    yield measurement(
        f"{rounds}: processor time of the relay for each session in a round",
        "ms",
        [1e3 * one / sessions for one in cpu],
        note=f"{sorted(cpu)[len(cpu) // 2] / delivered_gb:.3g} s for 1 GB of models and replies",
    )
    yield measurement(
        f"{rounds}: memory of the relay for each session after each round",
        "KiB",
        [1024 * (after.resident_mib - start.resident_mib) / sessions for _, after in between],
        note=f"{start.resident_mib:.1f} MiB without sessions, {moments[-1].resident_mib:.1f} MiB at the end",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, help="nodes in all")
    parser.add_argument("--rounds", type=int, help="rounds")
    parser.add_argument(
        "--security",
        choices=("psk", "none"),
        default="psk",
        help="with one key, each member proves to all that it is alive",
    )
    add_effort(parser, "fewer nodes and rounds")


BENCHMARK = Benchmark(__doc__ or "", {"relay-sessions": Part(measure, "A relay with 200 sessions", 300, 60)}, _options)

"""Accuracy of federated runs on MNIST: real processes over real DDS, codecs in one and in both directions."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gradbus.experiments.bench_rows import Row, at_least, at_most

_SETTINGS = ["--rounds", "10", "--clients", "2", "--samples", "6000", "--data", "mnist", "--no-live"]


def accuracy(codec: str, downlink: str, partition: str, seed: int, *, timeout_s: float = 600.0) -> float:
    """Test accuracy in percent after one run of ``gradbus demo``."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "gradbus", "demo", *_SETTINGS, "--run-dir", str(run_dir)]
        command += ["--codec", codec, "--downlink-codec", downlink, "--partition", partition, "--seed", str(seed)]
        command += ["--set", "federated.eval_every=10"]  # after the last round: evaluation takes as long as a round
        subprocess.run(command, check=True, timeout=timeout_s, stdout=subprocess.DEVNULL, env=os.environ)
        reports = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    return 100.0 * float(reports[-1]["accuracy"])


def accuracy_rows(seeds: int = 3) -> tuple[list[Row], dict[str, Any]]:
    """All codecs against fp32, uplink alone and both directions; and fp32 on unequal shares."""
    taken: dict[str, list[float]] = {}
    directions = [("fp32", "fp32")]
    for codec in ("q8", "s4", "sq8"):
        directions += [(codec, "fp32"), (codec, codec)]
    for seed in range(seeds):
        for up, down in directions:
            taken.setdefault(f"{up} up, {down} down", []).append(accuracy(up, down, "iid", seed))
        taken.setdefault("dirichlet", []).append(accuracy("fp32", "fp32", '{"kind":"dirichlet","alpha":0.5}', seed))
    reference = statistics.mean(taken["fp32 up, fp32 down"])
    rows = [at_least("MNIST, 2 clients IID, fp32", reference, 98.0, "%", _list(taken["fp32 up, fp32 down"]))]
    for up, down in directions[1:]:
        values = taken[f"{up} up, {down} down"]
        name = f"points below fp32: {up} up" + (f", {down} down" if down != "fp32" else "")
        rows.append(at_most(name, reference - statistics.mean(values), 0.3, "points", _list(values)))
    dirichlet = taken["dirichlet"]
    rows.append(at_least("MNIST, Dirichlet 0.5, fp32", statistics.mean(dirichlet), 97.4, "%", _list(dirichlet)))
    return rows, {"accuracy": taken}


def _list(values: list[float]) -> str:
    return f"mean of {len(values)} seeds: " + " ".join(f"{value:.2f}" for value in values)

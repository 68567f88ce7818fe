"""Accuracy of data-parallel training on MNIST, dense and by DGC, and what a step sends."""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradbus import codecs, models
from gradbus.experiments.bench_ddp_process import Data, Training, run_ranks
from gradbus.experiments.bench_rows import Row, at_least, at_most, shown

_LR = 0.05
_MLP = {"epochs": 10, "lr": _LR}
_CNN = {"epochs": 2, "lr": _LR}
# 17.8, 3.16 and 0.56 %. Ten epochs leave time for any: with "none", "paper" and 1 the means were within 0.06 points.
_MLP_WARMUP = 3
# Two epochs are 938 steps, and after a fall of the density what is owed grows for some 1 / density steps. After a first
# epoch at 10 % too few are left (0.5 points below dense); with 3 %, and without warm-up, it is 0.2 points below.
_CNN_WARMUP = [0.01]


def mlp_rows(seeds: int = 3) -> tuple[list[Row], dict[str, Any]]:
    """Ten epochs of the perceptron, world 2, batch 128."""
    taken = _both(models.mnist_mlp, 128, _MLP, _MLP_WARMUP, seeds, timeout_s=300.0)
    dense, dgc = ([run["accuracy"] for run in taken[f"mlp_{kind}"]] for kind in ("dense", "dgc"))
    gap = statistics.mean(dense) - statistics.mean(dgc)
    rows = [
        at_least("MLP, dense fp32: test accuracy", statistics.mean(dense), 97.8, "%", _list(dense)),
        at_most("MLP, DGC 0.1 % with warm-up: points below dense", gap, 0.2, "points", _list(dgc)),
        *_shown(taken, "mlp"),
    ]
    return rows, taken


def cnn_rows(seeds: int = 2) -> tuple[list[Row], dict[str, Any]]:
    """Two epochs of the CNN, world 2, batch 64."""
    taken = _both(models.mnist_cnn, 64, _CNN, _CNN_WARMUP, seeds, timeout_s=900.0)
    dense, dgc = ([run["accuracy"] for run in taken[f"cnn_{kind}"]] for kind in ("dense", "dgc"))
    gap = statistics.mean(dense) - statistics.mean(dgc)
    note = f"dense {_list(dense)}; DGC {' '.join(f'{value:.2f}' for value in dgc)}"
    return [at_most("CNN, DGC 0.1 %: points below dense", gap, 0.3, "points", note), *_shown(taken, "cnn")], taken


def _both(
    model: Callable[..., nn.Module], batch_size: int, config: dict[str, Any], warmup: Any, seeds: int, *,
    timeout_s: float,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    name = model.__name__.removeprefix("mnist_")
    taken: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        for kind, more in (("dense", {}), ("dgc", {"exchange": "dgc", "density": 0.001, "warmup": warmup})):
            run = Training(
                world=2, model=model, batch_size=batch_size, config={**config, **more, "seed": seed},
            )  # fmt: skip
            found = run_ranks(run, timeout_s=timeout_s)
            epochs = [[{key: of[key] for key in _KEPT} for of in rank["epochs"]] for rank in found]
            taken.setdefault(f"{name}_{kind}", []).append(
                {
                    "seed": seed,
                    "accuracy": 100 * found[0]["accuracy"],
                    "epochs": epochs,
                    "step_mean": [rank["mean"] for rank in found],
                }
            )
    return taken


_KEPT = ("accuracy", "loss", "density", "wait_s_mean", "step_s_mean", "bytes_out_per_step", "seconds")


def _shown(taken: dict[str, list[dict[str, Any]]], name: str) -> list[Row]:
    """What a step waits in the last epoch, for the network and for the other rank: mean of all, median of the runs."""
    rows = []
    for kind in ("dense", "dgc"):
        last = [[rank[-1] for rank in run["epochs"]] for run in taken[f"{name}_{kind}"]]
        wait_s = statistics.median(statistics.mean(rank["wait_s_mean"] for rank in run) for run in last)
        sent = statistics.mean(rank["bytes_out_per_step"] for run in last for rank in run)
        step_s = statistics.median(statistics.mean(rank["step_s_mean"] for rank in run) for run in last)
        note = f"last epoch; a step takes {1e3 * step_s:.1f} ms and sends {sent:,.0f} B"
        rows.append(shown(f"{name.upper()}, {kind}: wait of a step, mean of the ranks", 1e3 * wait_s, "ms", note))
    return rows


def bytes_rows(
    *, steps: int = 40, data: Data = "mnist", model: Callable[..., nn.Module] = models.mnist_cnn
) -> tuple[list[Row], dict[str, Any]]:
    """Payload of a step and rank, dense and at 0.1 %: means of the second half of a short run."""
    sent: dict[str, float] = {}
    settings: dict[str, dict[str, Any]] = {
        "dense fp32": {}, "DGC fp32": {"exchange": "dgc", "warmup": "none"},
        "DGC fp16": {"exchange": "dgc", "warmup": "none", "value_dtype": "fp16"},
    }  # fmt: skip
    for name, more in settings.items():
        config = {"max_steps": steps, "eval_every_epochs": 0, "profile_window_steps": 1, "lr": _LR, **more}
        found = run_ranks(Training(world=2, model=model, batch_size=64, data=data, config=config))
        sent[name] = statistics.mean(window["bytes_out"] for rank in found for window in rank["windows"][steps // 2 :])
    rows = [
        at_least(
            f"bytes of a step and rank, CNN: dense / {name}", sent["dense fp32"] / sent[name], 500, "x",
            f"{sent['dense fp32']:,.0f} B / {sent[name]:,.0f} B",
        )
        for name in ("DGC fp32", "DGC fp16")
    ]  # fmt: skip
    return rows + _index_rows(), {"bytes_per_step": sent}


def _index_rows() -> list[Row]:
    """Coded indices in messages of normal random gradients, whose largest entries are a uniform set."""
    rows = []
    for elems, density in ((25_000_000, 0.001), (1_200_000, 0.01), (1_200_000, 0.1)):
        gradient = torch.randn(elems // 1000, 1000, generator=torch.Generator().manual_seed(elems))
        layout = codecs.DgcLayout.of([("weight", gradient)])
        payload, _ = codecs.dgc_step([gradient], codecs.DgcState.zeros(layout), codecs.DgcConfig(density=density))
        k, coded_bytes = struct.unpack_from("<II", payload, 16)  # see docs/dgc.md
        floor_bits = (math.lgamma(elems + 1) - math.lgamma(k + 1) - math.lgamma(elems - k + 1)) / math.log(2)
        name = f"indices, {k:,} of {elems:,}"
        rows.append(at_most(name, 8 * coded_bytes / floor_bits, 1.05, "x entropy", f"{coded_bytes:,} B"))
    return rows


def _list(values: Sequence[float]) -> str:
    return f"mean of {len(values)} seeds: " + " ".join(f"{value:.2f}" for value in values)

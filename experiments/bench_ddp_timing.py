"""What a data-parallel step costs beside forward and backward: waiting, with and without overlap, and compression."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradbus import codecs, models
from gradbus.experiments.bench_ddp_process import Data, Training, run_ranks
from gradbus.experiments.bench_rows import Row, at_least, at_most, one_thread, shown

_WARM_UP_STEPS = 10  # buffers are made, DDS has found its window


def overlap_rows(
    repeats: int = 3, *, steps: int = 60, model: Callable[..., nn.Module] = models.mnist_cnn, data: Data = "mnist"
) -> tuple[list[Row], dict[str, Any]]:
    """Waiting in a dense step on the CNN, world 2: runs with and without overlap by turns, all else equal.

    The rank that is ready last waits for nothing but the exchange: that is the pure wait. The other one also waits for
    it to finish computing, which no overlap can hide; the mean of both is shown as well.
    """
    pure: dict[bool, list[float]] = {True: [], False: []}
    mean: dict[bool, list[float]] = {True: [], False: []}
    period: dict[bool, list[float]] = {True: [], False: []}
    taken: dict[str, Any] = {}
    for number in range(repeats):
        for overlap in (True, False):
            config = {
                "overlap": overlap, "max_steps": _WARM_UP_STEPS + steps, "seed": number, "hash_every": 0,
                "eval_every_epochs": 0, "profile_window_steps": 1, "epochs": 100,
            }  # fmt: skip
            found = run_ranks(Training(world=2, model=model, batch_size=64, data=data, config=config))
            waits, periods = (
                [[window[name] for window in rank["windows"][_WARM_UP_STEPS:]] for rank in found]
                for name in ("wait_s", "step_s")
            )
            taken[f"{'with' if overlap else 'without'}_overlap_{number}"] = {"wait_s": waits, "step_s": periods}
            pure[overlap].append(statistics.median(map(min, zip(*waits, strict=True))))
            mean[overlap].append(statistics.median(map(statistics.mean, zip(*waits, strict=True))))
            period[overlap].append(statistics.median(map(max, zip(*periods, strict=True))))
    rows = [_pair("pure wait of a dense step on the CNN", pure), _pair("wait of it, mean of the ranks", mean)]
    rows.insert(1, at_least("pure wait that overlap hides", _hidden(pure), 50, "%", f"{steps} steps per run, medians"))
    rows.append(shown("wait that overlap hides, mean of the ranks", _hidden(mean), "%"))
    rows.append(_pair("dense step on the CNN", period))
    return rows, taken


def _pair(name: str, of_runs: dict[bool, list[float]]) -> Row:
    """The median with overlap; the note has that without, and all runs."""
    with_it, without = (1e3 * statistics.median(of_runs[overlap]) for overlap in (True, False))
    each = "; without ".join(" ".join(f"{1e3 * value:.3g}" for value in of_runs[overlap]) for overlap in (True, False))
    return shown(f"{name}, overlap", with_it, "ms", f"without overlap {without:.3g} ms (runs: with {each})")


def _hidden(of_runs: dict[bool, list[float]]) -> float:
    return 100 * (1 - statistics.median(of_runs[True]) / statistics.median(of_runs[False]))


def step_cost_rows(repeats: int = 60, *, data: Data = "mnist") -> tuple[list[Row], dict[str, Any]]:
    """Compress and decode on the CNN at 0.1 %, with the gradients of a training, in one thread."""
    encode_s, decode_s, cpu_s, sizes = [], [], [], []
    run = Training(world=2, model=models.mnist_cnn, batch_size=16, data=data)
    with one_thread():
        task = run.task()
        model = task.build_model()
        parameters = list(model.parameters())
        layout = codecs.DgcLayout.of(model.named_parameters())
        config, state = codecs.DgcConfig(), codecs.DgcState.zeros(layout)
        dense, out = codecs.DenseMomentum.zeros(layout), torch.empty(layout.dim)
        optimizer = codecs.DgcSgd(parameters, lr=0.05)
        other = b""  # of the other rank: this one's of the step before
        for batch, _ in zip(task.batches(rank=0, world=2, epoch=0, seed=0), range(repeats + 10), strict=False):
            gradients: list[Tensor] = list(torch.autograd.grad(task.loss(model, batch), parameters))
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            payload, state = codecs.dgc_step(gradients, state, config)
            sent_s = time.perf_counter()
            mean = codecs.combine_dgc([payload, other or payload], layout, out=out)
            dense = codecs.dense_momentum_step(mean, dense, config)
            mean.write_to(parameters)
            end_s = time.perf_counter()
            cpu_s.append(time.thread_time() - start_cpu_s)
            optimizer.step()
            other = payload
            encode_s.append(sent_s - start_s)
            decode_s.append(end_s - sent_s)
            sizes.append(len(payload))
    both = [a + b for a, b in zip(encode_s[10:], decode_s[10:], strict=True)]
    parts = {"compress": encode_s, "decode": decode_s, "processor time": cpu_s}
    note = ", ".join(f"{name} {1e3 * statistics.median(values[10:]):.2f}" for name, values in parts.items())
    taken = {"dgc_encode_s": encode_s, "dgc_decode_s": decode_s, "dgc_cpu_s": cpu_s, "dgc_bytes": sizes}
    name = "DGC step, compress and decode, CNN, one thread"
    return [at_most(name, 1e3 * statistics.median(both), 8, "ms", f"median of {len(both)}; {note}")], taken

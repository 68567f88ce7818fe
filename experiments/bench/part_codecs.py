"""Codecs: time, bytes and error by size of the vector and by density, one thread. Time against a copy of the vector."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.experiments.bench.results import Effort, Figure, figure
from gradbus.experiments.bench_collectives_timing import block, in_turns
from gradbus.experiments.bench_rows import one_thread

_BLOCK_S = 0.01  # a copy of a small vector is too short for the clock
_MAX_CALLS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """``blocks``: of each figure. ``dims``: elements. ``densities``: of the sparse codecs."""

    blocks: int
    dims: Sequence[int] = (10_000, 100_000, 1_199_882, 25_000_000)
    densities: Sequence[float] = (0.1, 0.01, 0.001)


PLANS: dict[Effort, Plan] = {
    "tiny": Plan(blocks=2, dims=(10_000,), densities=(0.01,)),
    "quick": Plan(blocks=5, dims=(10_000, 1_199_882), densities=(0.1, 0.01)),
    "full": Plan(blocks=9),
}


def measure(effort: Effort) -> Iterator[Figure]:
    """Every codec in its newest version, at every size."""
    plan = PLANS[effort]
    with one_thread():
        for dim in plan.dims:
            vector = torch.randn(dim, generator=torch.Generator().manual_seed(0))
            for name in codecs.ALL:
                densities = plan.densities if name in ("s4", "sq8") else (None,)
                for density in densities:
                    options: dict[str, Any] = {} if density is None else {"density": density}
                    label = name if density is None else f"{name} {density:g}"
                    codec = codecs.get(name, **options)
                    yield from _figures(f"{label}, {dim:,} elements", codec.encode, vector, plan.blocks)


def _figures(name: str, encode: Callable[[Tensor], Any], vector: Tensor, blocks: int) -> list[Figure]:
    payload, out = encode(vector), torch.empty_like(vector)
    dim = vector.numel()
    calls: dict[str, Callable[[], Any]] = {
        "encode": partial(encode, vector),
        "decode": partial(codecs.decode, payload, expected_dim=dim, out=out),
        "copy": partial(out.copy_, vector),
    }
    counts = {}
    for what, call in calls.items():
        typical_s = min(block(call, 3))  # it warms up, too
        counts[what] = max(1, min(_MAX_CALLS, round(_BLOCK_S / typical_s)))
    ms: dict[str, list[float]] = {what: [] for what in calls}
    for what in in_turns(calls, blocks):
        ms[what].append(1e3 * statistics.median(block(calls[what], counts[what])))
    decoded = codecs.decode(payload, expected_dim=dim).vector
    error = float((decoded - vector).norm() / vector.norm())
    rates = {what: f"{4 * dim / statistics.median(ms[what]) / 1e3:,.0f} MB/s" for what in ("encode", "decode")}
    return [
        figure(f"encode {name}", "ms", ms["encode"], against=("copy", ms["copy"]), note=rates["encode"]),
        figure(f"decode {name}", "ms", ms["decode"], against=("copy", ms["copy"]), note=rates["decode"]),
        figure(f"bytes {name}", "B", [len(payload)], against=("fp32", [4 * dim])),
        figure(f"error {name}", "", [error], against=("norm", [1.0]), note="of a random normal vector"),
    ]

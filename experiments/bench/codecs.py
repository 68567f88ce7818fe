"""Codecs: time, bytes and error by size of the vector and by density, on one thread, against a copy of the vector.

``make bench PART=codecs`` compares rates with limits, in float32 bytes of the vector per second (4 D / time),
whatever the size of the message.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.timing import block, by_turns

REFERENCE_DIM = 1_199_882  # parameters of the reference network
_BLOCK_S = 0.01  # a copy of a small vector is too short for the clock
_MAX_CALLS = 2000
_MAX_BYTES = {("s4", 2): 560_000, ("sq8", 2): 210_000}  # of the reference network
_MIN_MB_PER_S = {("encode", "q8"): 800, ("encode", "s4"): 150, ("encode", "sq8"): 150, ("decode", "q8"): 1200}


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecsPlan:
    """``blocks``: of each figure. ``dims``: elements. ``densities``: of the sparse codecs."""

    blocks: int
    dims: Sequence[int] = (10_000, 100_000, REFERENCE_DIM, 25_000_000)
    densities: Sequence[float] = (0.1, 0.01, 0.001)


PLANS = {
    "tiny": CodecsPlan(blocks=2, dims=(10_000,), densities=(0.01,)),
    "quick": CodecsPlan(blocks=5, dims=(10_000, REFERENCE_DIM), densities=(0.1, 0.01)),
    "full": CodecsPlan(blocks=9),
}


def measure(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Every codec in its newest version, at every size."""
    plan = PLANS[chosen.effort]
    for dim in plan.dims:
        vector = _vector(dim)
        for name in codecs.ALL:
            for density in plan.densities if name in ("s4", "sq8") else (None,):
                options: dict[str, Any] = {} if density is None else {"density": density}
                label = f"{name if density is None else f'{name} {density:g}'}, {dim:,} elements"
                codec = codecs.get(name, **options)
                payload = codec.encode(vector)
                decoded = codecs.decode(payload, expected_dim=dim).vector
                error = float((decoded - vector).norm() / vector.norm())
                ms = _block_ms(codec.encode, payload, vector, plan.blocks)
                for what in ("encode", "decode"):
                    note = f"{4 * dim / statistics.median(ms[what]) / 1e3:,.0f} MB/s"
                    yield measurement(f"{what} {label}", "ms", ms[what], against=("copy", ms["copy"]), note=note)
                yield measurement(f"bytes {label}", "B", [len(payload)], against=("fp32", [4 * dim]))
                note = "of a random normal vector"
                yield measurement(f"error {label}", "", [error], against=("norm", [1.0]), note=note)


def _vector(dim: int) -> Tensor:
    return torch.randn(dim, generator=torch.Generator().manual_seed(0))


def _block_ms(encode: Callable[[Tensor], Any], payload: Any, vector: Tensor, blocks: int) -> dict[str, list[float]]:
    """Milliseconds of a call, the median of each block: encode, decode, and a copy."""
    out = torch.empty_like(vector)
    calls: dict[str, Callable[[], Any]] = {
        "encode": partial(encode, vector),
        "decode": partial(codecs.decode, payload, expected_dim=vector.numel(), out=out),
        "copy": partial(out.copy_, vector),
    }

    def sample(what: str, count: int) -> float:
        return 1e3 * statistics.median(block(calls[what], count))

    counts = {what: max(1, min(_MAX_CALLS, round(_BLOCK_S / min(block(call, 3))))) for what, call in calls.items()}
    return by_turns({what: partial(sample, what, count) for what, count in counts.items()}, blocks)


def measure_rates(dim: int = REFERENCE_DIM, repeats: int = 15) -> Iterator[Measurement]:
    """Every codec in both versions on a random normal vector of ``dim`` elements, beside its limits."""
    vector = _vector(dim)
    for name in codecs.ALL:
        for version in codecs.get(name).versions:
            codec = codecs.get(name, version=version)
            payload = codec.encode(vector)
            ms = _block_ms(codec.encode, payload, vector, repeats)
            most = _MAX_BYTES.get((name, version)) if dim == REFERENCE_DIM else None
            yield measurement(f"{name} v{version} message", "B", [len(payload)], at_most=most)
            for what in ("encode", "decode"):
                rates = [4 * dim / one / 1e3 for one in ms[what]]
                limit = _MIN_MB_PER_S.get((what, name))
                yield measurement(f"{name} v{version} {what}", "MB/s", rates, at_least=limit)
    seconds = block(lambda: codecs.top_k(vector, max(1, dim // 10)), 1 + repeats)[1:]  # the first maps memory
    yield measurement("top_k 10 %", "MB/s", [4 * dim / one / 1e6 for one in seconds])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dim", type=int, default=REFERENCE_DIM, help="elements of the vector")
    parser.add_argument("--repeats", type=int, default=15, help="blocks of each figure; the median counts")


BENCHMARK = Benchmark(
    __doc__ or "",
    {"codecs": Part(lambda chosen: measure_rates(chosen.dim, chosen.repeats), "Codecs, one thread", 10)},
    _options,
)

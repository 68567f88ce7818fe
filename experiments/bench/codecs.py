"""Codecs: time, bytes and error by size of the vector and by density, on one thread.

In the suite the reference is a copy of the vector, by turns. ``make bench-codecs`` or ``python -m
gradbus.experiments.bench.codecs`` compares with limits instead: medians, rates in float32 bytes of the vector per
second (4 D / time), whatever the size of the message; the exit code is 1 if a figure falls short.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.experiments.bench import limits
from gradbus.experiments.bench.limits import Row, at_least, at_most, shown
from gradbus.experiments.bench.results import Effort, Measurement, measurement
from gradbus.experiments.bench.timing import block, in_turns, one_thread

REFERENCE_DIM = 1_199_882  # parameters of the reference network; the limits of sizes are for this one
_BLOCK_S = 0.01  # a copy of a small vector is too short for the clock
_MAX_CALLS = 2000
_MAX_OVER_ENTROPY = 1.05
_V1_BYTES = {"fp32": 4_799_528, "q8": 1_200_490, "s4": 959_916, "sq8": 600_020}
_V2_MAX_BYTES = {"s4": 560_000, "sq8": 210_000}
_MIN_MB_PER_S = {
    "q8 encode": 800, "s4 encode": 150, "sq8 encode": 150, "q8 decode": 1200,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecsPlan:
    """``blocks``: of each figure. ``dims``: elements. ``densities``: of the sparse codecs."""

    blocks: int
    dims: Sequence[int] = (10_000, 100_000, REFERENCE_DIM, 25_000_000)
    densities: Sequence[float] = (0.1, 0.01, 0.001)


PLANS: dict[Effort, CodecsPlan] = {
    "tiny": CodecsPlan(blocks=2, dims=(10_000,), densities=(0.01,)),
    "quick": CodecsPlan(blocks=5, dims=(10_000, REFERENCE_DIM), densities=(0.1, 0.01)),
    "full": CodecsPlan(blocks=9),
}


def measure(effort: Effort) -> Iterator[Measurement]:
    """Every codec in its newest version, at every size."""
    plan = PLANS[effort]
    with one_thread():
        for dim in plan.dims:
            vector = _vector(dim)
            for name in codecs.ALL:
                densities = plan.densities if name in ("s4", "sq8") else (None,)
                for density in densities:
                    options: dict[str, Any] = {} if density is None else {"density": density}
                    label = name if density is None else f"{name} {density:g}"
                    codec = codecs.get(name, **options)
                    yield from _figures(f"{label}, {dim:,} elements", codec.encode, vector, plan.blocks)


def _vector(dim: int) -> Tensor:
    return torch.randn(dim, generator=torch.Generator().manual_seed(0))


def _figures(name: str, encode: Callable[[Tensor], Any], vector: Tensor, blocks: int) -> list[Measurement]:
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
    timed = [
        measurement(
            f"{what} {name}", "ms", ms[what], against=("copy", ms["copy"]),
            note=f"{4 * dim / statistics.median(ms[what]) / 1e3:,.0f} MB/s",
        )
        for what in ("encode", "decode")
    ]  # fmt: skip
    return [
        *timed,
        measurement(f"bytes {name}", "B", [len(payload)], against=("fp32", [4 * dim])),
        measurement(f"error {name}", "", [error], against=("norm", [1.0]), note="of a random normal vector"),
    ]


def rows(dim: int = REFERENCE_DIM, repeats: int = 15) -> list[Row]:
    """Every codec in both versions on a random normal vector of ``dim`` elements, beside its limits."""
    vector = _vector(dim)
    with one_thread():
        found = [
            row for name in codecs.ALL for version in (1, 2) for row in _codec_rows(name, version, vector, repeats)
        ]
        found += [_entropy_row(dim, dim // divisor) for divisor in (10, 100) if dim // divisor >= 10_000]
        return [*found, _rate_row("top_k 10 %", "", dim, lambda: codecs.top_k(vector, max(1, dim // 10)), repeats)]


def _codec_rows(name: str, version: int, vector: Tensor, repeats: int) -> Iterator[Row]:
    codec = codecs.get(name, version=version)
    label, dim = f"{name} v{version}", vector.numel()
    payload, out = codec.encode(vector), torch.empty(dim)
    exact = _V1_BYTES[name] if version == 1 and dim == REFERENCE_DIM else None
    limit = _V2_MAX_BYTES.get(name) if version == 2 and dim == REFERENCE_DIM else None
    if exact is not None:
        yield Row(f"{label} message", f"== {exact:,}", len(payload), "bytes", len(payload) == exact)
    elif limit is not None:
        yield at_most(f"{label} message", len(payload), limit, "bytes")
    else:
        yield shown(f"{label} message", len(payload), "bytes")
    yield _rate_row(f"{label} encode", f"{name} encode", dim, lambda: codec.encode(vector), repeats)
    decode = partial(codecs.decode, payload, expected_dim=dim, out=out)
    yield _rate_row(f"{label} decode", f"{name} decode", dim, decode, repeats)


def _rate_row(name: str, asked: str, dim: int, call: Callable[[], Any], repeats: int) -> Row:
    """``asked``: a key of the least rates."""
    _, *seconds = block(call, 1 + repeats)  # the first call pays for memory that the later ones find mapped
    rate = 4 * dim / statistics.median(seconds) / 1e6
    return at_least(name, rate, _MIN_MB_PER_S[asked], "MB/s") if asked in _MIN_MB_PER_S else shown(name, rate, "MB/s")


def entropy_bits(dim: int, k: int) -> float:
    """The least bits that any code can take for a set of ``k`` out of ``dim`` indices, log2 C(dim, k)."""
    return (math.lgamma(dim + 1) - math.lgamma(k + 1) - math.lgamma(dim - k + 1)) / math.log(2)


def _entropy_row(dim: int, k: int) -> Row:
    indices = torch.randperm(dim, generator=torch.Generator().manual_seed(1))[:k].sort().values
    coding, coded = codecs.encode_indices(indices, dim)
    over = 8 * len(coded) / entropy_bits(dim, k)
    return at_most(f"indices, k={k:,} ({coding.name.lower()})", over, _MAX_OVER_ENTROPY, "x entropy")


def main(arguments: list[str] | None = None) -> int:
    """Measure all codecs and compare them with the limits."""
    parser = limits.parser_of(__doc__, "runs/bench-codecs.json")
    parser.add_argument("--dim", type=int, default=REFERENCE_DIM, help="elements of the vector")
    parser.add_argument("--repeats", type=int, default=15, help="runs per figure; the median is shown")
    chosen = parser.parse_args(arguments)
    title = f"Codecs, {chosen.dim:,} elements, one thread, median of {chosen.repeats}: asked and measured"
    return limits.finish(title, rows(chosen.dim, chosen.repeats), chosen.out, {})


if __name__ == "__main__":
    raise SystemExit(main())

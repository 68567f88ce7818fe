"""Codecs: size and speed, what is asked beside what was measured.

Run ``python -m gradbus.experiments.bench_codecs``; the exit code is 1 if a figure falls short. One torch thread,
medians, rates in float32 bytes of the vector per second (4 D / time), whatever the size of the message.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gradbus import codecs

REFERENCE_DIM = 1_199_882  # parameters of the reference network; the sizes asked for are for this one
MAX_OVER_ENTROPY = 1.05

_V1_BYTES = {"fp32": 4_799_528, "q8": 1_200_490, "s4": 959_916, "sq8": 600_020}
_V2_MAX_BYTES = {"s4": 560_000, "sq8": 210_000}
_MIN_ENCODE_MB_PER_S = {"q8": 800, "s4": 150, "sq8": 150}
_MIN_DECODE_MB_PER_S = {"q8": 1200}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; ``asked`` is a text such as ">= 800", or empty if nothing is asked."""

    name: str
    asked: str
    measured: float
    unit: str
    ok: bool


def run(dim: int = REFERENCE_DIM, repeats: int = 15) -> list[Row]:
    """Measure every codec in both versions on a random normal vector of ``dim`` elements."""
    x = torch.randn(dim, generator=torch.Generator().manual_seed(0))
    with _one_thread():
        rows = [row for name in codecs.ALL for version in (1, 2) for row in _codec_rows(name, version, x, repeats)]
        rows += [_entropy_row(dim, dim // divisor) for divisor in (10, 100) if dim // divisor >= 10_000]
        seconds = _median_seconds(lambda: codecs.top_k(x, max(1, dim // 10)), repeats)
        rows.append(Row("top_k 10 %", "", 4 * dim / seconds / 1e6, "MB/s", True))
    return rows


def _codec_rows(name: str, version: int, x: torch.Tensor, repeats: int) -> Iterator[Row]:
    codec = codecs.get(name, version=version)
    label, dim = f"{name} v{version}", x.numel()
    payload = codec.encode(x)
    exact = _V1_BYTES[name] if version == 1 and dim == REFERENCE_DIM else None
    limit = _V2_MAX_BYTES.get(name) if version == 2 and dim == REFERENCE_DIM else None
    if exact is not None:
        yield Row(f"{label} message", f"== {exact:,}", len(payload), "bytes", len(payload) == exact)
    elif limit is not None:
        yield Row(f"{label} message", f"<= {limit:,}", len(payload), "bytes", len(payload) <= limit)
    else:
        yield Row(f"{label} message", "", len(payload), "bytes", True)
    encode_s = _median_seconds(lambda: codec.encode(x), repeats)
    yield _rate_row(f"{label} encode", dim, encode_s, _MIN_ENCODE_MB_PER_S.get(name))
    out = torch.empty(dim)
    decode_s = _median_seconds(lambda: codecs.decode(payload, expected_dim=dim, out=out), repeats)
    yield _rate_row(f"{label} decode", dim, decode_s, _MIN_DECODE_MB_PER_S.get(name))


def _rate_row(name: str, dim: int, seconds: float, asked: float | None) -> Row:
    rate = 4 * dim / seconds / 1e6
    return Row(name, f">= {asked:,}" if asked else "", rate, "MB/s", asked is None or rate >= asked)


def _entropy_row(dim: int, k: int) -> Row:
    """Bytes of the coded indices of a random set over the least that any code can do, log2 C(dim, k) bits."""
    indices = torch.randperm(dim, generator=torch.Generator().manual_seed(1))[:k].sort().values
    coding, coded = codecs.encode_indices(indices, dim)
    floor_bits = (math.lgamma(dim + 1) - math.lgamma(k + 1) - math.lgamma(dim - k + 1)) / math.log(2)
    over = 8 * len(coded) / floor_bits
    name = f"indices, k={k:,} ({coding.name.lower()})"
    return Row(name, f"<= {MAX_OVER_ENTROPY}", over, "x entropy", over <= MAX_OVER_ENTROPY)


def _median_seconds(action: Callable[[], object], repeats: int) -> float:
    action()  # the first call pays for memory that the later ones find mapped
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Size and speed of the codecs: asked beside measured.")
    parser.add_argument("--dim", type=int, default=REFERENCE_DIM, help="elements of the vector")
    parser.add_argument("--repeats", type=int, default=15, help="runs per figure; the median is shown")
    arguments = parser.parse_args()
    rows = run(arguments.dim, arguments.repeats)
    print(f"D = {arguments.dim:,}, one thread, median of {arguments.repeats}, torch {torch.__version__}")
    print(f"{'':34} {'asked':>12} {'measured':>12}")
    for row in rows:
        measured = f"{row.measured:,.3f}" if row.measured < 10 else f"{row.measured:,.0f}"
        print(f"{row.name:34} {row.asked:>12} {measured:>12} {row.unit:10} {'' if row.ok else 'SHORT'}".rstrip())
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

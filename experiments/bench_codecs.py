"""Codecs: size and speed, what is asked beside what was measured.

``make bench-codecs`` or ``python -m gradbus.experiments.bench_codecs``; the exit code is 1 if a figure falls short. One
torch thread, medians, rates in float32 bytes of the vector per second (4 D / time), whatever the size of the message.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gradbus import codecs
from gradbus.experiments.bench_rows import Row, at_least, at_most, finish, one_thread, shown

REFERENCE_DIM = 1_199_882  # parameters of the reference network; the sizes asked for are for this one
MAX_OVER_ENTROPY = 1.05

_V1_BYTES = {"fp32": 4_799_528, "q8": 1_200_490, "s4": 959_916, "sq8": 600_020}
_V2_MAX_BYTES = {"s4": 560_000, "sq8": 210_000}
_MIN_ENCODE_MB_PER_S = {"q8": 800, "s4": 150, "sq8": 150}
_MIN_DECODE_MB_PER_S = {"q8": 1200}


def run(dim: int = REFERENCE_DIM, repeats: int = 15) -> list[Row]:
    """Measure every codec in both versions on a random normal vector of ``dim`` elements."""
    x = torch.randn(dim, generator=torch.Generator().manual_seed(0))
    with one_thread():
        rows = [row for name in codecs.ALL for version in (1, 2) for row in _codec_rows(name, version, x, repeats)]
        rows += [_entropy_row(dim, dim // divisor) for divisor in (10, 100) if dim // divisor >= 10_000]
        seconds = _median_seconds(lambda: codecs.top_k(x, max(1, dim // 10)), repeats)
        rows.append(shown("top_k 10 %", 4 * dim / seconds / 1e6, "MB/s"))
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
        yield at_most(f"{label} message", len(payload), limit, "bytes")
    else:
        yield shown(f"{label} message", len(payload), "bytes")
    encode_s = _median_seconds(lambda: codec.encode(x), repeats)
    yield _rate_row(f"{label} encode", dim, encode_s, _MIN_ENCODE_MB_PER_S.get(name))
    out = torch.empty(dim)
    decode_s = _median_seconds(lambda: codecs.decode(payload, expected_dim=dim, out=out), repeats)
    yield _rate_row(f"{label} decode", dim, decode_s, _MIN_DECODE_MB_PER_S.get(name))


def _rate_row(name: str, dim: int, seconds: float, asked: float | None) -> Row:
    rate = 4 * dim / seconds / 1e6
    return shown(name, rate, "MB/s") if asked is None else at_least(name, rate, asked, "MB/s")


def _entropy_row(dim: int, k: int) -> Row:
    """Bytes of the coded indices of a random set over the least that any code can do, log2 C(dim, k) bits."""
    indices = torch.randperm(dim, generator=torch.Generator().manual_seed(1))[:k].sort().values
    coding, coded = codecs.encode_indices(indices, dim)
    floor_bits = (math.lgamma(dim + 1) - math.lgamma(k + 1) - math.lgamma(dim - k + 1)) / math.log(2)
    over = 8 * len(coded) / floor_bits
    return at_most(f"indices, k={k:,} ({coding.name.lower()})", over, MAX_OVER_ENTROPY, "x entropy")


def _median_seconds(action: Callable[[], object], repeats: int) -> float:
    action()  # the first call pays for memory that the later ones find mapped
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> int:
    """Measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=REFERENCE_DIM, help="elements of the vector")
    parser.add_argument("--repeats", type=int, default=15, help="runs per figure; the median is shown")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-codecs.json"), help="file of results")
    chosen = parser.parse_args()
    rows = run(chosen.dim, chosen.repeats)
    title = f"Codecs, {chosen.dim:,} elements, one thread, median of {chosen.repeats}: asked and measured"
    return finish(title, rows, chosen.out)


if __name__ == "__main__":
    raise SystemExit(main())

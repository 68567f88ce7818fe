"""Everything that is asked of data-parallel training, beside what was measured.

``make bench-ddp`` or ``python -m gradbus.experiments.bench_ddp``; the exit code is 1 if a figure falls short. Real
processes, one per rank and of one torch thread each, over real DDS on this machine; MNIST as ``GRADBUS_DATA`` says.
About 11 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gradbus import models
from gradbus.experiments import bench_ddp_accuracy, bench_ddp_collectives, bench_ddp_exact, bench_ddp_timing
from gradbus.experiments.bench_ddp_process import RankFailed
from gradbus.experiments.bench_rows import Row, finish


class Part(NamedTuple):
    """``measure`` gives rows, and samples for the file. ``about``: what it is, and its time on 2 cores."""

    measure: Callable[[], tuple[list[Row], dict[str, Any]]]
    about: str


PARTS: dict[str, Part] = {
    "collectives": Part(bench_ddp_collectives.collective_rows, "each against NumPy, worlds 2, 3, 4, 8: 15 s"),
    "lossy": Part(partial(bench_ddp_collectives.collective_rows, lossy=True), "while packets are dropped: 25 s"),
    "equal": Part(bench_ddp_exact.equal_rows, "parameters of all ranks after every step: 15 s"),
    "bits": Part(bench_ddp_exact.bit_equal_rows, "the perceptron against one process: 25 s"),
    "bits-cnn": Part(partial(bench_ddp_exact.bit_equal_rows, model=models.mnist_cnn), "the CNN: 12 s"),
    "sgd": Part(bench_ddp_exact.dense_dgc_rows, "DGC at density 1 against torch.optim.SGD: 15 s"),
    "bytes": Part(bench_ddp_accuracy.bytes_rows, "of a step on the CNN, and of indices: 10 s"),
    "cost": Part(bench_ddp_timing.step_cost_rows, "of compressing and decoding: 2 s"),
    "overlap": Part(bench_ddp_timing.overlap_rows, "waiting on the CNN, with and without: 60 s"),
    "mlp": Part(bench_ddp_accuracy.mlp_rows, "accuracy of the perceptron, 6 runs of 10 epochs: 2 to 3 min"),
    "cnn": Part(bench_ddp_accuracy.cnn_rows, "accuracy of the CNN, 4 runs of 2 epochs: 5 to 6 min"),
}


def run(names: list[str], parts: Mapping[str, Part]) -> tuple[list[Row], dict[str, Any]]:
    """Rows and samples of these parts. One that fails becomes a row that falls short, and the others go on."""
    rows: list[Row] = []
    samples: dict[str, Any] = {"seconds": {}}
    for name in names:
        print(f"measuring: {name} ({parts[name].about})", file=sys.stderr, flush=True)
        started_s = time.perf_counter()
        try:
            more, taken = parts[name].measure()
        except RankFailed as error:
            more, taken = [Row(name, "runs", 0, "", False, str(error).strip().splitlines()[-1])], {}
        samples["seconds"][name] = round(time.perf_counter() - started_s, 1)
        rows += more
        samples |= taken
    return rows, samples


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that are asked for, all by default."""
    listed = "\n".join(f"  {name:12} {part.about}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nparts:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this; may be given several times")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-ddp.json"), help="file of results")
    chosen = parser.parse_args(arguments)
    rows, samples = run(chosen.part or list(PARTS), PARTS)
    return finish("Data-parallel training: asked and measured", rows, chosen.out, samples)


if __name__ == "__main__":
    raise SystemExit(main())

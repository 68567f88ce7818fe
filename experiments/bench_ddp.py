"""Everything that is asked of data-parallel training, beside what was measured.

``make bench-ddp`` or ``python -m gradbus.experiments.bench_ddp``; the exit code is 1 if a figure falls short. Real
processes, one per rank and of one torch thread each, over real DDS on this machine; MNIST as ``GRADBUS_DATA`` says.
About 11 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from gradbus import models
from gradbus.experiments import (
    bench_ddp_accuracy,
    bench_ddp_collectives,
    bench_ddp_exact,
    bench_ddp_timing,
    bench_parts,
)
from gradbus.experiments.bench_parts import Part

PARTS: dict[str, Part] = {
    "collectives": Part(bench_ddp_collectives.collective_rows, "each against NumPy, worlds 2, 3, 4, 8: 15 s"),
    "lossy": Part(partial(bench_ddp_collectives.collective_rows, lossy=True), "while packets are dropped: 25 s"),
    "equal": Part(bench_ddp_exact.equal_rows, "parameters of all ranks after every step: 15 s", needs_mnist=True),
    "bits": Part(bench_ddp_exact.bit_equal_rows, "the perceptron against one process: 25 s", needs_mnist=True),
    "bits-cnn": Part(
        partial(bench_ddp_exact.bit_equal_rows, model=models.mnist_cnn), "the CNN: 12 s", needs_mnist=True
    ),
    "sgd": Part(bench_ddp_exact.dense_dgc_rows, "DGC at density 1 against torch.optim.SGD: 15 s", needs_mnist=True),
    "bytes": Part(bench_ddp_accuracy.bytes_rows, "of a step on the CNN, and of indices: 10 s", needs_mnist=True),
    "cost": Part(bench_ddp_timing.step_cost_rows, "of compressing and decoding: 2 s", needs_mnist=True),
    "overlap": Part(bench_ddp_timing.overlap_rows, "waiting on the CNN, with and without: 60 s", needs_mnist=True),
    "mlp": Part(
        bench_ddp_accuracy.mlp_rows, "accuracy of the perceptron, 6 runs of 10 epochs: 2 to 3 min", needs_mnist=True
    ),
    "cnn": Part(bench_ddp_accuracy.cnn_rows, "accuracy of the CNN, 4 runs of 2 epochs: 5 to 6 min", needs_mnist=True),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that are asked for, all by default."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{bench_parts.listed(PARTS)}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this; may be given several times")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-ddp.json"), help="file of results")
    chosen = parser.parse_args(arguments)
    title = "Data-parallel training: asked and measured"
    return bench_parts.main(title, chosen.part or list(PARTS), PARTS, chosen.out)


if __name__ == "__main__":
    raise SystemExit(main())

"""Everything that is asked of a federated run, beside what was measured.

``make bench-federated`` or ``python -m gradbus.experiments.bench_federated``; the exit code is 1 if a figure falls
short. ``--part`` runs some of it: bytes and codecs take seconds, overhead, memory and determinism some minutes,
accuracy (24 runs of 10 rounds on MNIST) about 20 minutes on 2 cores. ``--dds-only`` measures overhead, durable and
memory with no memory shared between the processes, as between machines.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from gradbus.experiments import bench_accuracy, bench_codecs, bench_overhead
from gradbus.experiments.bench_rows import Row, finish


def _codecs() -> tuple[list[Row], dict[str, Any]]:
    rows = [Row(row.name, row.asked, row.measured, row.unit, row.ok) for row in bench_codecs.run() if row.asked]
    return rows, {}


PARTS = {
    "codecs": _codecs,
    "overhead": bench_overhead.overhead_rows,
    "durable": bench_overhead.durable_rows,
    "memory": bench_overhead.memory_rows,
    "determinism": bench_overhead.determinism_rows,
    "accuracy": bench_accuracy.accuracy_rows,
}
_OVER_DDS = {
    "overhead": partial(bench_overhead.overhead_rows, shared_memory=False),
    "durable": partial(bench_overhead.durable_rows, shared_memory=False),
    "memory": partial(bench_overhead.memory_rows, shared_memory=False),
}


def main() -> int:
    """Run the parts that are asked for, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this; may be given several times")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-federated.json"), help="file of results")
    parser.add_argument("--dds-only", action="store_true", help="everything over DDS, as between machines")
    arguments = parser.parse_args()
    rows: list[Row] = []
    samples: dict[str, Any] = {}
    for name in arguments.part or PARTS:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        more, taken = _OVER_DDS[name]() if arguments.dds_only and name in _OVER_DDS else PARTS[name]()
        rows += more
        samples |= taken
    return finish("Federated runs: asked and measured", rows, arguments.out, samples)


if __name__ == "__main__":
    raise SystemExit(main())

"""Everything that is asked of a federated run, beside what was measured.

``make bench-federated`` or ``python -m gradbus.experiments.bench_federated``; the exit code is 1 if a figure falls
short. MNIST as ``GRADBUS_DATA`` says. About 25 minutes on 2 cores. ``--dds-only`` measures overhead, durable and memory
with no memory shared between the processes, as between machines.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from gradbus.experiments import bench_accuracy, bench_codecs, bench_overhead, bench_parts, bench_sealing
from gradbus.experiments.bench_parts import Part, Taken


def _codecs() -> Taken:
    return [row for row in bench_codecs.run() if row.asked], {}


PARTS: dict[str, Part] = {
    "codecs": Part(_codecs, "bytes and speed of each: 10 s"),
    "overhead": Part(bench_overhead.overhead_rows, "time of a round beside training: 2 min"),
    "durable": Part(bench_overhead.durable_rows, "the same with a checkpoint in every round: 20 s"),
    "memory": Part(bench_overhead.memory_rows, "of the controller, 2 to 32 clients: 2 min"),
    "sealing": Part(partial(bench_sealing.part_rows, bench_sealing.PARTS["round"], 3), "with a key and without: 20 s"),
    "determinism": Part(bench_overhead.determinism_rows, "weights after another order of arrival: 10 s"),
    "accuracy": Part(bench_accuracy.accuracy_rows, "24 runs of 10 rounds on MNIST: 20 min", needs_mnist=True),
}
OVER_DDS: dict[str, Part] = {
    "overhead": PARTS["overhead"]._replace(measure=partial(bench_overhead.overhead_rows, shared_memory=False)),
    "durable": PARTS["durable"]._replace(measure=partial(bench_overhead.durable_rows, shared_memory=False)),
    "memory": PARTS["memory"]._replace(measure=partial(bench_overhead.memory_rows, shared_memory=False)),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that are asked for, all by default."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{bench_parts.listed(PARTS)}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this; may be given several times")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-federated.json"), help="file of results")
    parser.add_argument("--dds-only", action="store_true", help="everything over DDS, as between machines")
    chosen = parser.parse_args(arguments)
    parts = PARTS | OVER_DDS if chosen.dds_only else PARTS
    return bench_parts.main("Federated runs: asked and measured", chosen.part or list(PARTS), parts, chosen.out)


if __name__ == "__main__":
    raise SystemExit(main())

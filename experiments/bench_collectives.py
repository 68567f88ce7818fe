"""``torch.distributed`` over our backend against gloo: what is asked, beside what was measured.

``make bench-collectives`` or ``python -m gradbus.experiments.bench_collectives``; the exit code is 1 if a figure falls
short. Real processes of one torch thread each on this machine, both backends in the same processes, by turns; a figure
is the median of whole repeats. --profile shows where the time of one cell goes instead.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gradbus.experiments import bench_collectives_timing as timing
from gradbus.experiments import bench_parts
from gradbus.experiments.bench_collectives_ddp import step_rows
from gradbus.experiments.bench_collectives_leftovers import big_rows, leftover_rows
from gradbus.experiments.bench_collectives_multicast import multicast_rows
from gradbus.experiments.bench_collectives_profile import print_profile
from gradbus.experiments.bench_collectives_ranks import TRANSPORTS, Transport
from gradbus.experiments.bench_parts import Part, Taken

PARTS = {
    "collectives": "all_reduce and all_gather, worlds 2 and 4: 3 min",
    "multicast": "what goes to all ranks, with multicast and without: 2 min",
    "ddp": "a step of DistributedDataParallel: 3.5 min",
    "leftovers": "of 100 groups, and of a rank that is killed: 1 min",
    "big": "memory for a tensor of 1 GB: 30 s",
}


def parts(chosen: argparse.Namespace) -> dict[str, Part]:
    """All parts, as the options say."""
    transports: Sequence[Transport] = (chosen.transport,) if chosen.transport else tuple(TRANSPORTS)
    sizes = chosen.sizes or timing.SIZES
    measures: dict[str, Callable[[], Taken]] = {
        "collectives": partial(
            timing.cell_rows, _setups(chosen), sizes=sizes, repeats=chosen.repeats or timing.REPEATS
        ),
        "multicast": partial(
            multicast_rows,
            chosen.world and (chosen.world,),
            sizes=chosen.sizes,
            repeats=chosen.repeats or timing.FEW_REPEATS,
        ),
        # Blocks of two steps. The two differ by a hundredth, and repeats scatter by two of them.
        "ddp": partial(step_rows, transports, repeats=6 * (chosen.repeats or timing.FEW_REPEATS) + 1),
        "leftovers": partial(leftover_rows, transports[0]),
        "big": partial(big_rows, transports),
    }
    return {name: Part(measures[name], about) for name, about in PARTS.items()}


def size_of(text: str) -> int:
    """The bytes in "64KiB". Raises ArgumentTypeError: it is no size, or not of whole float32."""
    found = re.fullmatch(r"(\d+) *(KiB|MiB|B?)", text)
    size = int(found[1]) * {"KiB": timing.KIB, "MiB": timing.MIB}.get(found[2], 1) if found else 0
    if size < 4 or size % 4:
        raise argparse.ArgumentTypeError(f"a size is a multiple of 4 bytes, such as 64KiB, got {text!r}")
    return size


def _setups(chosen: argparse.Namespace) -> list[timing.Setup]:
    ranks, transport = chosen.world, chosen.transport
    return [it for it in timing.SETUPS if ranks in (None, it.world) and transport in (None, it.transport)]


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that are asked for, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this; may be given several times")
    parser.add_argument(
        "--repeats",
        type=int,
        help=f"whole repeats, for medians; by default {timing.REPEATS}, or {timing.FEW_REPEATS} of what takes long",
    )
    parser.add_argument("--sizes", nargs="+", type=size_of, help="of tensors, such as 4KiB 1MiB")
    parser.add_argument("--world", type=int, help="only set-ups with so many ranks; with --profile any number")
    parser.add_argument(
        "--transport", choices=list(TRANSPORTS), help="only this; one-host: what the backend picks by itself"
    )
    parser.add_argument("--profile", action="store_true", help="where the time goes, for each of --sizes")
    parser.add_argument("--collective", choices=["all_reduce", "all_gather"], default="all_reduce", help="to profile")
    parser.add_argument("--seconds", type=float, default=1.0, help="of calls to profile")
    parser.add_argument("--ranks", nargs="+", type=int, default=[0], help="whose profiles are printed")
    parser.add_argument("--out", "--json", type=Path, help="file of results")
    chosen = parser.parse_args(arguments)
    if chosen.profile:
        return _profile(chosen)
    wanted = chosen.part or list(PARTS)
    if "collectives" in wanted and not _setups(chosen):
        parser.error(f"nothing is asked of {chosen.world or 'any'} ranks, {chosen.transport or 'any transport'}")
    title = "torch.distributed, ours against gloo: asked and measured"
    return bench_parts.main(title, wanted, parts(chosen), chosen.out or Path("runs/bench-collectives.json"))


def _profile(chosen: argparse.Namespace) -> int:
    found = {}
    for size in chosen.sizes or [timing.KIB * 4]:
        found[size] = print_profile(
            chosen.collective, size, chosen.transport or "one-host", chosen.world or 2, chosen.seconds, chosen.ranks
        )
    if chosen.out is not None:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m fault_simulation --seeds 300``, or ``make simulate-faults SEEDS=300``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fault_simulation.flavours import flavour_of
from fault_simulation.seeds import Totals, check_flavour, first_seed, parse_size
from fault_simulation.session import prepared

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]
SHOWN_FAILURES = 3  # in full, for each process; of all others, the seed
_TOTALS = "TOTALS "  # begins the last line of a process that runs a share of the seeds


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fault_simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds to run")
    parser.add_argument("--first", default="tree", help="first seed: a number, or tree for the one of this commit")
    parser.add_argument("--flavour", default="any", help="settings of the runs; any: each seed has its own")
    parser.add_argument("--size", default="3x6", help="clients and rounds of each run")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run seeds side by side")
    parser.add_argument("--seed", type=int, help="run this seed only, and show what happens")
    parser.add_argument("--keep", help="with --seed: the numbers of its faults that happen, or none")
    parser.add_argument("--shrink", action="store_true", help="with --seed: remove faults as long as it still fails")
    parser.add_argument("--digests", action="store_true", help="print the digest of each seed")
    parser.add_argument("--mutant", default="", help="plant this fault in the product: see mutants.py")
    parser.add_argument("--until-found", action="store_true", help="end with the first seed that fails")
    parser.add_argument("--found", action="store_true", help="run those that have shown a fault of the product")
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)  # K/N: of a process of this program
    return parser.parse_args(arguments)


def _run_one(options: argparse.Namespace) -> int:
    from fault_simulation import sweep
    from fault_simulation.world import World

    flavour = flavour_of(options.seed) if options.flavour == "any" else options.flavour
    keep: list[int] | None = None
    if options.keep:
        keep = [] if options.keep == "none" else [int(number) for number in options.keep.split(",")]
    if options.shrink:
        world, keep = sweep.shrink(options.seed, flavour, parse_size(options.size))
    else:
        world = sweep.run(World(options.seed, flavour, size=parse_size(options.size), keep=keep, keep_trace=True))
    if not options.shrink:
        print(*world.trace.lines, sep="\n")
    print(sweep.story(world, keep))
    print(f"  digest: {world.trace.digest}")
    return 1 if world.findings else 0


def _run_found() -> int:
    from fault_simulation.found import FOUND
    from fault_simulation.sweep import run, story
    from fault_simulation.world import World

    failed = 0
    for found in FOUND:
        world = run(World(found.seed, found.flavour, plan=found.plan))
        missed = [fault for fault in found.plan if fault not in world.happened]
        if world.findings or missed:
            failed += 1
            print(f"{found.effect}\n{story(world)}", *(f"never happened: {fault}" for fault in missed), sep="\n")
    print(f"{len(FOUND)} faults that were found, {failed} are here again")
    return 1 if failed else 0


def _run_share(options: argparse.Namespace) -> int:
    """Run each N-th seed, and print what came of them as JSON at last."""
    from fault_simulation import sweep

    share, shares = map(int, options.share.split("/"))
    seeds = range(int(options.first) + share, int(options.first) + options.seeds, shares)
    totals = Totals()
    for world, one in sweep.run_seeds(seeds, options.flavour, parse_size(options.size)):
        totals.add(one)
        if options.digests:
            print(world.seed, world.flavour, world.trace.digest)
        if one.failed and len(totals.failed) <= SHOWN_FAILURES:
            print(sweep.story(world), flush=True)
        if one.failed and options.until_found:
            break
    print(_TOTALS + json.dumps(totals.to_json()))
    return 1 if totals.failed else 0


def _run_all(options: argparse.Namespace) -> int:
    """Have processes run the seeds, and report what came of all."""
    first, source = first_seed(ROOT) if options.first == "tree" else (int(options.first), "as given")
    print(f"{options.seeds} seeds from {first} on ({source}), flavour {options.flavour}", flush=True)
    began_s, totals, is_broken = time.perf_counter(), Totals(), False
    common = [sys.executable, "-P", "-m", "fault_simulation", "--seeds", str(options.seeds), "--first", str(first)]
    common += ["--flavour", options.flavour, "--mutant", options.mutant, "--size", options.size]
    common += [name for name in ("--digests", "--until-found") if getattr(options, name[2:].replace("-", "_"))]
    running = [
        subprocess.Popen(
            [*common, "--share", f"{share}/{options.jobs}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE)},
        )
        for share in range(options.jobs)
    ]
    for process in running:
        lines = process.communicate()[0].splitlines()
        is_complete = bool(lines) and lines[-1].startswith(_TOTALS)
        if is_complete:
            totals.add(Totals(**json.loads(lines.pop().removeprefix(_TOTALS))))
        else:
            is_broken = True
            lines.append(f"a process ended with exit code {process.returncode} before its seeds were done")
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    seconds = time.perf_counter() - began_s
    print(
        f"{totals.seeds} seeds in {seconds:.0f} s, {1e3 * totals.cpu_s / max(1, totals.seeds):.0f} ms of CPU each: "
        f"{totals.faults} faults, {totals.callbacks} callbacks, {totals.virtual_s / 3600:.1f} h of virtual time; "
        f"{len(totals.failed)} seeds failed"
    )
    for command in totals.failed:
        print(f"  replay: {command}")
    return 1 if totals.failed or is_broken else 0


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for. Returns 0 if all holds."""
    options = _parsed(arguments)
    try:
        check_flavour(options.flavour)
        parse_size(options.size)
        if options.seed is None and not options.share and not options.found:
            return _run_all(options)
        with prepared():
            if options.mutant:
                from fault_simulation.mutants import plant

                plant(options.mutant)
            if options.found:
                return _run_found()
            return _run_share(options) if options.share else _run_one(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m fault_simulation --seeds 300``, or ``make simulate-faults SEEDS=300``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fault_simulation import planted_table
from fault_simulation.flavours import flavour_of
from fault_simulation.mutations import find, select
from fault_simulation.seeds import MEMORY, ZENOH, Totals, check_flavour, first_seed, parse_size
from fault_simulation.session import prepared

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]
SHOWN_FAILURES = 3  # in full, for each process; of all others, the seed
_RESULT = "RESULT "  # begins the last line of a process that has done its share


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fault_simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds to run")
    parser.add_argument("--first", default="tree", help="first seed: a number, tree for that of this commit, or today")
    parser.add_argument("--flavour", default="any", help="settings of the runs; any: each seed has its own")
    parser.add_argument("--transport", choices=(MEMORY, ZENOH), default=MEMORY, help="network under the bus")
    parser.add_argument("--size", default="3x6", help="clients and rounds of each run")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run seeds side by side")
    parser.add_argument("--seed", type=int, help="run this seed only, and show what happens")
    parser.add_argument("--keep", help="with --seed: the numbers of its faults that happen, or none")
    parser.add_argument("--shrink", action="store_true", help="with --seed: remove faults as long as it still fails")
    parser.add_argument("--digests", action="store_true", help="print the digest of each seed")
    parser.add_argument(
        "--plant", default="", help="faults of mutations.py, of which each is looked for: a name, a subject, or all"
    )
    parser.add_argument("--write", action="store_true", help="with --plant: write the results into docs/reliability.md")
    parser.add_argument("--found", action="store_true", help="run those that have shown a fault of the product")
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)  # K/N: of a process of this program
    return parser.parse_args(arguments)


def _run_one(options: argparse.Namespace) -> int:
    from fault_simulation import sweep
    from fault_simulation.worlds import new_world

    flavour = flavour_of(options.seed) if options.flavour == "any" else options.flavour
    keep: list[int] | None = None
    if options.keep:
        keep = [] if options.keep == "none" else [int(number) for number in options.keep.split(",")]
    if options.shrink:
        world, keep = sweep.shrink(options.seed, flavour, parse_size(options.size), options.transport)
    else:
        size, transport = parse_size(options.size), options.transport
        world = new_world(options.seed, flavour, size=size, keep=keep, transport=transport)
        world.trace.keep_all()
        sweep.run(world)
    if not options.shrink:
        print(*world.trace.lines, sep="\n")
    print(sweep.story(world, keep, options.plant))
    print(f"  digest: {world.trace.digest}")
    return 1 if world.findings else 0


def _run_found() -> int:
    from fault_simulation.found import FOUND
    from fault_simulation.sweep import run, story
    from fault_simulation.worlds import new_world

    failed = 0
    for found in FOUND:
        world = run(new_world(found.seed, found.flavour, plan=found.plan, transport=found.transport))
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
    for world, one in sweep.run_seeds(seeds, options.flavour, parse_size(options.size), transport=options.transport):
        totals.add(one)
        if options.digests:
            print(world.seed, world.flavour, world.trace.digest)
        if one.failed and len(totals.failed) <= SHOWN_FAILURES:
            print(sweep.story(world), flush=True)
    print(_RESULT + json.dumps(totals.to_json()))
    return 1 if totals.failed else 0


def _plant_share(options: argparse.Namespace) -> int:
    """Plant each N-th fault, and print what came of them as JSON at last."""
    from fault_simulation import planting, sweep

    share, shares = map(int, options.share.split("/"))
    chosen = select(options.plant)
    seeds = range(int(options.first), int(options.first) + options.seeds)
    found: list[planted_table.Outcome] = []
    for outcome, world in planting.search(
        chosen[share::shares], seeds, options.flavour, parse_size(options.size), ROOT, options.transport
    ):
        found.append(outcome)
        print(outcome, flush=True)
        if world is not None and len(chosen) == 1:
            print(sweep.story(world, planted=outcome.name), flush=True)
    print(_RESULT + json.dumps(found))
    return 0


def _share_out(options: argparse.Namespace, first: int) -> tuple[list[Any], bool]:
    """Have processes do a share of the work each, and print what they print. Returns the results of those that were
    done, and whether all were."""
    common = [sys.executable, "-P", "-m", "fault_simulation", "--seeds", str(options.seeds), "--first", str(first)]
    common += ["--flavour", options.flavour, "--plant", options.plant, "--size", options.size]
    common += ["--transport", options.transport]
    common += ["--digests"] if options.digests else []
    running = [
        subprocess.Popen(
            [*common, "--share", f"{share}/{options.jobs}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE)},
        )
        for share in range(options.jobs)
    ]
    results: list[Any] = []
    for process in running:
        lines = process.communicate()[0].splitlines()
        result = lines.pop() if lines and lines[-1].startswith(_RESULT) else ""
        if result:
            results.append(json.loads(result.removeprefix(_RESULT)))
        else:
            lines.append(f"a process ended with exit code {process.returncode} before its share was done")
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    return results, len(results) == len(running)


def _run_all(options: argparse.Namespace) -> int:
    """Run all seeds, and report what came of them."""
    first, source = first_seed(ROOT, options.first)
    print(f"{options.seeds} seeds from {first} on ({source}), flavour {options.flavour}", flush=True)
    began_s, totals = time.perf_counter(), Totals()
    results, is_complete = _share_out(options, first)
    for result in results:
        totals.add(Totals(**result))
    seconds = time.perf_counter() - began_s
    print(
        f"{totals.seeds} seeds in {seconds:.0f} s, {1e3 * totals.cpu_s / max(1, totals.seeds):.0f} ms of CPU each: "
        f"{totals.faults} faults, {totals.callbacks} callbacks, {totals.virtual_s / 3600:.1f} h of virtual time; "
        f"{len(totals.failed)} seeds failed"
    )
    for command in totals.failed:
        print(f"  replay: {command}")
    return 0 if is_complete and not totals.failed else 1


def _plant_all(options: argparse.Namespace) -> int:
    """Look for each of the chosen faults. Returns 0 if all are found."""
    first, source = first_seed(ROOT, options.first)
    options.jobs = min(options.jobs, len(select(options.plant)))
    print(f"planted faults, each in up to {options.seeds} seeds from {first} on ({source})", flush=True)
    results, is_complete = _share_out(options, first)
    outcomes = [planted_table.Outcome(*one) for result in results for one in result]
    needed = sorted(one.seeds for one in outcomes if one.is_found and one.seeds)
    if needed:
        print(f"{len(needed)} found by seeds: {statistics.median(needed):g} seeds in the median, {needed[-1]} at most")
    if options.write:
        planted_table.write(ROOT / planted_table.PAGE, outcomes)
    missed = [one.name for one in outcomes if not one.is_found]
    print(*(f"not found: {name}" for name in missed), sep="\n", end="\n" if missed else "")
    return 0 if is_complete and not missed else 1


def _run_prepared(options: argparse.Namespace) -> int:
    with prepared(), contextlib.ExitStack() as planted:
        if options.found:
            return _run_found()
        if options.share:
            return _plant_share(options) if options.plant else _run_share(options)
        if options.plant:
            from fault_simulation.sweep import run_calm

            run_calm(parse_size(options.size))
            planted.enter_context(find(options.plant).planted())
        return _run_one(options)


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for. Returns 0 if all holds."""
    options = _parsed(arguments)
    try:
        check_flavour(options.flavour)
        parse_size(options.size)
        if options.seed is None and not options.share and not options.found:
            return _plant_all(options) if options.plant else _run_all(options)
        return _run_prepared(options)
    except (ValueError, LookupError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

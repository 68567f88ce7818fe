"""Runs of many seeds, of one seed again, and of one seed with fewer and fewer faults. In a prepared process."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator

from fault_simulation.flavours import flavour_of
from fault_simulation.seeds import Totals, replay_command
from fault_simulation.session import collect
from fault_simulation.world import World

SHOWN_FINDINGS = 5
COLLECT_EVERY = 10  # seeds


def run_seeds(seeds: Iterable[int], flavour: str) -> Iterator[tuple[World, Totals]]:
    """Run seeds one after the other. Yields each world, which is over, and what to add to the totals.

    Args:
        flavour: a name, or ``any``: each seed has one of its own.
    """
    for number, seed in enumerate(seeds, 1):
        began_s = time.process_time()
        world = World(seed, flavour_of(seed) if flavour == "any" else flavour)
        world.run()
        failed = [replay_command(seed, world.flavour)] if world.findings else []
        yield (
            world,
            Totals(1, len(world.plan), world.loop.steps, world.virtual_s, time.process_time() - began_s, failed),
        )
        if number % COLLECT_EVERY == 0:
            collect()


def story(world: World, keep: Collection[int] | None = None) -> str:
    """Return what a person needs to know of a run in which something does not hold."""
    faults = [f"    {number}  {fault}" for number, fault in enumerate(world.drawn) if keep is None or number in keep]
    more = len(world.findings) - SHOWN_FINDINGS
    return "\n".join(
        [
            f"seed {world.seed}, flavour {world.flavour}: what does not hold:",
            *(f"    {text}" for text in world.findings[:SHOWN_FINDINGS]),
            *([f"    and {more} more"] if more > 0 else []),
            f"  circumstances: {world.circumstances}",
            "  faults:" if faults else "  no faults",
            *faults,
            "  the last events:",
            *(f"    {line}" for line in world.trace.last()),
            f"  replay: {replay_command(world.seed, world.flavour, keep)}",
        ]
    )


def shrink(seed: int, flavour: str) -> tuple[World, list[int]]:
    """Remove faults from the plan of a seed as long as something still does not hold. Returns the last run that fails,
    and the numbers of its faults.

    Raises:
        ValueError: all holds with all faults.
    """
    failing = World(seed, flavour)
    failing.run()
    if not failing.findings:
        raise ValueError(f"seed {seed}, flavour {flavour}: all holds, so there is nothing to shrink")
    keep, smaller = list(range(len(failing.drawn))), True
    while smaller:
        smaller = False
        for number in list(keep):
            fewer = [one for one in keep if one != number]
            world = World(seed, flavour, keep=fewer)
            world.run()
            if world.findings:
                failing, keep, smaller = world, fewer, True
    return failing, keep

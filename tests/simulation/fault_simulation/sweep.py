"""Runs of many seeds, of one seed again, and of one seed with fewer and fewer faults. In a prepared process."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Iterable, Iterator

from fault_simulation.findings import SAME_MODEL, Finding
from fault_simulation.flavours import FLAVOURS, flavour_of
from fault_simulation.seeds import MEMORY, ZENOH, Totals, replay_command
from fault_simulation.session import collect
from fault_simulation.world import World
from fault_simulation.worlds import new_world

SHOWN_FINDINGS = 5
COLLECT_EVERY = 10  # seeds


@functools.cache
def undisturbed_crc32(flavour: str, size: tuple[int, int]) -> int:
    """Return the CRC-32 of the last model of a run without faults. Raises RuntimeError: something does not hold in
    it."""
    world = new_world(0, flavour, size=size, plan=(), is_calm=True)
    world.run()
    crc32 = world.fixed_crc32()
    if world.findings or crc32 is None:
        raise RuntimeError(f"a run of flavour {flavour} without faults failed: {world.findings}")
    return crc32


def run_calm(size: tuple[int, int]) -> None:
    """Run without faults what is compared later: before a fault is planted."""
    for name, flavour in FLAVOURS.items():
        if flavour.is_fixed:
            undisturbed_crc32(name, size)


def run(world: World) -> World:
    """Run a world, and compare its last model with that of a run without faults, where they must be equal."""
    world.run()
    crc32 = world.fixed_crc32() if FLAVOURS[world.flavour].is_fixed else None
    if crc32 is not None and crc32 != undisturbed_crc32(world.flavour, world.size):
        text = "all clients counted in all rounds, and the model differs from that of a run without faults"
        world.findings.append(Finding(SAME_MODEL, world.virtual_s, text))
    return world


def run_seeds(
    seeds: Iterable[int], flavour: str, size: tuple[int, int], planted: str = "", transport: str = MEMORY
) -> Iterator[tuple[World, Totals]]:
    """Run seeds one after the other. Yields each world, which is over, and what to add to the totals.

    Args:
        flavour: a name, or ``any``: each seed has one of its own. planted: the fault that is planted in this process.
    """
    for number, seed in enumerate(seeds, 1):
        began_s = time.process_time()
        drawn = flavour_of(seed) if flavour == "any" else flavour
        world = run(new_world(seed, drawn, size=size, transport=transport))
        again = replay_command(seed, drawn, size, planted=planted, transport=transport)
        failed = [again] if world.findings else []
        yield (
            world,
            Totals(1, len(world.plan), world.loop.steps, world.virtual_s, time.process_time() - began_s, failed),
        )
        if number % COLLECT_EVERY == 0:
            collect()


def story(world: World, keep: Collection[int] | None = None, planted: str = "") -> str:
    """Return what a person needs to know of a run in which something does not hold. ``planted``: as in run_seeds."""
    transport = ZENOH if world.is_relayed else MEMORY
    faults = [f"    {number}  {fault}" for number, fault in enumerate(world.drawn) if keep is None or number in keep]
    more = len(world.findings) - SHOWN_FINDINGS
    return "\n".join(
        [
            f"seed {world.seed}, flavour {world.flavour}: {'what does not hold:' if world.findings else 'all holds'}",
            *(f"    {text}" for text in world.findings[:SHOWN_FINDINGS]),
            *([f"    and {more} more"] if more > 0 else []),
            f"  circumstances: {world.circumstances}",
            "  faults:" if faults else "  no faults",
            *faults,
            "  the last events:",
            *(f"    {line}" for line in world.trace.last()),
            f"  replay: {replay_command(world.seed, world.flavour, world.size, keep, planted, transport)}",
        ]
    )


def shrink(seed: int, flavour: str, size: tuple[int, int], transport: str = MEMORY) -> tuple[World, list[int]]:
    """Remove faults from the plan of a seed as long as something still does not hold. Returns the last run that fails,
    and the numbers of its faults.

    Raises:
        ValueError: all holds with all faults.
    """
    failing = run(new_world(seed, flavour, size=size, transport=transport))
    if not failing.findings:
        raise ValueError(f"seed {seed}, flavour {flavour}: all holds, so there is nothing to shrink")
    keep, smaller = list(range(len(failing.drawn))), True
    while smaller:
        smaller = False
        for number in list(keep):
            fewer = [one for one in keep if one != number]
            world = run(new_world(seed, flavour, size=size, keep=fewer, transport=transport))
            if world.findings:
                failing, keep, smaller = world, fewer, True
    return failing, keep

"""What is said of in-network aggregation, simulated: ``python -m gradbus.experiments.studies.claims [PART ...]``.

Parts, each a table: ``forms`` times against the closed forms; ``memory`` RA-INA against its formula; ``one-job`` RA-INA
against a ring and parameter servers; ``jobs`` several jobs that share a switch, against a ring and SwitchML;
``completion`` the m and r at which two claims of job completion times hold, ``both`` those at which both do; ``loss``.
An iteration has no overlap: it is K / B / r of computing, then the exchange. All times are those of the clock of the
simulation, so the tables are the same on each machine.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradbus.commands.simulate import closed_forms as forms
from gradbus.commands.simulate.closed_forms import Fabric
from gradbus.commands.simulate.in_network import simulate_aggregation
from gradbus.commands.simulate.scenario import AggregationOutcome, Scenario
from gradbus.commands.simulate.topology import LinkSpec

RESNET50 = 102_400_000
WIRE = LinkSpec(rate_bytes_s=12.5e9, latency_s=2e-6)
UPLINK = LinkSpec(rate_bytes_s=12.5e9, latency_s=1e-6)
LOCAL = LinkSpec(rate_bytes_s=150e9, latency_s=1e-6)
FULL_S = RESNET50 / WIRE.rate_bytes_s  # K / B
MEMORY = (0.0, 0.25, 0.5, 0.75, 1.0)
SHARES = (0.5, 1.0, 2.0, 4.0, 8.0)  # r

Row = Sequence[str]


def simulated(kind: Any, fabric: Fabric, blocks: int, **more: Any) -> AggregationOutcome:
    """ResNet-50's gradient, summed in one way."""
    return simulate_aggregation(Scenario(kind=kind, fabric=fabric, gradient_bytes=RESNET50, blocks=blocks, **more))


def closed_forms(worlds: Sequence[int], blocks: int) -> Iterator[Row]:
    """Simulated times against the closed forms, without loss. The ring has a block for each rank."""
    yield ("N", "way", "blocks", "simulated, ms", "closed form, ms", "ratio")
    path = replace(WIRE, latency_s=2 * WIRE.latency_s)
    for world in worlds:
        racks, one = Fabric(world=world, network=WIRE, uplink=UPLINK, hosts_per_leaf=16), fabric_at_one(world)
        cases: list[tuple[str, Fabric, int, dict[str, int], float]] = [
            ("ina", one, blocks, {}, forms.ina_s(RESNET50, blocks, one)),
            ("hina", racks, blocks, {}, forms.hina_s(RESNET50, blocks, racks)),
            ("mtina", racks, blocks, {"trees": 4}, forms.mtina_s(RESNET50, blocks, racks, trees=4)),
            ("cina", racks, blocks, {}, forms.cina_s(RESNET50, blocks, racks)),
            ("ps", one, blocks, {}, forms.parameter_server_s(RESNET50, world, WIRE, servers=1, blocks=blocks)),
            ("ring", one, world, {}, forms.ring_s(RESNET50, world, path)),
        ]
        for kind, fabric, count, more, formula_s in cases:
            time_s = simulated(kind, fabric, count, **more).time_s
            times = (f"{1e3 * time_s:.4f}", f"{1e3 * formula_s:.4f}", f"{time_s / formula_s:.4f}")
            yield (f"{world}", kind, f"{count}", *times)


def fabric_at_one(world: int, wire: LinkSpec = WIRE) -> Fabric:
    """All hosts at one switch."""
    return Fabric(world=world, network=wire)


@dataclass(frozen=True)
class RingAssisted:
    """Tells how RA-INA is run: groups under way, and in a gradient. Slots for all groups under way are m = 1."""

    world: int
    window_groups: int
    groups: int

    def run(self, memory: float, **more: Any) -> AggregationOutcome:
        """With this share of the slots, for each job."""
        slots = round(memory * self.window_groups * more.get("jobs", 1)) * self.world
        wire = more.pop("wire", WIRE)
        return simulated(
            "ra-ina",
            fabric_at_one(self.world, wire),
            self.groups * self.world,
            slots=slots,
            window_blocks=self.window_groups * self.world,
            **more,
        )


def memory_of_ring_assisted() -> Iterator[Row]:
    """RA-INA with some of the slots for its window, against ``(K / B) c / (1 + m (c - 1))``.

    The formula takes it that a block finds a slot when it begins, or goes all the way around the ring (``at first``).
    The protocol moves groups to the switch as slots come free (``at any hop``).
    """
    yield ("N", "groups under way", "m", "formula", "slots at first", "", "at any hop", "", "link busy")
    cases = ((4, 16, 384), (4, 64, 768), (8, 4, 128), (8, 16, 192), (8, 64, 512), (16, 16, 96), (16, 64, 256))
    for case in (RingAssisted(*numbers) for numbers in cases):
        for memory in (number / 8 for number in range(9)):
            formula = forms.ring_assisted_s(RESNET50, case.world, WIRE, memory=memory)
            cells: list[str] = []
            for grabs_late in (False, True):
                found = case.run(memory, grabs_late=grabs_late)
                cells += [f"{found.time_s / FULL_S:.3f}", f"{found.time_s / formula - 1:+.1%}"]
            busy = found.busy_by_link["0 up"] / found.time_s
            start = (f"{case.world}", f"{case.window_groups}", f"{memory:g}", f"{formula / FULL_S:.3f}")
            yield (*start, *cells, f"{busy:.0%}")


def one_job() -> Iterator[Row]:
    """From which r on RA-INA is 1.57 times as fast as a ring and 2.0 times as parameter servers, with enough slots."""
    yield (
        "N",
        "against",
        "exchange / (K / B)",
        "RA-INA / (K / B)",
        *(f"r = {r:g}" for r in SHARES),
        "claim",
        "holds from r",
    )
    for world in (4, 8, 16, 32):
        fabric = fabric_at_one(world)
        assisted = RingAssisted(world, 16, 2048 // world).run(1.0).time_s / FULL_S
        others = [
            ("ring", 1.57, simulated("ring", fabric, 256).time_s),
            ("N servers", 2.0, simulated("ps", fabric, 256, trees=world).time_s),
            ("N / 2 servers", 2.0, simulated("ps", fabric, 256, trees=world // 2).time_s),
            ("1 server", 2.0, simulated("ps", fabric, 64).time_s),
        ]
        for name, wanted, time_s in others:
            exchange = time_s / FULL_S
            gains = [(1 + r * exchange) / (1 + r * assisted) for r in SHARES]
            margin = exchange - wanted * assisted
            yield (
                f"{world}",
                name,
                f"{exchange:.2f}",
                f"{assisted:.2f}",
                *(f"{gain:.2f}" for gain in gains),
                f"{wanted:.2f}",
                f"{(wanted - 1) / margin:.2f}" if margin > 0 else "never",
            )


def several_jobs(jobs: int = 4, world: int = 8) -> Iterator[Row]:
    """Completion times of jobs that share a switch and begin one after the other. Memory is m of what each needs."""
    yield ("m", "r", "ring", "SwitchML", "RA-INA", "against SwitchML", "against the ring")
    wire = replace(WIRE, latency_s=2e-5)
    groups, window = 64, 8
    blocks = groups * world
    block_s = FULL_S / blocks
    pool = round(2 * (block_s + wire.latency_s) / block_s)  # blocks of a round trip
    for memory in MEMORY[1:]:
        for r in (0.5, 1.0, 2.0, 4.0):
            compute_s = FULL_S / r
            turns = tuple(job / jobs * (compute_s + FULL_S) for job in range(jobs))
            more = {"iterations": 2, "compute_s": compute_s}
            ring = simulated("ring", fabric_at_one(world, wire), blocks, window_blocks=window * world, **more)
            shared = {"jobs": jobs, "starts_s": turns, **more}
            static = simulated(
                "switchml", fabric_at_one(world, wire), blocks, slots=2 * max(1, round(memory * pool)) * jobs, **shared
            )
            assisted = RingAssisted(world, window, groups).run(memory, wire=wire, **shared)
            times = [sum(one.job_s) / len(one.job_s) for one in (ring, static, assisted)]
            yield (
                f"{memory:.2f}",
                f"{r:g}",
                *(f"{1e3 * time_s:.1f} ms" for time_s in times),
                f"{times[2] / times[1] - 1:+.1%}",
                f"{times[2] / times[0] - 1:+.1%}",
            )


SAVED = {"SwitchML": 0.254, "the ring": 0.181}
"""By which share jobs are said to end sooner with RA-INA than with each of them."""
FAR_WIRE = replace(WIRE, latency_s=4e-5)  # a round trip is 12 blocks of 1,024, so SwitchML has twelfths of its slots
COMPLETION_BLOCKS = 1024
LEAST_SHARE, LEAST_MEMORY = 1 / 16, 1 / 16  # where bisection begins

Times = Callable[[float, float], dict[str, float]]
"""Completion times of RA-INA, SwitchML and the ring, in K / B, given m and r."""


def static_memory_s(gradient_bytes: float, link: LinkSpec, *, memory: float) -> float:
    """A switch with fixed slots, SwitchML: ``K / (B min(m, 1))``.

    Args:
        memory: m, the slots that a job has, as a share of those that keep its link busy.
    """
    return gradient_bytes / (link.rate_bytes_s * min(memory, 1.0))


def exchange_share_for(wanted: float, factor: float) -> float:
    """Return the r from which on a speed-up is at least ``wanted``, s: ``(s - 1) / (c - s)``.

    Infinity where none is enough: no speed-up reaches c.
    """
    if wanted <= 1:
        return 0.0
    return (wanted - 1) / (factor - wanted) if factor > wanted else math.inf


def times_by_formula(world: int) -> Times:
    """Return the times of one iteration, without overlap: K / (B r) of computing, then the exchange by its closed
    form."""

    def times(memory: float, share: float) -> dict[str, float]:
        assisted_s = forms.ring_assisted_s(RESNET50, world, WIRE, memory=memory)
        static_s = static_memory_s(RESNET50, WIRE, memory=memory)
        ring_s = FULL_S * forms.ring_factor(world)
        exchanges = {"RA-INA": assisted_s, "SwitchML": static_s, "the ring": ring_s}
        return {name: 1 / share + seconds / FULL_S for name, seconds in exchanges.items()}

    return times


def times_by_simulation(world: int, jobs: int) -> Times:
    """Return the times of jobs that begin one after the other and share a switch, two iterations each. Both switches
    have m of what each needs itself: SwitchML the blocks of a round trip, twice, RA-INA the groups under way."""
    block_s = FULL_S / COMPLETION_BLOCKS
    pool = round(2 * (block_s + FAR_WIRE.latency_s) / block_s)
    window, fabric = 16, fabric_at_one(world, FAR_WIRE)

    @functools.cache
    def times(memory: float, share: float) -> dict[str, float]:
        compute_s = FULL_S / share
        turns = tuple(job / jobs * (compute_s + FULL_S) for job in range(jobs))
        more: dict[str, Any] = {"iterations": 2, "compute_s": compute_s}
        shared = {"jobs": jobs, "starts_s": turns, **more}
        found = {
            "RA-INA": RingAssisted(world, window, COMPLETION_BLOCKS // world).run(memory, wire=FAR_WIRE, **shared),
            "SwitchML": simulated(
                "switchml", fabric, COMPLETION_BLOCKS, slots=2 * max(1, round(memory * pool)) * jobs, **shared
            ),
            "the ring": simulated("ring", fabric, COMPLETION_BLOCKS, window_blocks=window * world, **more),
        }
        return {name: sum(one.job_s) / len(one.job_s) / FULL_S / 2 for name, one in found.items()}

    return times


def saved(times: Mapping[str, float], other: str) -> float:
    """The share of a job's time that RA-INA saves against the other one."""
    return 1 - times["RA-INA"] / times[other]


def crossing(margin: Callable[[float], float], low: float, high: float, *, steps: int) -> float | None:
    """Return where ``margin`` changes its sign between ``low`` and ``high``, by bisection; None: it has the same at
    both."""
    is_positive = margin(low) > 0
    if is_positive == (margin(high) > 0):
        return None
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (margin(middle) > 0) == is_positive else (low, middle)
    return math.sqrt(low * high)


def share_at(times: Times, other: str, memory: float, *, steps: int) -> float:
    """The r from which on the claim about ``other`` holds with this m; 0: also with 1 / 16; infinity: not with 64."""

    def margin(share: float) -> float:
        return saved(times(memory, share), other) - SAVED[other]

    if margin(LEAST_SHARE) > 0:
        return 0.0
    return crossing(margin, LEAST_SHARE, 64.0, steps=steps) or math.inf


def memory_at(times: Times, other: str, share: float, *, steps: int) -> str:
    """The m from which on, or up to which, the claim about ``other`` holds with this r."""

    def margin(memory: float) -> float:
        return saved(times(memory, share), other) - SAVED[other]

    memory = crossing(margin, LEAST_MEMORY, 1.0, steps=steps)
    if memory is None:
        return "always" if margin(1.0) > 0 else "never"
    return f"{'up to' if margin(LEAST_MEMORY) > 0 else 'from'} {memory:.2f}"


def both_at(times: Times, *, steps: int) -> tuple[float, float] | None:
    """The m and r at which both claims hold exactly. More memory makes the claim about the ring hold from a smaller r
    on, and that about SwitchML from a larger one."""

    def is_harder_for_ring(memory: float) -> float:
        shares = [share_at(times, other, memory, steps=steps) for other in ("the ring", "SwitchML")]
        return 1.0 if shares[0] > shares[1] else -1.0

    memory = crossing(is_harder_for_ring, LEAST_MEMORY, 1.0, steps=steps)
    return None if memory is None else (memory, share_at(times, "the ring", memory, steps=steps))


def completion() -> Iterator[Row]:
    """The m and r at which jobs end 25.4 % sooner than with SwitchML and 18.1 % sooner than by a ring: for each m the r
    from which on, for each r the m; then both at once, and what the simulator has there."""
    memories, shares = (0.25, 0.375, 0.5, 0.625, 0.75, 1.0), (0.5, 1.0, 2.0, 4.0)
    yield (
        "N",
        "by",
        "sooner than",
        *(f"m = {memory:g}: from r" for memory in memories),
        *(f"r = {share:g}: m" for share in shares),
    )
    cases: list[tuple[int, str, Times, int]] = [
        (world, "the formulas", times_by_formula(world), 40) for world in (4, 6, 8, 16, 32)
    ]
    cases += [(8, f"simulation, jobs: {jobs}", times_by_simulation(8, jobs), 7) for jobs in (1, 4)]
    for world, name, times, steps in cases:
        for other in SAVED:
            by_memory = [share_at(times, other, memory, steps=steps) for memory in memories]
            yield (
                f"{world}",
                name,
                other,
                *("never" if one == math.inf else f"{one:.2f}" for one in by_memory),
                *(memory_at(times, other, share, steps=steps) for share in shares),
            )


def completion_at_both() -> Iterator[Row]:
    """The m and r at which both claims hold exactly by the formulas, and what the simulator finds there."""
    yield ("N", "m", "r", "jobs simulated", "against SwitchML", "against the ring")
    for world in (4, 6, 8, 16, 32):
        found = both_at(times_by_formula(world), steps=40)
        if found is None:
            yield (f"{world}", "none", "none", "", "", "")
            continue
        yield (f"{world}", f"{found[0]:.3f}", f"{found[1]:.3f}", "by the formulas", "-25.4 %", "-18.1 %")
        for jobs in (1, 4) if world in (8, 16) else ():
            times = times_by_simulation(world, jobs)(*found)
            changes = [f"{-100 * saved(times, other):+.1f} %" for other in SAVED]
            yield (f"{world}", f"{found[0]:.3f}", f"{found[1]:.3f}", f"{jobs}", *changes)


def losses() -> Iterator[Row]:
    """The time of one exchange on links that lose packets, over that without loss. A rank waits for twice the time of
    its window before it sends a packet again."""
    rates = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)
    yield ("N", "way", "without loss / (K / B)", *(f"{loss:g}" for loss in rates[1:]))
    blocks = 512
    for world in (8, 32):
        for kind in ("ina", "switchml", "ra-ina", "ring"):
            window = 2 * world if kind in ("ra-ina", "ring") else 16
            wait_s = 2 * (window * FULL_S / blocks + 2 * (FULL_S / blocks + WIRE.latency_s))
            times = []
            for loss in rates:
                fabric = fabric_at_one(world, replace(WIRE, loss=loss))
                times.append(simulated(kind, fabric, blocks, window_blocks=window, retransmit_s=wait_s).time_s)
            yield (f"{world}", kind, f"{times[0] / FULL_S:.2f}", *(f"{one / times[0]:.2f}" for one in times[1:]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "forms": lambda: closed_forms(options.worlds, options.blocks), "memory": memory_of_ring_assisted,
        "one-job": one_job, "jobs": several_jobs, "completion": completion, "both": completion_at_both, "loss": losses,
    }  # fmt: skip
    parser.add_argument("parts", nargs="*", default=[], metavar="PART", help=f"of {', '.join(parts)}; all by default")
    parser.add_argument("--worlds", nargs="+", type=int, default=[8, 64, 256], help="of forms")
    parser.add_argument("--blocks", type=int, default=256, help="of forms")
    options = parser.parse_args(arguments)
    for name in options.parts or parts:
        for number, row in enumerate(parts[name]()):
            print("|", " | ".join(row), "|", flush=True)
            if not number:
                print("|" + "---|" * len(row))
        print()


if __name__ == "__main__":
    main()

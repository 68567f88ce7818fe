"""The faults of a plan where all processes meet at a relay.

| a plan has | at a relay it is | because |
|---|---|---|
| two machines are cut off from each other | one of them is cut off from the relay, or the relay is killed and starts again | no machine reaches another one in any other way |
| a lease ends on one side only | the link of that process breaks, and its attempts to dial are refused for a while | a relay reports a process that is lost to all; but whose own link breaks keeps the others for the lease, while they lose it at once |

All other faults are the same: a process is killed, stopped or paused, its power fails, its clock jumps.
"""  # noqa: E501 - rows of a table

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from fault_simulation.faults import Fault

RELAY_SHARE = 0.4  # of the faults that cut machines off
DOWN_S = (0.05, 0.5, 3.0)  # from the death of a relay until it starts again


def on_links(rng: random.Random, plan: Iterable[Fault]) -> tuple[Fault, ...]:
    """Return a plan with the faults that links and a relay have, in the place of those of a network without a relay."""
    return tuple(_on_links(rng, fault) for fault in plan)


def _on_links(rng: random.Random, fault: Fault) -> Fault:
    if fault.action == "lease":
        return replace(fault, action="reset", other="")
    if fault.action != "cut":
        return fault
    if rng.random() < RELAY_SHARE:
        return replace(fault, action="relay", seconds=rng.choice(DOWN_S), machines=(0, 0))
    machine = rng.choice(fault.machines)
    return replace(fault, action="unlink", machines=(machine, machine))

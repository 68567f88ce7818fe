"""Faults: at which moment what happens to whom, and the plan of faults that a seed makes.

A moment is a callback of the loop, counted from the start of the run, or a decision: a line of a journal, a fail point
or a sync of a file, just before it or just after. Windows of less than a millisecond are seldom met by a random
callback, and by a decision at once; so most faults of a plan are at decisions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from gradbus.runtime.testing.failpoints import PLACES

CONTROLLER = "controller"
MACHINES = 3
OF_NETWORK = ("cut", "unlink", "relay", "reset")  # actions that may keep any two actors from each other
NOTES = {
    "controller": ("commanded", "counted", "counted", "committed", "committed"),
    "client": ("offered", "decoded", "receipt"),
    "site": ("commanded", "counted", "counted", "committed", "adopted", "decoded", "receipt"),
}
_PLACES = {**PLACES, "site": PLACES["controller"] + PLACES["client"]}
# Decisions of actors without a journal, and how often each is taken in a round.
DECISIONS = {
    "server": {"push": 3.0, "ask": 4.0, "apply": 1.0, "lose": 0.34, "save": 0.5, "load": 0.34},
    "worker": {"start": 0.17, "push": 1.0, "meet": 1.0, "save": 0.5, "end": 0.17},
    "rank": {"view": 4.0, "generation": 0.34},
}


@dataclass(frozen=True, slots=True)
class Moment:
    """When something happens.

    Attributes:
        kind: ``step``, the callback ``number``; ``note``, ``decision``, ``place`` or ``sync``, the decision of ``role``
            called ``name`` that is its ``number``-th, or for a place that of round ``number``.
        when: ``before`` or ``after`` the decision.
    """

    kind: str
    number: int
    role: str = ""
    name: str = ""
    when: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "step":
                return f"at callback {self.number}"
            case "place":
                return f"when {self.role} is at {self.name} of round {self.number}"
            case "note":
                return f"just {self.when} {self.role} journals {self.name!r} for the {_ordinal(self.number)} time"
            case "decision":
                return f"just {self.when} {self.role} decides {self.name!r} for the {_ordinal(self.number)} time"
            case _:
                return f"just {self.when} the {_ordinal(self.number)} sync of {self.role}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at a moment.

    Attributes:
        action: what happens; see ``World.inject``. role: to whom. seconds: for how long, or after how long it starts
            again. other: the other actor, where two are concerned. machines: that are cut off from each other.
    """

    moment: Moment
    action: str
    role: str = ""
    seconds: float = 0.0
    other: str = ""
    machines: tuple[int, int] = (0, 0)

    @property
    def lasts_s(self) -> float:
        """Return for how long it may keep its actors from others: a clock that jumps does not."""
        return 0.0 if self.action == "clock" else self.seconds

    def __str__(self) -> str:
        seconds = f"{self.seconds:.2f} s"
        effect = {
            "kill": f"{self.role} is killed, and starts again after {seconds}",
            "stop": f"{self.role} is stopped gracefully, and starts again after {seconds}",
            "power": f"the power of {self.role} fails, and it starts again after {seconds}",
            "pause": f"{self.role} is paused for {seconds}",
            "replace": f"{self.role} is paused, is replaced by another start, and goes on beside that for {seconds}",
            "slow": f"{self.role} takes nothing from its readers for {seconds}",
            "clock": f"the wall clock of {self.role} jumps by {seconds}",
            "disk": f"the disk of {self.role} is full for {seconds}",
            "cut": f"machines {self.machines[0]} and {self.machines[1]} are cut off from each other for {seconds}",
            "unlink": f"machine {self.machines[0]} is cut off from the relay for {seconds}",
            "relay": f"the relay is killed, and starts again after {seconds}",
            "reset": f"the link of {self.role} breaks, and is refused for {seconds}",
            "revoke": f"{self.role} is taken off the allow list, and put on it again after {seconds}",
            "stranger": f"a process with a key that is not on the allow list starts as {self.role}",
            "twin": f"{self.role} is started a second time, with the same key",
            "lease": f"the lease of {self.other} ends at {self.role} only, which finds it again after {seconds}",
        }
        return f"{self.moment}: {effect[self.action]}"


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number if number < 20 else number % 10, "th")
    return f"{number}{suffix}"


def draw_plan(rng: random.Random, roles: Sequence[str], rounds: int, *, replaces: bool = False) -> tuple[Fault, ...]:
    """Return the faults of a run: none in one of six, mostly one to four, and a storm of up to twelve in one of
    twelve. ``replaces``: the controller is replaced while it is paused, and at most two other faults happen. None of
    them cuts machines off or pauses a client: two controllers that do not hear each other, each with clients of its own
    that have not heard the other one, are two runs."""
    if replaces:
        moment = draw_decision(rng, roles[0], rounds)
        others = [_draw_fault(rng, roles, rounds) for _ in range(rng.choice([0, 0, 1, 2]))]
        effect = _draw_effect(rng, moment, roles, "replace")
        return effect, *(one for one in others if not _keeps_apart(one, roles[0]))
    number = rng.choice([0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, rng.randint(5, 12)])
    return tuple(_draw_fault(rng, roles, rounds) for _ in range(number))


def _keeps_apart(fault: Fault, controller: str) -> bool:
    """Return whether a client may hear of a start in the place of the controller only after the first one goes on."""
    return fault.action == "cut" or (fault.action == "pause" and fault.role != controller)


def _draw_fault(rng: random.Random, roles: Sequence[str], rounds: int) -> Fault:
    role = roles[0] if rng.random() < 0.5 else rng.choice(roles[1:])
    if rng.random() < 0.6:
        moment = draw_decision(rng, role, rounds)
        return _draw_effect(rng, moment, roles, rng.choice(["kill", "kill", "kill", "kill", "power", "pause", "cut"]))
    at_step = int(rng.paretovariate(0.7) * 150) if rng.random() < 0.3 else rng.randrange(100, 9000)
    actions = ["kill", "kill", "stop", "pause", "cut", "cut", "lease", "lease", "slow", "clock", "disk", "power"]
    return _draw_effect(rng, Moment("step", at_step, role), roles, rng.choice(actions))


def draw_decision(rng: random.Random, role: str, rounds: int) -> Moment:
    """Return a decision of this role."""
    kind, when = role.partition("-")[0], rng.choice(["before", "after"])
    if kind in DECISIONS:
        return _draw_from_table(rng, role, kind, when, rounds)
    match rng.choice(["note", "note", "place", "sync"]):
        case "note":
            name = rng.choice(NOTES[kind])
            number = rng.randint(1, 3 * rounds if name == "counted" else rounds)
            return Moment("note", number, role, name, when)
        case "place":
            return Moment("place", rng.randint(1, rounds), role, rng.choice(_PLACES[kind]))
        case _:
            return Moment("sync", rng.randint(1, 40), role, when=when)


def _draw_from_table(rng: random.Random, role: str, kind: str, when: str, rounds: int) -> Moment:
    """Return a decision of a role that writes no journal."""
    if kind == "server" and rng.random() < 0.25:
        return Moment("sync", rng.randint(1, 20), role, when=when)
    if kind in PLACES and rng.random() < 0.25:
        return Moment("place", rng.randint(1, rounds), role, rng.choice(PLACES[kind]))
    name, often = rng.choice(list(DECISIONS[kind].items()))
    return Moment("decision", rng.randint(1, max(1, round(often * rounds))), role, name, when)


def _draw_effect(rng: random.Random, moment: Moment, roles: Sequence[str], action: str) -> Fault:
    role = moment.role
    match action:
        case "kill" | "stop" | "power":  # half of them start again while the round goes on
            return Fault(moment, action, role, rng.choice([rng.uniform(0.01, 0.2), rng.uniform(0.01, 4.0)]))
        case "pause" | "slow":
            return Fault(moment, action, role, rng.choice([0.3, 2.0, 6.0]))
        case "replace":
            return Fault(moment, action, role, rng.choice([0.5, 2.0, 6.0]))
        case "clock":
            return Fault(moment, action, role, rng.choice([-3600.0, -1.0, 1.0, 3600.0]))
        case "disk":
            return Fault(moment, action, role, rng.choice([0.1, 1.0, 5.0]))
        case "lease":
            other = rng.choice(roles[1:]) if role == roles[0] else roles[0]
            return Fault(moment, action, role, rng.choice([0.0, 0.5, 3.0]), other)
        case _:
            machines = rng.choice([(0, 1), (0, 2), (1, 2)])
            return Fault(moment, "cut", role, rng.choice([0.5, 5.0, 5.0, 15.0]), machines=machines)

"""Flavours: settings of a run whose code paths differ, and the circumstances that a seed draws."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Flavour:
    """Settings of a run.

    Attributes:
        settings: of the controller. minimum, quorum: choices for ``clients.min`` and ``round.quorum``.
        packets: clients send their updates in several packets. named: clients have names, and are assigned their ids.
        keeps_payloads: updates and models are kept, so that each model is computed again at the end.
        is_checked: ``gradbus check`` takes its journals. learns_by_receipt: what a client keeps depends on the receipt;
            a client of secure aggregation goes by what it has helped to unmask.
        is_fixed: where all clients count in all rounds, the model is the same to the bit, whatever has failed. Not so
            where a residual goes with a client that is killed, or a part of the clients is drawn.
        is_mean: the model is the sum of the mean changes of each round.
        may_end_with: words of an error that ends such a run by design.
        replaces: the controller is paused, replaced by a start with a copy of its state, and goes on beside that.
        has_identities: each node has a key, and the controller a list of those that it admits, which changes.
        sites: clients belong to so many sites, whose controllers are between them and the controller; 0: there are
            none. upstream: settings of a site towards the controller. same_as: where all clients count in all rounds,
            the model is that of this flavour, to the bit; empty: of this one. may_log: errors that are logged by
            design. least_train_s: trainings are no shorter in the mean, as some circumstances have: rounds alone are
            many.
        world: whose actors run: federated; servers: parameter servers and their workers; elastic: ranks that come
            and go.
        is_drawn: a seed may have it; else it is run by name only, as it is known not to hold.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    minimum: tuple[int, ...] = (1, 2, 3)
    quorum: tuple[float, ...] = (1.0, 1.0, 0.6)
    packets: bool = False
    named: bool = False
    keeps_payloads: bool = True
    is_checked: bool = True
    learns_by_receipt: bool = True
    is_fixed: bool = False
    is_mean: bool = False
    may_end_with: str = ""
    replaces: bool = False
    has_identities: bool = False
    sites: int = 0
    upstream: Mapping[str, Any] = field(default_factory=dict)
    same_as: str = ""
    may_log: tuple[str, ...] = ()
    least_train_s: float = 0.0
    world: str = "federated"
    is_drawn: bool = True


# Clients that have been in a failed attempt answer no other one that would show too few of them.
_TOO_FEW = "A client does not answer where the sums of a round's attempts together would show too few clients"
_SECURE = {"enabled": True, "keys_timeout_s": 3, "shares_timeout_s": 3, "unmask_timeout_s": 3}
FLAVOURS: Mapping[str, Flavour] = {
    "fp32": Flavour(is_fixed=True, is_mean=True),
    "q8": Flavour({"codec": "q8"}),
    "s4": Flavour({"codec": {"name": "s4", "density": 0.1}}),
    "sq8": Flavour({"codec": {"name": "sq8", "density": 0.1}}),
    "downlink": Flavour({"downlink_codec": "q8"}, is_fixed=True),
    "adam": Flavour({"strategy": "fedadam"}, is_fixed=True),
    "select": Flavour({"selection": {"name": "uniform", "fraction": 0.67}}, minimum=(2,), is_mean=True),
    "packets": Flavour(packets=True, is_fixed=True),
    "named": Flavour(named=True, is_fixed=True, is_mean=True),
    "adversarial": Flavour({"limits": {"trust": "adversarial"}}, is_fixed=True),
    "secure": Flavour(
        {"secure_aggregation": _SECURE},
        minimum=(2,),
        keeps_payloads=False,
        learns_by_receipt=False,
        is_mean=True,
        may_end_with=_TOO_FEW,
    ),
    "async": Flavour(
        {"mode": "asynchronous", "asynchronous": {"buffer": 2}}, minimum=(1,), quorum=(1.0,), is_checked=False
    ),
    "tree": Flavour(
        sites=2, upstream={"alone": False}, minimum=(1, 2, 3), keeps_payloads=False, is_fixed=True, same_as="fp32"
    ),
    "tree_alone": Flavour(
        sites=2,
        upstream={"alone_after_s": 3.0},
        minimum=(1, 2, 3),
        keeps_payloads=False,
        is_fixed=True,
        same_as="fp32",
        may_log=("cut off", "rounds alone end"),
        least_train_s=0.1,
    ),
    "admission": Flavour(has_identities=True, minimum=(1, 2), is_mean=True, may_log=("join refused",)),
    "replaced": Flavour(replaces=True),
    "servers": Flavour({"mode": "synchronous"}, world="servers", is_fixed=True),
    "servers_continue": Flavour({"mode": "synchronous", "on_lost_worker": "continue"}, world="servers"),
    "servers_stale": Flavour({"mode": "asynchronous", "staleness": 1}, world="servers"),
    "elastic": Flavour(world="elastic", minimum=(1, 2)),
}
DRAWN = tuple(name for name, flavour in FLAVOURS.items() if flavour.is_drawn)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The network, the machines and the rules of one run.

    Attributes:
        base_s, jitter_s, loss, refused, lease_s: see :class:`.network.MemoryNetwork`.
        train_s: mean duration of a training. minimum, quorum, dead_after_s: of the configuration.
        machines: of each role.
    """

    base_s: float
    jitter_s: float
    loss: float
    refused: float
    lease_s: float
    train_s: float
    minimum: int
    quorum: float
    dead_after_s: float
    machines: Mapping[str, int]

    def __str__(self) -> str:
        places = ", ".join(f"{role} on machine {number}" for role, number in self.machines.items())
        clients = sum(role.startswith("client") for role in self.machines)
        return (
            f"{places}; delay {self.base_s:g} to {self.base_s + self.jitter_s:g} s, {self.loss:.0%} of packets lost, "
            f"{self.refused:.0%} of writes refused, lease {self.lease_s:g} s; training takes {self.train_s:g} s; at "
            f"least {self.minimum} of {clients} clients, quorum {self.quorum:g}, dead after "
            f"{self.dead_after_s:g} s"
        )


CALM: Mapping[str, Any] = {"loss": 0.0, "refused": 0.0, "quorum": 1.0, "dead_after_s": 30.0}
"""Circumstances in which all clients count in all rounds, with a minimum of all of them."""


def draw_circumstances(rng: random.Random, flavour: str, roles: list[str], machines: int) -> Circumstances:
    """Return the circumstances of a run."""
    chosen = FLAVOURS[flavour]
    return Circumstances(
        base_s=rng.choice([1e-4, 1e-3, 0.02]),
        jitter_s=rng.choice([1e-4, 5e-3, 0.1]),
        loss=rng.choice([0.0, 0.01, 0.1, 0.3]),
        refused=rng.choice([0.0, 0.0, 0.01]),
        lease_s=rng.choice([4.0, 10.0]),
        train_s=max(chosen.least_train_s, rng.choice([0.005, 0.1, 1.0])),
        minimum=rng.choice(chosen.minimum),
        quorum=rng.choice(chosen.quorum),
        dead_after_s=rng.choice([2.0, 5.0, 30.0]),
        machines={role: rng.randrange(machines) for role in roles},
    )


def flavour_of(seed: int) -> str:
    """Return the flavour of a seed where each seed has one of its own."""
    return DRAWN[seed % len(DRAWN)]

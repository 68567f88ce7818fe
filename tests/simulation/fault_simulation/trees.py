"""Trees of sites: who is below whom, the actor of a site, and what must hold through both levels.

Each site has a job of its own for its clients, and takes part in the run of the controller as one client of it. What is
in the sum of a site, the journal of its own controller says; what counts at the top, that of the top. The oracle reads
both, and computes each model again from scratch: from the change of each client, as one controller would add them up.
"""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fault_simulation.faults import CONTROLLER, Fault, draw_plan
from fault_simulation.findings import COUNTED_ONCE, LEVELS, TREE_MODEL
from fault_simulation.flavours import FLAVOURS
from fault_simulation.memory import connected
from fault_simulation.tasks import DIM, TRAINING_SEED
from gradbus.actors import Site
from gradbus.models import NoopTask
from gradbus.runtime.config.federated import FederatedConfig, UpstreamConfig

if TYPE_CHECKING:
    from fault_simulation.kernel import VirtualProcess
    from fault_simulation.world import World

SITE_WEIGHT = 3  # a site is hit so much more often than a client: it is both a controller and a client
RETIRED_AFTER_S = 5.0  # from the end of the run until a site that has missed it, and goes on alone, is stopped
_ONE = float(1 << 30)  # of the fixed point in which updates are added


def roles_of(clients: int, sites: int) -> list[str]:
    """Return the roles of a run, the controller first."""
    return [CONTROLLER, *(f"site-{number}" for number in range(sites)), *(f"client-{one}" for one in range(clients))]


def number_of(role: str) -> int:
    """Return the number of a site or a client."""
    return int(role.partition("-")[2])


def above(role: str, sites: int) -> str:
    """Return the role whose job a site or a client takes part in."""
    return f"site-{number_of(role) % sites}" if sites and role.startswith("client") else CONTROLLER


def draw_tree_plan(rng: random.Random, roles: Sequence[str], rounds: int, sites: int) -> tuple[Fault, ...]:
    """Return the faults of a run of a tree, whose leases are those of neighbours."""
    weighted = [role for role in roles for _ in range(SITE_WEIGHT if role.startswith("site") else 1)]
    plan = draw_plan(rng, weighted, rounds)
    return tuple(
        replace(fault, other=above(fault.role, sites)) if fault.other and fault.role != CONTROLLER else fault
        for fault in plan
    )


async def run_site(world: World, process: VirtualProcess) -> None:
    """Run a site until the controller above it has ended the run."""
    drawn, flavour = world.circumstances, FLAVOURS[world.flavour]
    own = sum(above(role, flavour.sites) == process.role for role in world.roles)
    config = FederatedConfig.model_validate(
        {
            "clients": {
                "num": own,
                "min": min(drawn.minimum, own),
                "dead_after_s": drawn.dead_after_s,
                "start_grace_s": 2.0,
            },
            "round": {"quorum": drawn.quorum, "grace_s": 1.0, "max_attempts": 5},
            "checkpoint": {"dir": world.disk.folder_of(process.role)},
            "history": {"dir": world.history_of(process.role)},
        }
    )
    upstream = UpstreamConfig(site=number_of(process.role), timeout_s=60.0, **flavour.upstream)
    async with (
        connected(process) as up,
        connected(process, process.role) as bus,
    ):
        site = Site(up, bus, NoopTask(DIM, delta="seeded"), config, upstream)
        world.sites[process.role] = site
        async for report in site.rounds():
            world.trace.add(f"{process.name} reports round {report.round_id}: clients {list(report.clients)}")


Update = tuple[int, int, int]
"""Client, incarnation and transfer."""


class TreeOracle:
    """Follows the journals of all levels, and computes again what the controller commits.

    It takes them as they are written: a start of the controller that dies between its checkpoint and the note of it
    leaves the round to the opening of the next start.

    Attributes:
        clients_of: the clients in the model of each committed round, in ascending order.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._task = NoopTask(DIM, delta="seeded")
        self._weights = torch.zeros(DIM)
        self._crc32_of = {0: zlib.crc32(self._weights.numpy().data)}
        self._run = ""
        self._member: dict[str, int] = {}  # by process of a site: the incarnation with which it takes part above
        self._run_of: dict[str, str] = {}  # by process of a site: the run that its controller serves now
        self._sums: dict[tuple[int, int, int], set[Update]] = defaultdict(set)  # by site, its incarnation, and round
        self._open: dict[int, dict[int, frozenset[Update]]] = defaultdict(dict)  # at the top, by round and site
        self._round_of: dict[Update, int] = {}  # of the updates that count for good
        self._sites_of: dict[int, tuple[int, ...]] = {}  # of each committed round
        self.clients_of: dict[int, tuple[int, ...]] = {}

    def on_note(self, process: VirtualProcess, event: str, facts: dict[str, Any], *, is_kept: bool) -> None:
        """Take a decision. ``is_kept``: see :meth:`.World.on_note`."""
        if process.role == CONTROLLER:
            self._on_top(process, event, facts)
        elif not is_kept:
            if event == "started":
                self._member[process.name] = facts["incarnation"]
        elif process.role.startswith("site"):
            self._on_site(process, event, facts)
        elif event == "decoded" and facts["run"] == self._run:
            self._expect_model(process, facts, "holds")

    def _on_site(self, process: VirtualProcess, event: str, facts: dict[str, Any]) -> None:
        match event:
            case "started":
                self._run_of[process.name] = facts["run"]
            case _ if self._run_of.get(process.name) != self._run:
                pass  # of a round alone
            case "counted":
                self._count_at_site(process, facts)
            case "adopted" | "committed":
                self._expect_model(process, facts, f"has {event}")
                if event == "committed" and number_of(process.role) not in self._sites_of.get(facts["round"], ()):
                    text = f"{process.name} takes its sum of round {facts['round']} for counted, and it does not count"
                    self._world.finding(LEVELS, text)

    def _count_at_site(self, process: VirtualProcess, facts: dict[str, Any]) -> None:
        updates = self._sums[number_of(process.role), self._member[process.name], facts["round"]]
        client_id = facts["client"]
        if any(client_id == one for one, *_ in updates):
            self._world.finding(COUNTED_ONCE, f"client {client_id} counts twice in a sum of {process.name}")
        updates.add((client_id, facts["incarnation"], facts["transfer"]))

    def _on_top(self, process: VirtualProcess, event: str, facts: dict[str, Any]) -> None:
        match event:
            case "started":
                self._run = facts["run"]
                if facts["round"] == max(self._crc32_of) + 1:  # the start before has saved it, and not noted it
                    self._commit(process, facts["round"], list(self._open[facts["round"]]))
                self._open.clear()
                self._expect_model(process, facts, "starts with")
            case "counted":
                self._count_at_top(facts)
            case "committed":
                self._commit(process, facts["round"], facts["clients"])
                self._expect_model(process, facts, "has committed")

    def _count_at_top(self, facts: dict[str, Any]) -> None:
        round_id, site = facts["round"], facts["client"]
        updates = frozenset(self._sums[site, facts["incarnation"], round_id])
        if len(updates) != facts["num_samples"]:
            text = (
                f"the sum of site {site} for round {round_id} has {facts['num_samples']} updates, and the site has "
                f"counted those of clients {sorted(one[0] for one in updates)}"
            )
            self._world.finding(LEVELS, text)
        self._open[round_id][site] = updates

    def _commit(self, process: VirtualProcess, round_id: int, sites: Sequence[int]) -> None:
        updates = [update for site in sites for update in self._open[round_id].get(site, ())]
        for update in updates:
            before = self._round_of.setdefault(update, round_id)
            if before != round_id:
                text = f"an update of client {update[0]} counts in round {before} and in round {round_id}"
                self._world.finding(COUNTED_ONCE, text)
        clients = sorted(client_id for client_id, *_ in updates)
        if len(set(clients)) < len(clients):
            self._world.finding(COUNTED_ONCE, f"{process.name} has committed round {round_id} with clients {clients}")
        self.clients_of[round_id], self._sites_of[round_id] = tuple(clients), tuple(sites)
        if clients:
            self._add_up(round_id, clients)
        self._crc32_of[round_id] = zlib.crc32(self._weights.numpy().data)

    def _add_up(self, round_id: int, clients: Sequence[int]) -> None:
        """Make the next model as one controller of these clients does: NoopTasks have one sample each."""
        total = np.zeros(DIM, dtype=np.int64)
        for client_id in clients:
            model = self._task.build_model()
            with torch.no_grad():
                model.vector.copy_(self._weights)
            self._task.train(
                model,
                client_id=client_id,
                round_id=round_id,
                epochs=1,
                lr=0.0,
                seed=TRAINING_SEED,
                subset_size=0,
                should_stop=lambda: False,
            )
            change = (model.vector.detach() - self._weights).numpy().astype(np.float64)
            total += np.rint(change * _ONE).astype(np.int64)
        weights = self._weights.numpy()
        weights[:] = total * (1.0 / (len(clients) * _ONE)) + weights

    def _expect_model(self, process: VirtualProcess, facts: dict[str, Any], what: str) -> None:
        round_id, crc32 = facts["round"], facts["crc32"]
        expected = self._crc32_of.get(round_id)
        if expected != crc32:
            known = "which is not committed" if expected is None else f"of which the oracle has {expected:08x}"
            text = f"{process.name} {what} the model {crc32:08x} of round {round_id}, {known}"
            self._world.finding(TREE_MODEL, text)

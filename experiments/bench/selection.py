"""Bytes of a round in which one client of twenty takes part, beside one of all.

Clients are on hosts, network namespaces, with links to that of the controller: each a process of its own, or 20 of
them in one process (``gradbus host``), which receives a model once for all of its own. Nothing is shared in memory. Two
things are counted: frames of models and updates, where they are received, and everything that passes the link of the
controller's host in a round, with all headers. That has heartbeats and discovery, too, which are there whether or not
anybody trains, and weigh more the smaller the model.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import gradbus
from gradbus.actors.virtual.client_trainer import PoolSettings
from gradbus.actors.virtual.host import ClientHost
from gradbus.actors.virtual.local_pool import LocalPool
from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import Host, enter_host, hosts_on_a_switch, link_bytes
from gradbus.experiments.bench.federation import (
    MODELS,
    Noted,
    OpenBus,
    RoleWork,
    note_rounds,
    run_federation,
    take_part,
)
from gradbus.experiments.bench.processes import DOMAIN
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.models import NoopTask
from gradbus.runtime.security import Security

CLIENTS, SHARE = 40, 20  # in all, and for each one that takes part
HOSTED, OF_EACH = 200, 20  # in all, and in one process
DIM = 250_000  # 1 MB
ON_A_HOST = 100
WARM_ROUNDS = 1  # who comes then has not found everybody yet
_LEASE_S = 60.0  # 200 processes on a few cores stand still for long


class NetworkedProcess(NamedTuple):
    """Tells where a process is. ``hosts``: of all."""

    job: str
    host: Host
    hosts: tuple[Host, ...]
    dim: int

    def connect(self) -> OpenBus:
        """A bus, from inside the host."""
        enter_host(self.host)
        peers = tuple(host.address for host in self.hosts)
        network = gradbus.NetworkConfig(
            profile="network", interface=self.host.interface, peers=peers, lease_s=_LEASE_S, shared_memory=False
        )
        return gradbus.connect(self.job, domain=DOMAIN, network=network, security=Security(level="none", insecure=True))


class RoundBytes(NamedTuple):
    """Bytes of a run. ``link``: of each round after the first. ``payload``: of models and updates, of a round."""

    link: list[int]
    payload: float
    models: float
    updates: float


async def _controller(place: NetworkedProcess, rules: Mapping[str, Any]) -> Noted[int]:
    """Note the bytes that have passed the link at the end of each round."""
    return await note_rounds(place.connect(), NoopTask(place.dim), rules, lambda _: link_bytes(place.host.interface))


async def _client(place: NetworkedProcess, client_id: int) -> int:
    """Return the bytes of models that it received."""
    return await take_part(place.connect(), NoopTask(place.dim), client_id)


async def _host(place: NetworkedProcess, ids: range) -> int:
    """Bytes of models that a process with these clients has received."""
    with tempfile.TemporaryDirectory(prefix="gradbus-bench-") as folder:
        task, state_dir = NoopTask(place.dim), Path(folder)
        pool = LocalPool(task, PoolSettings(state_dir=state_dir), size=1)  # forks, so before there is a bus
        try:
            async with place.connect() as bus:
                await ClientHost(bus, task, ids=ids, pool=pool, state_dir=state_dir).run()
                return int(bus.received_bytes[MODELS])
        finally:
            await pool.close()


def count_bytes(
    clients: int, rounds: int, *, dim: int = DIM, selection: Mapping[str, Any], of_each: int = 1
) -> RoundBytes:
    """Bytes of the rounds of one run.

    Args:
        of_each: clients in one process, on a host of its own; with 1 up to 100 processes share a host.

    Raises:
        NoNamespaces: none can be made here. ProcessFailed: a process failed, or they have not ended in time.
    """
    rules = {
        "rounds": rounds, "eval_every": 0, "selection": dict(selection),
        "clients": {"num": clients, "min": 1, "start_timeout_s": 240.0, "start_grace_s": 240.0, "dead_after_s": 240.0},
        "round": {"timeout_s": 240.0},
    }  # fmt: skip
    on_a_host = ON_A_HOST if of_each == 1 else of_each
    with hosts_on_a_switch(1 + math.ceil(clients / on_a_host), LinkConditions()) as network:
        first = NetworkedProcess(f"bench-selection-{os.getpid()}", network.hosts[0], network.hosts, dim)
        works: dict[str, RoleWork] = {}
        for client_id in range(0, clients, of_each):
            place = first._replace(host=network.hosts[1 + client_id // on_a_host])
            if of_each == 1:
                works[f"client {client_id}"] = RoleWork(_client, (place, client_id))
            else:
                ids = range(client_id, min(client_id + of_each, clients))
                works[f"clients from {client_id}"] = RoleWork(_host, (place, ids))
        (passed, updates), models = run_federation(RoleWork(_controller, (first, rules)), works, 580.0)
    # Where all take part, all are sent the model that the run begins with, and that of each round.
    down, up = sum(models) / (rounds + (not selection)), updates / rounds
    link = [after - before for before, after in pairwise(passed)]
    return RoundBytes(link[WARM_ROUNDS - 1 :], down + up, down, up)


def measure(clients: int = CLIENTS, rounds: int = 5, dim: int = DIM) -> Iterator[Measurement]:
    """A part of the clients beside all of them: each in a process of its own, and 200 in ten processes."""
    for count, of_each in ((clients, 1), (HOSTED, OF_EACH)):
        asked = max(1, count // SHARE)
        everyone = count_bytes(count, rounds, dim=dim, selection={}, of_each=of_each)
        some = count_bytes(count, rounds, dim=dim, selection={"count": asked}, of_each=of_each)
        where = "" if of_each == 1 else f", {of_each} in a process"
        what, whole = f"{asked} of {count} clients{where}, {4 * dim / 1e6:g} MB", f"all {count}"
        note = f"{some.models:,.0f} B down and {some.updates:,.0f} B up"
        yield measurement(
            f"models and updates of a round, {what}",
            "MB",
            [some.payload / 1e6],
            against=(whole, [everyone.payload / 1e6]),
            at_most=0.1,
            note=note,
        )
        yield measurement(
            f"everything on the controller's link in a round, {what}",
            "MB",
            [one / 1e6 for one in some.link],
            against=(whole, [one / 1e6 for one in everyone.link]),
            at_most=0.1,
        )

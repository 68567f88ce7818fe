"""What control messages cost in a federated round: how many a client receives, and processor time.

The Controller and all clients are in one process, each on a bus of its own, with a task that does nothing: what is left
is the control path. Heartbeats are counted apart, as they come with time and not with rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import gradbus
from gradbus.experiments.bench.command import Benchmark, Part, add_effort
from gradbus.experiments.bench.processes import DOMAIN
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.models.noop import NoopTask
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.security import Security
from gradbus.runtime.security.identity.allow_list import AllowList, Entry, write_allow_list
from gradbus.runtime.security.identity.key import new_node_key, public_text
from gradbus.runtime.security.job_key import new_job_key, write_secret_file
from gradbus.runtime.tasks import TaskGroup
from gradbus.runtime.transport.channels import ToClients
from gradbus.runtime.wire.control import Status
from gradbus.runtime.wire.messages import Control, Message

LEVELS = ("none", "user", "psk", "identity")
MAX_RECEIVED = 8.0  # by a client in a round, beside heartbeats
MAX_CPU_MS = {2: 18.0, 5: 35.0, 32: 150.0}  # of a round, of all processes together
_DIM = 1000
_WARM_UP = 5  # rounds that are not counted
_JOIN_S = 120.0
_jobs = count(1)


class RoundState(NamedTuple):
    """The state at the end of a round: processor time of this process, and what all clients have received until then.

    Attributes:
        messages: that count. heartbeats: of the Controller.
    """

    cpu_s: float
    messages: int
    heartbeats: int


def securities(level: str, clients: int, folder: Path) -> list[Security]:
    """Return the security of the Controller, and of each client."""
    if level == "identity":
        keys = [new_node_key("server"), *(new_node_key(f"client-{number}") for number in range(clients))]
        nodes = [Entry(key.name, "client", key.public, ((number, number),)) for number, key in enumerate(keys[1:])]
        write_allow_list(folder / "allow.list", AllowList(tuple(nodes)))
        for key in keys:
            write_secret_file(folder / f"{key.name}.key", key.text)
        controller = public_text(keys[0].public)
        return [
            Security(
                level="identity",
                key_file=folder / f"{key.name}.key",
                allow_file=folder / "allow.list",
                controller_key=controller,
            )
            for key in keys
        ]
    if level == "psk":
        write_secret_file(folder / "job.key", new_job_key().text)
        return [Security(level="psk", key_file=folder / "job.key")] * (clients + 1)
    return [Security(level=level)] * (clients + 1)  # type: ignore[arg-type]


async def rounds_of(level: str, clients: int, rounds: int, folder: Path) -> list[RoundState]:
    """Return the state at the end of each round of a run."""
    heartbeats = Counter[str]()

    def note(message: Message) -> bool:
        heartbeats["received"] += isinstance(message, Control) and isinstance(message.body, Status)
        return False  # nothing is put into the subscription

    place: dict[str, Any] = {"job": f"control-{os.getpid()}-{next(_jobs)}", "domain": DOMAIN}
    async with AsyncExitStack() as stack:
        buses: list[Bus] = [
            await stack.enter_async_context(gradbus.connect(**place, security=security))
            for security in securities(level, clients, folder)
        ]
        config = gradbus.FederatedConfig(
            rounds=rounds, eval_every=0, clients={"num": clients, "min": clients, "start_timeout_s": _JOIN_S}
        )
        controller = gradbus.Controller(buses[0], NoopTask(_DIM), config)
        for bus in buses[1:]:
            stack.enter_context(bus.subscribe(ToClients, only=note))
        counted: list[RoundState] = []
        async with TaskGroup() as group:
            for client_id, bus in enumerate(buses[1:]):
                client = gradbus.Client(bus, NoopTask(_DIM), client_id=client_id)
                group.create_task(client.run(), name=f"client-{client_id}")
            async for _ in controller.rounds():
                received = sum(sum(bus.received_control.values()) for bus in buses[1:])
                beats = heartbeats["received"]
                counted.append(RoundState(time.process_time(), received - beats, beats))
        return counted


def figures_of(level: str, clients: int, counted: Sequence[RoundState]) -> Iterator[Measurement]:
    """Yield both figures of a run."""
    pairs = list(zip(counted[_WARM_UP:], counted[_WARM_UP + 1 :], strict=False))
    title = f"{level}, {clients} clients"
    beats = (counted[-1].heartbeats - counted[_WARM_UP].heartbeats) / len(pairs) / clients
    yield measurement(
        f"{title}: processor time of a round",
        "ms",
        [1e3 * (after.cpu_s - before.cpu_s) for before, after in pairs],
        at_most=MAX_CPU_MS.get(clients),
    )
    yield measurement(
        f"{title}: control messages that a client receives in a round",
        "messages",
        [(after.messages - before.messages) / clients for before, after in pairs],
        at_most=MAX_RECEIVED,
        note=f"and {beats:.2f} heartbeats",
    )


def measure(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the figures of each level and number of clients."""
    rounds = {"full": 40, "quick": 20, "tiny": 3}[chosen.effort] + _WARM_UP
    for clients in chosen.clients or ([2] if chosen.effort == "tiny" else list(MAX_CPU_MS)):
        for level in chosen.level or LEVELS:
            with tempfile.TemporaryDirectory(prefix="gradbus-control-") as folder:
                yield from figures_of(level, clients, asyncio.run(rounds_of(level, clients, rounds, Path(folder))))


def _options(parser: argparse.ArgumentParser) -> None:
    add_effort(parser, "fewer rounds")
    parser.add_argument("--level", action="append", choices=LEVELS, help="of security; all")
    parser.add_argument("--clients", action="append", type=int, help="how many; 2, 5 and 32")


BENCHMARK = Benchmark(
    __doc__ or "", {"control-path": Part(measure, "The control path of a federated round", 300, 180)}, _options
)

"""Federated runs of the benchmarks: a controller, its clients, and the processes that they are in.

A benchmark says how each of its processes gets a bus, which task is trained, and what it notes. ``opening`` is a bus to
be entered, which the actor has for itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import gradbus
from gradbus.experiments.bench.processes import Processes

T = TypeVar("T")

OpenBus = AbstractAsyncContextManager[gradbus.Bus]
MODELS, UPDATES = "train/model_blob", "train/client_update"


class RoleWork(NamedTuple):
    """What a process does: a function or coroutine function of a module, and its arguments."""

    do: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


class Noted(NamedTuple, Generic[T]):
    """What a controller noted at the end of each round, and the bytes of updates that it received in the run."""

    rounds: list[T]
    updates: int


def run_federation(controller: RoleWork, clients: Mapping[str, RoleWork], timeout_s: float) -> tuple[Any, list[Any]]:
    """Start a process for the controller and each of ``clients``, by name. Return what they found, in that order.

    Raises:
        ProcessFailed: a process failed or died, or they have not ended in time. The others are ended.
    """
    with Processes() as running:
        running.start("controller", controller.do, *controller.arguments)
        for name, client in clients.items():
            running.start(name, client.do, *client.arguments)
        found, *others = running.results(timeout_s)
    return found, others


@asynccontextmanager
async def controller_of(
    opening: OpenBus, task: Any, rules: Mapping[str, Any]
) -> AsyncIterator[tuple[gradbus.Bus, gradbus.Controller]]:
    """Open the bus, and make a controller on it with these settings of a FederatedConfig."""
    async with opening as bus:
        yield bus, gradbus.Controller(bus, task, gradbus.FederatedConfig(**rules))


async def note_rounds(
    opening: OpenBus, task: Any, rules: Mapping[str, Any], note: Callable[[gradbus.RoundReport], T]
) -> Noted[T]:
    """Run the rounds, and call ``note`` with the report of each as it ends."""
    async with controller_of(opening, task, rules) as (bus, controller):
        noted = [note(report) async for report in controller.rounds()]
        return Noted(noted, int(bus.received_bytes[UPDATES]))


async def take_part(opening: OpenBus, task: Any, client_id: int, **options: Any) -> int:
    """Be a client until the run ends. Return the bytes of models that it received. ``options``: of the Client."""
    async with opening as bus:
        await gradbus.Client(bus, task, client_id=client_id, **options).run()
        return int(bus.received_bytes[MODELS])

"""Time to 97 % on MNIST where one client is ten times slower: rounds that wait for it, and rounds that do not.

Four clients train the MLP, each on a quarter of the data. A client sleeps in each of its steps, the slow one ten times
as long, and for longer than a step computes, so that the cores of this machine do not decide. The controller has a
process of its own, and so have the clients together; all of them talk over DDS. Synchronous and asynchronous runs take
turns, each pair with the same strategy and the same work in a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import gradbus
from gradbus import models
from gradbus.experiments.bench.federation import OpenBus, RoleWork, controller_of, run_federation, take_part
from gradbus.experiments.bench.processes import DOMAIN, LEASE_S, context
from gradbus.experiments.bench.results import Measurement, measurement

TARGET = 0.97
CLIENTS, BATCH, STEPS = 4, 32, 20  # steps of a client in a round
STEP_S, TIMES = 0.01, 10  # sleep in a step of the fast clients, and how much slower the last one is
_DECOUPLED = {"name": "decoupled", "lr": 0.5, "momentum": 0.3}

_runs = itertools.count()


class Way(NamedTuple):
    """A synchronous run and an asynchronous one. ``at_most``: of the time of the first that the second may take."""

    strategy: Any
    asynchronous: Mapping[str, Any]
    at_most: float


WAYS = {
    "FedBuff": Way("fedavg", {"buffer": 3}, 0.5),
    "decoupled DiLoCo": Way(_DECOUPLED, {"buffer": 3, "repeats": False}, 1 / 3),
}


class PacedTask(models.ClassificationTask):
    """MNIST, with a sleep in each step of a client."""

    def train(self, model: Any, *, should_stop: Callable[[], bool], **arguments: Any) -> models.TrainResult:
        pause_s = STEP_S * (TIMES if arguments["client_id"] == CLIENTS - 1 else 1)

        def paced() -> bool:
            time.sleep(pause_s)
            return should_stop()

        return super().train(model, should_stop=paced, **arguments)


def _task() -> PacedTask:
    data = models.load("mnist", download=False)
    return PacedTask(models.mnist_mlp, data, num_clients=CLIENTS, batch_size=BATCH)


def rules(way: Way, *, is_asynchronous: bool, seed: int) -> dict[str, Any]:
    """The settings of a run."""
    chosen = {"mode": "asynchronous", "asynchronous": dict(way.asynchronous)} if is_asynchronous else {}
    return {
        "rounds": 3000,
        "seed": seed,
        "eval_every": 2,
        "strategy": way.strategy,
        "codec": {"name": "fp32", "version": 2},
        "clients": {"num": CLIENTS, "dead_after_s": 60.0},
        "training": {"lr": 0.05, "subset_size": BATCH * STEPS},
        **chosen,
    }


class Run(NamedTuple):
    """Holds what a run took until it had the accuracy, and what its newest models were made of."""

    seconds: float
    rounds: int
    staleness: float


def time_to_target(settings: Mapping[str, Any], timeout_s: float = 400.0) -> Run:
    """Seconds from the first command to the first model with that accuracy.

    Raises:
        ProcessFailed: a process failed, or it was not there in time.
    """
    job, ended = f"bench-async-{os.getpid()}-{next(_runs)}", context.Event()
    clients = {"clients": RoleWork(_clients, (job, ended))}
    found: Run = run_federation(RoleWork(_controller, (job, settings, ended)), clients, timeout_s)[0]
    return found


def _bus(job: str) -> OpenBus:
    return gradbus.connect(job, domain=DOMAIN, lease_s=LEASE_S)


async def _controller(job: str, settings: Mapping[str, Any], ended: Any) -> Run:
    try:
        async with controller_of(_bus(job), _task(), settings) as (_, controller):
            began_s, stale = 0.0, []
            async with contextlib.aclosing(controller.rounds()) as reports:
                async for report in reports:
                    began_s = began_s or time.perf_counter() - report.seconds - report.eval_s
                    stale.append(report.staleness)
                    if (report.accuracy or 0.0) >= TARGET:
                        return Run(time.perf_counter() - began_s, report.round_id, statistics.mean(stale))
        raise RuntimeError(f"{TARGET:.0%} was not reached")
    finally:
        ended.set()


async def _clients(job: str, ended: Any) -> None:
    task = _task()  # one for all: the data is there once
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(take_part(_bus(job), task, client_id)) for client_id in range(CLIENTS)]
        await asyncio.to_thread(ended.wait)
        for one in running:
            one.cancel()


def measure(repeats: int = 3) -> Iterator[Measurement]:
    """The asynchronous time over the synchronous one of the same turn, for each way."""
    found: dict[tuple[str, bool], list[Run]] = {}
    for seed, (name, way), is_asynchronous in itertools.product(range(repeats), WAYS.items(), (False, True)):
        run = time_to_target(rules(way, is_asynchronous=is_asynchronous, seed=seed))
        found.setdefault((name, is_asynchronous), []).append(run)
    for name, way in WAYS.items():
        waits, goes_on = found[name, False], found[name, True]
        stale = statistics.mean(run.staleness for run in goes_on)
        note = f"{goes_on[0].rounds} rounds in place of {waits[0].rounds}, staleness {stale:.1f}"
        yield measurement(
            f"time to {TARGET:.0%}, one of {CLIENTS} clients {TIMES} times slower, {name}",
            "s",
            [run.seconds for run in goes_on],
            against=("synchronous", [run.seconds for run in waits]),
            at_most=way.at_most,
            note=note,
        )

"""One rung of the ladder: training on hosts behind slow links, as it is and simulated.

Each rank is a process in a network namespace of its own (see :mod:`gradbus.commands.lab.namespaces`). The simulation
has the same algorithm, links and sizes; what a rank computes in a step takes as long in it as it took in the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

import gradbus
from gradbus import models
from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import hosts_on_a_switch
from gradbus.commands.simulate.network import NetworkModel
from gradbus.commands.simulate.steps import SimulatedSteps, simulate_steps
from gradbus.commands.simulate.topology import LinkSpec, cluster
from gradbus.commands.simulate.trace import take_trace
from gradbus.experiments.bench.processes import BenchRank, run_ranks
from gradbus.experiments.bench.training import Data, Training
from gradbus.runtime.choices import Choice

Rung = Literal["star", "ring", "compression", "overlap"]

# Compression is ByteGrad, 8 bits in place of 32; each rung has what the one before it has, but for the route.
RUNGS: Mapping[Rung, dict[str, Any]] = {
    "star": {"algorithm": {"name": "dense", "route": "star"}, "overlap": False},
    "ring": {"algorithm": {"name": "dense", "route": "ring"}, "overlap": False},
    "compression": {"algorithm": {"name": "bytegrad"}, "overlap": False},
    "overlap": {"algorithm": {"name": "bytegrad"}, "overlap": True},
}
TARGET = 0.97  # of the test set
RATE_MBIT_S = 200.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderPlan:
    """Holds what all rungs train: the CNN on the first ``samples`` of MNIST, until TARGET or ``epochs`` are through."""

    rate_mbit_s: float = RATE_MBIT_S
    world: int = 4
    batch_size: int = 64
    samples: int = 12_800
    epochs: int = 6
    lr: float = 0.1
    seed: int = 0
    data: Data = "mnist"


@dataclass(frozen=True, kw_only=True, slots=True)
class RungTimes:
    """Holds what a rung has come to. Times in seconds, of a step; means of all ranks and of all epochs but the first.

    Attributes:
        compute_s: own work, coding included: all that is not waiting for the others and the network.
        steps: in all. accuracy: at the end. to_target_s: steps until TARGET was seen at the end of an epoch, times
            step_s; None: it was not.
        simulated_step_s: the same step in the simulator. bytes_out: of a step and rank, as handed to the bus.
    """

    rung: str
    step_s: float
    compute_s: float
    bytes_out: float
    samples_s: float
    steps: int
    accuracy: float | None
    to_target_s: float | None
    simulated_step_s: float

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def link_share(bytes_out: float, step_s: float, rate_mbit_s: float = RATE_MBIT_S) -> float:
    """Return the utilisation of a link over which so many bytes go one way in each step."""
    return 8 * bytes_out / (step_s * 1e6 * rate_mbit_s)


async def _train(place: BenchRank) -> list[dict[str, Any]]:
    """The role of a rank: its epochs."""
    run: Training = place.spec
    epochs = []
    async with place.group() as group:
        worker = gradbus.Worker(group, run.task(), gradbus.DataParallelConfig(**run.config))
        async for report in worker.epochs():
            epochs.append(report.to_json())
            if report.accuracy is not None and report.accuracy >= TARGET:  # equal on all ranks
                break
    return epochs


def climb(rung: Rung, plan: LadderPlan, *, timeout_s: float = 900.0) -> RungTimes:
    """Run a rung, and simulate it.

    Raises:
        NoNamespaces: none can be made here. ProcessFailed: a rank failed, or some had not ended in time.
    """
    run = Training(
        model=models.mnist_cnn,
        batch_size=plan.batch_size,
        world=plan.world,
        samples=plan.samples,
        data=plan.data,
        config={
            **RUNGS[rung],
            "epochs": plan.epochs,
            "seed": plan.seed,
            "optimizer": {"lr": plan.lr},
            "hash_every": 0,
            "timeouts": {"join_s": 600, "collective_s": 300},
        },
    )
    with hosts_on_a_switch(plan.world, LinkConditions(rate_bit_s=1e6 * plan.rate_mbit_s)) as network:
        ranks: list[list[dict[str, Any]]] = run_ranks(_train, plan.world, run, hosts=network.hosts, timeout_s=timeout_s)
    timed = [epoch for epochs in ranks for epoch in epochs[1:] or epochs]
    step_s = statistics.mean(epoch["step_s_mean"] for epoch in timed)
    compute_s = step_s - statistics.mean(epoch["wait_s_mean"] for epoch in timed)
    last = ranks[0][-1]
    reached = last["accuracy"] is not None and last["accuracy"] >= TARGET
    return RungTimes(
        rung=rung,
        step_s=step_s,
        compute_s=compute_s,
        bytes_out=max(epochs[-1]["bytes_out_per_step"] for epochs in ranks),
        samples_s=plan.world * plan.batch_size / step_s,
        steps=last["step"],
        accuracy=last["accuracy"],
        to_target_s=last["step"] * step_s if reached else None,
        simulated_step_s=simulate(rung, plan, compute_s).step_s,
    )


def simulate(rung: Rung, plan: LadderPlan, compute_s: float) -> SimulatedSteps:
    """The rung on a model of these links. ``compute_s``: of a step, spread over it as a pass of this model is here."""
    trace = take_trace(models.mnist_cnn(0), torch.randn(plan.batch_size, 1, 28, 28))
    work = trace.make_step_work(
        compute_scale=compute_s / trace.make_step_work().compute_s, overlap=RUNGS[rung]["overlap"]
    )
    network = NetworkModel(cluster(plan.world, network=LinkSpec(rate_bytes_s=plan.rate_mbit_s * 125_000)))
    chosen = dict(RUNGS[rung]["algorithm"])
    choice = Choice.model_validate(chosen)
    return simulate_steps(network, choice, work, 3, values=chosen["name"] != "dense", seed=plan.seed)

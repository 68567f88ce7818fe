"""Loss over time of data-parallel training on a thin and distant link: exchanges in every step against local steps.

Two ranks, each a process in a network namespace of its own, train for so many seconds; the link between them has the
network laboratory's rate and delay (:mod:`gradbus.commands.lab`). What a rank computes in a step is the same in all
ways, but for coding, so they differ in what they wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn

import gradbus
from gradbus import models
from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import hosts_on_a_switch
from gradbus.experiments.bench.processes import BenchRank, run_ranks
from gradbus.experiments.bench.training import Data
from gradbus.models.parallel import ShardBatch
from gradbus.runtime.errors import GradbusError

Way = Literal["DDP", "DGC", "DiLoCo", "streaming"]

# Options are those of `make bench PART=local` and `PART=compression`; streaming sends a fragment every ten steps, and
# has five of them in which to arrive.
WAYS: Mapping[Way, dict[str, Any]] = {
    "DDP": {"name": "dense"},
    "DGC": {"name": "dgc", "density": 0.001, "warmup": "none"},
    "DiLoCo": {"name": "diloco", "steps": 50, "outer_momentum": 0.5},
    "streaming": {
        "name": "diloco", "steps": 50, "outer_momentum": 0.5, "codec": "q4", "fragments": 5, "delay": 5,
    },
}  # fmt: skip
_POLL_S = 0.2
_JOIN_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinLinkPlan:
    """Is the same for all ways: the CNN on MNIST, two ranks, for ``seconds`` from the first step on."""

    rate_mbit_s: float = 50.0
    delay_ms: float = 50.0
    seconds: float = 90.0
    windows: int = 30
    batch_size: int = 16
    lr: float = 0.02
    momentum: float = 0.9
    seed: int = 0
    data: Data = "mnist"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWindow:
    """Holds what both ranks saw within a part of the time.

    Attributes:
        until_s: end of the window, from the first step of a rank on. steps: of a rank, until then; the mean of both.
        loss: mean over the batches of both ranks; None: no batch was computed.
    """

    until_s: float
    steps: float
    loss: float | None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


class _TimedTask(models.ClassificationTask):
    """Is the same task, and notes when it has computed which loss."""

    def __init__(self, plan: ThinLinkPlan) -> None:
        super().__init__(models.mnist_cnn, lambda: _split(plan), batch_size=plan.batch_size, seed=plan.seed)
        self.at_s: list[float] = []
        self.losses: list[float] = []

    def loss(self, model: nn.Module, batch: ShardBatch) -> Tensor:
        """Return that of the task."""
        loss = super().loss(model, batch)
        self.at_s.append(time.monotonic())
        self.losses.append(float(loss.detach()))
        return loss


def _split(plan: ThinLinkPlan) -> models.DataSplit:
    return models.glyphs(train=2048, test=50) if plan.data == "glyphs" else models.load(plan.data, download=False)


async def _train(place: BenchRank) -> tuple[list[float], list[float]]:
    """The role of a rank: seconds from its first step on, and the losses seen then."""
    way, plan = place.spec
    task = _TimedTask(plan)
    config = gradbus.DataParallelConfig(
        algorithm=WAYS[way],
        epochs=1000,
        eval_every_epochs=0,
        hash_every=0,
        seed=plan.seed,
        optimizer={"lr": plan.lr, "momentum": plan.momentum},
        timeouts={"join_s": _JOIN_S, "collective_s": 60},
    )
    async with place.group() as group:
        running = asyncio.create_task(gradbus.Worker(group, task, config).run())
        while not running.done() and not (task.at_s and time.monotonic() - task.at_s[0] > plan.seconds):
            await asyncio.wait([running], timeout=_POLL_S)
        is_early = running.done()
        running.cancel()
        # The other rank may have ended first: then this one has lost it, when its time was over, too.
        with contextlib.suppress(asyncio.CancelledError, *(() if is_early else (GradbusError,))):
            await running
    return [at_s - task.at_s[0] for at_s in task.at_s], task.losses


def train_on_a_thin_link(way: Way, plan: ThinLinkPlan) -> list[LossWindow]:
    """Train, and give the windows in the order of time.

    Raises:
        NoNamespaces: none can be made here. ProcessFailed: a rank failed.
    """
    conditions = LinkConditions(rate_bit_s=1e6 * plan.rate_mbit_s, delay_s=1e-3 * plan.delay_ms)
    with hosts_on_a_switch(2, conditions) as network:
        ranks: list[tuple[list[float], list[float]]] = run_ranks(
            _train, 2, (way, plan), hosts=network.hosts, timeout_s=plan.seconds + _JOIN_S
        )
    width_s = plan.seconds / plan.windows
    found = []
    for index in range(plan.windows):
        until_s = (index + 1) * width_s
        seen = [
            loss
            for at_s, losses in ranks
            for at, loss in zip(at_s, losses, strict=True)
            if until_s - width_s <= at < until_s
        ]
        steps = sum(sum(at < until_s for at in at_s) for at_s, _ in ranks) / len(ranks)
        found.append(LossWindow(until_s=until_s, steps=steps, loss=sum(seen) / len(seen) if seen else None))
    return found

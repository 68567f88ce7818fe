"""The training of a data-parallel benchmark: the role of a rank, which runs a :class:`gradbus.Worker` to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import gradbus
from gradbus import models
from gradbus.commands.lab.namespaces import Host
from gradbus.experiments.bench.processes import LEASE_S, BenchRank, run_ranks
from gradbus.runtime.network.network_config import NetworkConfig

Data = Literal["mnist", "glyphs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A run on MNIST or on the first of its samples.

    Attributes:
        model: takes ``seed``. batch_size: of one rank. config: of ``gradbus.DataParallelConfig``, which also has the
            seed. samples: of the training set, None for all. data: glyphs are drawn on the spot, at most
            ``drawn`` different ones, which are repeated. data_root: folder of MNIST, None: as ``GRADBUS_DATA`` says.
    """

    model: Callable[..., nn.Module]
    batch_size: int
    config: dict[str, Any] = field(default_factory=dict)
    world: int = 2
    samples: int | None = None
    data: Data = "mnist"
    drawn: int | None = None
    data_root: Path | None = None
    datagram_bytes: int | None = None

    def task(self) -> models.ClassificationTask:
        """Model, data and loss, also for a loop in one process."""
        return models.ClassificationTask(
            self.model, self.split, batch_size=self.batch_size, seed=self.config.get("seed", 0)
        )

    def split(self) -> models.DataSplit:
        """The data."""
        if self.data == "glyphs":
            samples = self.samples or 1000
            split = models.glyphs(train=min(samples, self.drawn or samples), test=50)
            repeated = split.train.subset(torch.arange(samples) % len(split.train))
            return split if self.drawn is None else models.DataSplit(repeated, split.test)
        split = models.load(self.data, self.data_root, download=False)
        if self.samples is None:
            return split
        return models.DataSplit(split.train.subset(torch.arange(self.samples)), split.test)


async def _train(place: BenchRank) -> dict[str, Any]:
    run: Training = place.spec
    async with place.group(NetworkConfig(lease_s=LEASE_S, datagram_bytes=run.datagram_bytes)) as group:
        worker = gradbus.Worker(group, run.task(), gradbus.DataParallelConfig(**run.config))
        epochs = [report.to_json() async for report in worker.epochs()]
    summary = worker.summary
    return {
        "epochs": epochs,
        "accuracy": summary.accuracy,
        "mean": summary.profile.mean,
        "windows": [window.mean for window in summary.profile.windows],
    }


def train(run: Training, *, timeout_s: float = 300.0, hosts: tuple[Host, ...] = ()) -> list[dict[str, Any]]:
    """Train in one process per rank over DDS on this machine, and return what the ranks found, in rank order.

    Args:
        hosts: network namespaces that the ranks are on, see :func:`run_ranks`.

    Raises:
        ProcessFailed: a rank failed, or some had not ended in time.
    """
    return run_ranks(_train, run.world, run, timeout_s=timeout_s, hosts=hosts)

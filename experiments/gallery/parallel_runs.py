"""A data-parallel run in processes of its own: its ranks leave their epochs and their profile as JSONL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gradbus
from gradbus import models
from gradbus.experiments.bench_children import ChildFailed
from gradbus.experiments.bench_ddp_process import run_ranks
from gradbus.experiments.gallery.federated_runs import RunFailed
from gradbus.experiments.gallery.int8_exchange import Int8Exchange
from gradbus.experiments.gallery.plan import ParallelRun
from gradbus.experiments.rundir.directory import json_text
from gradbus.runtime.collectives import Group
from gradbus.runtime.dds.network import NetworkConfig

_TIMEOUT_S = 3600.0  # on a very busy machine; an idle one takes half a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What each rank does. See :class:`gradbus.experiments.bench_ddp_process.Role`."""

    what: ParallelRun
    folder: Path

    @property
    def network(self) -> NetworkConfig:
        """What is measured is the bus: by default, ranks of one machine pass large data through memory they share."""
        return NetworkConfig(shared_memory=False, lease_s=10.0)

    @property
    def world(self) -> int:
        return self.what.world

    async def run(self, group: Group) -> dict[str, Any]:
        """Train to the end, and write a line for each epoch."""
        what = self.what
        config = gradbus.DataParallelConfig(
            epochs=what.epochs, lr=what.lr, seed=what.seed, exchange="dgc" if what.exchange == "dgc" else "dense",
            density=what.density, warmup=what.warmup, overlap=what.overlap, profile_dir=self.folder,
            join_timeout_s=1800, collective_timeout_s=1800,
        )  # fmt: skip
        make_exchange = Int8Exchange if what.exchange == "int8" else None
        worker = gradbus.Worker(group, self._task(), config, make_exchange=make_exchange)
        with (self.folder / f"epochs-rank-{group.rank}.jsonl").open("w", encoding="utf-8") as file:
            async for report in worker.epochs():
                file.write(json_text({"rank": group.rank, **report.to_json()}) + "\n")
        return {"params_hash": worker.summary.params_hash}

    def _task(self) -> models.ClassificationTask:
        what = self.what

        def data() -> models.DataSplit:
            if what.data == "glyphs":
                return models.glyphs(train=what.samples or 1000, test=100)
            split = models.load(what.data, download=False)
            if what.samples is None:
                return split
            return models.DataSplit(split.train.subset(torch.arange(what.samples)), split.test)

        return models.ClassificationTask(models.mnist_mlp, data, batch_size=what.batch_size, seed=what.seed)


def run_parallel(run: ParallelRun, folder: Path) -> None:
    """Do the run; ``epochs-rank-R.jsonl`` and ``profile-rank-R.jsonl`` are then in ``folder``.

    Raises:
        RunFailed: a rank failed, took too long, or ended with other parameters.
    """
    try:
        found = run_ranks(_Rank(what=run, folder=folder.absolute()), timeout_s=_TIMEOUT_S)
    except ChildFailed as error:
        (folder / "output.log").write_text(f"{error}\n", encoding="utf-8")
        raise RunFailed(f"{run.label}: {str(error).strip().splitlines()[-1]}; see {folder / 'output.log'}") from None
    hashes = {rank["params_hash"] for rank in found}
    if len(hashes) != 1:
        raise RunFailed(f"{run.label}: the ranks ended with different parameters")

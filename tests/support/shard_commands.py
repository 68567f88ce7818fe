"""A task of ranks in a file of the user's, for commands as processes of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TASK = """
import time, torch
from torch import nn

class Task:
    def __init__(self, inputs=4, width=8, batches=5, more_each_rank=1, slow_s=0.0):
        self.inputs, self.width = inputs, width
        self.first, self.more, self.slow_s = batches, more_each_rank, slow_s

    def build_model(self):
        model = nn.Sequential(nn.Linear(self.inputs, self.width), nn.Tanh(), nn.Linear(self.width, 1))
        own = torch.Generator().manual_seed(5)
        with torch.no_grad():  # not from torch's own generator: ranks that share a process do so at once
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=own) / 2)
        return model

    def prepare_shard(self, rank, world):
        pass

    def num_batches(self, *, rank, world, epoch):
        return self.first + self.more * rank

    def batches(self, *, rank, world, epoch, seed):
        for number in range(self.num_batches(rank=rank, world=world, epoch=epoch)):
            time.sleep(self.slow_s)
            generator = torch.Generator().manual_seed(1000 * epoch + 10 * number + rank)
            yield torch.randn(8, self.inputs, generator=generator)

    def loss(self, model, batch):
        return (model(batch)[:, 0] - batch.sum(1)).square().mean()

    def evaluate_shard(self, model, *, rank, world):
        class Counts:
            correct, total, loss_sum = 4 + rank, 5, 1.0
        return Counts()
"""


def write_task(folder: Path, module: str, **options: Any) -> dict[str, Any]:
    """Write the task into a folder; its settings. ``options``: of the task, such as ``slow_s`` for each batch."""
    (folder / f"{module}.py").write_text(TASK, encoding="utf-8")
    return {"task": f"{module}:Task", "task_options": options}


def read_until_epoch(process: Any, epoch: int) -> None:
    """Read what a rank prints, until it has finished this epoch, from 1."""
    for line in process.stdout:
        if re.match(f"epoch {epoch}/", line):
            return
    raise AssertionError(f"it has ended before epoch {epoch}")

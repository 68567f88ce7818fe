"""What torchrun starts in test_torchrun.py: it trains a little, and says in files how that went.

On the first attempt rank 1 dies in the midst of it. Gradients are averaged by hand: to load what DDP loads takes longer
than all the rest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

STEPS = 3


def train(dies: bool) -> float:
    """A few steps of data-parallel training. Returns the sum of all weights."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    for step in range(STEPS):
        if dies and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model.zero_grad()
        model(torch.full((2, 8), dist.get_rank() + 1.0)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data.sub_(parameter.grad, alpha=0.1 / dist.get_world_size())
    return sum(float(parameter.detach().sum()) for parameter in model.parameters())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    facts: dict[str, object] = {"pid": os.getpid()}
    note = folder / f"attempt {attempt} rank {rank}.json"
    note.write_text(json.dumps(facts))
    dist.init_process_group("dds", timeout=timedelta(seconds=30))
    try:
        facts["weights"] = train(dies=rank == 1 and attempt == 0)
    except RuntimeError as error:
        facts["error"] = str(error)
        raise
    finally:
        note.write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""An elastic script whose steps use what keeps something for a process group: an algorithm, and Horovod's optimizer.

Rank 1 is killed in the midst of a step, started again, and joins. The argument says where: ``backward``, before its
backward pass, so that the other rank waits in its own; ``step``, after it, with gradients of both on their way.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradbus.torch as hvd

DIES_AT, DIES_BEFORE = 6, sys.argv[1]
LR_OF_RANK = 0.005


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    ddp = DistributedDataParallel(state.model)
    hvd.with_algorithm(ddp, [state.optimizer], "topk", density=0.2)
    state.worlds = [*state.worlds, dist.get_world_size()]
    least = max(12, state.step + 4)  # steps with the rank that has joined, too
    while state.step < least or len(state.worlds) < 3:
        x = torch.full((4, 6), float(dist.get_rank() + state.step % 5))
        state.optimizer.zero_grad()
        state.other_optimizer.zero_grad()
        dies = state.step == DIES_AT and os.environ["RANK"] == "1" and "GRADBUS_ELASTIC__JOIN" not in os.environ
        if dies and DIES_BEFORE == "backward":
            os.kill(os.getpid(), signal.SIGKILL)
        ddp(x).square().mean().backward()
        state.other(x).square().mean().backward()
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        state.optimizer.step()
        state.other_optimizer.step()
        state.step += 1
        state.commit()
        # As a larger model would take. Alone, it waits for a process that starts, and leaves the cores to that.
        time.sleep(0.01 if dist.get_world_size() > 1 else 0.1)


def scale(optimizers: list[torch.optim.Optimizer]) -> None:
    """Have the learning rate follow the number of ranks. A rank that joins gets it with the state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = LR_OF_RANK * dist.get_world_size()


def main() -> None:
    torch.set_num_threads(1)
    model, other = net(), net()
    distributed = hvd.DistributedOptimizer(
        torch.optim.SGD(other.parameters(), lr=2 * LR_OF_RANK, momentum=0.9), other.named_parameters()
    )
    state = hvd.elastic.TorchState(
        model,
        torch.optim.SGD(model.parameters(), lr=2 * LR_OF_RANK),
        other=other,
        other_optimizer=distributed,
        step=0,
        worlds=[],
    )
    scaled: list[int] = []
    state.register_reset_callbacks(
        [
            lambda: scaled.append(dist.get_world_size()),
            lambda: scale([state.optimizer, state.other_optimizer]),
        ]
    )

    train(state)
    flat = torch.cat([one.detach().flatten() for part in (model, other) for one in part.parameters()])
    weights = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    finite = bool(flat.isfinite().all())
    sys.stdout.write(f"END {weights} {finite} {state.worlds} {scaled}\n")


if __name__ == "__main__":
    main()

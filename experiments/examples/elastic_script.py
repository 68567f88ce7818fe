"""A training script of one's own whose ranks come and go.

    gradbus run --elastic 1:3 -- -m gradbus.experiments.examples.elastic_script

A rank that is killed is started again and joins, while the others go on; ``--kill 2:12`` has rank 2 killed in step 12.
Under torchrun, which starts all ranks again, it goes on from the checkpoint:

    torchrun --nnodes=1:3 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --max-restarts=3 \\
        -m gradbus.experiments.examples.elastic_script --checkpoint state.pt

Each rank prints a line of JSON for each step, and one at the end with a digest of its weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from gradbus.torch import elastic

SAMPLES = 203  # not a multiple of what a step takes
BATCH_SIZE = 4
MIN_STEPS = 8  # of each group of ranks


def make_data() -> TensorDataset:
    """Return the same samples on all ranks: points, and which side of a curve they are on."""
    points = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, (points[:, 0] * points[:, 1] > 0.3 * points[:, 2]).long())


def make_model() -> nn.Module:
    """Return a small network, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return one that has a state."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


@elastic.run
def train(state: elastic.TorchState, given: argparse.Namespace) -> None:
    """Train until the last step. Called again in each new generation of ranks."""
    ddp = DistributedDataParallel(state.model)
    sampler, optimizer = state.sampler, state.optimizer
    loader = DataLoader(make_data(), BATCH_SIZE, sampler=sampler)
    state.worlds, state.began = [*state.worlds, dist.get_world_size()], state.step
    while is_to_go_on(state, given):
        sampler.set_epoch(state.epoch)
        for number, (points, sides) in enumerate(loader):
            tell(state, "step", processed=sampler.processed, weights=digest(list(ddp.parameters())))
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(points), sides).backward()  # type: ignore[no-untyped-call]
            die_if_told(state, given.kill)
            optimizer.step()
            sampler.record_batch(number, len(points))
            state.step += 1
            state.commit()
            time.sleep(given.pause_s)  # as a larger model would take
            if not is_to_go_on(state, given):
                return
        state.epoch += 1


def is_to_go_on(state: elastic.TorchState, given: argparse.Namespace) -> bool:
    """Whether steps are left, or further groups of ranks are awaited, or this one has made few steps yet."""
    is_new = state.step < state.began + MIN_STEPS
    return bool(is_new or state.step < given.steps or len(state.worlds) < given.until_groups)


def die_if_told(state: elastic.TorchState, kill: str) -> None:
    """Be killed in the midst of a step, once."""
    is_again = os.environ.get("GRADBUS_ELASTIC__JOIN") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if kill and not is_again and kill == f"{os.environ.get('RANK')}:{state.step}":
        os.kill(os.getpid(), signal.SIGKILL)


def tell(state: elastic.TorchState, event: str, **facts: Any) -> None:
    """Print a line."""
    place = {"rank": dist.get_rank(), "world": dist.get_world_size()} if dist.is_initialized() else {}
    line = {"event": event, **place, "at_s": time.time(), "step": state.step, "epoch": state.epoch}
    sys.stdout.write(json.dumps({**line, **facts}) + "\n")  # in one piece: the ranks write to one pipe
    sys.stdout.flush()


def digest(tensors: Sequence[Tensor]) -> str:
    """Return a hash of their bits."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", help="file that each commit replaces")
    parser.add_argument("--kill", default="", metavar="RANK:STEP")
    parser.add_argument("--until-groups", type=int, default=0, metavar="N", help="go on until so many have trained")
    parser.add_argument("--pause-s", type=float, default=0.01)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = make_model()
    state = elastic.TorchState(
        model,
        make_optimizer(model),
        sampler=elastic.ElasticSampler(make_data()),
        step=0,
        epoch=0,
        worlds=[],
        began=0,
        checkpoint=given.checkpoint,
    )
    train(state, given)
    tell(state, "end", worlds=state.worlds, weights=digest(list(model.parameters())))


if __name__ == "__main__":
    main()

"""Three ways for torch.distributed to go on when a rank has died.

``python -m gradbus.experiments.examples.torch_elastic reconfigure`` starts three ranks, one of which is killed in the
midst of training. The others form their process group anew with torch's ``_reconfigure``. With ``init`` they destroy it
and make another one. With ``torchrun``, torchrun starts the ranks, and all of them again from a checkpoint:

``torchrun --standalone --nproc-per-node 2 --max-restarts 1 -m gradbus.experiments.examples.torch_elastic torchrun``

Each rank that gets to the end prints its rank, the number of ranks, the steps and a digest of its weights.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from gradbus.runtime.errors import PeerLost

WORLD = 3
STEPS = 8
DIES_AT = 3  # the step in which the last rank is killed
LIMIT = timedelta(seconds=30)


class SmallTraining:
    """A small model on data of its own: the state that a rank brings along into another process group."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step_no = 0

    def step(self) -> None:
        """One step. Raises RuntimeError: a rank is gone, and nothing has changed here."""
        inputs = torch.full((2, 4), float(dist.get_rank() + self.step_no))
        self.optimizer.zero_grad()
        self.model(inputs).sum().backward()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split_with_sizes([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        self.optimizer.step()
        self.step_no += 1

    def align(self) -> None:
        """Take the state of the rank that is farthest: one may have made the step that failed for the others."""
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(steps, torch.tensor([self.step_no]))
        farthest = max(range(len(steps)), key=lambda rank: int(steps[rank]))
        self.step_no = int(steps[farthest])
        for parameter in self.model.parameters():
            dist.broadcast(parameter.detach(), group_src=farthest)

    def report(self) -> str:
        """Return what a rank prints."""
        weights = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        place = {"rank": dist.get_rank(), "world": dist.get_world_size()}
        return json.dumps({**place, "steps": self.step_no, "weights": digest})


Renew = Callable[[Sequence[int], int], None]  # with the ranks that are left, for this generation


def run_rank(way: str, rank: int, port: int) -> str:
    """A rank of the first two ways. Returns what it has printed.

    The store is in the process that has started it, which does not die.
    """
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)

    def init(rank: int, world: int, generation: int) -> None:
        of_this_time = PrefixStore(f"generation {generation}", store)
        later = way == "reconfigure"
        dist.init_process_group(
            "dds", store=of_this_time, rank=rank, world_size=world, timeout=LIMIT, enable_reconfigure=later
        )

    def renew_by_init(ranks: Sequence[int], generation: int) -> None:
        new_rank = ranks.index(dist.get_rank())
        dist.destroy_process_group()
        init(new_rank, len(ranks), generation)

    def renew_by_reconfigure(ranks: Sequence[int], generation: int) -> None:
        key = f"handle of {generation}"
        own = distributed_c10d._get_reconfigure_handle()  # noqa: SLF001 - torch has no public name for it yet
        store.set(f"{key} {dist.get_rank()}", own)
        handles = [store.get(f"{key} {other}").decode() for other in ranks]
        work = distributed_c10d._reconfigure(generation, handles, timeout=LIMIT)  # noqa: SLF001 - likewise
        work.wait()

    init(rank, WORLD, 0)
    if way == "reconfigure":
        renew_by_reconfigure(range(WORLD), 0)
    return train(renew_by_reconfigure if way == "reconfigure" else renew_by_init, rank)


def train(renew: Renew, first_rank: int) -> str:
    """Train to the end, whoever dies meanwhile. Returns the report."""
    training, generation = SmallTraining(), 0
    while training.step_no < STEPS:
        if first_rank == WORLD - 1 and training.step_no == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            training.step()
        except RuntimeError as error:
            if not isinstance(error.__cause__, PeerLost):
                raise
            lost = error.__cause__.ranks
            generation += 1
            renew([rank for rank in range(dist.get_world_size()) if rank not in lost], generation)
            training.align()
    return end(training)


def end(training: SmallTraining) -> str:
    """Print the report and leave."""
    report = training.report()
    sys.stdout.write(f"{report}\n")  # in one piece: the ranks write to one pipe
    sys.stdout.flush()
    dist.destroy_process_group()
    return report


def train_under_torchrun(checkpoint: Path) -> None:
    """torchrun ends all ranks when one has died, and starts them again: they go on from the checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group("dds", timeout=LIMIT)
    training = SmallTraining()
    with contextlib.suppress(FileNotFoundError):
        saved = torch.load(checkpoint, weights_only=True)
        training.model.load_state_dict(saved["model"])
        training.step_no = saved["step"]
    training.align()  # rank 0 may have saved while another one read
    while training.step_no < STEPS:
        if dist.get_rank() > 0 and training.step_no == DIES_AT and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        training.step()
        if dist.get_rank() == 0:
            part = checkpoint.with_suffix(".part")
            torch.save({"model": training.model.state_dict(), "step": training.step_no}, part)
            part.replace(checkpoint)
    end(training)


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the ranks of the first two ways, or be one of the third."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("reconfigure", "init", "torchrun"))
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")  # so that a second run does not begin where the first one ended
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / f"torch_elastic_{run}.pt")
    given = parser.parse_args(arguments)
    if given.way == "torchrun":
        train_under_torchrun(given.checkpoint)
        return
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = multiprocessing.get_context("spawn").Process
    ranks = [start(target=run_rank, args=(given.way, rank, store.port)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()

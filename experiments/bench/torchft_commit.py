"""What a step of two replicas takes more with torchft, over gloo: ``PYTHON -m ...torchft_commit BLOCKS STEPS``.

Runs in an environment that has torchft and gradbus, as ``make setup-integrations`` makes one. Of gradbus it needs no
more than how a benchmark starts its processes, so that none outlives it. Prints two lines of numbers: mean milliseconds
of a step by block, with torchft's quorum and commit, and without them; blocks take turns in the same processes. A step
is the MLP's: forward, backward, one mean of all gradients, the optimizer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from gradbus.experiments.bench.processes import Processes

REPLICAS = 2
LIMIT = timedelta(seconds=60)
WARM_STEPS = 5


def replica(number: int, lighthouse: str, port: int, blocks: int, steps: int) -> list[list[float]]:
    """One replica. Returns mean seconds of a step by block, of both ways."""
    from torchft import Manager, ProcessGroupGloo

    torch.manual_seed(number)
    shared = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    dist.init_process_group("gloo", store=shared, rank=number, world_size=REPLICAS, timeout=LIMIT)
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=2,
        replica_id=f"replica_{number}",
        store_addr="127.0.0.1",
        store_port=own.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        hostname="127.0.0.1",
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, labels = torch.randn(32, 784), torch.randint(10, (32,))

    def step(mean: Callable[[torch.Tensor], object], has_committed: Callable[[], bool]) -> None:
        optimizer.zero_grad(set_to_none=False)
        torch.autograd.backward(nn.functional.cross_entropy(model(batch), labels))
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        mean(flat)
        for gradient, part in zip(gradients, flat.split_with_sizes([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        if has_committed():
            optimizer.step()

    def with_torchft() -> None:
        manager.start_quorum()
        step(lambda flat: manager.allreduce(flat).wait(), manager.should_commit)

    def without() -> None:
        step(lambda flat: (dist.all_reduce(flat), flat.div_(REPLICAS)), lambda: True)

    found: list[list[float]] = [[], []]
    for way in (with_torchft, without):
        for _ in range(WARM_STEPS):
            way()
    for block in range(2 * blocks):
        way = (with_torchft, without)[block % 2]
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(steps):
            way()
        found[block % 2].append((time.perf_counter() - began_s) / steps)
    dist.barrier()
    manager.shutdown(wait=False)
    return found


def main() -> None:
    """Start lighthouse and replicas, and print the slower replica's numbers."""
    from torchft.coordination import LighthouseServer

    blocks, steps = map(int, sys.argv[1:])
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=REPLICAS, join_timeout_ms=60_000)
    # Its address has the host's name, which need not be known anywhere.
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        with Processes() as processes:
            for number in range(REPLICAS):
                processes.start(f"replica {number}", replica, number, address, store.port, blocks, steps)
            found = processes.results(600.0)
    finally:
        lighthouse.shutdown()
    for way in range(2):
        sys.stdout.write(
            " ".join(f"{1e3 * max(times):.4f}" for times in zip(*(one[way] for one in found), strict=True))
        )
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()

"""DeepSpeed over the bus, on CPUs: the Zero Redundancy Optimizer, stages 1, 2 and 3.

``torchrun --standalone --nproc-per-node 2 -m gradbus.experiments.examples.deepspeed_training`` trains a small network
on synthetic data, once with each stage. Each rank prints its last losses, and a digest of the weights, by stage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from torch import nn


def train(stage: int) -> tuple[float, str]:
    """Train for a few steps. Returns the last loss and the digest of the weights.

    Args:
        stage: what is spread over the ranks: 1 the optimizer's state, 2 gradients as well, 3 parameters as well.
    """
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    model, *_ = deepspeed.initialize(
        model=network,
        optimizer=torch.optim.AdamW(network.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 16,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own AdamW would be compiled first
        },
    )
    random = torch.Generator().manual_seed(dist.get_rank())  # each rank draws data of its own
    for _ in range(8):
        inputs = torch.randn(16, 16, generator=random)
        loss = nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))
        model.backward(loss)
        model.step()
    with GatheredParameters(list(network.parameters()), enabled=stage == 3):
        weights = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    return loss.item(), hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank. ``--backend gloo`` does the same without gradbus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="dds")
    backend = parser.parse_args(arguments).backend
    # DeepSpeed would compile an all_reduce of its own for inference on one machine, for a minute at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Before `initialize`, which would make a process group of the accelerator's backend: gloo, or ccl where that is.
    deepspeed.init_distributed(dist_backend=backend)
    trained = {stage: train(stage) for stage in (1, 2, 3)}
    report = {
        "rank": dist.get_rank(), "backend": dist.get_backend(),
        "loss": {stage: loss for stage, (loss, _) in trained.items()},
        "weights": {stage: weights for stage, (_, weights) in trained.items()},
    }  # fmt: skip
    print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

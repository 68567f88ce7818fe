"""DiLoCo in a script of one's own, on any backend of torch.distributed.

``torchrun --standalone --nproc-per-node 2 -m gradbus.experiments.examples.local_updates`` trains a small network on
synthetic data, different on each rank, and exchanges weights after every tenth step. Each rank prints the loss on data
of all ranks, how much it has sent, and a digest of its weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import gradbus.torch


def train(steps: int = 100) -> dict[str, object]:
    """Train in the default process group. Returns what this rank is to print."""
    torch.manual_seed(dist.get_rank())  # of the data; weights are those of rank 0
    inputs = torch.randn(320, 16)
    wanted = inputs.square().mean(1, keepdim=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = gradbus.torch.DiLoCo(model, inner, outer, steps=10, codec="q8")
    for number in range(steps):
        batch = slice(32 * (number % 10), 32 * (number % 10 + 1))
        loss = nn.functional.mse_loss(model(inputs[batch]), wanted[batch])
        inner.zero_grad()
        torch.autograd.backward(loss)
        inner.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.manual_seed(99)
    inputs = torch.randn(1000, 16)
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))
    return {
        "rank": dist.get_rank(),
        "backend": dist.get_backend(),
        "loss": loss.item(),
        "bytes_out": diloco.bytes_out,
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank. ``--backend gloo`` does the same without gradbus's transport."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="dds")
    dist.init_process_group(parser.parse_args(arguments).backend)
    print(json.dumps(train()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

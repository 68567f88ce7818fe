"""Hugging Face Accelerate over the bus, on CPUs.

``torchrun --standalone --nproc-per-node 2 -m gradbus.experiments.examples.accelerate_training`` trains a small network
on synthetic data. Each rank prints the mean loss of the last step over all ranks, and a digest of its weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(backend: str) -> dict[str, object]:
    """Train for two epochs with gradients added up over two batches. Returns what this rank is to print."""
    # On CPUs, Accelerate makes a process group of gloo and refuses another name; a group that exists it takes as it is.
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(network, optimizer, DataLoader(dataset, batch_size=16))
    for _ in range(2):
        for batch, wanted in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch), wanted)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    weights = torch.cat([parameter.detach().flatten() for parameter in accelerator.unwrap_model(model).parameters()])
    return {
        "rank": accelerator.process_index,
        "backend": dist.get_backend(),
        "loss": accelerator.gather(loss.detach()).mean().item(),
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank. ``--backend gloo`` does the same without gradbus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="dds")
    print(json.dumps(train(parser.parse_args(arguments).backend)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

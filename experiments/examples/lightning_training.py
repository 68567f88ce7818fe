"""Lightning over the bus, on CPUs.

``torchrun --standalone --nproc-per-node 2 -m gradbus.experiments.examples.lightning_training`` trains a small network
on synthetic data. Each rank prints the mean loss of the last epoch over all ranks, and a digest of its weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):  # type: ignore[misc]  # a set-up need not have Lightning's types
    """A network of two layers that learns the mean square of a vector (16,)."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(backend: str) -> dict[str, object]:
    """Train for two epochs. Returns what this rank is to print."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(dataset, batch_size=16))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {
        "rank": trainer.global_rank,
        "backend": dist.get_backend(),
        "loss": trainer.callback_metrics["loss_epoch"].item(),
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

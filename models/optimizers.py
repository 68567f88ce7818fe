"""What the optimizers of PyTorch cost once in every process."""

from __future__ import annotations

import torch


def load_optimizers() -> None:
    """Make one: the first of a process imports the compiler of PyTorch, seconds that should not fall into training."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

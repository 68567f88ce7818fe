"""Networks for tests that name their model in a configuration."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Awkward(nn.Module):
    """All that can go wrong between a vector and names: a frozen layer, tied weights, batch norm with its counter, and
    parameters whose order is not that of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.frozen, self.first = nn.Linear(3, 4), nn.Linear(4, 4)
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.last(self.norm(self.first(self.frozen(x - self.mean))).relu())


def awkward(seed: int = 0) -> nn.Module:
    """The same in every process."""
    torch.manual_seed(seed)
    return Awkward()


def awkward_compiled(seed: int = 0) -> nn.Module:
    """The same behind ``torch.compile``: nothing is compiled before its first batch."""
    model: nn.Module = torch.compile(awkward(seed))  # type: ignore[assignment]
    return model


def narrow() -> nn.Module:
    """Another model."""
    return nn.Linear(3, 2)

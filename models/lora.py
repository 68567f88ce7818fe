"""LoRA: a trained product of two thin matrices beside each frozen weight.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021 (arXiv:2106.09685), section 4.1: the layer
``h = W x`` becomes ``h = W x + (alpha / r) B A x``, with A drawn at random and B zero, so that training begins with the
model as it was. Differs from the paper: A is uniform in +-1 / sqrt(in_features), where the paper has a Gaussian.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .seeds import seeded_generator

PATTERN = "*.lora_*"
"""Matches the names of all adapters in a model's state, and of nothing else in it: for ``federated.share.include``."""


class LoraLinear(nn.Module):
    """A linear layer with an adapter; its weight and bias keep their names, and are frozen.

    Input (..., in_features), output (..., out_features).

    Attributes:
        weight, bias: of the layer. lora_a: shape (rank, in_features). lora_b: shape (out_features, rank).
    """

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear, *, rank: int, alpha: float, generator: torch.Generator) -> None:
        """Take over the parameters of ``layer``. ``generator``: draws A."""
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = alpha / rank
        dtype, device = layer.weight.dtype, layer.weight.device
        bound = 1 / math.sqrt(layer.in_features)
        drawn = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(drawn.to(device, dtype))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias) + self.scale * linear(linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain layer with the weight ``W + (alpha / r) B A``, which is tied to no other."""
        layer = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight + self.scale * self.lora_b @ self.lora_a)
        layer.register_parameter("bias", self.bias)
        return layer

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}, rank={self.lora_a.shape[0]}, scale={self.scale:g}"


def add_lora(model: nn.Module, targets: Sequence[str] = ("*",), *, rank: int, alpha: float, seed: int = 0) -> list[str]:
    """Freeze a model, and give adapters to its linear layers.

    Args:
        targets: patterns of the layers' names in ``named_modules``, where ``*`` stands for any characters.
        rank: r, the number of columns of B. alpha: the adapters' product counts alpha / rank times.
        seed: of A, which differs from layer to layer.

    Returns:
        Names of the layers, in the order of the model.

    Raises:
        ValueError: a pattern matches no linear layer, or a number is out of range.
    """
    if rank < 1 or not alpha > 0:
        raise ValueError(f"need rank >= 1 and alpha > 0, got {rank} and {alpha}")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    for pattern in targets:
        if not _matching(layers, [pattern]):
            near = difflib.get_close_matches(pattern.strip("*."), list(layers), n=5, cutoff=0.3) or list(layers)[:5]
            raise ValueError(f"no linear layer is named like {pattern!r}; there are {', '.join(near) or 'none'}")
    model.requires_grad_(False)
    found = _matching(layers, targets)
    for name in found:
        generator = seeded_generator("lora", seed, name)
        _replace(model, name, LoraLinear(layers[name], rank=rank, alpha=alpha, generator=generator))
    return found


def merge_lora(model: nn.Module) -> list[str]:
    """Add each adapter to its weight, in place, and leave plain layers with the names that they had. What was frozen
    stays so. Returns the names of the layers."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}
    for name, layer in layers.items():
        _replace(model, name, layer.merged().requires_grad_(False))
    return list(layers)


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)

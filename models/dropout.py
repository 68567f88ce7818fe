"""Dropout whose masks come from its own generator."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SeededDropout(nn.Module):
    """``nn.Dropout``, except that the masks are a function of the last :meth:`reseed`.

    ``nn.Dropout`` draws from the global generator, which the threads of one process share; two clients training side by
    side would then get different masks on every run.

    Args:
        p: share of entries set to zero, in [0, 1); the others are scaled by 1 / (1 - p).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout p must be in [0, 1), got {p}")
        self.p = p
        self._seed = 0
        self._generator: torch.Generator | None = None  # made in forward, which knows the device

    def reseed(self, seed: int) -> None:
        """Start the sequence of masks anew."""
        self._seed, self._generator = seed, None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self._generator is None or self._generator.device != x.device:
            self._generator = torch.Generator(x.device).manual_seed(self._seed)
        keep = torch.empty_like(x).bernoulli_(1 - self.p, generator=self._generator)
        return x * keep.div_(1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def reseed_dropout(model: nn.Module, generator: torch.Generator) -> None:
    """Give every :class:`SeededDropout` in ``model`` a new seed, drawn from ``generator`` in module order."""
    for module in model.modules():
        if isinstance(module, SeededDropout):
            module.reseed(int(torch.randint(2**62, (), generator=generator)))

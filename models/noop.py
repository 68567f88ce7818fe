"""A task that learns nothing: the time of a round is that of communication alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from .seeds import seeded_generator
from .task import EvalResult, TrainingStopped, TrainResult

Delta = Literal["none", "constant", "seeded"]


class VectorModel(nn.Module):
    """One parameter ``vector``, float32 (dim,), all zero; ``forward`` adds it to its input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.vector


class NoopTask:
    """Implements :class:`gradbus.models.Task` without data; ``train`` returns at once.

    Args:
        dim: number of parameters, >= 1.
        delta: added to the parameters by training. ``"none"``: nothing; ``"constant"``: ``scale`` to each;
            ``"seeded"``: normal noise of that scale, different for each client and round, at some 10 ns per parameter.

    Raises:
        ValueError: ``dim`` below 1, or no such delta.
    """

    def __init__(self, dim: int, *, delta: Delta = "none", scale: float = 1e-3) -> None:
        if dim < 1:
            raise ValueError(f"dim must be >= 1, got {dim}")
        if delta not in ("none", "constant", "seeded"):
            raise ValueError(f"delta must be 'none', 'constant' or 'seeded', got {delta!r}")
        self.num_params = dim
        self.delta = delta
        self.scale = scale

    def build_model(self) -> VectorModel:
        return VectorModel(self.num_params)

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Nothing to load."""

    def train(  # noqa: PLR0913 (the public signature)
        self,
        model: nn.Module,
        *,
        client_id: int,
        round_id: int,
        epochs: int,
        lr: float,
        seed: int,
        subset_size: int,
        should_stop: Callable[[], bool],
    ) -> TrainResult:
        """Add the delta. All clients report one sample, so the mean over clients is a plain one.

        Raises:
            TrainingStopped: ``should_stop`` was true.
        """
        if should_stop():
            raise TrainingStopped(0)
        with torch.no_grad():
            for vector in model.parameters():
                if self.delta == "constant":
                    vector.add_(self.scale)
                elif self.delta == "seeded":
                    generator = seeded_generator("null", seed, client_id, round_id)
                    vector.add_(torch.randn(vector.shape, generator=generator), alpha=self.scale)
        return TrainResult(num_samples=1, loss=0.0)

    def evaluate(self, model: nn.Module) -> EvalResult | None:
        """None: there is nothing to be good at."""
        return None

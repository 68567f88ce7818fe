"""What algorithms with local steps share: they remember the weights from which a rank's changes are measured."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket

ANCHOR, MOMENTUM = "anchor", "momentum"
"""Kinds in the memory: the weights after the last exchange, and the momentum of the outer step."""


class Anchored(Algorithm, ABC):
    """Ranks train by themselves for ``steps`` steps, then exchange what their weights have changed.

    The change is measured from the last exchange that has counted, the anchor: one that is taken back, on all ranks,
    leaves it for the next. Whether one is due follows from the number of the step alone.
    """

    scope = "weights"
    equal_replicas = False
    options: Any

    def parts(self, flat: Tensor) -> Mapping[str, Tensor]:
        """Views of the parts that are exchanged by themselves, by the names that they have in the memory."""
        return {"weights": flat}

    @torch.no_grad()
    def begin(self, weights: TensorBucket) -> None:
        for key, part in self.parts(weights.flat).items():
            if self.memory.find(ANCHOR, key) is None:
                self.memory.stage(ANCHOR, key, part.clone())
        self.memory.commit()

    def weights_of_joiner(self, weights: Tensor) -> Tensor:
        """The anchor where all ranks have the same one: what the rank sends first is what it has changed itself."""
        if ANCHOR not in self.shared:
            return weights
        return torch.cat([self.anchor(key, part) for key, part in self.parts(weights).items()])

    @property
    def interval_steps(self) -> int:
        return int(self.options.steps)

    def is_due(self, step: Step) -> bool:
        return (step.number + 1) % int(self.options.steps) == 0

    def anchor(self, key: str, own: Tensor) -> Tensor:
        """The anchor of a part; not to be changed. ``own``: this rank's weights.

        Raises:
            RuntimeError: it was never begun, or with other weights.
        """
        found = self.memory.find(ANCHOR, key)
        if found is None or found.shape != own.shape:
            raise RuntimeError(
                f"{self.called}: {key} has {own.numel()} weights, and those after the last exchange are "
                f"{0 if found is None else found.numel()}: call begin() with the weights that the run begins with"
            )
        return found

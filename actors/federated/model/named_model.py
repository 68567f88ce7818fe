"""The global model of a client as tensors by name, beside the module that is being trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.runtime.wire.control import Welcome


@dataclass(frozen=True, slots=True, eq=False)
class ArrivedModel:
    """Holds a global model as it has arrived.

    Attributes:
        round_id: the round after which this is the model; 0: the initial one.
        vector: float32, shape (D,): what is exchanged. buffers: the block of the merged buffers.
        welcome: of the run.
    """

    round_id: int
    vector: Tensor
    buffers: bytes
    welcome: Welcome


class NamedModel:
    """Names the tensors of models that have arrived, by the layout of the module that is trained, which is neither
    touched nor built a second time. May be used on any thread."""

    def __init__(self, trained: Callable[[], FlatModel]) -> None:
        """``trained``: gives the model that is trained, which has the frozen parameters."""
        self._trained = trained

    def is_laid_out(self, welcome: Welcome) -> bool:
        """Whether the trained model is laid out for what this run exchanges."""
        return self._trained().sharing == Sharing.of_welcome(welcome)

    def is_complete(self, welcome: Welcome) -> bool:
        """Whether all is here that a model of this run has beside what arrives in each round: the layout, and the
        frozen parameters of the controller."""
        lacks_frozen = bool(welcome.frozen) and self._trained().frozen != welcome.frozen
        return self.is_laid_out(welcome) and not lacks_frozen

    def state(self, model: ArrivedModel, personal: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the tensors of this model by name, for ``load_state_dict``: copies on the CPU. It is complete.

        ``personal``: what this client keeps of its own, by name.
        """
        trained = self._trained()
        frozen = trained.read_frozen() if model.welcome.frozen else torch.empty(0)
        return trained.state_layout.state(model.vector, frozen, model.buffers, personal)

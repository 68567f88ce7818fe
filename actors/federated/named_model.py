"""The global model of a client as tensors by name, beside the module that is being trained."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradbus.actors.federated.flat_model import FlatModel
from gradbus.actors.federated.sharing import Sharing
from gradbus.runtime.checkpoint import copy_state
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
    """Names the tensors of models that have arrived, in a module of its own: training goes on in the other one.

    Both methods that take long may be called on any thread but the event loop's. To build the module draws from torch's
    global random numbers: :meth:`build` does so where nothing trains, else :meth:`state` does when it is first called.
    """

    def __init__(self, build: Callable[[], FlatModel], trained: Callable[[], FlatModel]) -> None:
        """``build``: makes the module. ``trained``: gives the one that is trained, which has the frozen parameters."""
        self._build = build
        self._trained = trained
        self._flat: FlatModel | None = None
        self._lock = threading.Lock()

    def lacks_frozen(self, welcome: Welcome) -> bool:
        """Whether the frozen parameters of the controller are not here yet, so that no model is complete."""
        return bool(welcome.frozen) and self._trained().frozen != welcome.frozen

    def build(self) -> None:
        """Build the module, if it is not there yet."""
        with self._lock:
            self._built()

    def _built(self) -> FlatModel:
        if self._flat is None:
            self._flat = self._build()
        return self._flat

    def state(self, model: ArrivedModel, personal: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the tensors of this model by name, for ``load_state_dict``: copies on the CPU. ``personal``: what this
        client keeps of its own, by name."""
        with self._lock:
            flat = self._built()
            flat.arrange(Sharing.of_welcome(model.welcome))
            if model.welcome.frozen and flat.frozen != model.welcome.frozen:
                flat.write_frozen(self._trained().read_frozen().clone())
            flat.write_personal(personal)
            flat.hold(model.vector, flat.buffers.unpack(model.buffers))
            return copy_state(flat.module)

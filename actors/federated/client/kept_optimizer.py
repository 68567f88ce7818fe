"""An optimizer whose state stays at the client from round to round, as the inner optimizer of DiLoCo does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradbus.runtime.complex_pairs import as_pairs
from gradbus.runtime.errors import ConfigError

_PAIRS = ".pairs"  # at the end of a name: the tensor is complex, and kept as pairs of floats


def _fits(state: Tensor, parameter: Tensor) -> bool:
    """Return whether the state has the parameter's shape, or broadcasts to it, as Adafactor's means over rows do."""
    return state.dim() <= parameter.dim() and all(
        one in (1, other) for one, other in zip(reversed(state.shape), reversed(parameter.shape), strict=False)
    )


class KeptOptimizer:
    """Makes the optimizer of a round, with the state that the last round of this client which counts has left."""

    def __init__(self, make: Callable[[Iterable[Tensor]], Optimizer], state: Mapping[str, Tensor]) -> None:
        """``make``: from parameters to a new optimizer. ``state``: as :meth:`state` gave it; empty: begin anew."""
        self._make = make
        self._before = state
        self._made: Optimizer | None = None
        self._parameters: list[Tensor] = []

    def __call__(self, parameters: Iterable[Tensor]) -> Optimizer:
        """The optimizer of these parameters, which are the same in each round.

        Raises:
            ValueError: it was made already, or the state is of other parameters.
        """
        if self._made is not None:
            raise ValueError("keep_optimizer keeps one optimizer: make_optimizer was called twice in a round")
        self._parameters = list(parameters)
        self._made = self._make(self._parameters)
        for name, value in self._before.items():
            number, _, key = name.partition(".")
            if int(number) >= len(self._parameters):
                raise ValueError(f"the kept optimizer has a state for parameter {number}, of {len(self._parameters)}")
            parameter = self._parameters[int(number)]
            if key.endswith(_PAIRS):
                key, value = key.removesuffix(_PAIRS), torch.view_as_complex(value.clone())
            if not _fits(value, parameter):
                raise ValueError(f"the kept optimizer has {key} of shape {tuple(value.shape)} for parameter {number}")
            own = value.clone().to(parameter.device) if value.dim() else value.clone()
            self._made.state[parameter][key] = own
        return self._made

    def state(self) -> dict[str, Tensor]:
        """The state now, as ``NUMBER.KEY`` of each parameter; of what is complex as pairs of floats.

        Raises:
            ConfigError: the optimizer holds something else than tensors.
        """
        found: dict[str, Tensor] = {}
        made = self._made.state if self._made is not None else {}
        for number, parameter in enumerate(self._parameters):
            for key, value in made.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.is_complex():
                    found[f"{number}.{key}{_PAIRS}"] = as_pairs(value.detach()).cpu().clone()
                elif isinstance(value, Tensor):
                    found[f"{number}.{key}"] = value.detach().cpu().clone()
                elif value is not None:
                    raise ConfigError(
                        f"federated.training.keep_optimizer: {type(self._made).__name__} keeps {key} as "
                        f"{type(value).__name__}, and only tensors are saved. Choose another optimizer, such as adamw"
                    )
        return found

"""The state of an optimizer as tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbus.runtime.errors import CheckpointError


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """The state of an optimizer with one group, as ``optimizer/KEY/PARAMETER``, not copied."""
    tensors = {}
    for name, parameter in zip(names, optimizer.param_groups[0]["params"], strict=True):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):  # SGD without momentum remembers a None
                tensors[f"optimizer/{key}/{name}"] = value
    return tensors


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor]
) -> None:
    """Replace the state of the optimizer by copies of these tensors; what is named otherwise is left to others.

    Raises:
        CheckpointError: a tensor for a parameter that is not there, or of another shape or type.
    """
    parameters = dict(zip(names, optimizer.param_groups[0]["params"], strict=True))
    optimizer.state.clear()
    for full_name, tensor in tensors.items():
        kind, _, rest = full_name.partition("/")
        key, _, name = rest.partition("/")
        if kind != "optimizer":
            continue
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != tensor.shape or parameter.dtype != tensor.dtype:
            here = None if parameter is None else f"{tuple(parameter.shape)} of {parameter.dtype}"
            raise CheckpointError(
                f"state of the optimizer: {key} of {name!r} is {tuple(tensor.shape)} of {tensor.dtype}, here {here}"
            )
        optimizer.state[parameter][key] = tensor.detach().to(parameter.device, copy=True)

"""A model's state by name, apart from the live model: to keep, to save, to load into another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def copy_state(model: nn.Module) -> dict[str, Any]:
    """What ``model.state_dict()`` has, as tensors of their own on the CPU, for ``load_state_dict`` of such a model.

    Tied parameters are there under all their names, each with a copy: file formats have no place for ties.
    """
    return {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
        for name, value in model.state_dict().items()
    }

"""PyTorch's default initialisation of convolutions and linear layers, from a given generator.

The layers draw their initial values from the global generator when they are made; see :mod:`gradbus.models.seeds` for
why that is avoided. So they are made bare, and :func:`init_parameters` fills them. (The "meta" device and ``skip_init``
of PyTorch do the same, at the price of importing sympy: more than a second.)
"""

from __future__ import annotations

import math

import torch
from torch import nn


class BareConv2d(nn.Conv2d):
    """``nn.Conv2d`` with parameters of undefined value."""

    def reset_parameters(self) -> None:
        """Draw nothing."""


class BareLinear(nn.Linear):
    """``nn.Linear`` with parameters of undefined value."""

    def reset_parameters(self) -> None:
        """Draw nothing."""


def init_parameters(model: nn.Module, generator: torch.Generator) -> None:
    """Overwrite weights and biases of all ``Conv2d`` and ``Linear`` layers, in module order.

    The distribution is the one the layers draw themselves: uniform in +-1 / sqrt(fan_in), for weights and biases alike.
    Layers of other kinds are left as they are.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(module.weight[0].numel())
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)

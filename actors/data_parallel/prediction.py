"""Weights as they will be when a late gradient is applied, foretold from the momentum.

Chen, Yang and Cheng, "Efficient and robust parallel DNN training through model parallelism on multi-GPU platform"
(SpecTrain), 2018 (arXiv:1809.02839), equation 4, for SGD with momentum m and its buffer v:

    w_ahead = w - lr (m + m^2 + ... + m^s) v          s: steps that are still to be applied

Differs from the paper: v is the buffer of torch.optim.SGD, which is not scaled by 1 - m.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradbus.runtime.errors import ConfigError


def check_prediction(optimizer: torch.optim.Optimizer, delay_steps: int, *, exchanges_weights: bool) -> None:
    """Refuse what cannot be foretold. Raises ConfigError: with the reason."""
    if not delay_steps or exchanges_weights:
        raise ConfigError("parallel.predicts_weights is for gradients that come late: set parallel.delay_steps=1")
    if not isinstance(optimizer, torch.optim.SGD) or not all(group["momentum"] for group in optimizer.param_groups):
        raise ConfigError(
            f"parallel.predicts_weights follows the momentum of SGD: set parallel.optimizer to sgd with momentum, got "
            f"{type(optimizer).__name__}"
        )


@contextmanager
def weights_ahead(optimizer: torch.optim.Optimizer, steps: int) -> Iterator[None]:
    """Have the parameters of an optimizer ``steps`` steps ahead inside the block, and as they were after it."""
    before: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for group in optimizer.param_groups if steps else ():
            share = sum(group["momentum"] ** (step + 1) for step in range(steps))
            for parameter in group["params"]:
                momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
                if momentum is not None:
                    before.append((parameter, parameter.detach().clone()))
                    parameter.add_(momentum, alpha=-group["lr"] * share)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, kept in before:
                parameter.copy_(kept)

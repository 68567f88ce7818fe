"""The optimizer that a client keeps goes on, from round to round, as one that was never interrupted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbus.actors.federated.client.kept_optimizer import KeptOptimizer


def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (3,), (2, 3, 4))]


def step(optimizer: torch.optim.Optimizer, weights: list[Tensor], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for one in weights:
        one.grad = torch.randn(one.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_two_rounds_have_the_bits_of_one(kind: Any, options: dict[str, Any]) -> None:
    whole, apart = parameters(), parameters()
    uninterrupted = kind(whole, **options)
    kept: dict[str, Tensor] = {}
    for number in range(3):
        step(uninterrupted, whole, number)
        keeper = KeptOptimizer(partial(kind, **options), kept)
        step(keeper(apart), apart, number)
        kept = keeper.state()
    assert all(torch.equal(one, other) for one, other in zip(whole, apart, strict=True))


def test_a_state_of_another_shape_is_refused() -> None:
    keeper = KeptOptimizer(torch.optim.AdamW, {"0.exp_avg": torch.zeros(4, 2)})
    with pytest.raises(ValueError, match=r"exp_avg of shape \(4, 2\) for parameter 0"):
        keeper(parameters())

"""Gradients that come late are computed where the momentum takes the weights meanwhile."""

from __future__ import annotations

import pytest
import torch
from ddp_scene import make_task, succeeded, train

from gradbus.actors.data_parallel.prediction import weights_ahead
from gradbus.runtime.errors import ConfigError


def test_weights_are_ahead_inside_the_block_and_as_they_were_after_it_even_after_an_error() -> None:
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    with weights_ahead(optimizer, 2):
        assert weight.tolist() == [1.0, -2.0]  # no momentum yet
    weight.grad = torch.tensor([4.0, 8.0])
    optimizer.step()
    before = weight.tolist()
    ahead = []

    def fail() -> None:
        with weights_ahead(optimizer, 2):
            ahead.extend(weight.tolist())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    # Two steps without a new gradient move by lr (m + m^2) v.
    assert ahead == pytest.approx([before[0] - 0.1 * 0.75 * 4, before[1] - 0.1 * 0.75 * 8])
    assert weight.tolist() == before


def test_the_prediction_is_exact_where_the_gradients_to_come_are_zero() -> None:
    weight = torch.tensor([3.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.tensor([1.0])
    optimizer.step()
    with weights_ahead(optimizer, 3):
        ahead = weight.item()
    for _ in range(3):
        weight.grad = torch.zeros(1)
        optimizer.step()
    assert weight.item() == pytest.approx(ahead)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "parallel.delay_steps=1"),
        ({"delay_steps": 1, "algorithm": "async-averaging"}, "parallel.delay_steps=1"),
        ({"delay_steps": 1, "optimizer": {"name": "adamw", "lr": 0.001}}, "momentum of SGD.*got AdamW"),
        ({"delay_steps": 1, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0}}, "momentum of SGD"),
    ],
)
def test_what_cannot_be_foretold_is_refused_at_the_start(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        succeeded(train(make_task(), predicts_weights=True, **settings))  # type: ignore[arg-type]

"""Gradients that come late are computed at the weights to come, as far as a rank knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddp_scene import data, make_task, small_mlp, succeeded, train
from torch import Tensor, nn

from gradbus.models import ClassificationTask
from gradbus.runtime.algorithms.prediction import weights_ahead
from gradbus.runtime.errors import ConfigError

LATE: dict[str, Any] = {"delay_steps": 1, "predicts_weights": True, "epochs": 2, "hash_every": 1}


def by_numpy(options: dict[str, Any], weights: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """SGD, after the equations of torch.optim.SGD."""
    lr, m, decay = options["lr"], options.get("momentum", 0.0), options.get("weight_decay", 0.0)
    buffer: np.ndarray | None = None
    for gradient in gradients:
        step = (-gradient if options.get("maximize") else gradient) + decay * weights
        if m:
            buffer = step if buffer is None else m * buffer + (1 - options.get("dampening", 0.0)) * step
            step = step + m * buffer if options.get("nesterov") else buffer
        weights = weights - lr * step
    return weights


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "dampening": 0.3, "maximize": True},
    ],
)
@pytest.mark.parametrize("made", [0, 1, 2])
def test_weights_are_ahead_by_the_late_steps_inside_the_block_and_as_they_were_after_it(
    options: dict[str, Any], made: int
) -> None:
    generator = torch.Generator().manual_seed(made)
    weight = torch.randn(5, generator=generator).requires_grad_()
    frozen = torch.ones(2)
    gradients = [torch.randn(5, generator=generator) for _ in range(made + 2)]
    start, options = weight.detach().numpy().copy(), {"lr": 0.1, **options}
    optimizer = torch.optim.SGD([weight, frozen], **options)
    for gradient in gradients[:made]:
        weight.grad = gradient
        optimizer.step()
    before, ahead = weight.tolist(), []

    def fail() -> None:
        with weights_ahead(optimizer, [{weight: gradient} for gradient in gradients[made:]]):
            ahead.extend(weight.tolist())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert ahead == pytest.approx(by_numpy(options, start, [one.numpy() for one in gradients]), rel=1e-5, abs=1e-6)
    assert weight.tolist() == before
    for gradient in gradients[made:]:  # the optimizer has nothing of it
        weight.grad = gradient
        optimizer.step()
    assert weight.tolist() == pytest.approx(ahead, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True},
        {"name": "sgd", "lr": 0.1, "momentum": 0.0},
        {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.1},
    ],
    ids=["nesterov", "no momentum", "clipped"],
)
def test_a_single_rank_trains_as_without_a_delay_for_its_gradients_are_the_mean(
    optimizer: dict[str, Any], delay: int
) -> None:
    settings = {**LATE, "optimizer": optimizer, "world": 1}
    (in_time,) = succeeded(train(make_task(), **{**settings, "delay_steps": 0, "predicts_weights": False}))
    (late,) = succeeded(train(make_task(), **{**settings, "delay_steps": delay}))
    assert torch.allclose(late.parameters, in_time.parameters, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["dense", "powersgd"])
def test_a_run_with_prediction_has_equal_replicas_and_goes_on_from_a_checkpoint_with_the_same_bits(
    algorithm: str, tmp_path: Path
) -> None:
    settings = {**LATE, "algorithm": algorithm, "checkpoint__every_steps": 4}
    whole, other = succeeded(train(make_task(), checkpoint__dir=tmp_path / "whole", **settings))
    assert torch.equal(whole.parameters, other.parameters)
    succeeded(train(make_task(), checkpoint__dir=tmp_path / "parts", max_steps=4, **settings))
    for again in succeeded(train(make_task(), checkpoint__dir=tmp_path / "parts", **settings)):
        assert torch.equal(again.parameters, whole.parameters)


class Spoils(ClassificationTask):
    """The gradient of one batch is infinite; its loss is not."""

    def __init__(self, at: int) -> None:
        super().__init__(small_mlp, data(), batch_size=16)
        self._at, self._number = at, -1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._number += 1
        loss = super().loss(model, batch)
        return loss + 0.0 * torch.sqrt(loss * 0) if self._number == self._at else loss


def test_a_gradient_that_is_not_finite_does_not_spoil_the_steps_after_it() -> None:
    for outcome in succeeded(train(make_task(), Spoils(2), **{**LATE, "epochs": 1})):
        # One step more: whether a gradient is finite is looked at from the first skipped step on.
        assert [report.skipped_steps for report in outcome.reports] == [2]
        assert outcome.parameters.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "set delay_steps=1"),
        ({"delay_steps": 1, "algorithm": "async-averaging"}, "set delay_steps=1"),
        ({"delay_steps": 1, "optimizer": {"name": "adamw", "lr": 0.001}}, "steps of SGD.*got AdamW and dense"),
        ({"delay_steps": 1, "algorithm": "qadam", "optimizer": {"name": "sgd", "momentum": 0.0}}, "got SGD and qadam"),
        ({"delay_steps": 1, "algorithm": "dgc"}, "steps of SGD.*got DgcSgd and dgc"),
    ],
)
def test_what_cannot_be_foretold_is_refused_at_the_start(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        succeeded(train(make_task(), predicts_weights=True, **settings))  # type: ignore[arg-type]

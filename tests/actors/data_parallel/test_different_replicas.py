"""Ranks whose models differ: each keeps its own; evaluated, exported and left at the end is the mean."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import make_task, succeeded, train
from torch import Tensor, nn

from gradbus.models import ClassificationTask
from gradbus.runtime.checkpoint import CheckpointStore

SETTINGS: dict[str, Any] = {"algorithm": "decentralized", "epochs": 2, "hash_every": 1}


def saved(folder: Path, rank: int, step: int) -> dict[str, Tensor]:
    with CheckpointStore(folder / f"rank-{rank}") as store:
        return store.load(step).tensors


def of_model(tensors: dict[str, Tensor], prefix: str) -> Tensor:
    """All parameters below the prefix, one vector."""
    return torch.cat([t.reshape(-1) for name, t in sorted(tensors.items()) if name.startswith(f"{prefix}parameter/")])


def test_the_model_of_a_run_is_the_mean_and_each_rank_saves_its_own(tmp_path: Path) -> None:
    outcomes = succeeded(train(make_task(), world=3, checkpoint__dir=tmp_path, **SETTINGS))
    ranks = [saved(tmp_path, rank, outcomes[0].worker.step) for rank in range(3)]
    own = torch.stack([of_model(tensors, "own/") for tensors in ranks])
    assert not torch.equal(own[0], own[1])
    mean = own.double().mean(dim=0)
    assert torch.allclose(of_model(ranks[0], "").double(), mean, atol=1e-6)  # what gradbus export writes
    for outcome in outcomes:
        live = dict(outcome.worker.model.named_parameters())
        left = torch.cat([live[name].detach().reshape(-1) for name in sorted(live)])
        assert torch.equal(left, of_model(ranks[0], ""))
        report = outcome.reports[-1]
        assert report.model == "mean"
        assert report.params_hash == outcomes[0].reports[-1].params_hash
        expected = math.sqrt(float((own.double() - mean).square().sum(dim=1).mean())) / float(mean.norm())
        assert report.consensus_distance == pytest.approx(expected, rel=1e-3)
        assert report.test_samples == 101


class Notes(ClassificationTask):
    """Keeps the parameters that it is evaluated with."""

    evaluated: list[Tensor]

    def evaluate_shard(self, model: nn.Module, **where: Any) -> Any:
        self.evaluated.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        return super().evaluate_shard(model, **where)


def test_all_ranks_evaluate_the_mean_and_go_on_with_their_own() -> None:
    tasks = []
    for _ in range(2):
        inner = make_task()
        task = Notes(inner._make_model, inner.data, batch_size=16)
        task.evaluated = []
        tasks.append(task)
    watched = succeeded(train(*tasks, **SETTINGS))
    assert len(tasks[0].evaluated) == 2
    for mine, other in zip(tasks[0].evaluated, tasks[1].evaluated, strict=True):
        assert torch.equal(mine, other)
    blind = succeeded(train(make_task(), eval_every_epochs=0, **SETTINGS))
    assert torch.equal(watched[0].parameters, blind[0].parameters)


def test_a_run_that_is_done_is_the_mean_again(tmp_path: Path) -> None:
    first = succeeded(train(make_task(), checkpoint__dir=tmp_path, **SETTINGS))
    again = succeeded(train(make_task(), checkpoint__dir=tmp_path, **SETTINGS))
    longer = succeeded(train(make_task(), checkpoint__dir=tmp_path, **{**SETTINGS, "epochs": 3}))
    whole = succeeded(train(make_task(), **{**SETTINGS, "epochs": 3}))
    for rank in (0, 1):
        assert torch.equal(first[rank].parameters, again[rank].parameters)
        assert torch.equal(longer[rank].parameters, whole[rank].parameters)


class NotFinite(ClassificationTask):
    """The loss of one batch is NaN."""

    number = -1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.number += 1
        return super().loss(model, batch) * (float("nan") if self.number == 3 else 1.0)


@pytest.mark.parametrize(
    ("settings", "skipped"),
    [
        ({}, [1, 1]),  # all agree
        ({"algorithm__interval_steps": 2}, [0, 1]),  # no exchange in this step: the rank skips its own
        ({"algorithm": "async-averaging"}, [0, 1]),
    ],
    ids=["exchange", "no exchange", "late"],
)
def test_a_step_that_is_not_finite_is_skipped_by_all_or_where_there_is_no_exchange_by_that_rank(
    settings: dict[str, Any], skipped: list[int]
) -> None:
    inner = make_task()
    odd = NotFinite(inner._make_model, inner.data, batch_size=16)
    outcomes = succeeded(train(make_task(), odd, **{**SETTINGS, "epochs": 1, **settings}))
    assert [outcome.reports[0].skipped_steps for outcome in outcomes] == skipped
    for outcome in outcomes:
        assert outcome.parameters.isfinite().all()
        assert outcome.reports[0].consensus_distance is not None


def test_local_steps_send_nothing() -> None:
    settings = {**SETTINGS, "algorithm__interval_steps": 1000, "epochs": 1, "eval_every_epochs": 0}
    outcomes = succeeded(train(make_task(), **settings))
    every = succeeded(train(make_task(), **{**settings, "algorithm__interval_steps": 1}))
    one_model = 4 * outcomes[0].parameters.numel()
    assert outcomes[0].reports[0].bytes_out_per_step * 7 == pytest.approx(one_model, rel=0.01)  # the first step only
    assert every[0].reports[0].bytes_out_per_step == pytest.approx(one_model, rel=0.01)

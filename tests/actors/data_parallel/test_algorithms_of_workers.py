"""Every algorithm as an option of the Worker, over DDS: it trains, and goes on from a checkpoint with the same bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import Outcome, make_task, single_process, succeeded, train, training_of, vector
from torch import Tensor, nn

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import ALGORITHMS, Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.choices import AlgorithmChoices, Choice
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError, ConfigError

SGD = {"optimizer__momentum": 0.0}
# Of each what lets it do within these steps all that it does; and settings without which it cannot work.
CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ALGORITHMS.table},
    "a codec of the user's": {"algorithm": "gradbus.experiments.examples.custom_codec:Ternary"},
    "dense bf16": {"algorithm": "dense", "algorithm__wire": "bf16"},
    "dense ring": {"algorithm": "dense", "algorithm__route": "ring"},
    "dense hierarchical": {"algorithm": "dense", "algorithm__route": "hierarchical"},
    "topk": {"algorithm": "topk", "algorithm__density": 0.1},
    "powersgd": {"algorithm": "powersgd", "bucket_bytes": 8192, "first_bucket_bytes": 1024},
    "signsgd": {"algorithm": "signsgd", "optimizer__lr": 0.002, **SGD},
    "qadam": {"algorithm": "qadam", "algorithm__warmup_steps": 4, "optimizer__lr": 0.003, **SGD},
    "onebit-adam": {"algorithm": "onebit-adam", "algorithm__warmup_steps": 4, "optimizer__lr": 0.003, **SGD},
    "adaptive-powersgd": {"algorithm": "adaptive-powersgd", "algorithm__window_steps": 3},
    "async-averaging": {"algorithm": "async-averaging", "algorithm__every_steps": 2},
    "local-sgd": {"algorithm": "local-sgd", "algorithm__steps": 3},
    "post-local-sgd": {"algorithm": "post-local-sgd", "algorithm__steps": 3, "algorithm__dense_steps": 4},
    "noloco": {"algorithm": "noloco", "algorithm__steps": 3},
    "sparseloco": {"algorithm": "sparseloco", "algorithm__steps": 3},
    "diloco": {"algorithm": "diloco", "algorithm__steps": 3},
    "diloco streaming": {
        "algorithm": "diloco", "algorithm__steps": 4, "algorithm__fragments": 2, "algorithm__delay": 1,
    },
    **{
        f"decentralized {peers}": {"algorithm": "decentralized", "algorithm__peers": peers}
        for peers in ("all", "shift-one", "ring", "choco")
    },
}  # fmt: skip


def state_of(outcome: Outcome) -> dict[str, torch.Tensor]:
    """All that a rank would save."""
    training = training_of(outcome.worker)
    return {**training.state.own(), **training.state.shared()}


class Double(nn.Module):
    """A model of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(784, 10).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.flatten(1).double())  # type: ignore[no-any-return]


@pytest.mark.parametrize("algorithm", ["dense", "dgc"])
def test_models_of_other_types_are_for_algorithms_that_can(algorithm: str) -> None:
    for outcome in succeeded(train(make_task(Double), algorithm=algorithm, hash_every=1)):
        assert torch.equal(outcome.parameters, vector(single_process(make_task(Double), 2, algorithm=algorithm)))
    with pytest.raises(ConfigError, match=r"topk: parameter net\.weight is torch\.float64, expected torch\.float32"):
        succeeded(train(make_task(Double), world=1, algorithm="topk"))


class Scaled(Algorithm):
    """An algorithm of a user's own, without a name: the mean, times a factor."""

    class Options(base.Options):
        factor: float = 1.0

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        yield AllReduce("mean", bucket.flat, "mean", out=bucket.flat, divisor=step.active)
        bucket.flat.mul_(self.options.factor)


class Stepping(Scaled):
    """The same, as if it made steps."""

    makes_steps = True


OWN = f"{__name__}:Scaled"


def test_an_algorithm_of_ones_own_trains_with_its_options_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    settings = {"algorithm": {"name": OWN, "factor": 0.5}, "hash_every": 1}
    whole = succeeded(train(make_task(), optimizer__lr=0.1, **settings))
    expected = vector(single_process(make_task(), 2, optimizer__lr=0.05))
    saved = {**settings, "optimizer__lr": 0.1, "checkpoint__dir": tmp_path}
    succeeded(train(make_task(), max_steps=3, **saved))
    again = succeeded(train(make_task(), **saved))
    for outcome in (*whole, *again):
        assert outcome.worker.algorithm == OWN
        assert torch.equal(outcome.parameters, expected)
    with pytest.raises(CheckpointError, match=r"algorithm\.factor"):
        succeeded(train(make_task(), **{**saved, "algorithm": {"name": OWN, "factor": 0.25}}))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"algorithm": {"name": OWN, "fcator": 0.5}}, "fcator: there is no such option, did you mean 'factor'"),
        (
            {"algorithm": OWN, "task": Double},
            r"test_algorithms_of_workers:Scaled: parameter net\.weight is torch\.float64",
        ),
        ({"algorithm": f"{__name__}:Stepping"}, "test_algorithms_of_workers:Stepping computes the steps itself"),
        (
            {"algorithm": f"{__name__}:Stepping", **SGD, "optimizer__clip_norm": 1.0},
            "test_algorithms_of_workers:Stepping makes steps, not gradients",
        ),
    ],
    ids=str,
)
def test_what_an_algorithm_of_ones_own_cannot_work_with_is_refused_by_its_class(
    settings: dict[str, Any], text: str
) -> None:
    task = make_task(settings.pop("task")) if "task" in settings else make_task()
    with pytest.raises(ConfigError, match=text):
        succeeded(train(task, world=1, **settings))


def test_a_model_that_the_bus_cannot_reach_is_refused() -> None:
    task = make_task()
    task.build_model = lambda: nn.Sequential(nn.Linear(784, 10, device="meta"))
    with pytest.raises(ConfigError, match=r"topk: parameter 0\.weight is on meta, expected on the CPU"):
        succeeded(train(task, world=1, algorithm="topk"))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"algorithm": "qadam"}, "qadam computes the steps itself: it needs torch.optim.SGD without momentum"),
        ({"algorithm": "onebit-adam", **SGD, "optimizer__clip_norm": 1.0}, "makes steps, not gradients: .*clip_norm"),
        ({"algorithm": "dense", "algorithm__topology": {"ranks": [{"host": "a"}]}}, "topology"),
        ({"algorithm": "no_such_package:Algorithm"}, "there is no module 'no_such_package'"),
        ({"algorithm": "gradbus.models:DataSplit"}, "is no Algorithm"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_the_first_step(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        succeeded(train(make_task(), world=1, **settings))


@pytest.mark.parametrize("case", CASES)
def test_a_run_learns_and_goes_on_in_the_midst_of_an_epoch_with_the_bits_of_one_that_never_stopped(
    case: str, tmp_path: Path
) -> None:
    settings = {"epochs": 2, "hash_every": 1, "checkpoint__every_steps": 5, **CASES[case]}
    whole = succeeded(train(make_task(), checkpoint__dir=tmp_path / "whole", **settings))
    losses = [report.loss for report in whole[0].reports]
    assert losses[-1] < losses[0] < math.log(10) + 0.1  # ten classes
    succeeded(train(make_task(), checkpoint__dir=tmp_path / "parts", max_steps=5, **settings))
    again = succeeded(train(make_task(), checkpoint__dir=tmp_path / "parts", **settings))
    for mine, other in zip(whole, again, strict=True):
        assert torch.equal(mine.parameters, other.parameters)
        assert mine.reports[-1].params_hash == other.reports[-1].params_hash == whole[0].reports[-1].params_hash
        ours, theirs = state_of(mine), state_of(other)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert mine.reports[-1].loss == other.reports[-1].loss


def test_an_algorithm_is_looked_up_and_its_options_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check, checked = AlgorithmChoices.checked, list[str]()

    def count_and_check(choices: AlgorithmChoices[Any], choice: Choice) -> Any:
        checked.append(choice.name)
        return check(choices, choice)

    config = DataParallelConfig.model_validate({"algorithm": {"name": OWN, "factor": 0.5}})
    monkeypatch.setattr(AlgorithmChoices, "checked", count_and_check)
    succeeded(train(make_task(), world=2, configs=[config] * 2))
    assert checked == [OWN, OWN]  # by each rank

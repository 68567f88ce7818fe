"""Local steps of workers over DDS: outer state, steps that are not finite, running means of batch norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import NotFinite, make_task, small_mlp, succeeded, train, training_of, vector
from torch import Tensor, nn

from gradbus.models import ClassificationTask
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import TrainingDiverged

SETTINGS: dict[str, Any] = {
    "algorithm": "diloco", "algorithm__steps": 3, "algorithm__codec": "fp32", "epochs": 2, "max_steps": 6,
    "eval_every_epochs": 0,
}  # fmt: skip


def shared(outcome: Any) -> dict[str, Tensor]:
    """Weights after the last exchange and outer momentum, of a rank."""
    found: dict[str, Tensor] = training_of(outcome.worker).algorithm.shared_state()
    return found


@pytest.mark.parametrize("codec", ["fp32", "q4"])
@pytest.mark.parametrize("world", [2, 3])
def test_after_an_exchange_ranks_have_the_same_bits_of_weights_and_outer_momentum(world: int, codec: str) -> None:
    outcomes = succeeded(train(make_task(), world=world, **{**SETTINGS, "algorithm__codec": codec}))
    first = shared(outcomes[0])
    assert sorted(first) == ["anchor/fragment0", "momentum/fragment0"]
    for outcome in outcomes:
        assert all(torch.equal(shared(outcome)[key], first[key]) for key in first)
        assert torch.allclose(outcome.parameters, first["anchor/fragment0"], atol=1e-7)  # the mean of equal ones
        assert outcome.reports[-1].consensus_distance == pytest.approx(0.0, abs=1e-7)


def test_a_rank_skips_a_step_that_is_not_finite_alone_and_the_exchange_after_it_has_what_it_did_before() -> None:
    inner = make_task()
    odd = NotFinite(small_mlp, inner.data, batch_size=16)
    outcomes = succeeded(train(make_task(), odd, **{**SETTINGS, "max_steps": 3}))
    start = vector(make_task().build_model())
    assert [outcome.worker.skipped_steps for outcome in outcomes] == [0, 1]
    for outcome in outcomes:
        found = shared(outcome)
        momentum = found["momentum/fragment0"]  # of one exchange: what the ranks have changed since the start
        assert torch.allclose(found["anchor/fragment0"], start - 0.7 * 1.9 * momentum, atol=1e-6)
        assert momentum.norm() > 0
        assert outcome.reports[-1].skipped_exchanges == 0


def test_a_rank_that_skips_one_step_after_the_other_ends_the_run_of_all_before_the_next_exchange() -> None:
    inner = make_task()
    odd = NotFinite(small_mlp, inner.data, batch_size=16)
    odd.at = tuple(range(99))
    settings = {**SETTINGS, "max_steps": 30, "max_nonfinite_steps": 3}
    for outcome in train(make_task(), odd, **settings):
        assert isinstance(outcome.error, TrainingDiverged)
        assert (outcome.error.step, outcome.error.ranks) == (6, (1,))  # the exchange after step 3 has told it


class OverflowingSGD(torch.optim.SGD):
    """Of one of its steps, counted from 0, a weight is infinite; -1: of none."""

    number, at = -1, -1

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.number += 1
        if self.number == self.at:
            self.param_groups[0]["params"][-1][0] = torch.inf


class Overflows(ClassificationTask):
    """Steps as an :class:`OverflowingSGD`."""

    at = -1

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = OverflowingSGD(model.parameters(), lr=0.05)
        optimizer.at = self.at
        return optimizer


@pytest.mark.parametrize(
    ("at", "settings", "skipped_steps", "skipped_exchanges"),
    [
        (2, {}, [0, 0], 1),
        (0, {}, [0, 2], 1),  # its gradients are not finite after that
        (2, {"algorithm__delay": 1, "algorithm__fragments": 2}, [0, 1], 1),  # with the other part at that time
    ],
    ids=["in the step with the exchange", "before it", "late"],
)
def test_weights_that_overflow_on_one_rank_spoil_no_other_and_it_goes_on_from_the_last_exchange(
    at: int, settings: dict[str, Any], skipped_steps: list[int], skipped_exchanges: int
) -> None:
    tasks = [Overflows(small_mlp, make_task().data, batch_size=16) for _ in range(2)]
    tasks[1].at = at
    outcomes = succeeded(train(*tasks, optimizer="task", **{**SETTINGS, **settings}))
    assert [outcome.worker.skipped_steps for outcome in outcomes] == skipped_steps
    first = shared(outcomes[0])
    for outcome in outcomes:
        assert outcome.parameters.isfinite().all()
        assert outcome.reports[-1].skipped_exchanges == skipped_exchanges
        for key, tensor in shared(outcome).items():
            assert tensor.isfinite().all()
            assert torch.equal(tensor, first[key])
    assert first["momentum/fragment0"].norm() > 0  # of the exchange after it


def test_learning_rates_go_by_the_steps_of_the_run_also_on_a_rank_that_has_skipped_one() -> None:
    inner = make_task()
    odd = NotFinite(small_mlp, inner.data, batch_size=16)
    odd.at = (1,)
    outcomes = succeeded(train(make_task(), odd, schedule="cosine", **SETTINGS))
    assert [outcome.worker.skipped_steps for outcome in outcomes] == [0, 1]
    steps = {name: SETTINGS[name] for name in ("epochs", "max_steps", "eval_every_epochs")}
    dense = succeeded(train(make_task(), schedule="cosine", **steps))
    rates = {training_of(outcome.worker).optimizer.lr for outcome in (*outcomes, *dense)}
    assert len(rates) == 1
    assert rates.pop() < DataParallelConfig().optimizer.options.get("lr", 0.05) / 2


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.last = nn.Linear(784, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.out = nn.Linear(24, 10)
        self.last.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x.flatten(1)).relu()).relu()
        return self.out(self.last(hidden).relu())  # type: ignore[no-any-return]


def test_tied_weights_stay_one_where_fragments_are_cut_through_them() -> None:
    outcomes = succeeded(train(make_task(Tied), **{**SETTINGS, "algorithm__fragments": 2}))
    first = shared(outcomes[0])
    assert sum(first[f"anchor/fragment{number}"].numel() for number in range(2)) == vector(Tied()).numel()
    for outcome in outcomes:
        assert outcome.worker.model.last.weight is outcome.worker.model.second.weight
        assert all(torch.equal(shared(outcome)[key], first[key]) for key in first)
        assert torch.equal(outcome.parameters, outcomes[0].parameters)


def test_a_delay_of_the_run_alone_is_refused_at_the_start() -> None:
    for outcome in train(make_task(), delay_steps=1, **SETTINGS):
        assert "set parallel.algorithm.delay=1 instead" in str(outcome.error)


def with_batch_norm(seed: int = 0) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), small_mlp(seed))


def test_running_means_are_each_ranks_own_and_the_model_of_the_run_has_their_mean(tmp_path: Path) -> None:
    outcomes = succeeded(train(make_task(with_batch_norm), checkpoint__dir=tmp_path, **SETTINGS))
    ranks = []
    for rank in range(2):
        with CheckpointStore(tmp_path / f"rank-{rank}") as store:
            ranks.append(store.load(6).tensors)
    for name in ("buffer/1.running_mean", "buffer/1.running_var"):
        own = [tensors[f"own/{name}"] for tensors in ranks]
        assert not torch.equal(*own)
        assert torch.allclose(ranks[0][name], (own[0] + own[1]) / 2, atol=1e-7)
        for outcome in outcomes:
            live = dict(outcome.worker.model.named_buffers())
            assert torch.equal(live[name.removeprefix("buffer/")], ranks[0][name])

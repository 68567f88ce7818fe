"""What bounds make of updates, by what is typical; and which runs may have them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.bounded_strategy import BoundedStrategy, bounded
from gradbus.actors.aggregation.bounds import Bounds
from gradbus.actors.aggregation.fednova import FedNova
from gradbus.actors.aggregation.qfedavg import LOSS_BEFORE, QFedAvg
from gradbus.actors.aggregation.robust import CoordinateMedian
from gradbus.actors.aggregation.scaffold import CONTROL
from gradbus.actors.aggregation.strategies import FedAvg, Strategy
from gradbus.actors.aggregation.typical import lower_median, most_samples
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.federated.controller.combinations import check_combination, make_strategy
from gradbus.codecs import Parsed
from gradbus.runtime.config.federated import FederatedConfig, LimitSettings
from gradbus.runtime.errors import CheckpointError, ConfigError

DIM = 4


def facts(client_id: int, samples: int, *, steps: int = 10, loss: float = 1.0) -> Facts:
    return Facts(client_id=client_id, num_samples=samples, steps=steps, metrics={LOSS_BEFORE: loss})


def settled(strategy: Strategy, *announced: Facts, **options: Any) -> Bounds:
    bounds = Bounds(strategy, times=4.0, sections=(), **options)
    bounds.open_round(1)
    bounds.settle(announced, [])
    return bounds


def vector(*values: float) -> Parsed:
    return codecs.parse(codecs.get("fp32").encode(torch.tensor(values, dtype=torch.float32)), expected_dim=len(values))


# -- medians -----------------------------------------------------------------------------------------------------------


def test_the_median_of_an_even_number_is_the_lower_one() -> None:
    assert (lower_median([]), lower_median([3.0]), lower_median([9, 1]), lower_median([5, 1, 3])) == (None, 3.0, 1, 3)


def test_samples_of_earlier_rounds_are_limited_by_the_same_rule_where_nobody_has_announced_any_yet() -> None:
    assert most_samples(LimitSettings(), [10, 10, 1 << 30]) is None
    assert most_samples(LimitSettings(trust="adversarial"), [10, 10, 1 << 30]) == 40
    assert most_samples(LimitSettings(trust="adversarial"), []) is None
    assert most_samples(LimitSettings(trust="adversarial", cap_samples=7), [10, 10, 1 << 30]) == 7


# -- weights -----------------------------------------------------------------------------------------------------------


def test_samples_weigh_up_to_four_times_the_median_of_this_round() -> None:
    bounds = settled(FedAvg(1), facts(0, 100), facts(1, 50), facts(2, 1 << 30))
    assert [bounds.believed(facts(9, samples)).num_samples for samples in (7, 400, 401, 1 << 30)] == [7, 400, 400, 400]


def test_a_second_attempt_at_a_round_has_the_bounds_of_the_first_and_the_next_round_has_none_yet() -> None:
    bounds = settled(FedAvg(1), facts(0, 100))
    bounds.open_round(1)
    assert bounds.is_settled
    bounds.open_round(2)
    assert not bounds.is_settled


def test_in_fednova_samples_and_steps_are_bounded_together() -> None:
    strategy = FedNova(1)
    others = [facts(client_id, 100, steps=20) for client_id in range(3)]
    bounds = settled(strategy, *others)
    for samples, steps in ((100, 1), (100, 10**6), (1 << 30, 20), (1 << 30, 1), (1 << 30, 10**6), (1, 1)):
        believed = bounds.believed(facts(3, samples, steps=steps))
        own, of_all = strategy.weights(believed)
        assert own <= 4 * 100 / 20 * (1 + 1e-9)
        assert of_all <= 4 * 100 * 20 * (1 + 1e-9)
    assert bounds.believed(facts(3, 100, steps=1)).steps == 5
    assert bounds.believed(facts(3, 100, steps=10**6)).steps == 80
    assert bounds.believed(others[0]) is others[0]


def test_steps_with_momentum_are_bounded_by_how_far_they_go() -> None:
    strategy = FedNova(1, momentum=0.9)
    bounds = settled(strategy, *(facts(client_id, 100, steps=20) for client_id in range(3)))
    believed = bounds.believed(facts(3, 100, steps=1))
    assert 100 / strategy.reach(believed.steps) <= 4 * 100 / strategy.reach(20)
    assert 100 / strategy.reach(believed.steps - 1) > 4 * 100 / strategy.reach(20), "no more than needed"


@pytest.mark.parametrize("q", [0.3, 1.0, 2.0, 5.0])
def test_in_qfedavg_powers_of_losses_are_bounded_from_both_sides_where_both_do_harm(q: float) -> None:
    strategy = QFedAvg(1, q=q)
    bounds = settled(strategy, *(facts(client_id, 100, loss=2.0) for client_id in range(3)))
    high = bounds.believed(facts(3, 1 << 30, loss=9e5)).metrics[LOSS_BEFORE]
    assert (high**q, bounds.believed(facts(3, 7, loss=2.5)).num_samples) == (pytest.approx(4 * 2.0**q), 7)
    low = bounds.believed(facts(3, 100, loss=0.0)).metrics[LOSS_BEFORE]
    assert low == (pytest.approx(2.0 * 4 ** (1 / (q - 1))) if q < 1 else 0.0)


def test_a_loss_of_zero_under_a_small_q_is_bounded_and_not_an_overflow() -> None:
    bounds = settled(QFedAvg(1, q=0.001), *(facts(client_id, 100, loss=2.0) for client_id in range(3)))
    assert 0.0 < bounds.believed(facts(3, 100, loss=0.0)).metrics[LOSS_BEFORE] < 2.0


class ByAccuracy(FedAvg):
    """Weighs by a metric that a client announces, and divides by another one."""

    metrics = ("accuracy", "spread")

    def weights(self, facts: Facts) -> tuple[float, ...]:
        return (facts.num_samples * facts.metrics["accuracy"] / facts.metrics["spread"],)


@pytest.mark.parametrize(
    "metrics",
    [
        {"accuracy": 0.5},
        {"accuracy": 0.5, "spread": 0.0},
        {"accuracy": -0.5, "spread": 1.0},
        {"accuracy": 1e308, "spread": 1e-300},
        {"accuracy": 0.0, "spread": 1.0},
    ],
)
def test_numbers_with_which_a_users_own_strategy_cannot_compute_are_refused_and_in_no_median(
    metrics: dict[str, float],
) -> None:
    bad = Facts(client_id=9, num_samples=10, metrics=metrics)
    good = [Facts(client_id=i, num_samples=10, metrics={"accuracy": 0.5, "spread": 1.0}) for i in range(2)]
    bounds = settled(ByAccuracy(1), *good, bad)
    assert bounds.in_force()["weights"] == [5.0]
    for refuse in (bounds.check, bounds.believed):
        with pytest.raises(ValueError, match=r"cannot compute with the numbers|expected finite numbers above 0"):
            refuse(bad)


def test_announcements_that_cannot_be_used_leave_a_round_without_bounds_and_not_with_none() -> None:
    bounds = settled(FedNova(1), facts(0, 100, steps=0), facts(1, 100, steps=0))
    assert not bounds.is_settled
    bounds.settle([facts(2, 100), facts(3, 100)], [])
    assert bounds.believed(facts(4, 1 << 30)).num_samples == 400


def test_strategies_that_give_each_client_one_vote_wait_for_no_announcements() -> None:
    for strategy in (CoordinateMedian(1), QFedAvg(1, q=0.0)):
        bounds = Bounds(strategy, times=4.0, sections=())
        bounds.open_round(1)
        assert bounds.is_settled


def test_a_strategy_of_the_users_own_says_by_what_it_counts() -> None:
    class ByAccuracy(FedAvg):
        metrics = ("accuracy",)

        def weights(self, facts: Facts) -> tuple[float, ...]:
            return (facts.num_samples * facts.metrics["accuracy"],)

    bounds = Bounds(ByAccuracy(1), times=4.0, sections=())
    bounds.open_round(1)
    announced = [Facts(client_id=i, num_samples=10, metrics={"accuracy": 0.5}) for i in range(3)]
    bounds.settle(announced, [])
    assert bounds.believed(Facts(client_id=4, num_samples=1000, metrics={"accuracy": 1.0})).num_samples == 20


def test_an_announcement_that_cannot_be_used_is_none() -> None:
    bounds = settled(FedNova(1), facts(0, 100), facts(1, 100), facts(2, 100, steps=0))
    assert bounds.believed(facts(0, 100)).steps == 10
    with pytest.raises(ValueError, match="no optimizer steps"):
        bounds.believed(facts(2, 100, steps=0))


# -- norms -------------------------------------------------------------------------------------------------------------


def round_of(strategy: BoundedStrategy, round_id: int, *vectors: tuple[float, ...]) -> Tensor:
    """The change of the model by a round of updates with one sample each."""
    base, weights = torch.zeros(DIM), torch.zeros(DIM)
    strategy.bounds.open_round(round_id)
    strategy.begin(round_id, base)
    given = [Update(vector(*values)) for values in vectors]
    announced = [facts(client_id, 1) for client_id in range(len(given))]
    strategy.bounds.settle(announced, map(strategy.norms, given))
    for update, one in zip(given, announced, strict=True):
        strategy.add(update, one)
    strategy.finish(weights)
    return weights


def adversarial(**limits: Any) -> BoundedStrategy:
    strategy = bounded(FedAvg(DIM), FederatedConfig(limits={"trust": "adversarial", **limits}))
    assert isinstance(strategy, BoundedStrategy)
    return strategy


def test_the_first_round_has_the_median_norm_of_its_own_updates_and_the_next_that_of_the_first() -> None:
    strategy = adversarial()
    found = round_of(strategy, 1, (1, 0, 0, 0), (0, 2, 0, 0), (0, 0, 1000, 0))
    assert found.tolist() == pytest.approx([1 / 3, 2 / 3, 8 / 3, 0])
    assert strategy.marks() == {"norm bounded": (2,)}
    found = round_of(strategy, 2, (500, 0, 0, 0), (0, 600, 0, 0), (0, 0, 1, 0))
    assert found.tolist() == pytest.approx([8 / 3, 8 / 3, 1 / 3, 0])
    found = round_of(strategy, 3, (2000, 0, 0, 0), (0, 600, 0, 0), (0, 0, 1, 0))
    assert found.tolist() == pytest.approx([2000 / 3, 200, 1 / 3, 0]), "the median is of norms as they came"


def test_updates_of_zeros_do_not_say_what_is_typical() -> None:
    strategy = adversarial()
    zeros = (0.0,) * DIM
    round_of(strategy, 1, zeros, zeros, zeros, (3, 0, 0, 0), (4, 0, 0, 0))
    assert round_of(strategy, 2, (12, 0, 0, 0))[0] == 12
    assert round_of(strategy, 3, (13, 0, 0, 0))[0] == 12, "one update alone says nothing of later rounds"


def test_where_all_updates_are_zero_the_next_round_is_a_first_one() -> None:
    strategy = adversarial()
    round_of(strategy, 1, (0.0,) * DIM, (0.0,) * DIM)
    strategy.bounds.open_round(2)
    assert strategy.bounds.needs_norms


def test_where_most_updates_are_zero_the_few_others_do_not_raise_what_is_known() -> None:
    strategy = adversarial()
    zeros = (0.0,) * DIM
    round_of(strategy, 1, (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0))
    round_of(strategy, 2, zeros, zeros, (0, 0, 1e6, 0))
    assert round_of(strategy, 3, (1e6, 0, 0, 0))[0] == 4, "one liar among clients that have not moved"
    round_of(strategy, 4, zeros, (2, 0, 0, 0), (0, 3, 0, 0))
    assert round_of(strategy, 5, (1e6, 0, 0, 0))[0] == 8, "most have moved"


def test_a_norm_for_itself_and_samples_for_themselves_take_precedence() -> None:
    strategy = bounded(
        FedNova(DIM), FederatedConfig(limits={"trust": "adversarial", "cap_samples": 1000, "clip_norm": 9.0})
    )
    bounds = strategy.bounds
    assert bounds is not None
    assert bounds.sections == ()
    bounds.open_round(1)
    bounds.settle([facts(i, 10, steps=10) for i in range(3)], [])
    believed = bounds.believed(facts(3, 900, steps=1))
    assert (believed.num_samples, believed.steps) == (900, 3), "steps are still bounded, by samples of one each"


def test_no_round_waits_for_samples_that_have_a_limit_of_their_own() -> None:
    bounds = Bounds(FedAvg(1), times=4.0, sections=(), fixed_samples=True)
    bounds.open_round(1)
    assert bounds.is_settled
    assert bounds.believed(facts(0, 1 << 30)).num_samples == 1 << 30


def test_a_fixed_norm_and_further_sections_work_together() -> None:
    def run(trust: str) -> tuple[Tensor, Tensor]:
        config = FederatedConfig(
            strategy="scaffold",
            clients={"num": 3},
            training={"rule": "scaffold"},
            limits={"clip_norm": 1.0, "trust": trust},
        )
        check_combination(config)
        strategy = make_strategy(config, DIM)
        strategy.check(config)
        strategy.begin(1, torch.zeros(DIM))
        given = [Update(vector(8.0, 0, 0, 0), {CONTROL: vector(0, length, 0, 0)}) for length in (1.0, 1.0, 100.0)]
        if strategy.bounds is not None:
            assert isinstance(strategy, BoundedStrategy)
            strategy.bounds.open_round(1)
            strategy.bounds.settle([facts(i, 1) for i in range(3)], map(strategy.norms, given))
        for client_id, update in enumerate(given):
            strategy.add(update, facts(client_id, 1))
        weights = torch.zeros(DIM)
        strategy.finish(weights)
        control = strategy.broadcast()
        assert control is not None
        assert strategy.marks()["clipped"] == (0, 1, 2)
        return weights, control

    weights, control = run("adversarial")
    assert (weights.tolist(), control.tolist()) == ([1, 0, 0, 0], [0, 2, 0, 0])
    weights, control = run("cooperative")
    assert (weights.tolist(), control.tolist()) == ([1, 0, 0, 0], [0, 34, 0, 0])


# -- state -------------------------------------------------------------------------------------------------------------


def test_what_is_typical_is_part_of_the_checkpoint() -> None:
    strategy, again = adversarial(), adversarial()
    round_of(strategy, 1, (1, 0, 0, 0), (0, 2, 0, 0), (0, 0, 3, 0))
    again.load_state(strategy.state())
    later = ((9, 1, 0, 0), (0, 9, 7, 0), (0.1, 0, 0, 0))
    assert torch.equal(round_of(strategy, 2, *later), round_of(again, 2, *later))


def test_weights_of_asynchronous_rounds_are_compared_with_the_last_committed_buffer() -> None:
    bounds = settled(FedAvg(1), facts(0, 1000), by_rounds=False)
    for one in (facts(0, 10), facts(1, 20), facts(2, 30)):
        bounds.count(one, {})
    bounds.commit()
    bounds.open_round(2)
    assert (bounds.is_settled, bounds.believed(facts(3, 999)).num_samples) == (True, 80)
    again = Bounds(FedAvg(1), times=4.0, sections=(), by_rounds=False)
    again.load_state(bounds.state())
    again.open_round(2)
    assert (again.is_settled, again.believed(facts(3, 999)).num_samples) == (True, 80)


def test_weights_of_another_strategy_are_not_gone_on_with() -> None:
    bounds = Bounds(FedAvg(1), times=4.0, sections=(), by_rounds=False)
    for client_id in range(3):
        bounds.count(facts(client_id, 10), {})
    bounds.commit()
    again = Bounds(FedNova(1), times=4.0, sections=(), by_rounds=False)
    again.load_state(bounds.state())
    again.open_round(2)
    assert not again.is_settled


def test_a_client_with_many_updates_in_a_buffer_has_one_vote() -> None:
    bounds = settled(FedAvg(1), facts(0, 10), by_rounds=False)
    for one in (facts(0, 10), facts(1, 10), *(facts(2, 10**6) for _ in range(8))):
        bounds.count(one, {})
    bounds.commit()
    bounds.open_round(2)
    assert bounds.believed(facts(3, 999)).num_samples == 40


def test_a_checkpoint_of_a_cooperative_run_begins_with_a_first_round_and_a_damaged_one_is_refused() -> None:
    strategy = adversarial()
    strategy.load_state({})
    strategy.bounds.open_round(5)
    assert not strategy.bounds.is_settled
    for value in (-1.0, 0.0, math.inf):
        with pytest.raises(CheckpointError, match="typical_norms"):
            strategy.load_state({"typical_norms": torch.tensor([value], dtype=torch.float64)})


# -- which runs --------------------------------------------------------------------------------------------------------


def test_a_cooperative_run_has_no_bounds_at_all() -> None:
    strategy = make_strategy(FederatedConfig(), 3)
    assert type(strategy) is FedAvg
    assert strategy.bounds is None


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"secure_aggregation": {"enabled": True}, "clients": {"min": 3}}, "neither the norm nor the weight of one"),
        ({"clients": {"kind": "sites"}}, r"sees the sums of sites, .* adversarial at the sites"),
        ({"mode": "asynchronous", "asynchronous": {"buffer": 2}}, "one liar is the median. Set it to 3 or more"),
    ],
)
def test_where_no_update_can_be_bounded_the_run_does_not_begin(rules: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=rf"limits\.trust = adversarial with .*{text}"):
        check_combination(FederatedConfig(limits={"trust": "adversarial"}, **rules))


def test_with_central_privacy_there_is_one_norm_and_all_weigh_alike() -> None:
    config = FederatedConfig(
        limits={"trust": "adversarial"}, privacy={"name": "central", "noise_multiplier": 1.0}, clients={"num": 3}
    )
    strategy = make_strategy(config, 3)
    assert isinstance(strategy, BoundedStrategy)
    strategy.bounds.open_round(1)
    assert (strategy.bounds.is_settled, strategy.bounds.sections) == (True, ())
    assert strategy.epsilon is not None


OF_0_1 = {
    "receive_budget_bytes": 1 << 26, "max_samples": 1 << 30, "cap_samples": "median", "cap_times_median": 4.0,
    "clip_norm": None, "max_strikes": 3, "quarantine_rounds": 10,
}  # fmt: skip


def test_the_default_of_version_0_1_is_read_as_that_of_today_where_it_was_written_down() -> None:
    assert LimitSettings.model_validate(OF_0_1) == LimitSettings()


@pytest.mark.parametrize(
    "given", [{"cap_samples": "median"}, {**OF_0_1, "cap_times_median": 8.0}, {**OF_0_1, "trust": "cooperative"}]
)
def test_whoever_has_asked_for_the_median_is_told_what_does_that_now(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"set limits\.trust = adversarial"):
        LimitSettings.model_validate(given)

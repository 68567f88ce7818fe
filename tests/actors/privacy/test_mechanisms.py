"""Noise in front of a strategy: bounds at both ends, the scale of the noise, the budget, and what cannot work."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gradbus import FederatedConfig, codecs
from gradbus.actors.aggregation.strategies import Strategy
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.privacy import mechanisms
from gradbus.actors.privacy.client import ClientPrivacy, privacy_of
from gradbus.actors.privacy.discrete_gaussian import discrete_gaussian
from gradbus.actors.privacy.mechanisms import LEDGER, WITHIN, with_privacy
from gradbus.runtime.choices import STRATEGIES
from gradbus.runtime.errors import CheckpointError, ConfigError

pytest.importorskip("scipy", reason="the extra gradbus[privacy] is not installed")

DIM = 4_000
NONE = torch.empty(0)


def private(dim: int = DIM, *, strategy: Any = "fedavg", **privacy: Any) -> Strategy:
    config = FederatedConfig(
        rounds=5, clients={"num": 3}, strategy=strategy, privacy={"name": "central", "noise_multiplier": 4.0, **privacy}
    )
    found = with_privacy(STRATEGIES.make(config.strategy, dim), config)
    found.lay_out([[dim]])
    found.check(config)
    return found


def asked_of(strategy: Strategy) -> ClientPrivacy:
    found = privacy_of(strategy.terms())
    assert found is not None
    return found


def update_of(change: torch.Tensor) -> Update:
    return Update(codecs.parse(codecs.get("fp32").encode(change), expected_dim=change.numel()))


def one_round(strategy: Strategy, changes: list[torch.Tensor], weights: torch.Tensor) -> None:
    asked, sent = asked_of(strategy), strategy.broadcast()
    strategy.begin(1, weights.clone())
    for client_id, change in enumerate(changes):
        clipped, metrics = asked.protected(change, NONE if sent is None else sent)
        strategy.add(update_of(clipped), Facts(client_id=client_id, num_samples=10 + client_id, metrics=metrics))
    strategy.finish(weights)


@pytest.mark.parametrize("size", [1e-7, 0.5, 0.999999, 1.0, 1.000001, 3.0, 1e6, 1e30])
def test_whatever_a_client_has_trained_comes_within_the_bound_and_is_taken(size: float) -> None:
    strategy = private(clip_norm=0.7)
    change = torch.randn(DIM, generator=torch.Generator().manual_seed(3))
    change *= size * 0.7 / change.norm()
    clipped, _ = asked_of(strategy).protected(change, NONE)
    assert float(clipped.double().norm()) <= 0.7
    torch.testing.assert_close(clipped, change * min(1.0, 1 / size), rtol=3e-6, atol=1e-12)
    strategy.begin(1, torch.zeros(DIM))
    strategy.add(update_of(clipped), Facts(client_id=0, num_samples=1))


def test_a_client_that_does_not_clip_is_refused_and_adds_nothing() -> None:
    strategy, weights = private(clip_norm=1.0), torch.zeros(DIM)
    strategy.begin(1, weights.clone())
    strategy.add(update_of(torch.zeros(DIM)), Facts(client_id=0, num_samples=1))
    for long in (torch.full((DIM,), 1.01 / DIM**0.5), torch.full((DIM,), 1e30)):
        with pytest.raises(ValueError, match="its client had to clip it to 1"):
            strategy.add(update_of(long), Facts(client_id=1, num_samples=1))
    strategy.finish(weights)
    assert float(weights.abs().max()) < 4.0 * 8


def test_noise_of_the_promised_scale_is_added_once_as_integers_and_clients_weigh_the_same() -> None:
    strategy, weights = private(clip_norm=1.0), torch.zeros(DIM)
    changes = [torch.full((DIM,), value) for value in (0.01, 0.002, -0.006)]  # of 10, 11 and 12 samples
    one_round(strategy, changes, weights)
    noise = (weights.double() - 0.002) * 3
    assert float(noise.std()) == pytest.approx(4.0, rel=0.06)  # 5 standard deviations of an estimate from so many
    assert abs(float(noise.mean())) < 5 * 4.0 / DIM**0.5
    again = torch.zeros(DIM)
    one_round(private(clip_norm=1.0), changes, again)
    assert not torch.equal(weights, again)


def test_clients_that_drop_out_do_not_lower_the_noise_on_the_sum() -> None:
    for clients in (1, 3):
        weights = torch.zeros(DIM)
        one_round(private(clip_norm=1.0), [torch.zeros(DIM)] * clients, weights)
        assert float(weights.double().std()) * clients == pytest.approx(4.0, rel=0.06)


def test_a_strategy_sees_the_noisy_mean_alone() -> None:
    plain, server = torch.zeros(DIM), torch.zeros(DIM)
    strategy = private(strategy={"name": "fedavgm", "momentum": 0.5})
    one_round(strategy, [torch.zeros(DIM)], server)
    one_round(private(), [torch.zeros(DIM)], plain)
    assert float(server.std()) == pytest.approx(float(plain.std()), rel=0.1)
    torch.testing.assert_close(strategy.state()["server_momentum"], server)


def test_the_budget_ends_the_run_before_it_is_exceeded_and_goes_through_a_checkpoint() -> None:
    strategy = private(epsilon=2.2)
    spent = []
    while not strategy.end_reason():
        one_round(strategy, [torch.zeros(DIM)], torch.zeros(DIM))
        assert strategy.epsilon is not None
        spent.append(strategy.epsilon)
    assert spent == sorted(spent)
    assert spent[-1] <= 2.2
    assert "the privacy budget is spent" in strategy.end_reason()
    again = private(epsilon=2.2)
    assert not again.end_reason()
    again.load_state(strategy.state())
    assert again.end_reason() == strategy.end_reason()
    more = private(epsilon=20.0, noise_multiplier=2.0)
    more.load_state(strategy.state())
    one_round(more, [torch.zeros(DIM)], torch.zeros(DIM))
    assert strategy.epsilon is not None
    assert more.epsilon is not None
    assert more.epsilon > strategy.epsilon
    with pytest.raises(CheckpointError, match=r"made without federated.privacy"):
        again.load_state({key: value for key, value in strategy.state().items() if key != LEDGER})


def test_without_a_multiplier_the_budget_lasts_for_all_rounds_and_no_longer() -> None:
    strategy = private(noise_multiplier=None, epsilon=8.0)
    for _ in range(5):
        assert not strategy.end_reason()
        one_round(strategy, [torch.zeros(DIM)], torch.zeros(DIM))
    assert strategy.end_reason()
    assert strategy.epsilon == pytest.approx(8.0, rel=2e-3)


def test_a_budget_that_no_round_fits_into_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"one more would make it .* Allow more, or add more noise"):
        private(epsilon=0.01)


def test_the_bound_follows_the_quantile_of_the_norms_and_is_kept() -> None:
    options = {"clip_norm": 0.01, "target_quantile": 0.5, "clip_lr": 0.5, "noise_multiplier": 0.01, "count_noise": 0.1}
    strategy, weights = private(64, **options), torch.zeros(64)
    changes = [torch.full((64,), norm / 8) for norm in (0.5, 1.0, 2.0)]
    for _ in range(30):
        one_round(strategy, changes, weights)
    bound = strategy.broadcast()
    assert bound is not None
    assert 0.4 < float(bound) < 2.5
    again = private(64, **options)
    again.load_state(strategy.state())
    assert torch.equal(again.broadcast(), bound)  # type: ignore[arg-type]


def test_the_count_of_updates_within_the_bound_is_part_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, drawn = private(target_quantile=0.5, clip_norm=1.0), []

    def noted(size: int, sigma: int, random_bytes: Any) -> Any:
        drawn.append(sigma)
        return discrete_gaussian(size, sigma, random_bytes)

    monkeypatch.setattr(mechanisms, "discrete_gaussian", noted)
    one_round(strategy, [torch.zeros(DIM)], torch.zeros(DIM))
    # With the default, noise on the count of 4: 1/4^2 = 1/z^2 + 1/8^2.
    assert drawn[0] == pytest.approx(mechanisms.grid_sigma(4 / 0.75**0.5, 1.0, DIM))
    strategy.begin(1, torch.zeros(DIM))
    for said in ({}, {WITHIN: 7.0}, {WITHIN: 0.5}):
        with pytest.raises(ValueError, match="expected 0 or 1"):
            strategy.add(update_of(torch.zeros(DIM)), Facts(client_id=0, num_samples=1, metrics=said))
    with pytest.raises(ConfigError, match="more than half of the noise"):
        private(target_quantile=0.5, count_noise=1.0)


CENTRAL = {"name": "central", "noise_multiplier": 4.0}
LOCAL = {"name": "local", "noise_multiplier": 4.0}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"strategy": "median"}, "median is no mean|CoordinateMedian is no mean"),
        ({"strategy": "krum"}, "is no mean of the updates"),
        ({"strategy": "fednova"}, "is no mean of the updates"),
        ({"strategy": "scaffold", "training": {"rule": "scaffold"}}, "which no noise is added to"),
        ({"strategy": "qfedavg", "training": {"rule": "loss_before"}}, "is no mean of the updates"),
        ({"codec": "q8"}, "what its residual or its rounding adds"),
        ({"codec": "s4"}, "what its residual or its rounding adds"),
        ({"codec": {"name": "fp32", "version": 1}}, "fp32 of version 1"),
        ({"mode": "asynchronous"}, "Use mode = synchronous"),
        ({"clients": {"kind": "sites"}}, "Let the clients take part themselves"),
        ({"limits": {"clip_norm": 1.0}}, "privacy.clip_norm is the bound here"),
        ({"selection": "weighted"}, "chooses by the samples or losses"),
        ({"selection": {"name": "power_of_choice", "fraction": 0.5}}, "Use uniform or round_robin"),
        ({"history": {"payloads": True}}, "would keep all updates without noise"),
        ({"privacy": {**CENTRAL, "clip_norm": 1e6}}, "Lower clip_norm or noise_multiplier"),
        ({"privacy": LOCAL, "mode": "asynchronous"}, "Use mode = synchronous"),
        ({"privacy": LOCAL, "strategy": "fednova"}, "needs the number of steps"),
        ({"privacy": LOCAL, "training": {"rule": "loss_before"}}, "without noise"),
        ({"privacy": LOCAL, "training": {"rule": "scaffold"}}, "without noise"),
    ],
)
def test_what_cannot_work_together_is_refused_with_the_reason(changed: dict[str, Any], text: str) -> None:
    config = FederatedConfig(**{"privacy": CENTRAL, **changed})
    strategy = with_privacy(STRATEGIES.make(config.strategy, DIM), config)
    strategy.lay_out([[DIM]])
    with pytest.raises(ConfigError, match=text):
        strategy.check(config)


def test_a_mechanism_without_a_word_on_how_much_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected noise_multiplier, epsilon, or both"):
        FederatedConfig(privacy="central")
    assert FederatedConfig().privacy.name == "none"


def test_local_noise_is_for_twice_the_bound_and_too_long_an_update_is_refused() -> None:
    strategy = private(name="local", noise_multiplier=2.0, clip_norm=0.5)
    asked, change = asked_of(strategy), torch.full((DIM,), 1.0)
    sent, metrics = asked.protected(change, NONE)
    assert metrics == {}
    assert float((sent.double() - 0.5 / DIM**0.5).std()) == pytest.approx(2.0 * 2 * 0.5, rel=0.06)
    strategy.begin(1, torch.zeros(DIM))
    strategy.add(update_of(sent), Facts(client_id=0, num_samples=1))
    with pytest.raises(ValueError, match="is to be expected"):
        strategy.add(update_of(sent * 1.5), Facts(client_id=0, num_samples=1))


def test_a_client_may_insist_on_noise_and_does_not_guess() -> None:
    terms = dict(private(name="local").terms())
    assert privacy_of(terms, least_noise=4.0) == ClientPrivacy(clip_norm=1.0, noise_multiplier=4.0)
    assert privacy_of({"mu": 1.0}) is None
    for sent in (terms, private().terms(), {}):
        with pytest.raises(ConfigError, match=r"client.least_noise is 4.1"):
            privacy_of(sent, least_noise=4.1)
    for wrong in ({"privacy.name": "other"}, {"privacy.clip_norm": -1.0}, {"privacy.more": 1}, {"privacy.name": [1]}):
        with pytest.raises(ConfigError, match="the controller asks for privacy"):
            privacy_of({**terms, **wrong})
    adaptive = dataclasses.replace(asked_of(private()), adaptive=True)
    with pytest.raises(ConfigError, match="expected one, the bound"):
        adaptive.protected(torch.zeros(3), NONE)

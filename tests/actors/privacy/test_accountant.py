"""What noise spends, by the accountant of opacus."""

from __future__ import annotations

import importlib.util
import math
import warnings

import pytest
import torch

from gradbus.actors.privacy.accountant import Ledger, epsilon_of, noise_for, rdp_analysis
from gradbus.runtime.errors import CheckpointError, ConfigError

pytest.importorskip("scipy", reason="the extra gradbus[privacy] is not installed")

SETTINGS = ((1.0, 1, 1e-5), (2.0, 10, 1e-5), (4.0, 100, 1e-6), (10.0, 50, 1e-3), (0.7, 3, 1e-4))


@pytest.mark.parametrize(("noise_multiplier", "rounds", "delta"), SETTINGS)
def test_epsilon_is_within_a_percent_of_opacus_with_its_own_orders(
    noise_multiplier: float, rounds: int, delta: float
) -> None:
    analysis = rdp_analysis()
    orders = [1 + tenth / 10 for tenth in range(1, 100)] + list(range(12, 64))  # RDPAccountant.DEFAULT_ALPHAS
    theirs = analysis.compute_rdp(q=1.0, noise_multiplier=noise_multiplier, steps=rounds, orders=orders)
    expected, _ = analysis.get_privacy_spent(orders=orders, rdp=theirs, delta=delta)
    ledger = Ledger(delta)
    for _ in range(rounds):
        ledger.spend(noise_multiplier)
    assert ledger.epsilon() == pytest.approx(expected, rel=0.01)
    # And no less than the Gaussian mechanism spends, whatever the accountant (Balle and Wang, ICML 2018, Theorem 8).
    epsilon, sensitivity = ledger.epsilon(), math.sqrt(rounds) / noise_multiplier
    above, below = (sensitivity / 2 - epsilon / sensitivity, -sensitivity / 2 - epsilon / sensitivity)
    assert normal(above) - math.exp(epsilon) * normal(below) <= delta


def normal(at: float) -> float:
    return math.erfc(-at / math.sqrt(2)) / 2


def test_rounds_of_other_noise_add_up_and_a_ledger_goes_through_a_checkpoint() -> None:
    ledger = Ledger(1e-5)
    assert ledger.epsilon() == 0.0
    for noise_multiplier in (3.0, 3.0, 5.0):
        expected = ledger.epsilon_with(noise_multiplier)
        ledger.spend(noise_multiplier)
        assert ledger.epsilon() == expected
    again = Ledger(1e-5)
    again.load_state(ledger.state())
    assert again == ledger
    assert again.rounds == 3
    assert epsilon_of([(3.0, 2)], 1e-5) < again.epsilon() < epsilon_of([(3.0, 3)], 1e-5)


@pytest.mark.parametrize("state", [torch.zeros(2, 2), torch.tensor([[1.0, 0.5]]).double(), torch.zeros(3).double()])
def test_a_damaged_ledger_is_refused(state: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match="ledger of privacy is damaged"):
        Ledger(1e-5).load_state(state)


def test_the_noise_for_a_budget_is_the_least_that_lasts() -> None:
    noise_multiplier = noise_for(8.0, 1e-5, 30)
    assert epsilon_of([(noise_multiplier, 30)], 1e-5) <= 8.0 < epsilon_of([(noise_multiplier * 0.999, 30)], 1e-5)
    with pytest.raises(ConfigError, match="which 1,000,000 rounds exceed with any noise"):
        noise_for(1e-9, 1e-5, 1_000_000)


def test_without_opacus_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {"gradbus.models": "here"}.get)
    rdp_analysis.cache_clear()
    with pytest.raises(ConfigError, match=r"gradbus\[privacy\] does: .*pip install .*'opacus"):
        epsilon_of([(1.0, 1)], 1e-5)


def test_a_warning_of_the_accountant_is_kept_back_without_the_filters_that_all_threads_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two controllers in one process, each with a thread of its own, would restore each other's filters."""
    epsilon_of([(1e6, 2)], 1e-5)  # loads the accountant
    with monkeypatch.context() as patched:
        patched.setattr(warnings, "catch_warnings", None)
        assert epsilon_of([(1e6, 2)], 1e-5) < 0.1

"""The benchmarks of privacy and of client drift: what they judge, and that finished trainings are kept."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradbus.actors.privacy.accountant import epsilon_of
from gradbus.experiments.bench import drift, early_stop, privacy
from gradbus.experiments.bench.drift import DriftMethod, DriftSetting

pytestmark = pytest.mark.timeout(300)  # of training processes that a busy machine starts slowly
pytest.importorskip("scipy", reason="the extra gradbus[privacy] is not installed")


def test_an_epsilon_that_is_two_percent_from_that_of_another_accountant_falls_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Importing all of opacus takes seconds: test_accountant.py compares with its functions."""
    for share, short in ((1.0, 0), (1.02, 5)):

        def theirs(noise: float, rounds: int, delta: float, share: float = share) -> float:
            return share * epsilon_of([(noise, rounds)], delta)

        monkeypatch.setattr(privacy, "opacus_epsilon", theirs)
        figures = list(privacy.measure_epsilon(""))
        assert sum(one.falls_short for one in figures) == short
        assert [one.name.rpartition(", by ")[2] for one in figures] == ["opacus", "closed form"] * 5
        assert all(1.0 < one.judged < 1.2 for one in figures if not one.asked)


def test_the_noise_passes_chi_squared_and_noise_that_is_two_percent_too_wide_does_not() -> None:
    figures = list(privacy.measure_noise(200_000))
    assert [one.falls_short for one in figures] == [False] * 6
    samples = np.rint(np.random.default_rng(1).normal(0, 17 * 1.02, 200_000)).astype(np.int64)
    assert privacy.chi_squared(*privacy.integer_classes(samples, 17)) > 1


@pytest.mark.slow
def test_a_private_training_is_kept_and_compared_with_one_without_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = argparse.Namespace(out=tmp_path / "p.json")
    smaller = {"clients": 3, "rounds": 5, "data": "glyphs"}
    (figure,) = privacy.measure_accuracy(chosen, 1, **smaller)
    assert figure.name.startswith("accuracy, 3 clients, round 5, epsilon ")
    assert 0 < figure.judged < 1  # three clients are too few for that noise
    monkeypatch.setattr(privacy, "run_alone", None)
    assert list(privacy.measure_accuracy(chosen, 1, **smaller)) == [figure]


@pytest.mark.slow
def test_rounds_with_noise_are_timed_beside_rounds_without() -> None:
    figures = list(privacy.measure_cost(1, dim=1000, clients=2, rounds=4))
    assert [one.name.rpartition("clients, ")[2] for one in figures[::2]] == [
        "central",
        "central, adaptive bound",
        "local",
    ]
    assert all(len(one.ratios) == 1 and one.ratios[0] > 0 for one in figures)


@pytest.mark.slow
def test_rounds_to_a_target_are_counted_and_runs_that_are_there_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = argparse.Namespace(out=tmp_path / "d.json")
    fedavg = {"FedAvg": DriftMethod("fedavg")}
    ways = {**fedavg, "SCAFFOLD": DriftMethod("scaffold", "scaffold")}
    few: dict[str, Any] = {"clients": 3, "alpha": 100.0, "data": "glyphs"}
    missed = DriftSetting(target=1.1, rounds=2, **few)
    figures = list(drift.measure_setting(chosen, missed, ways, 1))
    assert [one.samples for one in figures] == [(2.0,), (2.0,)]
    assert [one.note for one in figures] == ["1 of 1 without it, after 2 rounds"] * 2
    reached = DriftSetting(target=0.01, rounds=2, count=2, epochs=2, **few)
    (figure,) = drift.measure_setting(chosen, reached, fedavg, 1)
    assert (figure.samples, figure.note) == ((1.0,), "")
    assert "2 of 3 clients, 2 epochs" in figure.name
    monkeypatch.setattr(drift, "run_alone", None)
    assert list(drift.measure_setting(chosen, missed, ways, 1)) == figures


@pytest.mark.slow
def test_the_end_of_a_client_of_a_run_that_ends_early_is_timed(tmp_path: Path) -> None:
    (seconds,) = early_stop.ends_s(tmp_path, clients=1)
    assert 0 < seconds < 60

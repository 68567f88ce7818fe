"""The sampler of the noise: every integer has the probability that it has to have."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

from gradbus.actors.privacy import discrete_gaussian as sampler
from gradbus.actors.privacy.discrete_gaussian import MAX_SIGMA, discrete_gaussian

LEAST_P = 1e-3  # of the seeds below: a sampler that is wrong by 1 % at one integer is far beyond


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of Pearson's chi-squared test, where every class is expected at least 5 times."""
    expected = probabilities / probabilities.sum() * counts.sum()
    assert expected.min() >= 5
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def at_each_integer(samples: np.ndarray, sigma: float) -> float:
    """The p-value of samples against exp(-x^2 / (2 sigma^2)), integer by integer, the tails as one class each."""
    end = math.floor(3 * sigma)
    grid = np.arange(-60 * end - 60, 60 * end + 61)
    weights = np.exp(-(grid**2) / (2 * sigma**2))
    classes = np.clip(grid, -end, end) + end
    counts = np.bincount(np.clip(samples, -end, end) + end, minlength=2 * end + 1)
    return p_value(counts, np.bincount(classes, weights=weights))


@pytest.mark.parametrize("sigma", [1, 3, 17])
def test_each_integer_comes_as_often_as_the_discrete_gaussian_says(sigma: int) -> None:
    samples = discrete_gaussian(200_000, sigma, np.random.default_rng(sigma).bytes)
    assert at_each_integer(samples, sigma) > LEAST_P
    assert at_each_integer(samples, 1.02 * sigma) < 1e-6  # the test would see 2 %


def test_noise_on_the_grid_of_a_run_has_the_quantiles_and_the_lowest_bits_of_one() -> None:
    sigma = round(4.2 * 2**30)
    samples = discrete_gaussian(200_000, sigma, np.random.default_rng(5).bytes)
    normal = 0.5 * (1 + torch.erf(torch.from_numpy(samples / sigma) / math.sqrt(2)))
    places = (normal.clamp(max=1 - 1e-12) * 100).long().numpy()
    assert p_value(np.bincount(places, minlength=100), np.ones(100)) > LEAST_P
    # Floating-point noise would leave holes here: every residue is as likely as every other.
    assert p_value(np.bincount(samples & 1023, minlength=1024), np.ones(1024)) > LEAST_P


def test_an_event_that_a_float_cannot_decide_is_decided_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = discrete_gaussian(3_000, 2, np.random.default_rng(7).bytes)
    monkeypatch.setattr(sampler, "MARGIN", 2.0)  # every event then
    exact = discrete_gaussian(3_000, 2, np.random.default_rng(7).bytes)
    assert np.array_equal(fast, exact)
    calls: list[int] = []

    def more(size: int) -> bytes:
        calls.append(size)
        return b"\xff" * size

    # The number that begins with the first 64 bits of 1/e, and goes on with ones, is above it: bits are drawn for that.
    first = int(sampler.Context(prec=60).exp(sampler.Decimal(-1)) * 2**64)
    assert not sampler.is_below(first, sampler.Fraction(1), more)
    assert sampler.is_below(first, sampler.Fraction(1), bytes)
    assert calls == [8]

    # 256 bits and more of exp(-1/3), as 64 to begin with and the others drawn; one less or more in the last decides.
    wide = sampler.Context(prec=200)
    exact_value = int(wide.multiply(wide.exp(wide.divide(-1, 3)), 2**320))

    def decided(value: int) -> bool:
        words = [value >> shift & (1 << 64) - 1 for shift in (256, 192, 128, 64, 0)]
        rest = iter(words[1:])
        return sampler.is_below(words[0], sampler.Fraction(1, 3), lambda size: next(rest).to_bytes(size, "little"))

    for at in (0, 64, 128):
        assert decided(exact_value - (1 << at))
        assert not decided(exact_value + (1 << at))


def test_two_calls_give_other_noise_and_a_wrong_scale_is_refused() -> None:
    assert not np.array_equal(discrete_gaussian(100, 1 << 40), discrete_gaussian(100, 1 << 40))
    assert discrete_gaussian(0, 5, os.urandom).shape == (0,)
    for sigma in (0, -3, MAX_SIGMA + 1):
        with pytest.raises(ValueError, match=f"sigma is {sigma}, expected a whole number from 1"):
            discrete_gaussian(10, sigma)

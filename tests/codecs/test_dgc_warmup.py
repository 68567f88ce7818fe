"""The density of each epoch."""

from __future__ import annotations

import pytest

from gradbus import codecs


def test_the_paper_starts_at_75_percent_sparsity_and_ends_at_999_permille() -> None:
    densities = [codecs.warmup_density(epoch) for epoch in range(6)]
    assert [100 * (1 - density) for density in densities] == pytest.approx([75, 93.75, 98.4375, 99.6, 99.9, 99.9])


def test_three_equal_factors_are_these() -> None:
    schedule = codecs.geometric_warmup(3)
    assert schedule == pytest.approx([0.177828, 0.0316228, 0.00562341], rel=1e-5)
    assert [codecs.warmup_density(epoch, schedule=schedule) for epoch in (2, 3)] == [schedule[2], 0.001]


def test_five_equal_factors_are_not_quarters() -> None:
    assert codecs.geometric_warmup(5) == pytest.approx([0.31623, 0.1, 0.031623, 0.01, 0.0031623], rel=1e-4)


def test_an_own_list_is_followed_and_then_the_final_density() -> None:
    own = [1.0, 0.5, 0.0005]
    assert [codecs.warmup_density(epoch, density=0.01, schedule=own) for epoch in range(5)] == [
        1,
        0.5,
        0.01,
        0.01,
        0.01,
    ]
    assert codecs.warmup_density(0, schedule=()) == 0.001
    assert codecs.geometric_warmup(0) == ()


@pytest.mark.parametrize("bad", [0.0, -0.1, 1.5, 100.0, float("nan")])
def test_a_density_outside_of_0_to_1_is_refused(bad: float) -> None:
    for call in (
        lambda: codecs.warmup_density(0, density=bad),
        lambda: codecs.warmup_density(0, schedule=[bad]),
        lambda: codecs.geometric_warmup(3, density=bad),
        lambda: codecs.DgcConfig(density=bad),
    ):
        with pytest.raises(ValueError, match=r"density must be in \(0, 1\]"):
            call()


def test_a_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="epoch must be >= 0, got -1"):
        codecs.warmup_density(-1)
    with pytest.raises(ValueError, match="num_epochs must be >= 0"):
        codecs.geometric_warmup(-1)

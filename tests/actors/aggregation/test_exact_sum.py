"""The exact mean: right to its stated error, the same bits in any order, and never a part of an update."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.profiler import profile

from gradbus import codecs
from gradbus.actors.aggregation.exact_sum import BLOCK_ELEMS, ExactMean, GridRounding, OutOfRange
from gradbus.actors.aggregation.partial_sum import parse
from gradbus.codecs import DenseBlock, Parsed

DIM = 1000
VARIANTS = [(name, version) for name in codecs.ALL for version in codecs.get(name).versions]
each_variant = pytest.mark.parametrize(("name", "version"), VARIANTS)


def random_vector(dim: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(dim, generator=torch.Generator().manual_seed(seed))


def update_of(name: str, version: int, delta: Tensor, base: Tensor) -> Parsed:
    """A client's message: weights or the difference, as this format carries it."""
    codec = codecs.get(name, version=version)
    carries_weights = version == 1 and not codec.v1_is_delta
    payload = codec.encode(base + delta if carries_weights else delta)
    parsed = codecs.parse(payload, expected_dim=delta.numel())
    assert parsed.is_delta is not carries_weights
    return parsed


def mean_of(mean: ExactMean, dim: int = DIM) -> Tensor:
    """float64, shape (dim,)."""
    out = torch.full((dim,), float("nan"), dtype=torch.float64)
    for place, values in mean.blocks():
        out[place] = values
    return out


def oracle(updates: list[tuple[Parsed, int]], base: Tensor) -> np.ndarray[Any, Any]:
    """The weighted mean of the differences, in extended precision."""
    total = np.zeros(base.numel(), np.longdouble)
    for parsed, num_samples in updates:
        vector = np.zeros(base.numel(), np.longdouble)
        for block in parsed.blocks():
            where = (
                block.indices.numpy() if parsed.is_sparse else slice(block.start, block.start + block.values.numel())
            )
            vector[where] = block.values.numpy()
        total += num_samples * (vector if parsed.is_delta else vector - base.numpy().astype(np.longdouble))
    return total / sum(num_samples for _, num_samples in updates)


def stated_error(updates: list[tuple[Parsed, int]], mean: np.ndarray[Any, Any]) -> float:
    rounding = len(updates) * 2.0**-31 / sum(num_samples for _, num_samples in updates)
    return rounding + 4 * 2.0**-53 * float(np.abs(mean).max())


@each_variant
@pytest.mark.parametrize("dim", [1, DIM, BLOCK_ELEMS, 2 * BLOCK_ELEMS + 17])
def test_the_mean_is_that_of_float64_within_the_stated_error(name: str, version: int, dim: int) -> None:
    base = random_vector(dim, 1)
    updates = [(update_of(name, version, random_vector(dim, seed, 0.01), base), 7 * seed) for seed in (2, 3, 4)]
    mean = ExactMean(dim)
    for parsed, num_samples in updates:
        mean.add(parsed, base=base, num_samples=num_samples)
    expected = oracle(updates, base)
    assert np.abs(mean_of(mean, dim).numpy() - expected).max() <= stated_error(updates, expected)
    assert (mean.count, mean.num_samples) == (3, 63)


BASE = random_vector(DIM, 0)
MIXED = [
    (update_of(name, version, random_vector(DIM, seed, 0.1), BASE), 1 + 37 * seed)
    for seed, (name, version) in enumerate(VARIANTS)
]


@settings(derandomize=True, deadline=None)
@given(order=st.permutations(range(len(MIXED))))
def test_updates_of_all_codecs_give_the_same_bits_in_any_order(order: list[int]) -> None:
    means = []
    for indices in (range(len(MIXED)), order):
        mean = ExactMean(DIM)
        for index in indices:
            mean.add(MIXED[index][0], base=BASE, num_samples=MIXED[index][1])
        means.append(mean_of(mean))
    assert torch.equal(means[0], means[1])


def test_the_mean_of_mixed_codecs_is_that_of_what_each_message_says() -> None:
    mean = ExactMean(DIM)
    for parsed, num_samples in MIXED:
        mean.add(parsed, base=BASE, num_samples=num_samples)
    expected = oracle(MIXED, BASE)
    assert np.abs(mean_of(mean).numpy() - expected).max() <= stated_error(MIXED, expected)


@settings(derandomize=True, deadline=None)
@given(
    values=st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(1, 1 << 20)), min_size=1, max_size=12),
    seed=st.randoms(use_true_random=False),
)
def test_any_values_give_the_same_bits_in_any_order(values: list[tuple[float, int]], seed: Any) -> None:
    base = torch.zeros(1)
    updates = [(update_of("fp32", 2, torch.tensor([value]), base), num_samples) for value, num_samples in values]
    shuffled = list(updates)
    seed.shuffle(shuffled)
    results = []
    for order in (updates, shuffled):
        mean = ExactMean(1)
        for parsed, num_samples in order:
            mean.add(parsed, base=base, num_samples=num_samples)
        results.append(float(mean_of(mean, 1)))
    expected = oracle(updates, base)
    assert results[0] == results[1]
    assert abs(results[0] - expected[0]) <= stated_error(updates, np.array([1e3]))


def test_one_update_of_weights_gives_its_own_difference_to_the_base() -> None:
    base, local = random_vector(DIM, 1), random_vector(DIM, 2)
    mean = ExactMean(DIM)
    mean.add(codecs.parse(local.numpy().tobytes(), expected_dim=DIM), base=base, num_samples=1)
    assert (mean_of(mean) - (local.double() - base.double())).abs().max() <= 2.0**-31


def test_the_weights_of_the_clients_are_their_samples() -> None:
    mean = ExactMean(2)
    for values, num_samples in (([1.0, 0.0], 3), ([0.0, 1.0], 1)):
        delta = torch.tensor(values)
        mean.add(update_of("fp32", 2, delta, torch.zeros(2)), base=torch.zeros(2), num_samples=num_samples)
    assert mean_of(mean, 2).tolist() == [0.75, 0.25]


def test_what_a_sparse_update_does_not_name_counts_as_no_change() -> None:
    base = random_vector(DIM, 1)
    delta = torch.zeros(DIM)
    delta[17] = 0.5
    mean = ExactMean(DIM)
    mean.add(codecs.parse(codecs.get("s4", density=0.001).encode(delta), expected_dim=DIM), base=base, num_samples=1)
    mean.add(update_of("fp32", 2, torch.zeros(DIM), base), base=base, num_samples=1)
    assert torch.equal(mean_of(mean), delta.double() / 2)


def test_sparse_weights_are_refused_for_they_say_nothing_of_most_of_the_model() -> None:
    base = random_vector(DIM, 1)
    mean = ExactMean(DIM)
    parsed = codecs.parse(codecs.get("s4").encode(base, is_delta=False), expected_dim=DIM)
    with pytest.raises(ValueError, match="sparse"):
        mean.add(parsed, base=base, num_samples=1)
    assert (mean.count, mean.num_samples) == (0, 0)


@pytest.mark.parametrize("name", ["fp32", "q8", "s4", "sq8"])
def test_an_update_that_is_out_of_range_is_refused_and_nothing_of_it_is_added(name: str) -> None:
    base = torch.zeros(DIM)
    mean = ExactMean(DIM)
    mean.add(update_of("fp32", 2, random_vector(DIM, 1), base), base=base, num_samples=5)
    before = mean_of(mean)
    huge = torch.zeros(DIM)
    huge[-1] = 5.0
    with pytest.raises(OutOfRange, match="does not fit the exact sum"):
        mean.add(update_of(name, 2, huge, base), base=base, num_samples=1 << 30)
    assert torch.equal(mean_of(mean), before)
    assert (mean.count, mean.num_samples) == (1, 5)
    mean.add(update_of(name, 2, huge, base), base=base, num_samples=1)  # it is the product that counts
    assert mean.count == 2


@pytest.mark.parametrize("value", [-3.99, 3.99])
def test_the_sum_has_room_for_as_many_of_the_largest_updates_as_come(value: float) -> None:
    base, just_fits = torch.zeros(1), torch.tensor([value])
    mean = ExactMean(1)
    for _ in range(9):
        mean.add(update_of("fp32", 2, just_fits, base), base=base, num_samples=1 << 30)
    assert mean_of(mean, 1).item() == pytest.approx(just_fits.item(), rel=1e-15)
    with pytest.raises(OutOfRange):
        mean.add(update_of("fp32", 2, torch.tensor([4.0]), base), base=base, num_samples=1 << 30)


@pytest.mark.parametrize("first", [True, False])
def test_an_update_that_takes_up_all_the_room_keeps_nobody_out(first: bool) -> None:
    greedy = torch.zeros(DIM)
    greedy[3] = torch.nextafter(torch.tensor(4.0), torch.tensor(0.0))
    updates = [(update_of("fp32", 2, greedy, BASE), 1 << 30), *MIXED]
    mean = ExactMean(DIM)
    for parsed, num_samples in updates if first else reversed(updates):
        mean.add(parsed, base=BASE, num_samples=num_samples)
    expected = oracle(updates, BASE)
    assert mean.count == len(updates)
    assert np.abs(mean_of(mean).numpy() - expected).max() <= stated_error(updates, expected)


@settings(derandomize=True, deadline=None)
@given(
    values=st.lists(
        st.tuples(st.floats(-3.75, 3.75, width=32), st.integers(1 << 28, 1 << 30)), min_size=3, max_size=12
    ),
    seed=st.randoms(use_true_random=False),
)
def test_a_sum_beyond_64_bits_is_rounded_once_and_the_same_in_any_order(values: list[Any], seed: Any) -> None:
    base = torch.zeros(1)
    exact = sum(round(value * n * 2.0**30) for value, n in values)
    samples = sum(n for _, n in values)
    for _ in range(2):
        seed.shuffle(values)
        mean = ExactMean(1)
        for value, n in values:
            mean.add(update_of("fp32", 2, torch.tensor([value]), base), base=base, num_samples=n)
        assert float(mean_of(mean, 1)) == float(exact) * (1.0 / (samples * 2.0**30))


def test_the_largest_float_is_out_of_range_and_no_error_of_its_own() -> None:
    base = torch.zeros(1)
    with pytest.raises(OutOfRange):
        ExactMean(1).add(update_of("fp32", 2, torch.tensor([3.4e38]), base), base=base, num_samples=1 << 30)


def test_a_base_far_from_the_update_is_out_of_range_as_well() -> None:
    base = torch.full((1,), 1e30)
    parsed = codecs.parse(torch.ones(1).numpy().tobytes(), expected_dim=1)
    with pytest.raises(OutOfRange):
        ExactMean(1).add(parsed, base=base, num_samples=1)


def test_weights_far_from_zero_fit_if_they_are_near_the_base() -> None:
    base = torch.full((1,), 1e6)
    mean = ExactMean(1)
    mean.add(codecs.parse((base + 1).numpy().tobytes(), expected_dim=1), base=base, num_samples=60_000)
    assert mean_of(mean, 1).item() == 1.0


def test_a_reset_mean_knows_nothing_of_the_past() -> None:
    mean, fresh = ExactMean(DIM), ExactMean(DIM)
    for parsed, num_samples in MIXED[:3]:
        mean.add(parsed, base=BASE, num_samples=num_samples)
    mean.reset()
    assert (mean.count, mean.num_samples) == (0, 0)
    for each in (mean, fresh):
        each.add(MIXED[3][0], base=BASE, num_samples=2)
    assert torch.equal(mean_of(mean), mean_of(fresh))
    mean.reset()
    with pytest.raises(ValueError, match="no vectors"):
        next(mean.blocks())


def has_carried(mean: ExactMean) -> bool:
    """Of one number. Whether it holds a second set of integers."""
    payload = mean.encode((range(mean.count),), (), 0)
    return parse(payload, expected_dim=1, max_samples=1 << 40).carried is not None


def test_a_reset_mean_forgets_what_it_has_carried_and_gives_back_that_memory() -> None:
    base, huge = torch.zeros(1), torch.tensor([3.9])
    mean = ExactMean(1)
    for _ in range(3):
        for _ in range(2):
            mean.add(update_of("fp32", 2, huge, base), base=base, num_samples=1 << 30)
        assert has_carried(mean)
        mean.reset()
        mean.add(update_of("fp32", 2, huge, base), base=base, num_samples=1)
        assert not has_carried(mean)
        assert mean_of(mean, 1).item() == pytest.approx(huge.item(), abs=1e-9)


def peak_bytes(work: Callable[[], None]) -> int:
    """The most that torch held at one time beyond what it held before."""
    with profile(profile_memory=True) as profiled:
        work()
    return max(itertools.accumulate(event.self_cpu_memory_usage for event in profiled.function_events))


@each_variant
def test_adding_updates_takes_no_more_memory_than_one_block(
    name: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_elems = 512
    monkeypatch.setattr("gradbus.actors.aggregation.exact_sum.BLOCK_ELEMS", block_elems)
    dim = 8 * block_elems + 3
    base = random_vector(dim, 1)
    update = update_of(name, version, random_vector(dim, 2, 0.01), base)
    mean = ExactMean(dim)

    def work() -> None:
        for _ in range(20):
            mean.add(update, base=base, num_samples=3)
        for _ in mean.blocks():
            pass

    assert peak_bytes(work) <= 8 * block_elems + 64  # and a few scalars
    assert mean.count == 20


@given(st.lists(st.floats(-(2.0**51), 2.0**51, exclude_min=True, exclude_max=True), min_size=1, max_size=20))
def test_both_ways_to_round_give_the_same_integers(values: list[float]) -> None:
    halves = [float(np.trunc(value)) + 0.5 for value in values if abs(value) < 2.0**50]
    block = DenseBlock(0, torch.tensor([*values, *halves], dtype=torch.float64) / 2.0**30)
    update: Any = SimpleNamespace(is_delta=True, blocks=lambda elems: [block])
    found = []
    # The bound says which way is taken, and nothing public whether it was: with another limit both might be one.
    for bound, way in ((math.nextafter(2.0**51, 0.0), "_round_small"), (2.0**62, "_round")):
        rounding = GridRounding()
        with mock.patch.object(rounding, way, wraps=getattr(rounding, way)) as taken:
            ((_, integers),) = rounding.blocks(update, torch.empty(0), 1, bound)
        assert taken.call_count == 1
        found.append(integers.tolist())
    assert found[0] == found[1]


def test_a_value_at_the_limit_of_the_quick_way_is_added_exactly() -> None:
    for samples in ((1 << 21) - 1, 1 << 21, (1 << 21) + 1):
        mean, delta = ExactMean(2), torch.tensor([1.0, -0.5])
        mean.add(update_of("fp32", 2, delta, torch.zeros(2)), base=torch.zeros(2), num_samples=samples)
        assert torch.equal(mean_of(mean, 2), delta.double())

"""The common grid: updates of several clients become small integers, whose sum is that of what each has sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.actors.aggregation.common_grid import (
    EXACT,
    MAX_ADDENDS,
    MAX_EXPONENT,
    MAX_SCALES,
    MIN_EXPONENT,
    CommonGrid,
    GridIntegers,
    SpreadIntegers,
    exponent_for,
    round_to_grid,
)
from gradbus.actors.aggregation.exact_sum import ExactMean
from gradbus.actors.aggregation.grid_steps import STEPS, CommonSteps, next_exponents
from gradbus.actors.aggregation.partial_sum import Integers, PartialSum, SumSummary
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.aggregation.updates import Facts
from gradbus.runtime.errors import ConfigError

DIM, CHUNK = 70_001, 1000  # more than two pieces, and a last chunk that is shorter


def grid_of(exponents: Sequence[int], sent: int = 0) -> CommonGrid:
    return CommonGrid(sent, CHUNK, np.array(exponents, np.int8).tobytes())


def some_exponents(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(-20, -5, -(-DIM // CHUNK)).tolist()


def values_of(integers: Integers) -> torch.Tensor:
    return torch.cat([values.clone() for _, values in integers.blocks()])


@pytest.mark.parametrize("sent", [0, 7001])
def test_the_sum_of_the_integers_is_that_of_what_clients_have_sent_and_the_rest_is_their_residual(sent: int) -> None:
    grid, weights = grid_of(some_exponents(1), sent), (3, 20, 1000)
    positions = grid.positions(DIM, b"a round")
    total, expected = np.zeros(grid.count(DIM), np.int16), np.zeros(DIM)
    steps = 2.0 ** np.repeat(some_exponents(1), CHUNK)[:DIM]
    is_sent = np.ones(DIM, bool) if positions is None else np.isin(np.arange(DIM), positions)
    for number, weight in enumerate(weights):
        change = torch.randn(DIM, generator=torch.Generator().manual_seed(number)) * 0.01
        before = change.numpy().astype(np.float64)
        rounded = np.empty(grid.count(DIM), np.int16)
        chosen = change[torch.from_numpy(is_sent)]
        round_to_grid(chosen, weight, grid, positions, rounded)
        change[torch.from_numpy(is_sent)] = chosen
        q = np.where(is_sent, np.clip(np.rint(before * weight / steps), -127, 127), 0.0)
        assert np.array_equal(rounded, q[is_sent].astype(np.int16))
        assert np.array_equal(change.numpy(), (before - q * (steps / weight)).astype(np.float32))
        fits = is_sent & (np.abs(q) < 127)
        assert (np.abs(change.numpy()[fits]) <= 0.5001 * steps[fits] / weight).all(), "more than half a step is lost"
        total += rounded
        expected += q * steps
    integers: Integers = GridIntegers(total, grid, positions)
    if positions is not None:
        integers = SpreadIntegers(integers, positions, DIM)
    found = values_of(integers)
    assert np.array_equal(found.numpy(), expected * 2.0**30)
    mean = ExactMean(DIM)
    mean.add_sum(PartialSum(SumSummary(sum(weights), 3, (), (), 0), integers, None))
    parts = torch.cat([values.clone() for _, values in mean.blocks()])
    assert np.array_equal(parts.numpy(), expected * 2.0**30 * (1.0 / (1023 * 2.0**30)))


@pytest.mark.parametrize("exponent", [MIN_EXPONENT, 0, MAX_EXPONENT])
def test_the_largest_integers_of_all_clients_have_room_in_16_bits_and_in_the_exact_sum(exponent: int) -> None:
    grid = CommonGrid(0, 4, bytes([exponent % 256]))
    total = np.zeros(4, np.uint16)
    for _ in range(MAX_ADDENDS):
        rounded = np.empty(4, np.int16)
        round_to_grid(torch.tensor([1e30, -1e30, 0.0, 1.0]) * 2.0**exponent, 1, grid, None, rounded)
        total += rounded.view(np.uint16)
    integers = GridIntegers(total.view(np.int16), grid, None)
    assert values_of(integers).tolist() == [one * MAX_ADDENDS * 2 ** (exponent + 30) for one in (127, -127, 0, 1)]
    mean = ExactMean(4)
    for _ in range(3):
        mean.add_sum(PartialSum(SumSummary(MAX_ADDENDS, MAX_ADDENDS, (), (), 0), integers, None))
    assert float(next(mean.blocks())[1][0]) == pytest.approx(127 * 2.0**exponent, rel=1e-12)


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), weight=st.integers(1, 1 << 40),
    exponent=st.integers(MIN_EXPONENT, MAX_EXPONENT),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_nothing_is_lost_between_what_is_sent_and_what_stays(values: list[float], weight: int, exponent: int) -> None:
    rounded, change = np.empty(3, np.int16), torch.tensor(values)
    round_to_grid(change, weight, CommonGrid(0, 3, bytes([exponent % 256])), None, rounded)
    sent = rounded * math.ldexp(1.0, exponent) / weight
    assert np.allclose(sent + change.numpy(), np.float32(values), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("grid", "why"),
    [
        ((-1,), "-1 values"), (((1 << 40) + 1,), "values: expected 0 to"), ((0, 5, b""), "expected both or none"),
        ((0, 0, b"\0"), "expected both or none"), ((0, (1 << 30) + 1, b"\0"), "at most 1073741824"),
        ((0, 1, bytes(MAX_SCALES + 1)), "16385 steps: expected at most 16384"),
        ((0, 1, bytes([17])), r"steps of 2\^17 to 2\^17: expected exponents of -30 to 16"),
        ((0, 1, bytes([0, 225])), r"steps of 2\^-31 to 2\^0"),
    ],
)  # fmt: skip
def test_a_grid_out_of_the_limits_is_refused(grid: tuple[int, int, bytes], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        CommonGrid(*grid)


def test_a_grid_of_a_model_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="8 values of a model of 7"):
        CommonGrid(8).check(7)
    grid = CommonGrid(0, 5, bytes(3))
    for dim in (11, 15):
        grid.check(dim)
    for dim in (10, 16):
        with pytest.raises(ValueError, match=f"3 steps for blocks of 5 values: expected {-(-dim // 5)}"):
            grid.check(dim)
    EXACT.check(0)


def test_the_step_for_a_value_is_the_least_power_of_two_of_which_127_reach_so_far() -> None:
    for largest in (127.0, 126.9, 1.0, 3e-7):
        step = 2.0 ** exponent_for(largest)
        assert 127 * step / 2 <= largest <= 127 * step
    assert exponent_for(1e300) == MAX_EXPONENT
    assert exponent_for(1e-300) == MIN_EXPONENT


def test_steps_grow_at_once_and_shrink_by_half_in_a_round() -> None:
    peaks = np.array([127.0, 127.0, 127e6, 0.0])
    first = next_exponents(np.zeros(0, np.int8), peaks, 64)  # a reach of 8 / sqrt(64)
    assert first.tolist() == [1, 1, 16, 1], "a block without changes is no coarser than any other"
    assert next_exponents(first, peaks * [1.0, 100.0, 1e-9, 0.0], 64).tolist() == [1, 7, 15, 0]
    low = np.full(4, MIN_EXPONENT, np.int8)
    assert next_exponents(low, np.zeros(4), 16).tolist() == [MIN_EXPONENT] * 4
    none = np.zeros(0, np.int8)
    assert next_exponents(none, np.zeros(4), 16) is none, "a first round in which nothing changes says nothing"


def steps_after(strategy: CommonSteps, values: np.ndarray, grid: CommonGrid) -> CommonGrid:
    facts = [Facts(client_id=one, num_samples=1) for one in range(4)]
    strategy.begin(1, torch.zeros(len(values)))
    low = GridIntegers(values.astype(np.int16), grid, None)
    strategy.add_masked(PartialSum(SumSummary(4, 4, (), (), 0), low, None), facts)
    strategy.finish(torch.zeros(len(values)))
    return strategy.grid


def test_the_steps_are_part_of_the_checkpoint_and_change_with_the_model_alone() -> None:
    dim, chunk = 65_000, 30_000  # chunks across the pieces of a sum
    values = np.zeros(dim)
    values[[3, 29_999, 30_719, 30_720, 64_999]] = 5, -100, 60, -70, 127
    strategy = CommonSteps(FedAvg(dim), dim, block_elems=chunk)
    assert strategy.grid == EXACT
    found = steps_after(strategy, values, CommonGrid(0, dim, bytes(1)))
    expected = [exponent_for(4.0 * peak) for peak in (100, 70, 127)]  # a reach of 8 / sqrt(4)
    assert np.frombuffer(found.exponents, np.int8).tolist() == expected
    strategy.begin(2, torch.zeros(dim))
    facts = [Facts(client_id=0, num_samples=1)]
    low = GridIntegers(np.full(dim, 999, np.int16), CommonGrid(0, dim, bytes([9])), None)
    strategy.add_masked(PartialSum(SumSummary(1, 1, (), (), 0), low, None), facts)
    assert strategy.grid == found, "the round has not been committed"
    again = CommonSteps(FedAvg(dim), dim, block_elems=chunk)
    again.load_state(strategy.state())
    assert again.grid == found
    other = CommonSteps(FedAvg(dim), dim, block_elems=chunk // 2)
    other.load_state(strategy.state())
    assert other.grid == EXACT, "other chunks begin anew"
    assert STEPS in strategy.state()


def test_more_steps_than_can_be_sent_are_refused_with_the_chunk_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"codec.chunk_elems is 8: .* makes 16,385, .* Set it to 9 or more"):
        CommonSteps(FedAvg(1), 8 * MAX_SCALES + 1, block_elems=8)

"""The common grid: updates of several clients become small integers, whose sum is that of what each has sent."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gradbus.actors.aggregation.common_grid import (
    EXACT,
    MAX_EXPONENT,
    MAX_SCALES,
    MIN_EXPONENT,
    CommonGrid,
    Dither,
    GridIntegers,
    Rounding,
    SpreadIntegers,
    limit_for,
)
from gradbus.actors.aggregation.exact_sum import ExactMean
from gradbus.actors.aggregation.grid_steps import STEPS, CommonSteps, next_exponents
from gradbus.actors.aggregation.partial_sum import Integers, PartialSum
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.aggregation.sum_summary import SumSummary
from gradbus.actors.aggregation.updates import Facts
from gradbus.runtime.errors import CheckpointError, ConfigError

DIM, CHUNK = 70_001, 1000  # more than two pieces, and a last chunk that is shorter
MEMBERS, LIMIT = 5, 4095


def grid_of(exponents: Sequence[int], sent: int = 0) -> CommonGrid:
    return CommonGrid(sent, CHUNK, np.array(exponents, np.int8).tobytes())


def some_exponents(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(-8, 7, -(-DIM // CHUNK)).tolist()


def dither_of(seed: bytes, count: int) -> np.ndarray:
    """Written out once more: 16 bits each of Philox, as a signed number, of which the largest are +-7/16."""
    key = int.from_bytes(hashlib.blake2b(seed, digest_size=16).digest(), "little")
    raw = np.random.Philox(key=key).random_raw(-(-count // 4)).astype("<u8")
    return raw.view("<i2")[:count] * (7 / 8 / 65536)


def values_of(integers: Integers) -> torch.Tensor:
    return torch.cat([values.clone() for _, values in integers.blocks()])


@pytest.mark.parametrize("sent", [0, 7001])
def test_the_sum_of_the_integers_is_that_of_what_clients_have_sent_and_the_rest_is_their_residual(sent: int) -> None:
    grid, weights = grid_of(some_exponents(1), sent), (3, 20, 1000)
    positions = grid.positions(DIM, b"a round")
    total, expected = np.zeros(grid.count(DIM), np.int16), np.zeros(DIM)
    steps = 2.0 ** (np.repeat(some_exponents(1), CHUNK)[:DIM] - 12)
    is_sent = np.ones(DIM, bool) if positions is None else np.isin(np.arange(DIM), positions)
    for number, weight in enumerate(weights):
        change = torch.randn(DIM, generator=torch.Generator().manual_seed(number)) * 0.01
        before = change.numpy().astype(np.float64)
        rounded = np.empty(grid.count(DIM), np.int16)
        chosen = change[torch.from_numpy(is_sent)]
        seed = bytes([number])
        clamped = Rounding(grid, positions, MEMBERS, weight, seed).round(chosen, rounded)
        change[torch.from_numpy(is_sent)] = chosen
        dither = np.zeros(DIM)
        dither[is_sent] = dither_of(seed, is_sent.sum())
        q = np.where(is_sent, np.clip(np.rint(before * weight / steps + dither), -LIMIT, LIMIT), 0.0)
        assert clamped == (np.abs(q) == LIMIT).sum()
        assert np.array_equal(rounded, q[is_sent].astype(np.int16))
        assert np.array_equal(change.numpy(), (before - q * (steps / weight)).astype(np.float32))
        fits = is_sent & (np.abs(q) < LIMIT)
        assert (np.abs(change.numpy()[fits]) <= 0.9376 * steps[fits] / weight).all(), (
            "more than 15/16 of a step is lost"
        )
        total += rounded
        expected += q * steps
    integers: Integers = GridIntegers(total, grid, positions, MEMBERS)
    if positions is not None:
        integers = SpreadIntegers(integers, positions, DIM)
    found = values_of(integers)
    assert np.array_equal(found.numpy(), expected * 2.0**30)
    mean = ExactMean(DIM)
    mean.add_sum(PartialSum(SumSummary(sum(weights), 3, (), (), 0), integers, None))
    parts = torch.cat([values.clone() for _, values in mean.blocks()])
    assert np.array_equal(parts.numpy(), expected * 2.0**30 * (1.0 / (1023 * 2.0**30)))


@pytest.mark.parametrize("members", [2, 3, 4, 5, 17, 64, 65, 128, 129, 255])
@pytest.mark.parametrize("exponent", [MIN_EXPONENT, 0, MAX_EXPONENT])
def test_the_largest_integers_of_all_clients_have_room_in_16_bits_and_in_the_exact_sum(
    exponent: int, members: int
) -> None:
    grid, limit = CommonGrid(0, 4, bytes([exponent % 256])), limit_for(members)
    assert limit * members < 2**15 <= 2 * (limit + 1) * (2 * members - 1), "a bit is not used"
    step = max(2.0**exponent / (limit + 1), 2.0**-30)
    total = np.zeros(4, np.uint16)
    for one in range(members):
        rounded = np.empty(4, np.int16)
        values = torch.tensor([1e30, -1e30, 0.0, step])
        assert Rounding(grid, None, members, 1, bytes([one])).round(values, rounded) == 2
        total += rounded.view(np.uint16)
    integers = GridIntegers(total.view(np.int16), grid, None, members)
    units = round(step * 2**30)
    found = values_of(integers).tolist()
    assert found[:3] == [one * members * units for one in (limit, -limit, 0)]
    assert max(map(abs, found)) <= integers.largest() < 2**62
    mean = ExactMean(4)
    for _ in range(3):
        mean.add_sum(PartialSum(SumSummary(members, members, (), (), 0), integers, None))
    assert float(next(mean.blocks())[1][0]) == pytest.approx(limit * step, rel=1e-12)


def test_what_is_less_than_a_sixteenth_of_a_step_is_rounded_to_0_and_waits() -> None:
    grid, rounded = CommonGrid(0, 200_000, bytes(1)), np.empty(200_000, np.int16)
    for share, most in ((1 / 16, 0), (-1 / 16, 0), (0.1, 1), (0.5, 1)):
        values = torch.full((200_000,), share / 4096)
        Rounding(grid, None, MEMBERS, 1, b"seed").round(values, rounded)
        assert np.abs(rounded).max() == most
    assert rounded.mean() == pytest.approx(0.5, abs=0.01)


def test_a_dither_is_as_specified_and_another_one_for_each_seed() -> None:
    """It decides the bits of a model: a round that is done again on another machine has the same ones."""
    first, second = np.empty(9), np.empty(9)
    Dither(b"seed").next(first)
    Dither(b"another").next(second)
    assert (first * 65536 * 8 / 7).tolist() == [18570, -27097, -19379, -13408, -945, 21959, -9235, -14292, -32314]
    assert not np.array_equal(first, second)
    many = np.empty(100_000)
    Dither(b"many").next(many)
    assert -7 / 16 <= many.min() < -0.437
    assert 0.437 < many.max() < 7 / 16
    assert abs(many.mean()) < 0.005


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3),
    weight=st.integers(1, 1 << 40),
    exponent=st.integers(MIN_EXPONENT, MAX_EXPONENT),
)
@settings(max_examples=100, deadline=None)
def test_nothing_is_lost_between_what_is_sent_and_what_stays(values: list[float], weight: int, exponent: int) -> None:
    rounded, change = np.empty(3, np.int16), torch.tensor(values)
    grid = CommonGrid(0, 3, bytes([exponent % 256]))
    Rounding(grid, None, MEMBERS, weight, b"seed").round(change, rounded)
    sent = rounded * grid.steps(MEMBERS) / weight
    assert np.allclose(sent + change.numpy(), np.float32(values), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("grid", "why"),
    [
        ((-1,), "-1 values"),
        (((1 << 40) + 1,), "values: expected 0 to"),
        ((0, 5, b""), "expected both or none"),
        ((0, 0, b"\0"), "expected both or none"),
        ((0, (1 << 30) + 1, b"\0"), "at most 1073741824"),
        ((0, 1, bytes(MAX_SCALES + 1)), "16385 steps: expected at most 16384"),
        ((0, 1, bytes([24])), r"reaches 2\^24 to 2\^24: expected exponents of -23 to 23"),
        ((0, 1, bytes([0, 232])), r"reaches 2\^-24 to 2\^0"),
    ],
)
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


def test_a_first_round_gives_each_block_its_reach_and_those_without_changes_the_least_one() -> None:
    peaks = np.array([127.0, 3.0, 127e9, 0.0])
    none = np.zeros(0, np.int8)
    assert next_exponents(none, peaks, 4).tolist() == [12, 7, MAX_EXPONENT, 7], "32 times as far"
    assert next_exponents(none, peaks, 100).tolist() == [8, 2, MAX_EXPONENT, 2], "9/8 times"
    assert next_exponents(none, np.zeros(4), 16) is none, "a first round in which nothing changes says nothing"


def steps_after(strategy: CommonSteps, values: np.ndarray, grid: CommonGrid) -> CommonGrid:
    facts = [Facts(client_id=one, num_samples=1) for one in range(4)]
    strategy.begin(1, torch.zeros(len(values)))
    low = GridIntegers(values.astype(np.int16), grid, None, 4)
    strategy.add_masked(PartialSum(SumSummary(4, 4, (), (), 0), low, None), facts)
    strategy.finish(torch.zeros(len(values)))
    return strategy.masked_grid


def test_the_steps_are_part_of_the_checkpoint_and_change_with_the_model_alone() -> None:
    dim, chunk = 65_000, 30_000  # chunks across the pieces of a sum
    values = np.zeros(dim)
    values[[3, 29_999, 30_719, 30_720, 64_999]] = 5, -100, 60, -70, 127
    strategy = CommonSteps(FedAvg(dim), dim, block_elems=chunk)
    assert strategy.masked_grid == EXACT
    found = steps_after(strategy, values, CommonGrid(0, dim, bytes(1)))
    expected = [math.frexp(8191 / 256 * peak / 8192)[1] for peak in (100, 70, 127)]  # in steps of 2^-13
    assert np.frombuffer(found.exponents, np.int8).tolist() == expected
    strategy.begin(2, torch.zeros(dim))
    facts = [Facts(client_id=0, num_samples=1)]
    low = GridIntegers(np.full(dim, 999, np.int16), CommonGrid(0, dim, bytes([9])), None, 4)
    strategy.add_masked(PartialSum(SumSummary(1, 1, (), (), 0), low, None), facts)
    assert strategy.masked_grid == found, "the round has not been committed"
    again = CommonSteps(FedAvg(dim), dim, block_elems=chunk)
    again.load_state(strategy.state())
    assert again.masked_grid == found
    other = CommonSteps(FedAvg(dim), dim, block_elems=chunk // 2)
    other.load_state(strategy.state())
    assert other.masked_grid == EXACT, "other chunks begin anew"
    assert STEPS in strategy.state()
    with pytest.raises(CheckpointError, match="grid_steps of -5 to 99: expected -23 to 23"):
        again.load_state({STEPS: torch.tensor([-5, 0, 99], dtype=torch.int8)})


@pytest.mark.parametrize("before", [{"sent": 3}, {"block_elems": 5}])  # s4, which has no steps; q8, before any round
def test_a_checkpoint_without_steps_is_gone_on_with(before: dict[str, int]) -> None:
    strategy, again = (CommonSteps(FedAvg(10), 10, **before) for _ in range(2))
    again.load_state(strategy.state())
    assert again.masked_grid == strategy.masked_grid == CommonGrid(before.get("sent", 0))


def test_more_steps_than_can_be_sent_are_refused_with_the_chunk_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"codec.chunk_elems is 8: .* makes 16,385, .* Set it to 9 or more"):
        CommonSteps(FedAvg(1), 8 * MAX_SCALES + 1, block_elems=8)


def test_the_log_says_how_many_blocks_came_to_their_limit() -> None:
    strategy, grid = CommonSteps(FedAvg(8), 8, block_elems=4), CommonGrid(0, 4, bytes([23, 0]))
    strategy.load_state({STEPS: torch.tensor([23, 0], dtype=torch.int8)})
    with capture_logs() as lines:
        steps_after(strategy, np.array([8191, 0, 0, 0, 8191, 0, 0, 0]), grid)
    (found,) = lines
    assert (found["log_level"], found["blocks"], found["made_coarser"], found["at_the_largest_step"]) == (
        "warning",
        2,
        1,
        1,
    )

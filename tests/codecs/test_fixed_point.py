"""Fixed point with a common power of two: sums are exact, never overflow, and close to those of float64."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.codecs.fixed_point import (
    CHECKSUM_MODULUS,
    NO_EXPONENT,
    NON_FINITE,
    exponents,
    from_fixed,
    linear_checksum,
    to_fixed,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def all_reduce(ranks: list[torch.Tensor], chunk_elems: int, divisor: int = 1) -> torch.Tensor:
    common = torch.stack([exponents(x, chunk_elems) for x in ranks]).amax(dim=0)
    fixed = [to_fixed(x, common, world=len(ranks), chunk_elems=chunk_elems) for x in ranks]
    total = torch.stack(fixed).sum(dim=0, dtype=torch.int32)
    assert (total == torch.stack(fixed).long().sum(dim=0)).all()  # nothing has overflowed
    return from_fixed(total, common, ranks[0].numel(), world=len(ranks), divisor=divisor)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.lists(FLOATS, min_size=5, max_size=5), min_size=n, max_size=n)))
def test_a_sum_is_within_half_a_unit_for_each_rank(rows: list[list[float]]) -> None:
    ranks, world = [torch.tensor(row) for row in rows], len(rows)
    total = all_reduce(ranks, chunk_elems=3)
    for chunk in (slice(0, 3), slice(3, 5)):
        peak = max(float(x[chunk].abs().max()) for x in ranks)
        exponent = torch.frexp(torch.tensor(peak)).exponent.item()
        unit = Fraction(2) ** int(exponent - 30 + (world - 1).bit_length())
        for at in range(chunk.start, chunk.stop):
            exact = sum(Fraction(float(x[at])) for x in ranks)
            limit = unit * world / 2 + abs(exact) * Fraction(1, 1 << 23) + Fraction(1, 1 << 149)
            if abs(exact) < Fraction(float(torch.finfo(torch.float32).max)):
                assert abs(Fraction(float(total[at])) - exact) <= limit


def test_the_order_of_the_ranks_changes_no_bit() -> None:
    ranks = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) * 10.0**seed for seed in range(5)]
    assert all_reduce(ranks, 64).equal(all_reduce(ranks[::-1], 64))


def test_the_largest_values_of_many_ranks_do_not_overflow() -> None:
    largest = torch.full((4,), float(torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))))
    for world in (1, 2, 3, 255, 256, 257, 1024):
        assert all_reduce([largest] * world, 4, divisor=world).allclose(largest, rtol=1e-5)


def test_a_mean_over_a_power_of_two_ranks_of_equal_values_is_exact() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).mul(1024).round().div(1024)
    assert all_reduce([x] * 8, 10, divisor=8).equal(x)


def test_nan_on_one_rank_is_nan_on_all_in_its_chunk_alone() -> None:
    bad, good = torch.ones(6), torch.ones(6)
    bad[4] = torch.inf
    total = all_reduce([bad, good], 3)
    assert total[:3].tolist() == [2.0] * 3
    assert total[3:].isnan().all()


def test_zeros_and_no_entries_are_sums_too() -> None:
    assert all_reduce([torch.zeros(5)] * 3, 2).tolist() == [0.0] * 5
    assert all_reduce([torch.zeros(0)] * 3, 2).tolist() == []
    assert exponents(torch.zeros(3), 2).tolist() == [NO_EXPONENT] * 2
    assert exponents(torch.tensor([float("nan"), 1.0]), 1).tolist() == [NON_FINITE, 1]


def test_exponents_that_are_not_the_largest_are_refused() -> None:
    x = torch.tensor([100.0])
    with pytest.raises(ValueError, match="not all ranks' maximum"):
        to_fixed(x, exponents(torch.tensor([1.0]), 1), world=2, chunk_elems=1)
    with pytest.raises(ValueError, match="expected shape"):
        to_fixed(x, exponents(torch.ones(2), 1), world=2, chunk_elems=1)


def test_the_checksum_of_a_sum_is_the_sum_of_the_checksums() -> None:
    blocks = [torch.randint(-(1 << 28), 1 << 28, (7, 64), dtype=torch.int32) for _ in range(5)]
    total = torch.stack(blocks).sum(dim=0, dtype=torch.int32)
    checksum = sum(linear_checksum(block, seed=3) for block in blocks) % CHECKSUM_MODULUS
    assert linear_checksum(total, seed=3) == checksum
    total[2, 3] += 1
    assert linear_checksum(total, seed=3) != checksum

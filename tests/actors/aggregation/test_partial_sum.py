"""Sums of sites: a tree of any shape has the bits of one sum, and no bytes do more than they say."""

from __future__ import annotations

import dataclasses
import math
import random
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation import exact_sum
from gradbus.actors.aggregation.exact_sum import ExactMean, OutOfRange
from gradbus.actors.aggregation.partial_sum import (
    BLOCK_ELEMS,
    MAX_RANGES,
    NotAPartialSum,
    PartialSum,
    encode,
    max_bytes,
    parse,
)
from gradbus.actors.aggregation.sum_summary import SumSummary, exact_parts, ranges_of
from gradbus.actors.federated.controller.rounds import RoundTotals
from gradbus.codecs import CodecError, DimMismatchError

DIM = 2 * BLOCK_ELEMS + 17
MAX_SAMPLES = 1 << 30
ONE = SumSummary(1, 1, (range(7, 8),), (0.5,), 1)


def sum_of(updates: list[tuple[Tensor, int]], base: Tensor) -> ExactMean:
    mean = ExactMean(base.numel())
    for delta, num_samples in updates:
        parsed = codecs.parse(codecs.get("fp32").encode(delta), expected_dim=base.numel())
        mean.add(parsed, base=base, num_samples=num_samples)
    return mean


def up(mean: ExactMean, dim: int = DIM) -> PartialSum:
    """Through the bytes to the level above."""
    payload = mean.encode((range(mean.count),), (0.25,), 1)
    assert len(payload) <= max_bytes(dim)
    return parse(payload, expected_dim=dim, max_samples=1 << 40)


def bits(mean: ExactMean) -> bytes:
    return b"".join(values.numpy().tobytes() for _, values in mean.blocks())


def updates_of(count: int, scale: float, seed: int = 0) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(DIM, generator=generator), 100 + 17 * number) for number in range(count)]


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 3e6])  # the last one is beyond 64 bits in all, and carried
@pytest.mark.parametrize("shape", [[4, 4], [1, 7], [2, 2, 2, 2], [8]])
def test_a_tree_of_any_shape_has_the_bits_of_one_sum(scale: float, shape: list[int]) -> None:
    updates, base = updates_of(8, scale), torch.zeros(DIM)
    flat, centre, rest = sum_of(updates, base), ExactMean(DIM), list(updates)
    for clients in shape:
        mine, rest = rest[:clients], rest[clients:]
        region = ExactMean(DIM)
        for one in mine:  # a level more: each client with a site of its own
            region.add_sum(up(sum_of([one], base)))
        centre.add_sum(up(region))
    assert bits(centre) == bits(flat)
    assert (centre.num_samples, centre.count) == (flat.num_samples, flat.count)


def test_a_carried_sum_travels_and_a_level_above_may_carry_as_well() -> None:
    updates, base = updates_of(40, 1e6), torch.zeros(DIM)
    flat = sum_of(updates, base)
    assert up(flat).carried is not None
    sites = [sum_of(updates[start : start + 10], base) for start in range(0, 40, 10)]
    assert any(up(site).carried is not None for site in sites)
    centre = ExactMean(DIM)
    for site in reversed(sites):
        centre.add_sum(up(site))
    assert bits(centre) == bits(flat)


@pytest.mark.parametrize(
    "value", [0, 1, -1, 127, 128, -128, -129, (1 << 31) - 1, -(1 << 31), 1 << 31, (1 << 62) - 1, -(1 << 62) + 1]
)
def test_integers_come_back_as_they_were_in_as_few_bytes_as_they_need(value: int) -> None:
    low = torch.zeros(DIM, dtype=torch.int64)
    low[BLOCK_ELEMS + 5] = value
    payload = encode(ONE, low, None)
    back = torch.cat([values.clone() for _, values in parse(payload, expected_dim=DIM, max_samples=1).low.blocks()])
    assert torch.equal(back, low)
    width = next(n for n in range(9) if n == 8 or -(1 << 8 * n) <= 2 * value < 1 << 8 * n) if value else 0
    assert len(payload) == 48 + 8 + 8 + 3 + BLOCK_ELEMS * width  # header, ids, loss, a width for each block


def test_the_bytes_are_those_of_the_page() -> None:
    """docs/wire.md has the fields."""
    low, carried = torch.tensor([1, -2, 300], dtype=torch.int64), torch.tensor([0, 5, -1], dtype=torch.int64)
    summary = SumSummary(9, 3, (range(2, 4), range(7, 8)), (0.5,), 8)
    expected = (
        "47425853 01 1e 0100 0300000000000000 0900000000000000 03000000 02000000 0800000000000000 01000000 00000000"
        "02000000 02000000 07000000 01000000 000000000000e03f 02 0100 feff 2c01 01 00 05 ff"
    )
    assert encode(summary, low, carried) == bytes.fromhex(expected)


def test_a_typical_sum_takes_less_than_eight_bytes_for_each_value() -> None:
    payload = sum_of(updates_of(4, 1e-2), torch.zeros(DIM)).encode((), (), 0)
    assert len(payload) < 5.1 * DIM


@given(st.lists(st.floats(min_value=-1e100, max_value=1e100), max_size=30), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_parts_of_losses_add_up_to_the_same_bits(values: list[float], cut: int) -> None:
    parts = [*exact_parts(values[:cut]), *exact_parts(values[cut:])]
    assert math.fsum(parts) == math.fsum(values)
    assert len(exact_parts(values)) <= 40


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
@settings(max_examples=200, deadline=None)
def test_a_client_in_two_sums_is_found(one: set[int], other: set[int]) -> None:
    first, second = (SumSummary(99, 99, ranges_of(ids), (), 0) for ids in (one, other))
    assert first.shared_client(second) == min(one & other, default=None)
    assert {number for each in first.clients for number in each} == one


def test_what_is_not_a_sum_of_this_model_is_refused_with_the_reason() -> None:
    good = encode(ONE, torch.arange(DIM), None)

    def refused(payload: bytes, **changed: int) -> str:
        with pytest.raises(CodecError) as caught:
            parse(payload, **{"expected_dim": DIM, "max_samples": MAX_SAMPLES, **changed})
        return str(caught.value)

    def with_field(offset: int, form: str, value: int) -> bytes:
        changed = bytearray(good)
        struct.pack_into(form, changed, offset, value)
        return bytes(changed)

    with pytest.raises(NotAPartialSum, match="expected the exact sum of a site"):
        parse(codecs.get("fp32").encode(torch.zeros(DIM)), expected_dim=DIM, max_samples=1)
    with pytest.raises(DimMismatchError, match="the model has 5"):
        parse(good, expected_dim=5, max_samples=1)
    assert "of version 2" in refused(with_field(4, "<B", 2))
    assert "31 fraction bits" in refused(with_field(5, "<B", 31))
    assert "flags 0x2" in refused(with_field(6, "<H", 2))
    assert "2 updates with 1 samples" in refused(with_field(24, "<I", 2))
    assert "0 updates" in refused(with_field(24, "<I", 0))
    assert "at most limits.max_samples" in refused(with_field(16, "<Q", MAX_SAMPLES + 1))
    assert "4,294,967,295 ranges" in refused(with_field(28, "<I", 0xFFFF_FFFF)).replace("4294967295", "4,294,967,295")
    assert "parts of a loss" in refused(with_field(32, "<Q", 2))
    assert "parts of a loss" in refused(with_field(40, "<I", 41))
    assert "do not ascend, or are more" in refused(with_field(52, "<I", 2))
    assert "do not ascend" in refused(with_field(52, "<I", 0))
    nan = bytearray(good)
    struct.pack_into("<d", nan, 56, math.nan)
    assert "loss is not finite" in refused(bytes(nan))
    assert "of 9 bytes" in refused(with_field(64, "<B", 9))
    assert "expected" in refused(good + b"\0")
    for cut in [*range(80), len(good) - 1]:
        refused(good[:cut])


@given(st.binary(max_size=300), st.integers(0, 10_000))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_sum_or_an_error(noise: bytes, seed: int) -> None:
    rng, payload = random.Random(seed), bytearray(encode(ONE, torch.arange(40), None))
    for _ in range(rng.randrange(4)):
        payload[rng.randrange(4, len(payload))] = rng.randrange(256)
    for data in (noise, b"GBXS" + noise, bytes(payload)):
        try:
            found = parse(data, expected_dim=40, max_samples=MAX_SAMPLES)
        except CodecError:
            continue
        assert sum(values.numel() for _, values in found.low.blocks()) == 40


@pytest.mark.parametrize(("low", "carried"), [(1 << 62, None), (-(1 << 63), None), (0, (1 << 31) + 1), (0, -(1 << 63))])
def test_values_that_so_many_updates_cannot_have_are_refused_and_nothing_is_added(
    low: int, carried: int | None
) -> None:
    mean = sum_of(updates_of(2, 1.0), torch.zeros(DIM))
    before = bits(mean)
    high = None if carried is None else torch.full((DIM,), carried)
    payload = encode(ONE, torch.full((DIM,), low), high)
    with pytest.raises(OutOfRange, match="partial sum of 1 updates"):
        mean.add_sum(parse(payload, expected_dim=DIM, max_samples=MAX_SAMPLES))
    assert bits(mean) == before
    assert mean.count == 2


def test_an_empty_sum_and_one_of_too_many_gaps_are_not_sent() -> None:
    with pytest.raises(ValueError, match="no updates"):
        ExactMean(3).encode((), (), 0)
    gaps = tuple(range(2 * n, 2 * n + 1) for n in range(MAX_RANGES + 1))
    with pytest.raises(ValueError, match="65,537 ranges"):
        encode(dataclasses.replace(ONE, clients=gaps), torch.zeros(3, dtype=torch.int64), None)


def test_the_limits_are_those_of_the_sum() -> None:
    """A carry leaves at most 2^31 of an update, so a sum that an honest site carried is always taken."""
    largest = torch.full((4,), exact_sum.LARGEST * 0.999)
    updates = [(largest, 1), (-largest, 1)] * 3 + [(largest, 1)] * 9
    site = sum_of(updates, torch.zeros(4))
    assert up(site, 4).carried is not None
    centre = ExactMean(4)
    centre.add_sum(up(site, 4))
    centre.add_sum(up(sum_of(updates, torch.zeros(4)), 4))
    assert bits(centre) == bits(sum_of([*updates, *updates], torch.zeros(4)))


def test_the_ids_of_sites_are_joined_without_listing_them() -> None:
    many = 1_000_000
    first = SumSummary(many, many, (range(many), range(2 * many, 2 * many + 5)), (), 0)
    second = SumSummary(many, many, (range(many, many + 7),), (), 0)
    tracemalloc.start()
    try:
        found = RoundTotals(sums={0: first, 1: second}).clients()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == (range(many + 7), range(2 * many, 2 * many + 5))
    assert peak_bytes < 100_000

"""Masked updates as bytes, and their sum: the integers of the exact sum, modulo 2^56, or small ones, modulo 2^16."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus import codecs
from gradbus.actors.aggregation.common_grid import EXACT, MAX_ADDENDS, MAX_EXPONENT, CommonGrid, Dither, limit_for
from gradbus.actors.aggregation.exact_sum import ExactMean
from gradbus.actors.aggregation.partial_sum import PartialSum
from gradbus.actors.aggregation.sum_summary import SumSummary
from gradbus.actors.secure_aggregation.answered_sets import AnsweredSets
from gradbus.actors.secure_aggregation.keys import Attempt, NotInProtocol, Roster, RosterEntry
from gradbus.actors.secure_aggregation.masked_values import (
    MaskedValues,
    SignedIntegers,
    TooLarge,
    UpdateMasks,
    encode,
    integers_of,
    size_of,
)
from gradbus.actors.secure_aggregation.masks import add_masks
from gradbus.codecs import CodecError, Parsed

MEMBERS = 3


def masks_of(total: np.ndarray, *, cap: int = 0, members: int = MEMBERS) -> UpdateMasks:
    entries = tuple(RosterEntry(one, bytes([one] * 32), bytes([one + 100] * 32), bytes(32)) for one in range(3))
    return UpdateMasks(Roster(Attempt("job", 1, 2, 3, 4), 2, entries, cap), 1, members, total)


def parsed(vector: torch.Tensor, version: int = 2) -> Parsed:
    return codecs.parse(codecs.get("fp32", version=version).encode(vector), expected_dim=vector.numel())


VALUES = st.floats(-1000, 1000, width=32)


@given(
    data=st.lists(st.lists(VALUES, min_size=5, max_size=5), min_size=1, max_size=MEMBERS),
    samples=st.lists(st.integers(1, 10_000), min_size=MEMBERS, max_size=MEMBERS),
    version=st.sampled_from((1, 2)),
)
@settings(max_examples=60, deadline=None)
def test_the_unmasked_sum_is_the_exact_sum(data: list[list[float]], samples: list[int], version: int) -> None:
    base, expected = torch.tensor([0.5, -1.0, 0.0, 3.0, 1e-9]), ExactMean(5)
    total, all_masks = np.zeros(5, np.uint64), np.zeros(5, np.uint64)
    for values, num_samples in zip(data, samples, strict=False):
        update = parsed(torch.tensor(values), version)
        masks = np.random.default_rng(num_samples).integers(0, 2**64, 5, np.uint64, endpoint=False)
        payload, residual, _ = encode(update, base, masks_of(masks), num_samples)
        assert residual is None
        expected.add(update, base=base, num_samples=num_samples)
        found = MaskedValues.parse(payload, expected_dim=5)
        assert (found.attempt, found.weight, len(payload)) == (4, num_samples, size_of(5))
        found.add_to(total)
        all_masks += masks
    total -= all_masks
    sums, number = ExactMean(5), sum(samples[: len(data)])
    sums.add_sum(PartialSum(SumSummary(number, len(data), (), (), 0), SignedIntegers(total), None))
    assert [torch.equal(a.clone(), b) for (_, a), (_, b) in zip(sums.blocks(), expected.blocks(), strict=True)] == [
        True
    ]
    assert (sums.num_samples, sums.count) == (expected.num_samples, expected.count)


def test_the_bytes_are_those_of_the_page() -> None:
    masks = np.array([0, 2**64 - 1, 5], np.uint64)
    payload = bytes(encode(parsed(torch.tensor([1.0, -2.0, 0.0])), torch.zeros(3), masks_of(masks, cap=2), 7)[0])
    integers = [2 * 2**30, (-4 * 2**30 - 1) % 2**56, 5]  # the cap of 2 samples, and not 7
    head = b"GBXM" + struct.pack("<BBHIIQQ", 2, 7, 0, 4, 0, 3, 2)
    assert payload == head + b"".join(one.to_bytes(7, "little") for one in integers) + b"\0"


def test_blocks_of_more_than_one_piece_are_added_whole() -> None:
    dim = 70_001
    vector = torch.randn(dim, generator=torch.Generator().manual_seed(1))
    masks = np.random.default_rng(0).integers(0, 2**64, dim, np.uint64, endpoint=False)
    total = np.zeros(dim, np.uint64) - masks
    payload, *_ = encode(parsed(vector), torch.zeros(dim), masks_of(masks), 3)
    MaskedValues.parse(payload, expected_dim=dim).add_to(total)
    found = torch.cat([values.clone() for _, values in SignedIntegers(total).blocks()])
    assert torch.equal(found, (vector.double() * 3 * 2**30).round().long())
    assert int(found.abs().max()) < SignedIntegers(total).largest() == 2**55


@pytest.mark.parametrize("members", [2, 255])
def test_the_largest_values_of_all_members_have_room_and_larger_ones_are_refused(members: int) -> None:
    limit = 2.0**25 / members
    fits, beyond = (
        torch.tensor([math.nextafter(sign * limit, to)], dtype=torch.float32) for sign, to in ((-1, 0), (1, 0))
    )
    fits *= 1 - 2**-20
    masks = masks_of(np.zeros(1, np.uint64), members=members)
    payload, *_ = encode(parsed(fits), torch.zeros(1), masks, 1)
    total = np.zeros(1, np.uint64)
    for _ in range(members):
        MaskedValues.parse(payload, expected_dim=1).add_to(total)
    ((_, values),) = SignedIntegers(total).blocks()
    assert values.tolist() == [-members * round(float(fits.abs()) * 2**30)]
    with pytest.raises(TooLarge, match=f"no room in the sum of {members} clients"):
        encode(parsed(beyond * (1 + 2**-20)), torch.zeros(1), masks, 1)


@given(data=st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_a_masked_update_or_a_codec_error(data: bytes) -> None:
    try:
        MaskedValues.parse(data, expected_dim=3)
    except CodecError:
        return
    raise AssertionError("so few bytes are none")


def test_what_is_not_a_masked_update_of_this_model_is_refused_by_name() -> None:
    payload = bytearray(encode(parsed(torch.ones(3)), torch.zeros(3), masks_of(np.zeros(3, np.uint64)), 1)[0])
    for at, value, why in (
        (0, 0, "masked ones are expected"),
        (4, 1, "version 1"),
        (5, 8, "8 bytes a value"),
        (6, 1, "flags 0x1"),
        (16, 4, "4 values"),
        (-1, 1, "ends with 0x1"),
    ):
        wrong = payload.copy()
        wrong[at] = value
        with pytest.raises(CodecError, match=why):
            MaskedValues.parse(wrong, expected_dim=3)
    for wrong in (payload[:-1], payload + b"\0", codecs.get("fp32").encode(torch.ones(3))):
        with pytest.raises(CodecError):
            MaskedValues.parse(wrong, expected_dim=3)


def small_masks(total: list[int], exponent: int, *, sent: int = 0, cap: int = 0) -> UpdateMasks:
    dim = sent or len(total)
    grid = CommonGrid(sent, 10, bytes([exponent % 256]))
    roster = dataclasses.replace(masks_of(np.zeros(dim, np.uint64), cap=cap).roster, grid=grid)
    return UpdateMasks(roster, 1, MEMBERS, np.array(total, np.uint16), roster.positions(4) if sent else None)


def test_the_bytes_of_small_integers_are_those_of_the_page() -> None:
    update = parsed(torch.tensor([1.0, -2.0, 3000.0, 0.6875]))
    payload, residual, clamped = encode(update, torch.zeros(4), small_masks([0, 2**16 - 1, 5, 7], 12, cap=2), 7)
    # Twice the value, in steps of a half, as 3 members have room for 2^13 of them each; the third one is clamped.
    seed = b"gradbus dither 1" + struct.pack("<QII", 1, 3, 1)  # of the run, the round and the client
    dither = np.empty(4)
    Dither(seed).next(dither)
    fourth = round(0.6875 * 4 + dither[3])
    integers = [4, (-8 - 1) % 2**16, 8191 + 5, fourth + 7]
    head = b"GBXM" + struct.pack("<BBHIIQQ", 2, 2, 0, 4, 0, 4, 2)
    assert bytes(payload) == head + struct.pack("<4H", *integers)
    assert residual is not None
    assert torch.equal(residual, torch.tensor([0.0, 0.0, 3000.0 - 8191 / 4, 0.6875 - fourth / 4]))
    assert clamped == 1


def test_at_the_positions_of_a_round_are_the_values_of_the_page() -> None:
    masks = small_masks([0, 0], 12, sent=2)
    update = parsed(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    seed = b"gradbus positions 1" + struct.pack("<QI", 1, 3)  # of the run and the round
    first, second = codecs.random_k(4, 2, seed).tolist()
    payload, residual, _ = encode(update, torch.zeros(4), masks, 1)
    assert bytes(payload)[32:] == struct.pack("<2H", 2 * (first + 1), 2 * (second + 1))
    assert residual is not None
    assert residual.tolist() == [0.0 if at in (first, second) else (at + 1) / 2 for at in range(4)]
    exact = UpdateMasks(
        dataclasses.replace(masks.roster, grid=CommonGrid(2)), 1, MEMBERS, np.zeros(2, np.uint64), masks.positions
    )
    payload, of_exact, _ = encode(update, torch.zeros(4), exact, 1)
    MaskedValues.parse(payload, expected_dim=2).add_to(total := np.zeros(2, np.uint64))
    assert (total % 2**56).tolist() == [(first + 1) << 30, (second + 1) << 30]
    assert of_exact is not None
    assert torch.equal(of_exact, residual)


def test_small_integers_are_read_where_they_are_expected_and_nowhere_else() -> None:
    payload, *_ = encode(parsed(torch.ones(3)), torch.zeros(3), small_masks([0, 0, 0], 13), 1)
    found = MaskedValues.parse(payload, expected_dim=3, value_bytes=2)
    total = np.array([2**16 - 1, 0, 5], np.uint16)
    found.add_to(total)
    assert total.tolist() == [0, 1, 6]
    with pytest.raises(CodecError, match=r"version 2 with 2 bytes a value and flags 0x0: expected version 2 with 7"):
        MaskedValues.parse(payload, expected_dim=3)
    wide, *_ = encode(parsed(torch.ones(3)), torch.zeros(3), masks_of(np.zeros(3, np.uint64)), 1)
    with pytest.raises(CodecError, match=r"7 bytes a value .* expected version 2 with 2"):
        MaskedValues.parse(wide, expected_dim=3, value_bytes=2)
    with pytest.raises(CodecError, match="expected 38"):
        MaskedValues.parse(bytes(payload) + b"\0", expected_dim=3, value_bytes=2)


def test_keys_are_bound_to_the_grid_and_without_one_are_those_of_earlier_versions() -> None:
    plain = masks_of(np.zeros(4, np.uint64), cap=9).roster
    grids = [
        CommonGrid(2), CommonGrid(3), CommonGrid(0, 10, b"\1"), CommonGrid(0, 10, b"\2"), CommonGrid(0, 11, b"\1"),
        CommonGrid(2, 10, b"\1"),
    ]  # fmt: skip
    assert len({dataclasses.replace(plain, grid=grid).digest for grid in [EXACT, *grids]}) == 7
    name = struct.pack("<QQII", 1, 2, 3, 4) + b"job"
    expected = hashlib.sha256(b"gradbus roster 1" + struct.pack("<IQ", 2, 9) + plain.to_bytes() + name)
    assert plain.digest == expected.digest()


def test_a_client_answers_on_one_grid_and_limit_in_a_round() -> None:
    roster = small_masks([0] * 4, 1).roster
    others = [
        dataclasses.replace(roster, cap=5), dataclasses.replace(roster, grid=CommonGrid(0, 10, b"\2")),
        dataclasses.replace(roster, grid=EXACT), dataclasses.replace(roster, members=roster.members[:2]),
    ]  # fmt: skip
    assert roster.limit == 8191
    for other in others:
        answered = AnsweredSets()
        answered.check("round", roster.terms, {1, 2})
        answered.note("round", roster.terms, {1, 2})
        answered.check("round", dataclasses.replace(roster, threshold=3).terms, {1, 2})
        with pytest.raises(NotInProtocol, match="in other steps"):
            answered.check("round", other.terms, {1, 2})


def test_the_largest_integers_of_255_members_come_out_of_their_masks() -> None:
    """End to end at the limit: rounded, masked, added, unmasked and signed, modulo 2^16 all the way."""
    entries = tuple(
        RosterEntry(one, one.to_bytes(32, "big"), (one + 1000).to_bytes(32, "big"), bytes(32))
        for one in range(MAX_ADDENDS)
    )
    grid = CommonGrid(0, 4, bytes([MAX_EXPONENT]))
    roster = Roster(Attempt("job", 1, 2, 3, 4), 128, entries, 0, grid)
    update, zeros = parsed(torch.tensor([1e30, -1e30, 0.0, 1e30])), torch.zeros(4)
    total = np.zeros(4, np.uint16)
    for one in range(MAX_ADDENDS):
        own = np.zeros(4, np.uint16)
        add_masks(own, [(bytes([one] * 32), False)])
        payload, residual, clamped = encode(update, zeros, UpdateMasks(roster, one, MAX_ADDENDS, own.copy()), 1)
        assert residual is not None
        assert clamped == 3
        MaskedValues.parse(payload, expected_dim=4, value_bytes=2).add_to(total)
    add_masks(total, [(bytes([one] * 32), True) for one in range(MAX_ADDENDS)])
    assert limit_for(MAX_ADDENDS) == 127
    found = np.concatenate([values.numpy().copy() for _, values in integers_of(total, roster, None, 4).blocks()])
    assert found.tolist() == [one * 127 * 255 << (16 + 30) for one in (1, -1, 0, 1)]

"""Index coding: every coding there and back, the choice between them, and how near it comes to the possible."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradbus import codecs
from gradbus.codecs import index_coding
from gradbus.codecs.index_coding import (
    decode_rice,
    decode_varints,
    encode_rice,
    encode_varints,
    rice_parameter,
    rice_size,
)

Coding = codecs.Coding


def random_set(dim: int, k: int, seed: int = 0) -> Tensor:
    generator = np.random.default_rng(seed)
    if dim <= 1 << 24:
        chosen = generator.choice(dim, size=k, replace=False)
    else:
        chosen = np.unique(generator.integers(0, dim, size=k))
    return torch.from_numpy(np.sort(chosen.astype(np.int64)))


def floor_bytes(dim: int, k: int) -> float:
    """log2 C(dim, k) bits: no code can do with less on average over all sets."""
    return (math.lgamma(dim + 1) - math.lgamma(k + 1) - math.lgamma(dim - k + 1)) / math.log(2) / 8


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), dim=st.one_of(st.integers(1, 300), st.integers(1, 1 << 40)))
def test_any_set_comes_back(data: st.DataObject, dim: int) -> None:
    indices = torch.tensor(sorted(data.draw(st.sets(st.integers(0, dim - 1), max_size=60))), dtype=torch.int64)
    coding, coded = codecs.encode_indices(indices, dim)
    assert torch.equal(codecs.decode_indices(coding, coded, dim, indices.numel()), indices)
    assert len(coded) <= index_coding.max_index_bytes(dim, indices.numel())


@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_random_sets_of_any_density_come_back(density: float) -> None:
    dim = 300_000
    indices = random_set(dim, int(dim * density))
    coding, coded = codecs.encode_indices(indices, dim)
    assert torch.equal(codecs.decode_indices(coding, coded, dim, indices.numel()), indices)


@pytest.mark.parametrize(
    ("dim", "k"),
    [(1_199_882, 119_988), (1_199_882, 12_000), (2_000_000, 400_000), (400_000, 200_000), (1 << 24, 10_000)],
)
def test_random_sets_take_at_most_5_percent_over_the_entropy(dim: int, k: int) -> None:
    _, coded = codecs.encode_indices(random_set(dim, k), dim)
    assert len(coded) <= 1.05 * floor_bytes(dim, k)


def structured_sets() -> dict[Coding, tuple[Tensor, int]]:
    """A set for which each coding is the smallest."""
    bytes_on = torch.from_numpy(np.random.default_rng(0).random(10_000) < 0.3)  # eight neighbours always go together
    return {
        Coding.RAW: (torch.tensor([123_456]), 1 << 20),
        Coding.VARINT_ZSTD: (torch.arange(0, 1_000_000, 100), 1_000_000),
        Coding.RICE: (random_set(1_000_000, 10_000), 1_000_000),
        Coding.BITMAP: (random_set(10_000, 5000), 10_000),
        Coding.BITMAP_ZSTD: (bytes_on.repeat_interleave(8).nonzero().squeeze(1), 80_000),
    }


@pytest.mark.parametrize("coding", [coding for coding in Coding if coding is not Coding.DENSE])
def test_each_coding_is_chosen_where_it_is_the_smallest(coding: Coding) -> None:
    indices, dim = structured_sets()[coding]
    chosen, coded = codecs.encode_indices(indices, dim)
    assert chosen is coding
    assert torch.equal(codecs.decode_indices(chosen, coded, dim, indices.numel()), indices)


def test_whole_rows_take_far_less_than_a_random_set() -> None:
    rows = torch.arange(1_000_000).view(1000, 1000)[::10].reshape(-1)
    _, coded = codecs.encode_indices(rows, 1_000_000)
    assert len(coded) < 0.02 * floor_bytes(1_000_000, 100_000)


def test_a_wrong_estimate_never_costs_more_than_the_codings_without_zstd() -> None:
    """The sampled stretches are regular, all between them is random."""
    gaps = np.random.default_rng(0).integers(0, 120, size=1_000_000)
    for start in np.linspace(0, gaps.size - 8192, 16).astype(int):
        gaps[start : start + 8192] = 5
    indices = torch.from_numpy(np.cumsum(gaps + 1) - 1)
    dim = int(indices[-1]) + 1
    coding, coded = codecs.encode_indices(indices, dim)
    assert len(coded) <= rice_size(gaps, rice_parameter(gaps.size, dim))
    assert torch.equal(codecs.decode_indices(coding, coded, dim, indices.numel()), indices)


@pytest.mark.parametrize("bad", [[3, 3], [5, 2], [-1, 2], [2, 10]])
def test_indices_that_do_not_ascend_within_the_vector_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="strictly ascending"):
        codecs.encode_indices(torch.tensor(bad), 10)


def test_indices_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        codecs.encode_indices(torch.tensor([1, 2], dtype=torch.int32), 10)


@pytest.mark.parametrize("coding", [0, 6, 255])
def test_an_unknown_coding_is_refused(coding: int) -> None:
    with pytest.raises(codecs.CodecError, match="unknown coding"):
        codecs.decode_indices(coding, b"\0", 10, 1)


@pytest.mark.parametrize("coding", [Coding.RAW, Coding.VARINT_ZSTD, Coding.RICE, Coding.BITMAP, Coding.BITMAP_ZSTD])
def test_a_coded_set_with_another_k_or_length_is_refused(coding: Coding) -> None:
    indices, dim = structured_sets()[coding]
    _, coded = codecs.encode_indices(indices, dim)
    k = indices.numel()
    for other_k in (k - 1, k + 1, 0):
        with pytest.raises(codecs.CodecError):
            codecs.decode_indices(coding, coded, dim, other_k)
    for other in (coded[:-1], coded + b"\0", b""):
        with pytest.raises(codecs.CodecError):
            codecs.decode_indices(coding, other, dim, k)
    with pytest.raises(codecs.CodecError):
        codecs.decode_indices(coding, coded, int(indices[-1]), k)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(gaps=st.lists(st.one_of(st.integers(0, 200), st.integers(0, (1 << 40) - 1)), min_size=1, max_size=50))
def test_varints_come_back(gaps: list[int]) -> None:
    coded = encode_varints(np.array(gaps, dtype=np.int64))
    assert decode_varints(coded, len(gaps)).tolist() == gaps


def test_varints_are_leb128() -> None:
    assert encode_varints(np.array([0, 127, 128, 300, 16384])).hex(" ") == "00 7f 80 01 ac 02 80 80 01"


@pytest.mark.parametrize("coded", [b"\x80", b"\x01\x80", b"\x80\x80\x80\x80\x80\x80\x01", b"\x01\x02", b""])
def test_bad_varints_are_refused(coded: bytes) -> None:
    with pytest.raises(codecs.CodecError, match="varint"):
        decode_varints(coded, 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(gaps=st.lists(st.integers(0, 5000), min_size=1, max_size=50), parameter=st.integers(0, 40))
def test_rice_codes_come_back_in_the_size_foretold(gaps: list[int], parameter: int) -> None:
    array = np.array(gaps, dtype=np.int64)
    coded = encode_rice(array, parameter)
    assert len(coded) == rice_size(array, parameter)
    assert decode_rice(memoryview(coded), len(gaps), sum(gaps) + len(gaps)).tolist() == gaps


def test_a_rice_stream_of_three_gaps_is_these_bytes() -> None:
    # l = 2; gaps 5 = 1|01, 0 = 0|00, 11 = 2|11: low bits 1,0,1 and 0,0,1; unary 01 1 001.
    assert encode_rice(np.array([5, 0, 11]), 2).hex(" ") == "02 05 04 26"


def test_gaps_that_add_up_beyond_int64_are_refused() -> None:
    k, dim = 1 << 10, 1 << 40
    gaps = np.full(k, (1 << 42) - 1, dtype=np.int64)
    frame = zstandard.ZstdCompressor().compress(encode_varints(gaps))
    with pytest.raises(codecs.CodecError, match="add up beyond"):
        codecs.decode_indices(Coding.VARINT_ZSTD, frame, dim, k)

"""Bytes from anybody: a result or ``CodecError``, nothing else, and no memory for what a header merely claims."""

from __future__ import annotations

import itertools
import struct
import tracemalloc

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus import codecs

VARIANTS = [(name, version) for name in codecs.ALL for version in codecs.get(name).versions]
each_variant = pytest.mark.parametrize(("name", "version"), VARIANTS)
MAGICS = [b"F4\0\2", b"Q8\0\1", b"Q8\0\2", b"S4\0\1", b"S4\0\2", b"S8\0\1", b"SQ\0\1", b"SQ\0\2"]
MAGICS += [b"Q4\0\2", b"Q2\0\2", b"LC\0\2"]
DIM = 60


def message(name: str, version: int, dim: int = DIM) -> bytes:
    options = {"density": 0.3} if name in ("s4", "sq8") else {}
    x = torch.randn(dim, generator=torch.Generator().manual_seed(1))
    return codecs.get(name, version=version, **options).encode(x)


def decode_or_refuse(payload: bytes, dim: int) -> None:
    try:
        decoded = codecs.decode(payload, expected_dim=dim)
    except codecs.CodecError:
        return
    assert decoded.vector.shape == (dim,)
    assert decoded.vector.isfinite().all()


@each_variant
def test_a_message_cut_at_any_byte_is_refused(name: str, version: int) -> None:
    payload = message(name, version)
    for length in range(len(payload)):
        with pytest.raises(codecs.CodecError):
            codecs.decode(payload[:length], expected_dim=DIM)


@each_variant
def test_a_message_with_bytes_after_it_is_refused(name: str, version: int) -> None:
    payload = message(name, version)
    for extra in (b"\0", b"\0" * 4, b"\xff" * 5, payload):
        with pytest.raises(codecs.CodecError):
            codecs.decode(payload + extra, expected_dim=DIM)


@each_variant
@pytest.mark.parametrize("dim", [0, 1, DIM - 1, DIM + 1, 1 << 60])
def test_another_model_size_is_refused(name: str, version: int, dim: int) -> None:
    with pytest.raises(codecs.CodecError, match=rf"expected|exactly {4 * dim} bytes"):
        codecs.decode(message(name, version), expected_dim=dim)


@pytest.mark.parametrize(("name", "version"), [variant for variant in VARIANTS if variant != ("fp32", 1)])
def test_a_wrong_magic_is_refused(name: str, version: int) -> None:
    payload = message(name, version)
    for position in range(4):
        wrong = bytearray(payload)
        wrong[position] ^= 0x40
        with pytest.raises(codecs.CodecError, match="known magic"):
            codecs.decode(wrong, expected_dim=DIM)


@pytest.mark.parametrize("name", codecs.ALL)
@pytest.mark.parametrize(("position", "value"), [(4, 2), (4, 0x80), (6, 1), (7, 1)])
def test_unknown_flags_and_reserved_bits_are_refused(name: str, position: int, value: int) -> None:
    payload = bytearray(message(name, 2))
    payload[position] |= value
    with pytest.raises(codecs.CodecError, match="unknown bits"):
        codecs.decode(payload, expected_dim=DIM)


@each_variant
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_content_is_told_from_malformed_bytes(name: str, version: int, bad: float) -> None:
    payload = bytearray(message(name, version))
    floats_at = {
        ("fp32", 1): 0, ("fp32", 2): 16, ("q8", 1): 20, ("q8", 2): 20,
        ("s4", 1): 12 + 4 * 18, ("s4", 2): 24, ("sq8", 1): 20 + 4 * 18, ("sq8", 2): 28,
        ("q4", 2): 20, ("q2", 2): 20, ("loco", 2): 16,
    }  # fmt: skip
    struct.pack_into("<f", payload, floats_at[name, version], bad)
    with pytest.raises(codecs.NonFiniteError, match="non-finite"):
        codecs.decode(payload, expected_dim=DIM)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_is_not_positive_is_refused(version: int, scale: float) -> None:
    payload = bytearray(message("q8", version))
    struct.pack_into("<f", payload, 20, scale)
    with pytest.raises(codecs.CodecError, match="scales: expected > 0"):
        codecs.decode(payload, expected_dim=DIM)


def test_a_scale_whose_values_overflow_is_non_finite() -> None:
    payload = bytearray(message("q8", 2))
    struct.pack_into("<f", payload, 20, 3e38)
    with pytest.raises(codecs.NonFiniteError, match="overflows"):
        codecs.decode(payload, expected_dim=DIM)


def test_the_unused_code_of_int8_is_refused() -> None:
    payload = bytearray(message("q8", 1))
    payload[-1] = 0x80
    with pytest.raises(codecs.CodecError, match="got -128 at entry 59"):
        codecs.decode(payload, expected_dim=DIM)


@pytest.mark.parametrize("indices", [(3, 3), (4, 3), (-1, 3), (3, 10), (2**31 - 1, 0)])
def test_version_1_indices_must_ascend_within_the_vector(indices: tuple[int, int]) -> None:
    s4 = struct.pack("<4sii2i2f", b"S4\0\1", 10, 2, *indices, 1.0, 2.0)
    sq8 = struct.pack("<4siiii2if2b", b"SQ\0\1", 10, 2, 8192, 1, *indices, 1.0, 1, 2)
    s8 = struct.pack("<4siif2i2b", b"S8\0\1", 10, 2, 1.0, *indices, 1, 2)
    for payload in (s4, sq8, s8):
        with pytest.raises(codecs.CodecError, match="strictly ascending"):
            codecs.decode(payload, expected_dim=10)


@pytest.mark.parametrize("name", ["fp32", "q8", "q4", "q2", "loco"])
def test_a_dense_message_with_an_index_coding_is_refused(name: str) -> None:
    payload = bytearray(message(name, 2))
    payload[5] = codecs.Coding.RICE
    with pytest.raises(codecs.CodecError, match="index coding 3"):
        codecs.decode(payload, expected_dim=DIM)


HUGE_CLAIMS = {
    "fp32": struct.pack("<4sBBHQ", b"F4\0\2", 1, 0, 0, 1 << 60),
    "q8 v1": struct.pack("<4sIQI", b"Q8\0\1", 8192, 1 << 60, 1 << 31),
    "q8": struct.pack("<4sBBHQI", b"Q8\0\2", 1, 0, 0, 1 << 60, 1),
    "q4": struct.pack("<4sBBHQI", b"Q4\0\2", 1, 0, 0, 1 << 60, 1),
    "q2": struct.pack("<4sBBHQI", b"Q2\0\2", 1, 0, 0, 1 << 60, 1),
    "loco": struct.pack("<4sBBHQ", b"LC\0\2", 1, 0, 0, 1 << 60),
    "s4": struct.pack("<4sBBHQII", b"S4\0\2", 1, 3, 0, 1 << 60, 2**32 - 1, 2**32 - 1),
    "sq8": struct.pack("<4sBBHQIII", b"SQ\0\2", 1, 3, 0, 1 << 60, 2**32 - 1, 2**32 - 1, 1),
    "s4 v1": struct.pack("<4sii", b"S4\0\1", 2**31 - 1, 2**31 - 1),
    "sq8 v1": struct.pack("<4siiii", b"SQ\0\1", 2**31 - 1, 2**31 - 1, 1, 2**31 - 1),
    "s8 v1": struct.pack("<4siif", b"S8\0\1", 2**31 - 1, 2**31 - 1, 1.0),
}


@pytest.mark.parametrize("claim", HUGE_CLAIMS)
@pytest.mark.parametrize("expected_dim", [DIM, 2**31 - 1, 1 << 60])
def test_a_claimed_size_allocates_nothing(claim: str, expected_dim: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(codecs.CodecError):
            codecs.parse(HUGE_CLAIMS[claim], expected_dim=expected_dim)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))
    header = struct.pack("<4sBBHQII", b"S4\0\2", 1, codecs.Coding.VARINT_ZSTD, 0, DIM, 1, len(bomb))
    tracemalloc.start()
    try:
        with pytest.raises(codecs.CodecError, match="expected 1 to 6 bytes of content, header says 67108864"):
            codecs.decode(header + struct.pack("<f", 1.0) + bomb, expected_dim=DIM)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(start=st.sampled_from([b"", *MAGICS]), rest=st.binary(max_size=120), dim=st.integers(0, 30))
def test_any_bytes_give_a_result_or_a_codec_error(start: bytes, rest: bytes, dim: int) -> None:
    decode_or_refuse(start + rest, dim)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), variant=st.sampled_from(VARIANTS), dim=st.sampled_from([5, DIM, 700]))
def test_a_damaged_message_gives_a_result_or_a_codec_error(
    data: st.DataObject, variant: tuple[str, int], dim: int
) -> None:
    payload = bytearray(message(*variant, dim=dim))
    edits = st.lists(st.tuples(st.integers(0, len(payload) - 1), st.integers(0, 255)), min_size=1, max_size=4)
    for position, value in data.draw(edits):
        payload[position] = value
    decode_or_refuse(bytes(payload), dim)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    coding=st.integers(0, 7),
    body=st.binary(max_size=60),
    is_framed=st.booleans(),
    dim=st.integers(0, 400),
    k=st.integers(0, 60),
)
def test_any_coded_indices_give_a_set_or_a_codec_error(
    coding: int, body: bytes, is_framed: bool, dim: int, k: int
) -> None:
    data = zstandard.ZstdCompressor().compress(body) if is_framed else body
    try:
        indices = codecs.decode_indices(coding, data, dim, k).tolist()
    except codecs.CodecError:
        return
    assert len(indices) == k
    assert all(0 <= index < dim for index in indices)
    assert all(a < b for a, b in itertools.pairwise(indices))

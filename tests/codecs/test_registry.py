"""Codecs by name, and how a message is recognised."""

from __future__ import annotations

import codecs as stdlib_codecs
import dataclasses
import struct

import pytest
import torch

from gradbus import codecs


def test_the_standard_library_keeps_its_own_codecs() -> None:
    assert stdlib_codecs.lookup("utf-8").name == "utf-8"
    assert stdlib_codecs is not codecs


@pytest.mark.parametrize(("wrong", "nearest"), [("q_8", "q8"), ("fp23", "fp32"), ("SQ8", "sq8"), ("s5", "s4")])
def test_an_unknown_codec_names_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'"):
        codecs.get(wrong)


def test_a_name_like_no_codec_is_answered_with_all() -> None:
    with pytest.raises(ValueError, match=r"^no codec 'zip'; there are fp32, "):
        codecs.get("zip")


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'density'"):
        codecs.get("s4", densty=0.1)
    with pytest.raises(ValueError, match="did you mean 'chunk_elems'"):
        codecs.get("q8", chunk_size=8192)
    with pytest.raises(ValueError, match="has no option 'density'"):
        codecs.get("fp32", density=0.1)


def test_chunk_is_another_name_for_chunk_elems() -> None:
    assert codecs.get("q8", chunk=1024) == codecs.get("q8", chunk_elems=1024)
    with pytest.raises(ValueError, match="same option"):
        codecs.get("q8", chunk=1024, chunk_elems=1024)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("q8", {"chunk_elems": 0}),
        ("q8", {"chunk_elems": 2**31}),
        ("sq8", {"chunk_elems": 1.5}),
        ("s4", {"density": 0.0}),
        ("s4", {"density": 1.5}),
        ("sq8", {"density": float("nan")}),
        ("fp32", {"version": 3}),
    ],
)
def test_an_option_out_of_range_is_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        codecs.get(name, **options)


def test_a_codec_is_a_frozen_value() -> None:
    codec = codecs.get("sq8", density=0.2)
    assert codec == codecs.get("sq8", density=0.2)
    assert hash(codec) == hash(codecs.get("sq8", density=0.2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.version = 1  # type: ignore[misc]


def test_version_can_be_given_per_message() -> None:
    x = torch.ones(8)
    assert codecs.get("q8").encode(x, version=1) == codecs.get("q8", version=1).encode(x)
    with pytest.raises(ValueError, match="version must be 1 or 2"):
        codecs.get("q8").encode(x, version=3)


def test_weights_that_begin_like_a_magic_are_still_weights() -> None:
    raw = bytearray(torch.ones(16).numpy().tobytes())
    for magic in (b"Q8\0\1", b"S4\0\2", b"F4\0\2"):
        raw[:4] = magic
        decoded = codecs.decode(raw, expected_dim=16)
        assert decoded.codec == "fp32"
        assert not decoded.is_delta
        assert bytes(decoded.vector.numpy().tobytes()) == bytes(raw)


def test_a_consistent_header_wins_over_the_headerless_length() -> None:
    payload = struct.pack("<4sii2i2f", b"S4\0\1", 7, 2, 1, 5, 1.0, 2.0)  # 28 bytes, as are 7 headerless elements
    decoded = codecs.decode(payload, expected_dim=7)
    assert decoded.codec == "s4"
    assert decoded.vector.tolist() == [0, 1, 0, 0, 0, 2, 0]


def test_a_damaged_message_is_not_taken_for_weights_because_its_length_fits() -> None:
    payload = codecs.get("fp32").encode(torch.ones(60))
    with pytest.raises(codecs.CodecError, match="cut short"):
        codecs.decode(payload[:240], expected_dim=60)


def test_a_message_for_another_model_says_so() -> None:
    with pytest.raises(codecs.DimMismatchError, match="message of 60 elements, expected 61"):
        codecs.decode(codecs.get("q8").encode(torch.ones(60)), expected_dim=61)


def test_bad_content_behind_a_consistent_header_is_not_taken_for_weights() -> None:
    payload = struct.pack("<4sii2i2f", b"S4\0\1", 7, 2, 5, 1, 1.0, 2.0)
    with pytest.raises(codecs.CodecError, match="strictly ascending"):
        codecs.decode(payload, expected_dim=7)


def test_the_error_for_unknown_bytes_says_what_was_expected() -> None:
    with pytest.raises(codecs.CodecError, match=r"payload of 11 bytes.*headerless FP32 of exactly 40 bytes"):
        codecs.decode(b"hello world", expected_dim=10)

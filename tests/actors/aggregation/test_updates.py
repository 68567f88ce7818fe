"""Sections of an update: the bytes of today where there is one, and nothing that a table claims is believed."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation import updates
from gradbus.codecs import CodecError, Parsed

OTHERS = {"control": 3, "note": 1}
encode = codecs.get("fp32").encode


def values_of(parsed: Parsed) -> list[float]:
    return [float(value) for block in parsed.blocks() for value in block.values]


def message(model: Tensor | None = None) -> bytes:
    return updates.join(
        [
            ("model", codecs.get("q8").encode(torch.ones(5) if model is None else model)),
            ("control", encode(torch.tensor([1.0, 2.0, 3.0]))),
            ("note", encode(torch.tensor([7.0]))),
        ]
    )


def read(payload: bytes) -> updates.Update:
    return updates.parse(payload, expected_dim=5, others=OTHERS)


def test_an_update_of_the_model_alone_is_the_bytes_of_its_codec() -> None:
    payload = encode(torch.ones(5))
    assert updates.join([("model", payload)]) == payload
    assert values_of(updates.parse(payload, expected_dim=5, others={}).model) == [1.0] * 5


def test_each_section_has_its_own_codec_and_length() -> None:
    update = read(message())
    assert (update.model.codec, update.others["control"].codec) == ("q8", "fp32")
    assert values_of(update.others["control"]) == [1.0, 2.0, 3.0]
    assert values_of(update.others["note"]) == [7.0]


def test_sections_have_their_golden_bytes() -> None:
    payload = updates.join([("model", b"abc"), ("c", b"de")])
    table = b"model".ljust(24, b"\0") + struct.pack("<Q", 3) + b"c".ljust(24, b"\0") + struct.pack("<Q", 2)
    assert payload == b"GBXU\x01\x02\x00\x00" + table + b"abcde"


def test_no_cut_and_no_changed_byte_of_the_table_is_taken() -> None:
    payload = message()
    for end in range(len(payload)):
        with pytest.raises(CodecError):
            read(payload[:end])
    with pytest.raises(CodecError, match="end at"):
        read(payload + b"x")
    for place in range(8 + 3 * 32):
        with pytest.raises(CodecError):
            read(payload[:place] + bytes([payload[place] ^ 0x81]) + payload[place + 1 :])


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (encode(torch.ones(5)), "expects one with the sections"),
        (updates.join([("model", encode(torch.ones(5))), ("control", encode(torch.ones(3)))]), "2 sections"),
        (message(torch.ones(6)), "6"),
        (
            updates.join(
                [
                    ("model", encode(torch.ones(5))),
                    ("control", encode(torch.ones(3), is_delta=False)),
                    ("note", encode(torch.ones(1))),
                ]
            ),
            "holds weights",
        ),
    ],
    ids=["plain", "one missing", "model of another size", "weights as a section"],
)
def test_other_sections_than_the_strategy_takes_are_refused(payload: bytes, text: str) -> None:
    with pytest.raises(CodecError, match=text):
        read(payload)


def test_the_bound_on_bytes_is_that_of_the_longest_update() -> None:
    plain = codecs.get("q8").encode(torch.ones(5))
    assert len(message()) <= len(plain) + updates.overhead_bytes(OTHERS)
    assert updates.overhead_bytes({}) == 0
    dense = codecs.get("s4", density=1.0)  # longer than float32, which a client may send all the same
    assert updates.overhead_bytes({"a": 1000}, dense) > updates.overhead_bytes({"a": 1000})
    assert updates.overhead_bytes({"a": 1000}, codecs.get("q8")) == updates.overhead_bytes({"a": 1000})

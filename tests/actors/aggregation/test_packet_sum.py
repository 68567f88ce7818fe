"""The sum of an update's packets: of any codec and version, bit for bit that of their decoded vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.packet_sum import max_packet_bytes, sum_packets
from gradbus.codecs import CodecError, NonFiniteError

DIM = 257
VARIANTS = [(name, version) for name in codecs.ALL for version in codecs.get(name).versions]


def vector_of(seed: int) -> Tensor:
    vector = torch.randn(DIM, generator=torch.Generator().manual_seed(seed)) * 3
    vector[::7] = -0.0  # in a sum of vectors it is 0 as soon as one of them has 0 there
    return vector


def encoded(name: str, version: int, seed: int) -> bytes:
    return codecs.get(name, version=version).encode(vector_of(seed))


def bits(vector: Tensor) -> bytes:
    return vector.numpy().tobytes()


def test_four_packets_of_mixed_codecs_come_to_the_sum_of_their_decoded_vectors_bit_for_bit() -> None:
    packets = [encoded("fp32", 1, 1), encoded("q8", 2, 2), encoded("s4", 1, 3), encoded("sq8", 2, 4)]
    expected = sum((codecs.decode(packet, expected_dim=DIM).vector for packet in packets[1:]), vector_of(1))
    total = codecs.decode(sum_packets(packets, dim=DIM), expected_dim=DIM)
    assert bits(total.vector) == bits(expected)
    assert not total.is_delta  # fp32 of version 1 is weights


@given(st.lists(st.sampled_from(VARIANTS), min_size=1, max_size=6), st.integers(0, 1000))
def test_any_mix_comes_to_the_sum_in_the_order_of_the_numbers(variants: list[tuple[str, int]], seed: int) -> None:
    packets = [encoded(name, version, seed + number) for number, (name, version) in enumerate(variants)]
    decoded = [codecs.decode(packet, expected_dim=DIM) for packet in packets]
    expected = decoded[0].vector.clone()
    for one in decoded[1:]:
        expected = expected + one.vector
    total = codecs.decode(sum_packets(packets, dim=DIM), expected_dim=DIM)
    assert bits(total.vector) == bits(expected)
    assert total.is_delta == all(one.is_delta for one in decoded)


@given(
    st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0]), min_size=4, max_size=4), min_size=1, max_size=6),
    st.integers(0, 255),
)
def test_zeros_keep_the_sign_that_adding_whole_vectors_gives_them(rows: list[list[float]], kinds: int) -> None:
    def message(number: int, row: list[float]) -> bytes:
        if kinds >> number & 1:
            return codecs.get("fp32").encode(torch.tensor(row))
        return codecs.get("s4", density=0.5).encode(torch.tensor(row))

    sent = [message(number, row) for number, row in enumerate(rows)]
    total = codecs.decode(sent[0], expected_dim=4).vector.clone()
    for packet in sent[1:]:
        total += codecs.decode(packet, expected_dim=4).vector
    found = codecs.decode(sum_packets(sent, dim=4), expected_dim=4).vector
    assert found.numpy().tobytes() == total.numpy().tobytes()


@pytest.mark.parametrize(
    ("variants", "is_delta"),
    [
        ([("s4", 1), ("sq8", 1), ("s4", 1)], True),
        ([("s4", 1), ("q8", 1), ("sq8", 1)], False),
        ([("fp32", 1), ("s4", 1)], False),
        ([("fp32", 1)], False),
        ([("s4", 2), ("fp32", 2)], True),  # version 2 says so by its flag
    ],
)
def test_a_sum_is_a_difference_only_if_all_packets_are(variants: list[tuple[str, int]], is_delta: bool) -> None:
    packets = [encoded(name, version, number) for number, (name, version) in enumerate(variants)]
    assert codecs.parse(sum_packets(packets, dim=DIM), expected_dim=DIM).is_delta == is_delta


def test_weights_sent_layer_by_layer_come_to_the_weights() -> None:
    weights, packets = vector_of(1), []
    for place in (slice(0, 100), slice(100, 101), slice(101, DIM)):
        layer = torch.zeros(DIM)
        layer[place] = weights[place]
        packets.append(codecs.get("fp32", version=1).encode(layer))
    total = codecs.decode(sum_packets(packets, dim=DIM), expected_dim=DIM)
    assert not total.is_delta
    assert torch.equal(total.vector, weights)


def test_a_packet_of_a_few_bytes_takes_no_time_by_the_size_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client could else keep the controller's thread busy for seconds with 10 kB."""
    dim, decoded = 100_000, list[int]()
    decode = codecs.decode

    def counted(*args: Any, **options: Any) -> Any:
        decoded.append(1)
        return decode(*args, **options)

    monkeypatch.setattr(codecs, "decode", counted)
    packet = codecs.get("s4", density=1e-5).encode(torch.ones(dim))
    total = sum_packets([packet] * 256, dim=dim)
    assert len(decoded) == 1, "one vector of all elements"
    assert decode(total, expected_dim=dim).vector.sum() == 256


def test_a_packet_that_cannot_be_decoded_is_named() -> None:
    packets = [encoded("s4", 2, 1), encoded("s4", 2, 2)[:-1]]
    with pytest.raises(CodecError, match="packet 2 of 2: "):
        sum_packets(packets, dim=DIM)


def test_a_sum_that_overflows_is_refused_by_whoever_reads_it() -> None:
    packet = codecs.get("fp32").encode(torch.full((DIM,), 3e38))
    with pytest.raises(NonFiniteError):
        codecs.parse(sum_packets([packet, packet], dim=DIM), expected_dim=DIM)


def test_no_codec_makes_a_longer_packet_than_is_taken() -> None:
    for dim in (1, DIM, 5000):
        dense = [codecs.get(name).max_bytes(dim) for name in codecs.ALL]
        sparse = [codecs.get(name, density=1.0).max_bytes(dim) for name in ("s4", "sq8")]
        assert max(dense + sparse) <= max_packet_bytes(dim)

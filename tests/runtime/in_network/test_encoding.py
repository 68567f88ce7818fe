"""Packets as bytes: what is written is read again, and what does not fit is refused before anything is made of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradbus.runtime.in_network.encoding import MalformedPackets, decode_packets, encode_packets
from gradbus.runtime.in_network.packets import Packet, PacketKind

ELEMS = 3


def packet(kind: PacketKind, *, values: bool, **fields: int) -> Packet:
    return Packet(
        kind,
        1,
        2,
        fields.get("group", 3),
        0,
        -1,
        values=np.arange(ELEMS, dtype=np.int32) if values else None,
        bitmap=fields.get("bitmap", 5),
        acked=PacketKind.GATHER if kind is PacketKind.RING_ACK else None,
        is_repeated=True,
    )


PACKETS = [
    packet(PacketKind.REDUCE, values=True),
    packet(PacketKind.RING_ACK, values=False, group=2**40),
    packet(PacketKind.RESULT, values=True, bitmap=2**64 - 1),
]


def plain(one: Packet) -> dict[str, object]:
    fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    return fields | {"values": None if one.values is None else one.values.tolist()}


def test_packets_come_back_as_they_were() -> None:
    message = encode_packets(PACKETS)
    assert message.nbytes == 4 + 3 * 48 + 2 * 4 * ELEMS
    assert [plain(one) for one in decode_packets(message, block_elems=ELEMS)] == [plain(one) for one in PACKETS]


def test_a_message_of_another_length_is_refused() -> None:
    message = encode_packets(PACKETS)
    for cut in range(message.nbytes):
        with pytest.raises(MalformedPackets):
            decode_packets(message[:cut], block_elems=ELEMS)
    with pytest.raises(MalformedPackets, match="behind its packets"):
        decode_packets(np.concatenate([message, np.zeros(1, np.uint8)]), block_elems=ELEMS)
    with pytest.raises(MalformedPackets, match="announces"):
        decode_packets(np.full(64, 255, np.uint8), block_elems=ELEMS)


@given(st.binary(max_size=300))
def test_any_bytes_are_packets_or_are_refused(data: bytes) -> None:
    try:
        packets = decode_packets(np.frombuffer(data, dtype=np.uint8), block_elems=ELEMS)
    except MalformedPackets:
        return
    assert len(packets) * 48 + 4 <= len(data)

"""Packets as bytes: many in one message, so that a block's header is small beside it.

Little-endian. A message is a count (uint32), then for each packet a header of 48 bytes: kind, flags, kind that is
acknowledged, has values (uint8 each), job, epoch (uint32), group, bitmap (uint64), block, step (uint32), source,
destination (int32), and 4 bytes of zeros; behind all headers the values of those that have some, int32, in their order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradbus.runtime.in_network.packets import Packet, PacketKind

MAX_PACKETS = 1 << 16
MAX_WORLD = 64  # bits of the bitmap

_COUNT = struct.Struct("<I")
_HEADER = struct.Struct("<BBBBIIQQIIii4x")
_KINDS = tuple(PacketKind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS, start=1)}
_REPEATED, _OVERFLOWED = 1, 2


def message_limit(values_bytes: int, block_elems: int) -> int:
    """The size of the largest message of packets, where no packet is put behind so many bytes of values."""
    return _COUNT.size + MAX_PACKETS * _HEADER.size + values_bytes + 4 * block_elems


class MalformedPackets(ValueError):
    """A message is not one of packets of this run."""


def encode_packets(packets: Sequence[Packet]) -> npt.NDArray[np.uint8]:
    """A message of these packets: uint8, shape (n,). At most :data:`MAX_PACKETS`."""
    heads = _COUNT.size + len(packets) * _HEADER.size
    sizes = [0 if packet.values is None else packet.values.nbytes for packet in packets]
    message = np.empty(heads + sum(sizes), dtype=np.uint8)
    head = memoryview(message.data)
    _COUNT.pack_into(head, 0, len(packets))
    start = heads
    for number, (packet, size) in enumerate(zip(packets, sizes, strict=True)):
        _HEADER.pack_into(
            head,
            _COUNT.size + number * _HEADER.size,
            _NUMBERS[packet.kind],
            _REPEATED * packet.is_repeated + _OVERFLOWED * packet.has_overflowed,
            0 if packet.acked is None else _NUMBERS[packet.acked],
            packet.values is not None,
            packet.job,
            packet.epoch,
            packet.group,
            packet.bitmap,
            packet.block,
            packet.step,
            packet.source,
            packet.destination,
        )
        if packet.values is not None:
            message[start : start + size] = packet.values.view(np.uint8)
            start += size
    return message


def decode_packets(message: npt.NDArray[np.uint8], *, block_elems: int) -> list[Packet]:
    """The packets of a message; their values are views of it.

    Args:
        message: uint8, shape (n,). block_elems: entries of the values of a packet that has some.

    Raises:
        MalformedPackets: its length does not fit its headers, or a kind is not known.
    """
    if message.nbytes < _COUNT.size:
        raise MalformedPackets(f"a message of packets has at least {_COUNT.size} bytes, got {message.nbytes}")
    head = memoryview(message.data)
    (count,) = _COUNT.unpack_from(head, 0)
    start = _COUNT.size + count * _HEADER.size
    if count > MAX_PACKETS or start > message.nbytes:
        raise MalformedPackets(f"a message of {message.nbytes} bytes announces {count} packets")
    packets = []
    for number in range(count):
        kind, flags, acked, has_values, job, epoch, group, bitmap, block, step, source, destination = (
            _HEADER.unpack_from(head, _COUNT.size + number * _HEADER.size)
        )
        values = None
        if has_values:
            stop = start + 4 * block_elems
            if stop > message.nbytes:
                raise MalformedPackets(f"a message of {message.nbytes} bytes ends within the values of packet {number}")
            values, start = message[start:stop].view(np.int32), stop
        packets.append(
            Packet(
                _kind(kind),
                job,
                epoch,
                group,
                source,
                destination,
                block,
                step,
                bitmap,
                values,
                _kind(acked) if acked else None,
                bool(flags & _REPEATED),
                bool(flags & _OVERFLOWED),
            )
        )
    if start != message.nbytes:
        raise MalformedPackets(f"a message of {message.nbytes} bytes has {message.nbytes - start} behind its packets")
    return packets


def _kind(number: int) -> PacketKind:
    if not 1 <= number <= len(_KINDS):
        raise MalformedPackets(f"kind of a packet: expected 1 to {len(_KINDS)}, got {number}")
    return _KINDS[number - 1]

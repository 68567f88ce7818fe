"""Adding up the packets of one update, those that a client sends in one round.

A packet is a message of any codec and version, recognised by its first bytes, of the whole vector: of a layer alone the
other elements are 0, or not named where it is sparse. The decoded vectors are added element by element, in float32 and
in the order of their numbers, so that the sum has the same bits in whatever order they came.

A packet holds either weights or a difference to the global model. If all packets hold differences, the sum is a
difference; one packet of weights makes the sum weights. In version 1 the format says what a message holds: ``s4`` and
``sq8`` differences, ``fp32`` and ``q8`` weights. In version 2 a flag says it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.codecs import Codec, CodecError, Parsed, SparseBlock
from gradbus.codecs.base import V2_HEADER, Payload, pack_header
from gradbus.codecs.fp32 import MAGIC_V2

MAX_PACKETS = 256  # of one update
_BLOCK_ELEMS = 1 << 16  # of a packet that are read at a time
_SPARSE_BYTES, _HEAD_BYTES = 8, 4096  # of one element with its index; of all else in a message


def max_packet_bytes(dim: int) -> int:
    """Return the length of the longest packet: a sparse message of all ``dim`` elements with raw indices."""
    return _SPARSE_BYTES * dim + _HEAD_BYTES


def max_update_bytes(dim: int) -> int:
    """Return the largest length of all packets of one update together: that of 16 models in float32."""
    return 16 * (4 * dim + _HEAD_BYTES)


def _add(total: Tensor, parsed: Parsed, has_negative_zeros: bool) -> bool:
    """Add the vector of a packet in place. A sparse one takes time by its own length: else a client could keep the
    thread busy with many packets of a few bytes. ``has_negative_zeros``: ``total`` may hold some. Returns the same for
    the result."""
    kept: list[Tensor] = []
    for block in parsed.blocks(_BLOCK_ELEMS):
        if isinstance(block, SparseBlock):
            values = total[block.indices] + block.values
            total[block.indices] = values
            kept.append(block.indices[(values == 0) & torch.signbit(values)])
        else:
            total[block.start : block.start + block.values.numel()] += block.values
    if not parsed.is_sparse:
        return True
    if has_negative_zeros:
        total += 0.0  # elements that it does not name get a 0, which makes 0.0 of -0.0
        for indices in kept:
            total[indices] = -0.0
    return any(indices.numel() for indices in kept)


def sum_packets(packets: Sequence[Payload], *, dim: int, own: Sequence[type[Codec]] = ()) -> memoryview:
    """Add the vectors of all packets, in this order.

    Args:
        packets: at least one, by their numbers. dim: elements of the model.
        own: codecs that are not built in, in which packets may be.

    Returns:
        The sum as a message of ``fp32``, version 2. It may hold values that are not finite, where it has overflowed.

    Raises:
        CodecError: a packet cannot be decoded; the text says which.
    """
    message = bytearray(V2_HEADER.size + 4 * dim)
    total = torch.frombuffer(message, dtype=torch.float32, offset=V2_HEADER.size)
    is_delta = has_negative_zeros = True
    for number, packet in enumerate(packets, start=1):
        try:
            if number == 1:
                is_delta &= codecs.decode(packet, expected_dim=dim, out=total, own=own).is_delta
                continue
            parsed = codecs.parse(packet, expected_dim=dim, own=own)
        except CodecError as error:
            raise type(error)(f"packet {number} of {len(packets)}: {error}") from None
        is_delta &= parsed.is_delta
        has_negative_zeros = _add(total, parsed, has_negative_zeros)
    message[: V2_HEADER.size] = pack_header(MAGIC_V2, is_delta=is_delta, dim=dim)
    return memoryview(message)

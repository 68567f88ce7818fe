"""The messages between outlets and inlets on Zenoh, little-endian. Their first byte says which one it is.

| message | from | content |
|---|---|---|
| SAMPLE | outlet | number of the sample; the sample, as :mod:`~gradbus.runtime.transport.sample_layout` lays it out |
| START | outlet | epoch of the match; number of its first sample |
| PROBE | outlet | epoch; number of the last sample that was sent to this inlet: what it lacks of those is lost |
| ACK | inlet | epoch, or 0: it knows of no match; the first number that it lacks; the last that it has room for; whether it is reliable; over which of its links it wants to have the samples; what it asks for: the first, the last (0: nothing), and which of these it has |

Samples are numbered from 1 by their outlet, whoever they are for, so a number means one sample for the life of an
outlet, and needs no epoch. An epoch tells the matches of an outlet with one inlet apart.
"""  # noqa: E501 - a row of a table

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

SAMPLE, START, PROBE, ACK = 1, 2, 3, 4
MAX_NUMBER = (1 << 63) - 1
"""Stands for no bound where an inlet says what it has room for."""

_SAMPLE = struct.Struct("<B7xQ")  # the sample begins at a multiple of 16, as in memory of its own
_PAIR = struct.Struct("<B7xQQ")
_ACK = struct.Struct("<BBB5xQQQQQQ")
HEADER_BYTES = _SAMPLE.size
HERE_BITS = 64


class BadMessage(ValueError):
    """The bytes are no message. The text says why in a few words, by which such messages are counted."""


class MatchStart(NamedTuple):
    """A match begins, or goes on under another epoch."""

    epoch: int
    first: int


class LossProbe(NamedTuple):
    """All samples of the outlet up to ``last`` were sent to this inlet."""

    epoch: int
    last: int


class Ack(NamedTuple):
    """All samples before ``wanted`` have arrived, and there is room for those up to ``granted``.

    Those from ``ask_first`` to ``ask_last`` are to be sent again, except those that are here: bit ``i`` of ``here``
    stands for the sample ``ask_first + i``. ``link``: that the samples are to come over (:mod:`.side_links`).
    """

    epoch: int
    wanted: int
    granted: int
    ask_first: int = 0
    ask_last: int = 0
    here: int = 0
    is_reliable: bool = True
    link: int = 0

    def asks_for(self, number: int) -> bool:
        """Return whether a sample is to be sent again."""
        place = number - self.ask_first
        return self.ask_first <= number <= self.ask_last and not (place < HERE_BITS and self.here >> place & 1)


def sample_message(num_bytes: int, parts: Sequence[Any]) -> bytearray:
    """Return the message of a sample of ``num_bytes``, without its number. ``parts``: its first bytes, or all."""
    message = bytearray(HEADER_BYTES + num_bytes)
    start = HEADER_BYTES
    for part in parts:
        message[start : start + len(part)] = part
        start += len(part)
    return message


def set_number(message: bytearray, number: int) -> None:
    """Write the number of a sample into its message."""
    _SAMPLE.pack_into(message, 0, SAMPLE, number)


def pack_start(start: MatchStart) -> bytes:
    """Return the bytes of a START."""
    return _PAIR.pack(START, *start)


def pack_probe(probe: LossProbe) -> bytes:
    """Return the bytes of a PROBE."""
    return _PAIR.pack(PROBE, *probe)


def pack_ack(ack: Ack) -> bytes:
    """Return the bytes of an ACK."""
    return _ACK.pack(ACK, ack.is_reliable, ack.link, *ack[:-2])


def kind_of(message: bytes) -> int:
    """Return which message of an outlet this is. Raises BadMessage: none."""
    if len(message) < HEADER_BYTES:
        raise BadMessage("message too short")
    if message[0] not in (SAMPLE, START, PROBE):
        raise BadMessage("message of another kind")
    return message[0]


def number_of(message: bytes) -> int:
    """Return the number of the sample in a SAMPLE. Raises BadMessage."""
    return _numbers(_SAMPLE.unpack_from(message)[1:])[0]


def parse_start(message: bytes) -> MatchStart:
    """Return the content of a START. Raises BadMessage."""
    return MatchStart(*_numbers(_unpacked(_PAIR, message)))


def parse_probe(message: bytes) -> LossProbe:
    """Return the content of a PROBE. Raises BadMessage."""
    epoch, last = _unpacked(_PAIR, message)
    _numbers((epoch,))
    return LossProbe(epoch, last)


def parse_ack(message: bytes) -> Ack:
    """Return the content of an ACK. Raises BadMessage."""
    if not message or message[0] != ACK:
        raise BadMessage("message of another kind")
    is_reliable, link, epoch, wanted, granted, ask_first, ask_last, here = _unpacked(_ACK, message)
    if epoch:
        _numbers((wanted,))
    return Ack(epoch, wanted, min(granted, MAX_NUMBER), ask_first, ask_last, here, bool(is_reliable), link)


def _unpacked(layout: struct.Struct, message: bytes) -> tuple[int, ...]:
    if len(message) != layout.size:
        raise BadMessage("message of another size")
    return layout.unpack(message)[1:]


def _numbers(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return numbers that count from 1. Raises BadMessage: they do not."""
    if not all(0 < value <= MAX_NUMBER for value in values):
        raise BadMessage("number out of range")
    return values

"""Messages with which DDS participants announce themselves and leave (SPDP of RTPS 2.5), and where they go.

Made by hand: Cyclone DDS 11.0 has no call that sends them in the name of another participant.
"""

from __future__ import annotations

import socket
import struct

from gradbus.runtime.network.addresses import family_of

PREFIX_BYTES = 12  # of a GUID: what says which participant is meant
PLACEHOLDER_LEASE_S = 60
_VENDOR = b"\x01\x10"  # Eclipse Cyclone DDS
_HEAD = b"RTPS\x02\x05" + _VENDOR
_PARTICIPANT = b"\x00\x00\x01\xc1"
_READER, _WRITER = b"\x00\x01\x00\xc7", b"\x00\x01\x00\xc2"
_PARAMETER_LIST = b"\0\3\0\0"  # encapsulation, little-endian
_NUMBER = 1 << 60  # of the announcement: a later one of the participant itself does not count as news
_UDP4, _UDP6 = 1, 2  # kinds of locators
_INLINE_QOS, _HAS_DATA, _HAS_KEY = 2, 4, 8


def prefix_of(message: bytes) -> bytes:
    """Return the GUID prefix of the participant that a message is from; empty: it is no RTPS message."""
    return message[8 : 8 + PREFIX_BYTES] if message.startswith(b"RTPS") else b""


def goodbye(prefix: bytes) -> bytes:
    """The message with which a participant leaves: it is disposed of and unregistered. ``prefix``: of its GUID."""
    status = _parameters((0x71, b"\0\0\0\3"))
    key = _parameters((0x50, prefix + _PARTICIPANT))
    return _HEAD + prefix + _data(_INLINE_QOS | _HAS_KEY, 1, status + _PARAMETER_LIST + key)


def placeholder_of(prefix: bytes, own: bytes, now_s: float, address: str, port: int) -> bytes:
    """The message that announces a participant without discovery endpoints.

    Args:
        prefix: of the participant's GUID. own: of a participant of this process, whom the message is for.
        now_s: the time of day. address, port: where it can be reached, which is this process itself.
    """
    family = family_of(address)
    kind = _UDP6 if family == socket.AF_INET6 else _UDP4
    locator = struct.pack("<iI", kind, port) + socket.inet_pton(family, address).rjust(16, b"\0")
    parameters = _parameters(
        (0x15, b"\x02\x05\0\0"),
        (0x16, _VENDOR + b"\0\0"),  # protocol version, vendor
        (0x50, prefix + _PARTICIPANT),
        (0x58, bytes(4)),  # GUID, built-in endpoints: none
        (0x31, locator),
        (0x32, locator),  # default and metatraffic unicast locator
        (0x02, struct.pack("<iI", PLACEHOLDER_LEASE_S, 0)),
    )
    destination = struct.pack("<BBH", 0x0E, 1, 12) + own
    timestamp = struct.pack("<BBHII", 0x09, 1, 8, int(now_s), int(now_s % 1 * (1 << 32)))
    return _HEAD + prefix + destination + timestamp + _data(_HAS_DATA, _NUMBER, _PARAMETER_LIST + parameters)


def _data(flags: int, number: int, content: bytes) -> bytes:
    """A little-endian DATA submessage of the writer that announces participants."""
    body = struct.pack("<HH", 0, 16) + _READER + _WRITER + struct.pack("<iI", number >> 32, number & 0xFFFF_FFFF)
    return struct.pack("<BBH", 0x15, 1 | flags, len(body) + len(content)) + body + content


def _parameters(*given: tuple[int, bytes]) -> bytes:
    listed = (struct.pack("<HH", number, len(value)) + value for number, value in (*given, (1, b"")))  # 1: the end
    return b"".join(listed)

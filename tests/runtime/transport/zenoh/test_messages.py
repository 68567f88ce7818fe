"""Messages on Zenoh come back as they were, and other bytes are refused with a reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradbus.runtime.transport.zenoh.messages import (
    HEADER_BYTES,
    HERE_BITS,
    MAX_NUMBER,
    PROBE,
    SAMPLE,
    START,
    Ack,
    BadMessage,
    LossProbe,
    MatchStart,
    kind_of,
    number_of,
    pack_ack,
    pack_probe,
    pack_start,
    parse_ack,
    parse_probe,
    parse_start,
    sample_message,
    set_number,
)

NUMBERS = st.integers(1, MAX_NUMBER)
ACK = Ack(3, 5, 16, 5, 9, 0b10, is_reliable=False)


def test_a_sample_has_its_number_and_its_parts() -> None:
    message = sample_message(5, (b"ab", memoryview(b"cde")))
    set_number(message, 7)
    assert (kind_of(message), number_of(message), message[HEADER_BYTES:]) == (SAMPLE, 7, b"abcde")


@given(NUMBERS, NUMBERS)
def test_start_and_probe_come_back(epoch: int, number: int) -> None:
    assert parse_start(pack_start(MatchStart(epoch, number))) == (epoch, number)
    assert parse_probe(pack_probe(LossProbe(epoch, number))) == (epoch, number)
    assert (kind_of(pack_start(MatchStart(epoch, number))), kind_of(pack_probe(LossProbe(epoch, number)))) == (
        START,
        PROBE,
    )


@given(
    st.builds(
        Ack,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        st.integers(0, 2**HERE_BITS - 1),
        st.booleans(),
        st.integers(0, 255),
    )
)
def test_an_answer_comes_back(ack: Ack) -> None:
    assert parse_ack(pack_ack(ack)) == ack


def test_an_answer_asks_for_what_lacks_in_its_range() -> None:
    assert [number for number in range(12) if ACK.asks_for(number)] == [5, 7, 8, 9]
    far = Ack(1, 1, 1, ask_first=1, ask_last=200, here=2**HERE_BITS - 1)
    assert [far.asks_for(number) for number in (HERE_BITS, HERE_BITS + 1, 200, 201)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("parse", "message", "why"),
    [
        (kind_of, b"", "message too short"),
        (kind_of, bytes(HEADER_BYTES), "message of another kind"),
        (kind_of, b"\xff" * 64, "message of another kind"),
        (number_of, bytes([SAMPLE]) + bytes(HEADER_BYTES - 1), "number out of range"),
        (number_of, bytes([SAMPLE]) + b"\xff" * (HEADER_BYTES - 1), "number out of range"),
        (parse_start, pack_start(MatchStart(1, 1)) + b"x", "message of another size"),
        (parse_start, pack_start(MatchStart(0, 1)), "number out of range"),
        (parse_start, pack_start(MatchStart(1, 0)), "number out of range"),
        (parse_probe, pack_probe(LossProbe(0, 1)), "number out of range"),
        (parse_probe, pack_probe(LossProbe(1, 1))[:-1], "message of another size"),
        (parse_ack, b"", "message of another kind"),
        (parse_ack, pack_start(MatchStart(1, 1)), "message of another kind"),
        (parse_ack, pack_ack(ACK)[:-1], "message of another size"),
        (parse_ack, pack_ack(Ack(1, 0, 1)), "number out of range"),
    ],
)
def test_what_is_no_message_is_refused_with_a_reason(
    parse: Callable[[bytes], object], message: bytes, why: str
) -> None:
    with pytest.raises(BadMessage, match=f"^{why}$"):
        parse(message)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_message_or_refused(message: bytes) -> None:
    for parse in (kind_of, parse_start, parse_probe, parse_ack):
        with contextlib.suppress(BadMessage):
            parse(message)

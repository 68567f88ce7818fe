"""The handshake without a bus: both sides come to the same keys, and no changed message is taken."""

from __future__ import annotations

import os
import random

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security.identity import handshake
from gradbus.runtime.security.identity.handshake import Secrets, Stamps
from gradbus.runtime.security.identity.join_messages import (
    STAMP_BYTES,
    Beacon,
    JoinConfirm,
    JoinHello,
    JoinRefusal,
    JoinWelcome,
    pack,
    parse,
)
from gradbus.runtime.security.identity.key import new_node_key

JOB = "mnist"
SERVER, CLIENT, OTHER = new_node_key("server"), new_node_key("robot-1"), new_node_key("robot-2")
HERE, THERE = os.urandom(16), os.urandom(16)


class Exchange:
    """All three messages as they pass, each of which may be changed on its way."""

    stamps = True  # are looked at, which must hold nobody up but those who flood

    def __init__(self, *, job: str = JOB, pinned: bytes | None = None) -> None:
        self.private = X25519PrivateKey.generate()
        self.job = job
        hello = JoinHello(
            THERE,
            HERE,
            7,
            1,
            os.urandom(32),
            self.private.public_key().public_bytes_raw(),
            CLIENT.public,
            pinned or SERVER.public,
            0,
            CLIENT.name,
        )
        self.hello = Stamps(job, CLIENT).stamped(handshake.signed(job, CLIENT, hello), hello.pinned)

    def welcome(self, hello: bytes | None = None) -> bytes:
        """The controller's part: the hello is checked with the key that the list has."""
        self.heard = parse(memoryview(hello or self.hello))
        if self.stamps:
            Stamps(JOB, SERVER).check(self.heard, CLIENT.public)
        handshake.check(JOB, self.heard, CLIENT.public)
        self.welcomed, self.theirs = handshake.answer(
            JOB, SERVER, self.heard, session=HERE, start=9, epoch=5, nonce=os.urandom(32)
        )
        return Stamps(JOB, SERVER).stamped(self.welcomed, CLIENT.public, self.heard)

    def confirm(self, welcome: bytes) -> bytes:
        said = parse(memoryview(welcome))
        if not isinstance(said.message, JoinWelcome) or said.message.to != THERE:
            raise FrameError("join", "not for this node")
        if self.stamps:
            Stamps(self.job, CLIENT).check(said, SERVER.public, parse(memoryview(self.hello)))
        sent, self.ours = handshake.accept(self.job, CLIENT, parse(memoryview(self.hello)), self.private, said)
        return sent

    def conclude(self, confirm: bytes) -> Secrets:
        said = parse(memoryview(confirm))
        if not isinstance(said.message, JoinConfirm) or (said.message.controller, said.message.session) != (
            HERE,
            THERE,
        ):
            raise FrameError("join", "not of this exchange")
        handshake.check_confirm(JOB, said, self.heard, self.theirs, self.welcomed[-64:])
        return self.theirs


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_both_sides_come_to_the_same_keys_which_differ_by_direction_and_by_exchange() -> None:
    one, other = Exchange(), Exchange()
    for exchange in (one, other):
        assert exchange.conclude(exchange.confirm(exchange.welcome())) == exchange.ours
    secrets = [*one.ours, *other.ours]
    assert len(set(secrets)) == len(secrets) == 8


@pytest.mark.parametrize("which", ["hello", "welcome", "confirm"])
def test_one_changed_bit_of_any_message_ends_the_exchange(which: str) -> None:
    exchange = Exchange()
    welcome = exchange.welcome()
    heard, theirs, confirm = exchange.heard, exchange.theirs, exchange.confirm(welcome)
    message, step = {
        "hello": (exchange.hello, exchange.welcome),
        "welcome": (welcome, exchange.confirm),
        "confirm": (confirm, exchange.conclude),
    }[which]
    for bit in range(8 * len(message)):
        with pytest.raises(FrameError):
            step(flipped(message, bit))
    exchange.heard, exchange.theirs, exchange.welcomed = heard, theirs, welcome[:-STAMP_BYTES]
    assert exchange.conclude(confirm) == theirs


def test_messages_of_one_exchange_are_worth_nothing_in_another() -> None:
    one, other = Exchange(), Exchange()
    one.stamps = other.stamps = False
    theirs = one.welcome()
    old = one.confirm(theirs)
    welcome = other.welcome()
    with pytest.raises(FrameError, match="not signed"):
        other.confirm(theirs)
    with pytest.raises(FrameError, match="without the keys"):
        other.conclude(old)
    assert other.conclude(other.confirm(welcome)) == other.ours


def test_who_pins_another_key_or_is_of_another_job_comes_to_no_keys() -> None:
    wrong = Exchange(pinned=OTHER.public)
    wrong.stamps = False
    with pytest.raises(FrameError, match="not signed with the key"):
        wrong.confirm(wrong.welcome())
    foreign = Exchange(job="cifar")
    foreign.stamps = False
    with pytest.raises(FrameError, match="not signed"):
        foreign.welcome()


def test_another_member_can_play_neither_side() -> None:
    exchange = Exchange()
    exchange.stamps = False
    heard = parse(memoryview(exchange.hello))
    forged, _ = handshake.answer(JOB, OTHER, heard, session=HERE, start=9, epoch=5, nonce=os.urandom(32))
    with pytest.raises(FrameError, match="not signed with the key"):
        exchange.confirm(forged + bytes(STAMP_BYTES))
    # It answers for CLIENT with an ephemeral key of its own, and so has the keys, but not CLIENT's private one.
    private = X25519PrivateKey.generate()
    message = heard.message
    assert isinstance(message, JoinHello)
    fake = handshake.signed(JOB, OTHER, message._replace(ephemeral=private.public_key().public_bytes_raw()))
    with pytest.raises(FrameError, match="not signed"):
        exchange.welcome(fake + bytes(STAMP_BYTES))
    welcome = exchange.welcome()
    exchange.confirm(welcome)
    said = JoinConfirm(HERE, THERE, exchange.theirs.tag)
    with pytest.raises(FrameError, match="not signed"):
        exchange.conclude(
            handshake.signed(
                JOB, OTHER, said, exchange.theirs.transcript + exchange.welcomed[-64:] + exchange.theirs.tag
            )
        )


def test_an_ephemeral_key_that_gives_a_known_secret_is_refused() -> None:
    exchange = Exchange()
    exchange.stamps = False
    message = parse(memoryview(exchange.hello)).message
    assert isinstance(message, JoinHello)
    for point in (bytes(32), (1).to_bytes(32, "little")):
        with pytest.raises(FrameError, match="no secret"):
            exchange.welcome(handshake.signed(JOB, CLIENT, message._replace(ephemeral=point)) + bytes(STAMP_BYTES))


def test_every_kind_of_message_is_read_as_it_was_written_and_no_cut_of_it_is_read() -> None:
    for message in (
        Beacon(HERE, 1 << 63, SERVER.public),
        JoinHello(THERE, HERE, 1, 2, bytes(32), bytes(32), bytes(32), bytes(32), 3, "a"),
        JoinWelcome(THERE, HERE, 1, 2, bytes(32), bytes(32)),
        JoinConfirm(HERE, THERE, bytes(32)),
        JoinRefusal(THERE, HERE, bytes(32), "it is not on the allow list"),
    ):
        to_one = isinstance(message, JoinHello | JoinWelcome | JoinRefusal)
        data = pack(message) + bytes(64) + bytes(STAMP_BYTES if to_one else 0)
        assert parse(memoryview(data)).message == message
        for end in range(len(data)):
            with pytest.raises(FrameError):
                parse(memoryview(data[:end]))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=1200), st.booleans())
def test_any_bytes_are_a_message_or_a_frame_error(data: bytes, headed: bool) -> None:
    if headed:
        data = b"GBJ\0\2" + bytes([random.Random(len(data)).randrange(7)]) + data
    reason = ""
    try:
        signed = parse(memoryview(data))
    except FrameError as error:
        reason = error.reason
    if reason:
        assert reason in {"short", "not sealed", "version", "join"}
    else:
        assert signed.whole + signed.stamp == data
        assert pack(signed.message) == signed.body


def test_two_nodes_share_a_secret_that_nobody_else_has_and_no_job_has_that_of_another() -> None:
    assert SERVER.exchange(CLIENT.public) == CLIENT.exchange(SERVER.public)
    secrets = [SERVER.exchange(key.public) for key in (CLIENT, OTHER, SERVER)]
    assert len(set(secrets)) == 3
    for point in (bytes(32), (1).to_bytes(32, "little"), bytes.fromhex("ec" + "ff" * 30 + "7f")):
        with pytest.raises(ValueError, match=r".*"):
            SERVER.exchange(point)
    hello = parse(memoryview(Exchange().hello))
    Stamps(JOB, SERVER).check(hello, CLIENT.public)
    for stamps, by in ((Stamps("cifar", SERVER), CLIENT), (Stamps(JOB, OTHER), CLIENT), (Stamps(JOB, SERVER), OTHER)):
        with pytest.raises(FrameError, match="not made with the key"):
            stamps.check(hello, by.public)

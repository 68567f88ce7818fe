"""Whose process is gone when a DDS writer is, where others may say again what they have heard."""

from __future__ import annotations

from gradbus.runtime.bus.liveness import WriterRegistry
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.messages import Control, PeerGone

TRUE, OTHER, THIRD = 1, 2, 3  # handles of writers
BODY = Leave("x")
CHANNEL, INBOX = "train/control/clients", "train/control/000000000000000a"


def speakers(*words: tuple[int, int, int]) -> WriterRegistry:
    """``words``: through which writer, of which sender, its number."""
    made = WriterRegistry()
    for writer, sender, number in words:
        made.received(writer, Control(sender, 10, BODY, number), CHANNEL)
    return made


def test_a_writer_takes_along_all_that_only_it_has_spoken_for_each_once() -> None:
    known = speakers((TRUE, 7, 1), (TRUE, 7, 2), (TRUE, 5, 1), (OTHER, 6, 1))
    assert known.left([TRUE], "why") == [PeerGone(5, 10, "why"), PeerGone(7, 10, "why")]
    assert known.left([TRUE]) == []
    assert known.left([OTHER, OTHER]) == [PeerGone(6, 10)]
    assert not known.writers_on(CHANNEL)


def test_who_says_old_words_again_many_of_them_takes_nobody_along() -> None:
    known = speakers(*((OTHER, 7, number) for number in range(1, 50)), (TRUE, 7, 50))
    assert known.left([OTHER]) == []
    assert known.left([TRUE]) == [PeerGone(7, 10)]


def test_who_is_faster_with_the_newest_word_takes_nobody_along() -> None:
    known = speakers((TRUE, 7, 1), (TRUE, 7, 2), (OTHER, 7, 3))
    assert known.left([OTHER]) == []


def test_who_stays_and_has_said_a_word_again_does_not_hide_that_its_sender_is_gone() -> None:
    known = speakers((OTHER, 7, 1), (TRUE, 7, 2), (TRUE, 7, 3))
    assert known.left([TRUE]) == [PeerGone(7, 10)]


def test_of_two_that_leave_together_both_count_against_one_that_stays() -> None:
    words = [(TRUE, 7, 1), (TRUE, 7, 2), (TRUE, 7, 4), (OTHER, 7, 3), (THIRD, 7, 5)]
    assert speakers(*words).left([TRUE, OTHER]) == []
    assert speakers(*words[:-1]).left([TRUE, OTHER]) == [PeerGone(7, 10)]


def test_numbers_begin_again_after_the_highest() -> None:
    known = speakers((OTHER, 7, 0xFFFF_FFFF), (TRUE, 7, 0))
    assert known.left([OTHER]) == []


def test_a_sender_goes_on_while_a_writer_of_it_is_left_on_any_channel() -> None:
    known = speakers((TRUE, 7, 1))
    for number in range(2, 9):  # more, and later ones, than on the other channel
        known.received(OTHER, Control(7, 10, BODY, number), INBOX)
    assert known.left([OTHER], channel=INBOX) == []
    assert known.left([TRUE], channel=CHANNEL) == [PeerGone(7, 10)]


def test_who_says_words_again_on_one_channel_does_not_hide_that_their_sender_has_left_another() -> None:
    known = speakers((OTHER, 7, 1), (TRUE, 7, 1), (TRUE, 7, 2))
    known.received(THIRD, Control(7, 10, BODY, 3), INBOX)
    assert known.left([TRUE], channel=CHANNEL) == []
    assert known.left([THIRD], channel=INBOX) == [PeerGone(7, 10)]


def test_a_writer_that_is_gone_from_one_channel_stays_on_another_that_has_the_same_handle() -> None:
    known = speakers((TRUE, 7, 1))
    known.received(TRUE, Control(7, 10, BODY, 2), INBOX)
    assert known.left([TRUE], channel=INBOX) == []
    assert known.writers_on(CHANNEL) == {TRUE}
    assert known.left([TRUE], "why") == [PeerGone(7, 10, "why")]

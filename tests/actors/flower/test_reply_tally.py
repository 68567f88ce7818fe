"""What the replies of a run add up to; without Flower."""

from __future__ import annotations

import pytest

from gradbus.actors.flower.reply_tally import MAX_KEPT_ROUNDS, ReplyTally


def test_a_round_with_one_good_reply_is_no_failure_and_errors_are_counted_by_code() -> None:
    tally = ReplyTally()
    tally.send({"a": ("train", ""), "b": ("train", ""), "c": ("train", "")})
    tally.count_error("a", 1000, "NODE_UNAVAILABLE", None)
    tally.count_good("b")
    tally.expire(["c"])
    assert tally.failure == ""
    assert str(tally) == "2 replies, 1 of them errors (1 NODE_UNAVAILABLE), 1 messages without a reply in time"


def test_a_round_without_a_good_reply_fails_the_run_with_its_first_error() -> None:
    tally = ReplyTally()
    tally.send({"a": ("train", "")})
    tally.count_good("a")
    for first in ("b", "d"):
        tally.send({first: ("train.special", ""), f"{first}2": ("train.special", "")})
        tally.count_error(f"{first}2", 1001, "CLIENT_APP_RAISED_EXCEPTION", f"KeyError: {first}")
        tally.count_error(first, 1000, "CLIENT_APP_RAISED_EXCEPTION", "later")
    assert tally.failure == (
        "in 2 of 3 rounds of messages no reply was good, so nothing was learned from them. The first: round 2 (train): "
        "node 1001: CLIENT_APP_RAISED_EXCEPTION: KeyError: b"
    )


def test_evaluations_without_a_good_reply_fail_only_a_run_that_has_nothing_else() -> None:
    tally = ReplyTally()
    tally.send({})
    tally.send({"a": ("evaluate", "")})
    tally.count_error("a", 1000, "CLIENT_APP_RAISED_EXCEPTION", "no function\nfor it")
    assert tally.failure.startswith("none of 1 messages had a good reply")
    assert tally.failure.endswith("no function for it")
    tally.send({"b": ("train", "")})
    tally.count_good("b")
    assert tally.failure == ""


def test_messages_that_nobody_has_pulled_do_not_end_a_round() -> None:
    tally = ReplyTally()
    tally.send({"a": ("query", ""), "b": ("query", "")})
    tally.count_error("a", 1000, "NODE_UNAVAILABLE", "gone")
    assert tally.failure.startswith("none of 1 messages had a good reply")
    tally.count_good("b")
    assert tally.failure == ""


@pytest.mark.parametrize("fails", [1, 3])
def test_the_messages_of_a_named_round_are_one_round_however_many_calls_push_them(fails: int) -> None:
    """As Flower's older strategies do it: one call for each node, on threads of their own."""
    tally = ReplyTally()
    for number in (1, 2):
        for node in range(3):
            tally.send({f"{number} {node}": ("train", str(number))})
            if number == 2 and node < fails:
                tally.count_error(f"{number} {node}", node, "NODE_UNAVAILABLE", "gone")
            else:
                tally.count_good(f"{number} {node}")
    assert tally.rounds == 2
    assert tally.failure.startswith("in 1 of 2 rounds of messages no reply was good" if fails == 3 else "")
    assert bool(tally.failure) == (fails == 3)


def test_single_messages_of_no_named_round_are_taken_together() -> None:
    tally = ReplyTally()
    for node in range(3):
        tally.send({str(node): ("query", "")})
        if node == 1:
            tally.count_good(str(node))
        else:
            tally.count_error(str(node), node, "NODE_UNAVAILABLE", "gone")
    assert tally.failure == ""


def test_rounds_that_are_long_over_are_forgotten_and_still_counted() -> None:
    tally = ReplyTally()
    for number in range(5 * MAX_KEPT_ROUNDS):
        tally.send({f"{number} a": ("train", ""), f"{number} b": ("train", "")})
        tally.count_error(f"{number} a", 1, "NODE_UNAVAILABLE", f"for the {number}th time")
        tally.expire([f"{number} b"])
    assert tally.failure.startswith(f"in {5 * MAX_KEPT_ROUNDS} of {5 * MAX_KEPT_ROUNDS} rounds")
    assert tally.failure.endswith("round 1 (train): node 1: NODE_UNAVAILABLE: for the 0th time")

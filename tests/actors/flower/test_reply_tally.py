"""What the replies of a run add up to; without Flower."""

from __future__ import annotations

from gradbus.actors.flower.reply_tally import ReplyTally


def test_a_round_with_one_good_reply_is_no_failure_and_errors_are_counted_by_code() -> None:
    tally = ReplyTally()
    tally.send({"a": "train", "b": "train", "c": "train"})
    tally.count_error("a", 1000, "NODE_UNAVAILABLE", None)
    tally.count_good("b")
    tally.expire(["c"])
    assert tally.failure == ""
    assert str(tally) == "2 replies, 1 of them errors (1 NODE_UNAVAILABLE), 1 messages without one in time"


def test_a_round_without_a_good_reply_fails_the_run_with_its_first_error() -> None:
    tally = ReplyTally()
    tally.send({"a": "train"})
    tally.count_good("a")
    for first in ("b", "d"):
        tally.send({first: "train.special", f"{first}2": "train.special"})
        tally.count_error(f"{first}2", 1001, "CLIENT_APP_RAISED_EXCEPTION", f"KeyError: {first}")
        tally.count_error(first, 1000, "CLIENT_APP_RAISED_EXCEPTION", "later")
    assert tally.failure == (
        "in 2 of 3 rounds of messages no reply was good, so nothing was learned from them. The first: round 2 (train): "
        "node 1001: CLIENT_APP_RAISED_EXCEPTION: KeyError: b"
    )


def test_evaluations_without_a_good_reply_fail_only_a_run_that_has_nothing_else() -> None:
    tally = ReplyTally()
    tally.send({})
    tally.send({"a": "evaluate"})
    tally.count_error("a", 1000, "CLIENT_APP_RAISED_EXCEPTION", "no function\nfor it")
    assert tally.failure.startswith("none of the 1 messages had a good reply")
    assert tally.failure.endswith("no function for it")
    tally.send({"b": "train"})
    tally.count_good("b")
    assert tally.failure == ""


def test_messages_that_nobody_has_pulled_do_not_end_a_round() -> None:
    tally = ReplyTally()
    tally.send({"a": "query", "b": "query"})
    tally.count_error("a", 1000, "NODE_UNAVAILABLE", "gone")
    assert tally.failed == 0

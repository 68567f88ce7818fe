"""The mailbox as a small model: a sender, the thread of the mailbox, a visitor and whoever closes, step by step.

A step reads or writes one thing that another thread sees; all orders of the steps are tried. Sleeps may end by
themselves, but nothing may rely on that: where nobody can take a step unless a sleep ends so, all letters have been
read, nobody sleeps who waits for what has happened, and the attention word asks the sender to wake the thread.

The words that the steps write are those of the code, :data:`gradbus.runtime.shm.mailbox.AFTER`. Left out: more ranks,
rings that are full (their letters go over DDS), kernels without ``futex_waitv`` (there sleeps do have to end).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from gradbus.runtime.shm.mailbox import AFTER, ASLEEP, CLOSED

ALL = frozenset(
    {"look again", "thread looks for stop", "visit wakes thread", "sender looks after writing", "close locks"}
)


class State(NamedTuple):
    """Memory that threads share, and where each of them is (``thread``, ``visitor``, ``sender``, ``closer``)."""

    letters: int  # to be sent
    max_visits: int  # each waits for one letter more than the one before
    sender: str = "write"
    thread: str = "begin"
    visitor: str = "enter"
    closer: str = "idle"
    written: int = 0
    read: int = 0
    attention: int = AFTER["open"]
    seen: int = 0  # by the sender, of the attention word
    sent: int = 0
    has_visitor: bool = False
    visits: int = 0
    known_visits: int = 0  # to the thread
    on_duty: bool = False
    is_closing: bool = False  # what visitors wait for has ended with an error
    has_thread: bool = True
    stop: bool = False
    look_again: bool = False
    reading: str = ""  # who holds the lock
    attending: str = ""
    thread_expects: int = 0  # bytes written, remembered before the sleep
    visitor_expects: int = 0
    thread_found: bool = False
    visitor_found: bool = False


Moves = list[State]


def moved(s: State, changes: dict[str, Any]) -> State:
    return s._replace(**changes)


def woken(s: State) -> State:
    """A call for the attention word or the counter of letters: both sleepers wait for both."""
    return s._replace(
        thread="awake" if s.thread == "asleep" else s.thread,
        visitor="awake" if s.visitor == "asleep" else s.visitor,
    )


def is_done(s: State) -> bool:
    """What the visitor waits for."""
    return s.is_closing or s.read >= s.visits


def locked(s: State, lock: str, me: str, then: str) -> Moves:
    return [] if getattr(s, lock) else [moved(s, {lock: me, me: then})]


def polls(s: State, me: str, at: str, rules: frozenset[str], then: str) -> Moves:
    """:meth:`Mailbox.poll`, its steps named ``poll...``; goes on at ``then``."""
    match at:
        case "poll":
            return [moved(s, {me: "poll try", "look_again": True, f"{me}_found": False})]
        case "poll try":
            if not s.look_again or s.reading:
                return [moved(s, {me: then})]
            return [moved(s, {me: "poll clear", "reading": me})]
        case "poll clear":
            return [moved(s, {me: "poll read", "look_again": False})]
        case "poll read":
            found = s.written != s.read
            after = moved(s, {"read": s.written, f"{me}_found": getattr(s, f"{me}_found") or found})
            is_news = me == "thread" and found and s.visits > 0
            return [moved(after, {me: "wake poller" if is_news else "poll release"})]
        case "poll release":
            again = "poll try" if "look again" in rules else then
            return [moved(s, {me: again, "reading": ""})]
    return wakes_poller(s, me, at, "poll release")


def wakes_poller(s: State, me: str, at: str, then: str) -> Moves:
    """:meth:`Mailbox.wake_poller`."""
    match at:
        case "wake poller":
            return [moved(s, {me: "wake poller lock" if s.has_visitor else then})]
        case "wake poller lock":
            return locked(s, "attending", me, "wake poller write")
        case "wake poller write":
            attention = AFTER["wake poller"] if s.has_visitor else s.attention
            return [moved(s, {me: "wake poller wake", "attention": attention, "attending": ""})]
        case "wake poller wake":
            return [moved(woken(s), {me: then})]
    raise AssertionError(at)


def sender(s: State, rules: frozenset[str]) -> Moves:
    """:meth:`Mailbox.put` and :meth:`Mailbox.call`, of another process."""
    match s.sender:
        case "write" if s.sent == s.letters or s.attention == CLOSED:
            return [s._replace(sender="end")]
        case "write" if "sender looks after writing" not in rules:
            return [s._replace(sender="write late", seen=s.attention)]
        case "write":
            return [s._replace(sender="look", written=s.written + 1, sent=s.sent + 1)]
        case "write late":
            return [s._replace(sender="call", written=s.written + 1, sent=s.sent + 1)]
        case "look":
            return [s._replace(sender="call", seen=s.attention)]
        case "call":
            return [(woken(s) if s.seen == ASLEEP else s)._replace(sender="write")]
    return []


def thread(s: State, rules: frozenset[str]) -> Moves:  # noqa: C901, PLR0912 - a table of steps
    """:meth:`MailboxThread._run`."""
    match s.thread:
        case "begin":
            return [s._replace(thread="end lock") if s.stop else s._replace(thread="loop", on_duty=True)]
        case "loop":
            return [s._replace(thread="duty lock" if s.visits == s.known_visits and not s.stop else "off")]
        case "duty lock":
            return locked(s, "attending", "thread", "duty")
        case "duty" if s.has_visitor:
            return [s._replace(thread="off", attending="")]
        case "duty":
            return [s._replace(thread="duty write", thread_expects=s.written)]
        case "duty write":
            return [s._replace(thread="poll", attention=AFTER["begin duty"], attending="")]
        case "polled":
            stays = s.thread_found or ("thread looks for stop" in rules and s.stop)
            return [s._replace(thread="awake" if stays else "sleep")]
        case "sleep":
            sleeps = s.attention == ASLEEP and s.written == s.thread_expects
            return [s._replace(thread="asleep" if sleeps else "awake")]
        case "awake":
            return locked(s, "attending", "thread", "end duty")
        case "end duty":
            attention = s.attention if s.has_visitor else AFTER["end duty"]
            return [s._replace(thread="loop", attention=attention, attending="")]
        case "off":
            return [s._replace(thread="park", on_duty=False)]
        case "park" if s.stop or not (s.has_visitor or s.visits != s.known_visits):
            return [s._replace(thread="begin")]
        case "park" if s.visits != s.known_visits:
            return [s._replace(known_visits=s.visits)]
        case "end lock":
            return locked(s, "attending", "thread", "end")
        case "end":
            attention = s.attention if s.has_visitor else AFTER["end"]
            return [s._replace(thread="last poll", attention=attention, attending="")]
        case "last poll":
            return [s._replace(thread="ended", read=s.written)] if not s.reading else []
        case "park" | "asleep" | "ended":
            return []
    return polls(s, "thread", s.thread, rules, "polled")


def visitor(s: State, rules: frozenset[str]) -> Moves:  # noqa: C901, PLR0912 - a table of steps
    """:meth:`Mailbox.poll_until`."""
    match s.visitor:
        case "enter" if s.visits == s.max_visits:
            return [s._replace(visitor="ended")]
        case "enter":
            return locked(s, "attending", "visitor", "be there")
        case "be there":
            return [s._replace(visitor="begin", has_visitor=True)]
        case "begin":
            return [s._replace(visitor="count", attention=AFTER["begin poll"])]
        case "count":
            return [s._replace(visitor="wake thread", visits=s.visits + 1, attending="")]
        case "wake thread":
            return [(woken(s) if s.on_duty else s)._replace(visitor="check")]
        case "check":
            return [s._replace(visitor="exit" if is_done(s) else "poll")]
        case "polled" if s.visitor_found:
            return [s._replace(visitor="check")]
        case "polled":  # it falls asleep, or may not, or its time is over
            return [s._replace(visitor="remember"), s._replace(visitor="exit")]
        case "remember":
            return [s._replace(visitor="fall asleep", visitor_expects=s.written)]
        case "fall asleep":
            return [s._replace(visitor="sleeper poll", attention=AFTER["sleep"])]
        case "sleeper polled":
            return [s._replace(visitor="awake" if s.visitor_found or is_done(s) else "sleep")]
        case "sleep":
            sleeps = s.attention == ASLEEP and s.written == s.visitor_expects
            return [s._replace(visitor="asleep" if sleeps else "awake")]
        case "awake":
            return [s._replace(visitor="check", attention=AFTER["wake up"])]
        case "exit":
            return locked(s, "attending", "visitor", "leave")
        case "leave":
            return [s._replace(visitor="leave write", has_visitor=False)]
        case "leave write":
            attention = AFTER["end poll" if s.has_thread else "end"]
            return [s._replace(visitor="leave wake", attention=attention, attending="")]
        case "leave wake":
            wakes = s.on_duty and "visit wakes thread" in rules
            return [(woken(s) if wakes else s)._replace(visitor="enter")]
        case "asleep" | "ended":
            return []
    if s.visitor.startswith("sleeper "):
        after = polls(s._replace(visitor=s.visitor.removeprefix("sleeper ")), "visitor", s.visitor[8:], rules, "polled")
        return [one._replace(visitor=f"sleeper {one.visitor}") for one in after]
    return polls(s, "visitor", s.visitor, rules, "polled")


def closer(s: State, rules: frozenset[str]) -> Moves:
    """All collectives end with an error, then :meth:`Mailbox.close`."""
    match s.closer:
        case "begin":
            return [s._replace(closer="wake poller", is_closing=True)]
        case "stop lock" if "close locks" not in rules:
            return [s._replace(closer="stop", has_thread=False)]
        case "stop lock":
            return [one._replace(has_thread=False) for one in locked(s, "attending", "closer", "stop")]
        case "stop":
            return [s._replace(closer="stop write" if s.attending == "closer" else "stop late", stop=True)]
        case "stop late":
            return locked(s, "attending", "closer", "stop write")
        case "stop write":
            return [s._replace(closer="stop wake", attention=AFTER["stop"], attending="")]
        case "stop wake":
            return [woken(s)._replace(closer="ended")]
        case "idle" | "ended":
            return []
    return wakes_poller(s, "closer", s.closer, "stop lock")


ACTORS: tuple[Callable[[State, frozenset[str]], Moves], ...] = (sender, thread, visitor, closer)


def by_itself(s: State) -> Iterator[State]:
    """Sleeps that end because their time is over, or for no reason at all."""
    if s.thread == "asleep":
        yield s._replace(thread="awake")
    if s.visitor == "asleep":
        yield s._replace(visitor="awake")
        yield s._replace(visitor="exit")


def stuck(start: State, rules: frozenset[str]) -> tuple[int, list[State]]:
    """How many states can be reached, and those where nothing goes on though it should."""
    known, todo, found = {start}, [start], []
    while todo:
        state = todo.pop()
        after = [one for actor in ACTORS for one in actor(state, rules)]
        if not after and not is_good_end(state):
            found.append(state)
        for one in [*after, *by_itself(state)]:
            if one not in known:
                known.add(one)
                todo.append(one)
    return len(known), found


def is_good_end(s: State) -> bool:
    if s.sender != "end" or s.visitor != "ended" or s.attending or s.reading:
        return False
    if s.closer == "ended":
        return s.thread == "ended" and s.attention == CLOSED
    return s.read == s.written == s.letters and s.thread == "asleep" and s.attention == ASLEEP


@pytest.mark.parametrize(
    "start",
    [
        State(letters=1, max_visits=1),
        State(letters=2, max_visits=0),
        State(letters=1, max_visits=0, closer="begin"),
        State(letters=0, max_visits=2, closer="begin"),
    ],
)
def test_no_letter_is_left_and_nobody_sleeps_for_ever_in_any_order_of_the_steps(start: State) -> None:
    count, found = stuck(start, ALL)
    assert found[:1] == []
    assert count > 500


@pytest.mark.parametrize(
    ("rule", "start"),
    [
        ("look again", State(letters=1, max_visits=1)),
        ("visit wakes thread", State(letters=1, max_visits=1)),
        ("sender looks after writing", State(letters=1, max_visits=0)),
        ("thread looks for stop", State(letters=0, max_visits=0, closer="begin")),
        ("close locks", State(letters=0, max_visits=0, closer="begin")),
    ],
)
def test_each_rule_of_the_mailbox_is_needed(rule: str, start: State) -> None:
    _, found = stuck(start, ALL - {rule})
    assert found

"""The writer thread: jobs take turns, and one that has to wait holds up nobody."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gradbus.runtime.bus.sender import Job, Pause, Sample, Sender
from gradbus.runtime.errors import BusClosed

WAIT_S = 20.0


class Recording:
    """Takes what is written, as a DDS writer does. ``names``: of what came, in order."""

    def __init__(self) -> None:
        self.channel = SimpleNamespace(name="updates")
        self.names: list[str] = []

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        self.names.append(fields[0])
        return True


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.stop()
    if sender.is_alive():
        sender.join(WAIT_S)


def samples(name: str, count: int) -> Iterator[Sample | Pause]:
    for _ in range(count):
        yield (name,), (b"data",)


def start(sender: Sender, writer: Any, made: Iterator[Sample | Pause]) -> tuple[Job, threading.Event]:
    """Submit a job. The event is set when it has ended."""
    ended = threading.Event()
    job = Job(writer, made, lambda _: ended.set(), WAIT_S)
    sender.submit(job)
    return job, ended


def test_jobs_take_turns_sample_by_sample(sender: Sender) -> None:
    writer = Recording()
    ends = [start(sender, writer, samples(name, 3))[1] for name in ("a", "b")]
    sender.start()
    assert all(ended.wait(WAIT_S) for ended in ends)
    assert writer.names == ["a", "b", "a", "b", "a", "b"]
    assert sender.sent_bytes == {"updates": 6 * len(b"data")}


def test_a_job_that_has_nothing_to_write_yet_does_not_hold_up_the_others(sender: Sender) -> None:
    writer, other_is_through = Recording(), threading.Event()

    def waiting() -> Iterator[Sample | Pause]:
        while not other_is_through.is_set():
            yield WAIT_S
        yield from samples("late", 1)

    job, ended = start(sender, writer, waiting())
    _, other_ended = start(sender, writer, samples("other", 3))
    sender.start()
    assert other_ended.wait(WAIT_S / 2)
    other_is_through.set()
    start(sender, writer, samples("more", 1))  # a new job ends the pause of the others
    assert ended.wait(WAIT_S / 2)
    assert job.written_bytes == len(b"data")
    assert writer.names[:3] == ["other"] * 3
    assert sorted(writer.names[3:]) == ["late", "more"]


def test_a_job_that_comes_while_the_others_are_asked_is_not_slept_over(sender: Sender) -> None:
    writer, new = Recording(), threading.Event()

    def waiting(*, submits: bool) -> Iterator[Sample | Pause]:
        if submits:
            sender.submit(Job(writer, samples("new", 1), lambda _: new.set(), WAIT_S))  # type: ignore[arg-type]
        while not new.is_set():
            yield WAIT_S

    ends = [start(sender, writer, waiting(submits=submits))[1] for submits in (False, True)]
    sender.start()
    assert all(ended.wait(WAIT_S / 2) for ended in ends)
    assert writer.names == ["new"]


def test_a_job_that_pauses_is_asked_again(sender: Sender) -> None:
    writer = Recording()

    def pausing() -> Iterator[Sample | Pause]:
        for _ in range(100):
            yield 1e-4
        yield from samples("a", 1)

    _, ended = start(sender, writer, pausing())
    sender.start()
    assert ended.wait(WAIT_S)
    assert writer.names == ["a"]


def test_to_wake_the_thread_ends_all_pauses_also_one_that_begins_just_then(sender: Sender) -> None:
    writer = Recording()

    def waiting(*, wakes: bool) -> Iterator[Sample | Pause]:
        if wakes:
            sender.wake()
        yield WAIT_S
        yield from samples("a", 1)

    ends = [start(sender, writer, waiting(wakes=wakes))[1] for wakes in (False, True)]
    sender.start()
    assert all(ended.wait(WAIT_S / 2) for ended in ends)
    assert writer.names == ["a", "a"]


def test_a_job_that_is_cancelled_while_it_pauses_ends(sender: Sender) -> None:
    asked = threading.Event()

    def pausing() -> Iterator[Sample | Pause]:
        while True:
            asked.set()
            yield 1e-3

    job, ended = start(sender, Recording(), pausing())
    sender.start()
    assert asked.wait(WAIT_S)
    job.cancel()
    assert ended.wait(WAIT_S)


def test_a_sender_that_is_stopped_ends_the_jobs_that_pause_at_once() -> None:
    sender, outcomes, asked = Sender(), [], threading.Event()

    def pausing() -> Iterator[Sample | Pause]:
        asked.set()
        yield 2 * WAIT_S

    sender.submit(Job(Recording(), pausing(), outcomes.append, WAIT_S))  # type: ignore[arg-type]
    sender.start()
    assert asked.wait(WAIT_S)
    sender.stop()
    sender.join(WAIT_S)
    assert not sender.is_alive()
    assert [type(outcome) for outcome in outcomes] == [BusClosed]
    with pytest.raises(BusClosed):
        sender.submit(Job(Recording(), samples("a", 1), outcomes.append, WAIT_S))  # type: ignore[arg-type]


def steps(sender: Sender) -> list[float]:
    """What a driver in place of the thread gets: the pauses, until there is nothing to write."""
    found = [sender.step()]
    while found[-1] != math.inf:
        found.append(sender.step())
    return found


def test_a_driver_in_place_of_the_thread_writes_a_sample_a_step_and_is_told_when_the_next_is_due() -> None:
    sender, writer, outcomes = Sender(), Recording(), list[int | Exception]()

    def pausing() -> Iterator[Sample | Pause]:
        yield from samples("a", 1)
        yield 2.0
        yield from samples("a", 1)

    assert sender.step() == math.inf
    sender.submit(Job(writer, pausing(), outcomes.append, WAIT_S))  # type: ignore[arg-type]
    assert steps(sender) == [0.0, 2.0, 0.0, math.inf]
    assert (writer.names, outcomes) == (["a", "a"], [2 * len(b"data")])


def test_a_driver_may_wait_as_long_as_all_jobs_pause_unless_they_are_woken() -> None:
    sender, writer = Sender(), Recording()

    def waiting(pause_s: float) -> Iterator[Sample | Pause]:
        while True:
            yield pause_s

    for pause_s in (3.0, 2.0):
        sender.submit(Job(writer, waiting(pause_s), lambda _: None, WAIT_S))  # type: ignore[arg-type]
    assert [sender.step() for _ in range(4)] == [0.0, 3.0, 0.0, 3.0]  # the second job is asked before anybody waits
    sender.step()
    sender.wake()
    assert [sender.step() for _ in range(3)] == [0.0, 0.0, 3.0]  # both are asked again at once


def test_a_driver_ends_the_jobs_that_are_left() -> None:
    sender, outcomes = Sender(), list[int | Exception]()
    sender.submit(Job(Recording(), samples("a", 2), outcomes.append, WAIT_S))  # type: ignore[arg-type]
    assert sender.step() == 0.0
    sender.stop()
    assert sender.step() == math.inf
    sender.drop_rest()
    assert [type(outcome) for outcome in outcomes] == [BusClosed]
    assert sender.idle


def test_a_sender_that_has_ended_holds_no_payload_of_a_job_that_paused() -> None:
    class Payload(bytearray):
        """Can be referred to weakly."""

    sender, payload, asked = Sender(), Payload(b"data"), threading.Event()

    def pausing(kept: Payload) -> Iterator[Sample | Pause]:
        asked.set()
        yield 2 * WAIT_S
        yield ("a",), (kept,)

    sender.submit(Job(Recording(), pausing(payload), lambda _: None, WAIT_S))  # type: ignore[arg-type]
    reference = weakref.ref(payload)
    del payload
    sender.start()
    assert asked.wait(WAIT_S)
    sender.stop()
    sender.join(WAIT_S)
    assert not sender.is_alive()
    assert reference() is None

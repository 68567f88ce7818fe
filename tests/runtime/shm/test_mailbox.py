"""Mailbox: frames through rings in shared memory, and who is told of them when."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from shared_pair import Ranks, letter

from gradbus.runtime import forks
from gradbus.runtime.shm import futex
from gradbus.runtime.shm import mailbox as module
from gradbus.runtime.shm.layout import RING_BYTES
from gradbus.runtime.shm.mailbox import ASLEEP, CLOSED, LOOKING, MAX_MESSAGE_BYTES, Mailbox, Sleeper

pytestmark = pytest.mark.skipif(not module.AVAILABLE, reason="this system has no mailbox")

WAIT_S = 10.0


class NoWork:
    idle = True

    def push(self) -> bool:
        return False


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Two ranks whose letters only the test reads."""
    yield from without_threads(2)


@pytest.fixture
def three() -> Iterator[Ranks]:
    yield from without_threads(3)


def without_threads(world: int) -> Iterator[Ranks]:
    ranks = Ranks(world)
    for rank in range(world):
        thread = ranks.mailbox(rank).close()
        assert thread is not None
        thread.join(WAIT_S)
        assert ranks.attention(rank) == CLOSED
        ranks.set_attention(rank, LOOKING)
    yield ranks


@pytest.fixture
def attended() -> Iterator[Ranks]:
    """Two ranks with the threads that read their letters."""
    ranks = Ranks()
    yield ranks
    for rank in range(2):
        thread = ranks.mailbox(rank).close()
        if thread is not None:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def send(ranks: Ranks, transfer: int, data: bytes = b"", *, sender: int = 0, to: int = 1) -> bool:
    box = ranks.mailbox(sender)
    if not box.put([to], letter(transfer, data, sender=sender)):
        return False
    box.call([to])
    return True


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.0002)


def transfers(ranks: Ranks, rank: int = 1) -> list[int]:
    return [frame.key.transfer for frame in ranks.taken[rank]]


def visiting(letters: Mailbox, done: Callable[[], bool]) -> threading.Thread:
    """A thread that visits until it is done, and has begun to."""
    until_s = time.monotonic() + WAIT_S
    thread = threading.Thread(target=letters.poll_until, args=(done, until_s, NoWork()), daemon=True)
    thread.start()
    while not letters.is_polled:
        assert time.monotonic() < until_s
    return thread


# Rings


def test_letters_arrive_as_they_were_written(ranks: Ranks) -> None:
    assert send(ranks, 1, b"hello")
    assert ranks.mailbox(1).poll()
    (frame,) = ranks.taken[1]
    assert (frame.key.transfer, frame.key.sender, bytes(frame.data)) == (1, 0, b"hello")
    assert not ranks.mailbox(1).poll()


def test_nothing_is_written_for_a_rank_that_takes_no_letters(attended: Ranks) -> None:
    assert send(attended, 1)
    thread = attended.mailbox(1).close()
    assert thread is not None
    thread.join(WAIT_S)
    assert transfers(attended) == [1]
    assert not send(attended, 2)


def test_all_readers_get_it_or_none(three: Ranks) -> None:
    three.set_attention(2, CLOSED)
    assert not three.mailbox(0).put([1, 2], letter(1))
    three.set_attention(2, LOOKING)
    assert three.mailbox(0).put([1, 2], letter(2))
    for rank in (1, 2):
        three.mailbox(rank).poll()
        assert transfers(three, rank) == [2]


def test_a_full_ring_refuses_and_nothing_is_lost_where_it_begins_anew(ranks: Ranks) -> None:
    sent = taken = 0
    for size in (100, 5000, 3, 12_000, 0, 9999) * 20:
        while send(ranks, sent, bytes([sent % 251]) * size):
            sent += 1
        assert sent > taken
        ranks.mailbox(1).poll()
        taken = sent
    assert transfers(ranks) == list(range(sent))
    assert all(set(bytes(frame.data)) <= {frame.key.transfer % 251} for frame in ranks.taken[1])


def test_counters_of_bytes_wrap(ranks: Ranks) -> None:
    start = (1 << 32) - RING_BYTES // 2
    ranks.layout.tails(ranks.memory(0))[1] = ranks.layout.heads(ranks.memory(1))[0] = start
    for transfer in range(100):
        assert send(ranks, transfer, bytes(3000))
        ranks.mailbox(1).poll()
    assert transfers(ranks) == list(range(100))


def test_what_is_large_is_no_letter(ranks: Ranks) -> None:
    assert not send(ranks, 1, bytes(MAX_MESSAGE_BYTES))


# What a broken or malicious rank may have written


@pytest.mark.parametrize(
    ("size", "tail"),
    [
        (100, 8),
        (0xFFFF_FFF0, 64),
        (RING_BYTES, RING_BYTES),
        (0xFFFF_FFFF, RING_BYTES),
        (16, RING_BYTES + 8),
        (16, 0xFFFF_FFFF),
        (16, 13),
        (0, 3),
    ],
)
def test_a_ring_that_makes_no_sense_is_not_read_any_more(ranks: Ranks, size: int, tail: int) -> None:
    theirs, mine = ranks.memory(0), ranks.mailbox(1)
    ranks.layout.ring(theirs, 1)[:4].data[:] = struct.pack("<I", size)
    ranks.layout.tails(theirs)[1] = tail
    mine.poll()
    assert (mine.rejected, ranks.taken[1]) == (1, [])
    assert not mine.poll()


def test_what_is_no_frame_is_counted_and_the_next_one_is_taken(ranks: Ranks) -> None:
    ranks.mailbox(0).put([1], (b"no frame at all",))
    ranks.mailbox(0).put([1], (b"",))
    assert send(ranks, 5)
    ranks.mailbox(1).poll()
    assert (ranks.mailbox(1).rejected, transfers(ranks)) == (2, [5])


def test_nobody_can_write_letters_in_the_name_of_another_rank(three: Ranks) -> None:
    assert three.mailbox(2).put([1], letter(1, sender=0))
    three.mailbox(1).poll()
    assert (three.mailbox(1).rejected, three.taken[1]) == (1, [])


@pytest.mark.parametrize("head", [8, RING_BYTES, 1 << 31, 0xFFFF_0000])
def test_a_reader_that_claims_to_have_read_what_was_not_written_gets_no_letters(ranks: Ranks, head: int) -> None:
    ranks.layout.heads(ranks.memory(1))[0] = head
    assert not send(ranks, 1)


# Visits


def test_a_visitor_is_woken_by_a_letter(ranks: Ranks) -> None:
    letters = ranks.mailbox(1)
    thread = visiting(letters, lambda: len(ranks.taken[1]) == 3)
    for transfer in range(3):
        while ranks.attention(1) != ASLEEP:
            assert thread.is_alive()
        assert send(ranks, transfer)
        while len(ranks.taken[1]) <= transfer:
            assert thread.is_alive() or len(ranks.taken[1]) == 3
    thread.join(WAIT_S)
    assert transfers(ranks) == [0, 1, 2]


@pytest.mark.parametrize("has_waitv", [True, False])
def test_a_letter_that_comes_just_before_the_visitor_sleeps_does_not_wait_for_long(
    monkeypatch: pytest.MonkeyPatch, has_waitv: bool
) -> None:
    """It was not there when the visitor looked last, and its sender has called before there was anybody to wake."""
    if has_waitv and not futex.HAS_WAITV:
        pytest.skip("this kernel has no futex_waitv")
    monkeypatch.setattr(futex, "HAS_WAITV", has_waitv)
    (ranks,) = without_threads(2)
    letters, sleep = ranks.mailbox(1), Sleeper.sleep
    sent: list[bool] = []
    visitor = threading.current_thread()

    def late(sleeper: Any, timeout_s: float) -> None:
        if threading.current_thread() is visitor and not sent:  # others sleep, too
            sent.append(send(ranks, 1))
        sleep(sleeper, timeout_s)

    monkeypatch.setattr(Sleeper, "sleep", late)
    monkeypatch.setattr(module, "SLEEP_S", WAIT_S / 2)  # a sleep that nobody ends
    start_s = time.monotonic()
    letters.poll_until(lambda: bool(ranks.taken[1]), start_s + WAIT_S, NoWork())
    assert sent == [True]
    assert transfers(ranks) == [1]
    assert time.monotonic() - start_s < WAIT_S / 2


def test_a_thread_that_polls_is_woken(ranks: Ranks) -> None:
    letters, over = ranks.mailbox(1), threading.Event()
    thread = visiting(letters, over.is_set)
    while ranks.attention(1) != ASLEEP:
        assert thread.is_alive()
    over.set()
    letters.wake_poller()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_one_thread_visits_at_a_time(ranks: Ranks) -> None:
    letters, over = ranks.mailbox(1), threading.Event()
    thread = visiting(letters, over.is_set)
    assert not letters.poll_until(lambda: False, time.monotonic() + WAIT_S, NoWork())
    over.set()
    thread.join(WAIT_S)
    assert letters.poll_until(lambda: True, 0.0, NoWork())


@pytest.mark.parametrize("where", ["done", "work", "take"])
def test_a_visit_that_is_interrupted_is_over(ranks: Ranks, where: str) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    work: Any = NoWork()
    letters = ranks.mailbox(1)
    assert send(ranks, 1)
    match where:
        case "work":
            work.push = interrupt
        case "take":
            ranks.take[1] = interrupt
    with pytest.raises(KeyboardInterrupt):
        letters.poll_until(interrupt if where == "done" else lambda: False, time.monotonic() + WAIT_S, work)
    assert not letters.is_polled
    ranks.take[1] = ranks.taken[1].append
    ranks.set_attention(1, LOOKING)  # there is no thread that would look
    assert send(ranks, 2)
    assert letters.poll_until(lambda: 2 in transfers(ranks), time.monotonic() + WAIT_S, NoWork())


# Two threads that read


class Held:
    """A thread that reads letters and stands still in the midst of the first one."""

    def __init__(self, ranks: Ranks) -> None:
        self._reached, self.go_on = threading.Event(), threading.Event()
        letters, take = ranks.mailbox(1), ranks.take[1]

        def slow(frame: Any) -> None:
            if not self._reached.is_set():
                self._reached.set()
                self.go_on.wait(WAIT_S)
            take(frame)

        ranks.take[1] = slow
        assert send(ranks, 1)
        self.thread = threading.Thread(target=letters.poll, daemon=True)
        self.thread.start()
        assert self._reached.wait(WAIT_S)
        assert send(ranks, 2)  # that thread does not know of this one


def test_who_looks_while_another_thread_reads_has_that_look_again(ranks: Ranks) -> None:
    held = Held(ranks)
    assert not ranks.mailbox(1).poll()
    held.go_on.set()
    held.thread.join(WAIT_S)
    assert transfers(ranks) == [1, 2]


def test_what_needs_all_messages_is_done_by_the_thread_that_reads_and_keeps_no_other_one_waiting(ranks: Ranks) -> None:
    held = Held(ranks)
    had: list[list[int]] = []
    ranks.mailbox(1).after_messages(lambda: had.append(transfers(ranks)))
    assert had == []
    held.go_on.set()
    held.thread.join(WAIT_S)
    assert had == [[1, 2]]
    ranks.mailbox(1).after_messages(lambda: had.append([]))
    assert had[1:] == [[]], "no other thread reads: it is done at once"


def test_a_message_whose_reader_was_interrupted_is_taken_again(ranks: Ranks) -> None:
    mailbox, take = ranks.mailbox(1), ranks.take[1]

    def interrupted(frame: Any) -> None:
        raise KeyboardInterrupt

    assert send(ranks, 1)
    assert send(ranks, 2)
    ranks.take[1] = interrupted
    with pytest.raises(KeyboardInterrupt):
        mailbox.poll_until(lambda: False, time.monotonic() + WAIT_S, NoWork())
    assert not mailbox.is_polled
    ranks.take[1] = take
    assert mailbox.poll_until(lambda: len(transfers(ranks)) == 2, time.monotonic() + WAIT_S, NoWork())
    assert transfers(ranks) == [1, 2]


def test_a_message_that_its_reader_fails_on_is_not_taken_again(ranks: Ranks) -> None:
    mailbox, take = ranks.mailbox(1), ranks.take[1]

    def broken(frame: Any) -> None:
        raise ZeroDivisionError

    assert send(ranks, 1)
    assert send(ranks, 2)
    ranks.take[1] = broken
    with pytest.raises(ZeroDivisionError):
        mailbox.poll()
    ranks.take[1] = take
    assert mailbox.poll()
    assert transfers(ranks) == [2]


# The thread that reads while nobody visits


def test_letters_are_read_also_when_nobody_visits(attended: Ranks) -> None:
    for transfer in range(20):
        assert send(attended, transfer)
        wait_until(lambda count=transfer + 1: len(attended.taken[1]) == count)  # type: ignore[misc]
    assert transfers(attended) == list(range(20))


def test_the_thread_sleeps_while_there_is_nothing_to_read(attended: Ranks) -> None:
    wait_until(lambda: attended.attention(1) == ASLEEP)
    thread = attended.mailbox(1)._thread  # noqa: SLF001 - close() gives it, too, but only to end it
    assert thread is not None
    clock = time.pthread_getcpuclockid(thread.thread.ident or 0)
    before_s = time.clock_gettime(clock)
    time.sleep(0.2)
    assert time.clock_gettime(clock) - before_s < 0.02


def test_after_a_visit_letters_wait_for_the_next_one_or_not_for_long(attended: Ranks) -> None:
    letters = attended.mailbox(1)
    for transfer in range(0, 20, 2):
        letters.poll_until(lambda count=transfer + 1: len(attended.taken[1]) >= count, 0.0, None, may_sleep=False)  # type: ignore[misc]
        assert send(attended, transfer)
        letters.poll_until(lambda count=transfer + 1: len(attended.taken[1]) >= count, time.monotonic() + WAIT_S, None)  # type: ignore[misc]
        assert send(attended, transfer + 1)
        wait_until(lambda count=transfer + 2: len(attended.taken[1]) == count)  # type: ignore[misc]
    assert transfers(attended) == list(range(20))


def test_the_thread_goes_on_at_once_where_it_is_wanted(attended: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARKED_S", WAIT_S * 10)
    letters = attended.mailbox(1)
    for transfer in range(10):
        letters.poll_until(lambda: True, 0.0, None, may_sleep=False)
        letters.wake_thread()
        assert send(attended, transfer)
        wait_until(lambda count=transfer + 1: len(attended.taken[1]) == count)  # type: ignore[misc]


def test_a_frame_that_nobody_can_take_does_not_stop_the_thread(attended: Ranks) -> None:
    letters, take = attended.mailbox(1), attended.take[1]

    def refuse(frame: Any) -> None:
        attended.take[1] = take
        raise ValueError("no")

    attended.take[1] = refuse
    assert send(attended, 1)
    wait_until(lambda: letters.rejected == 1)
    assert send(attended, 2)
    wait_until(lambda: transfers(attended) == [2])


def test_a_visitor_that_may_not_sleep_comes_back(ranks: Ranks) -> None:
    start_s = time.monotonic()
    ranks.mailbox(1).poll_until(lambda: False, start_s + WAIT_S, None, may_sleep=False)
    assert time.monotonic() - start_s < WAIT_S / 2


def test_a_visit_ends_in_time_also_when_there_is_always_something_to_do(ranks: Ranks) -> None:
    start_s = time.monotonic()
    work: Any = SimpleNamespace(idle=False, push=lambda: True)
    ranks.mailbox(1).poll_until(lambda: time.monotonic() > start_s + WAIT_S, start_s + 0.01, work)
    assert time.monotonic() < start_s + WAIT_S


def test_a_thread_that_fell_asleep_beside_a_visitor_is_woken_when_that_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both sleep on the same word; the visitor takes its ASLEEP back, and no sender would wake the thread then."""
    sleep, is_polled, fell_asleep = Sleeper.sleep, threading.Event(), threading.Event()

    def late(sleeper: Any, timeout_s: float) -> None:
        if threading.current_thread() is reader and not is_polled.is_set():
            is_polled.wait(WAIT_S)
            fell_asleep.set()
        sleep(sleeper, timeout_s)

    monkeypatch.setattr(module, "IDLE_S", 2 * WAIT_S)
    ranks = Ranks()
    letters = ranks.mailbox(1)
    assert letters._thread is not None  # noqa: SLF001 - as above
    reader = letters._thread.thread  # noqa: SLF001 - as above
    wait_until(lambda: ranks.attention(1) == ASLEEP)
    monkeypatch.setattr(Sleeper, "sleep", late)
    assert send(ranks, 1)  # it reads this, and is about to sleep anew
    wait_until(lambda: transfers(ranks) == [1] and ranks.attention(1) == ASLEEP)

    def visitor_sleeps(sleeper: Any, timeout_s: float) -> None:
        if threading.current_thread() is threading.main_thread():
            is_polled.set()
            fell_asleep.wait(WAIT_S)
            time.sleep(0.01)  # until the other one is in the kernel; if it is not, nothing is tested
        late(sleeper, min(timeout_s, 0.001))

    with monkeypatch.context() as patch:
        patch.setattr(Sleeper, "sleep", visitor_sleeps)
        letters.poll_until(lambda: fell_asleep.is_set(), time.monotonic() + WAIT_S, NoWork())
    assert send(ranks, 2)
    wait_until(lambda: transfers(ranks) == [1, 2])
    for rank in range(2):
        thread = ranks.mailbox(rank).close()
        assert thread is not None
        thread.join(WAIT_S)


def test_a_thread_that_is_stopped_just_before_it_sleeps_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_duty, holds, go_on = Mailbox.begin_duty, threading.Event(), threading.Event()

    def late(letters: Mailbox, sleeper: Any) -> bool:
        holds.set()
        go_on.wait(WAIT_S)
        return begin_duty(letters, sleeper)

    monkeypatch.setattr(module, "IDLE_S", 2 * WAIT_S)
    monkeypatch.setattr(Mailbox, "begin_duty", late)
    ranks = Ranks()
    letters = ranks.mailbox(1)
    assert holds.wait(WAIT_S)
    thread = letters.close()
    go_on.set()
    assert thread is not None
    thread.join(WAIT_S / 2)
    assert not thread.is_alive()
    assert ranks.attention(1) == CLOSED


def test_a_child_by_fork_leaves_the_letters_to_its_parent(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = ranks.mailbox(1)
    assert send(ranks, 1)
    ranks.set_attention(1, ASLEEP)
    with monkeypatch.context() as child:
        child.setattr(forks, "generation", forks.generation + 1)
        assert not letters.poll_until(lambda: False, time.monotonic() + WAIT_S, NoWork())
        assert not letters.poll()
        assert not send(ranks, 2)
        letters.after_messages(lambda: None)
        letters.wake_poller()
        assert letters.close() is None
    assert (ranks.attention(1), transfers(ranks)) == (ASLEEP, [])
    assert letters.poll()
    assert transfers(ranks) == [1]


def test_the_word_changes_by_the_steps_of_the_table_alone(attended: Ranks) -> None:
    """Which the model in test_mailbox_model.py takes its words from."""
    letters = attended.mailbox(1)
    written: list[int] = []

    class Words:
        def __getitem__(self, number: int) -> int:
            return int(word[number])

        def __setitem__(self, number: int, value: int) -> None:
            written.append(value)
            word[number] = value

    # Of a word in shared memory only the newest value shows, and each store is meant.
    word, letters._attention = letters._attention, Words()  # type: ignore[assignment] # noqa: SLF001
    assert send(attended, 1)
    letters.poll_until(lambda: transfers(attended) == [1], time.monotonic() + WAIT_S, NoWork())
    assert set(written) <= set(module.AFTER.values())
    assert written[-1] in (module.AFTER["end poll"], module.AFTER["begin duty"])

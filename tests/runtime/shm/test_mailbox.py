"""Letters: frames through rings in shared memory, and who is told of them when."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from shared_pair import Ranks, letter

from gradbus.runtime.collectives.shared_memory_transport import BACK_SOON_S, LetterProgress
from gradbus.runtime.shm import mailbox as module
from gradbus.runtime.shm.layout import LETTER_RING_BYTES
from gradbus.runtime.shm.mailbox import MAX_LETTER_BYTES, SLEEP_S, Letters

pytestmark = pytest.mark.skipif(not module.AVAILABLE, reason="letters need Linux on x86-64")

WAIT_S = 10.0


class NoWork:
    idle = True

    def push(self) -> bool:
        return False


class Port:
    """Keeps the functions that the receive thread is to call."""

    def __init__(self) -> None:
        self.cares: list[Callable[[], bool]] = []

    def look_after(self, function: Callable[[], bool]) -> None:
        self.cares.append(function)

    def turn(self) -> None:
        """Call them once, as the receive thread does."""
        for function in list(self.cares):
            if not function():
                self.cares.remove(function)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def come_back(ranks: Ranks, rank: int = 1) -> Letters:
    """A visit that ends at once: from now on the rank is back soon."""
    letters = ranks.letters(rank)
    assert letters.visit(lambda: True, 0.0, NoWork())
    return letters


def send(ranks: Ranks, transfer: int, data: bytes = b"", *, sender: int = 0, to: int = 1) -> bool:
    box = ranks.letters(sender)
    return box.put([to], letter(transfer, data, sender=sender)) and box.call([to]) == []


def transfers(ranks: Ranks, rank: int = 1) -> list[int]:
    return [frame.key.transfer for frame in ranks.taken[rank]]


def visiting(letters: Letters, done: Callable[[], bool]) -> threading.Thread:
    """A thread that visits until it is done, and has begun to."""
    until_s = time.monotonic() + WAIT_S
    thread = threading.Thread(target=letters.visit, args=(done, until_s, NoWork()), daemon=True)
    thread.start()
    while not letters.has_visitor:
        assert time.monotonic() < until_s
    return thread


# Rings


def test_letters_arrive_as_they_were_written(ranks: Ranks) -> None:
    come_back(ranks)
    assert send(ranks, 1, b"hello")
    assert ranks.letters(1).poll()
    (frame,) = ranks.taken[1]
    assert (frame.key.transfer, frame.key.sender, bytes(frame.data)) == (1, 0, b"hello")
    assert not ranks.letters(1).poll()


def test_nothing_is_written_for_a_rank_that_is_away(ranks: Ranks) -> None:
    assert ranks.letters(1).is_away
    assert not send(ranks, 1)
    come_back(ranks)
    assert send(ranks, 2)
    assert ranks.letters(1).away()  # takes what has come
    assert transfers(ranks) == [2]
    assert not send(ranks, 3)


def test_all_readers_get_it_or_none() -> None:
    ranks = Ranks(3)
    come_back(ranks, 1)
    assert not ranks.letters(0).put([1, 2], letter(1))
    come_back(ranks, 2)
    assert ranks.letters(0).put([1, 2], letter(2))
    for rank in (1, 2):
        ranks.letters(rank).poll()
        assert transfers(ranks, rank) == [2]


def test_a_full_ring_refuses_and_nothing_is_lost_where_it_begins_anew(ranks: Ranks) -> None:
    come_back(ranks)
    sent = taken = 0
    for size in (100, 5000, 3, 12_000, 0, 9999) * 20:
        while send(ranks, sent, bytes([sent % 251]) * size):
            sent += 1
        assert sent > taken
        ranks.letters(1).poll()
        taken = sent
    assert transfers(ranks) == list(range(sent))
    assert all(set(bytes(frame.data)) <= {frame.key.transfer % 251} for frame in ranks.taken[1])


def test_counters_of_bytes_wrap(ranks: Ranks) -> None:
    start = (1 << 32) - LETTER_RING_BYTES // 2
    ranks.letters(0)._tails[1] = ranks.letters(1)._heads[0] = start
    come_back(ranks)
    for transfer in range(100):
        assert send(ranks, transfer, bytes(3000))
        ranks.letters(1).poll()
    assert transfers(ranks) == list(range(100))


def test_what_is_large_is_no_letter(ranks: Ranks) -> None:
    come_back(ranks)
    assert not send(ranks, 1, bytes(MAX_LETTER_BYTES))


# What a broken or malicious rank may have written


@pytest.mark.parametrize(
    ("size", "tail"),
    [
        (100, 8), (0xFFFF_FFF0, 64), (LETTER_RING_BYTES, LETTER_RING_BYTES), (0xFFFF_FFFF, LETTER_RING_BYTES),
        (16, LETTER_RING_BYTES + 8), (16, 0xFFFF_FFFF), (16, 13), (0, 3),
    ],
)  # fmt: skip
def test_a_ring_that_makes_no_sense_is_not_read_any_more(ranks: Ranks, size: int, tail: int) -> None:
    theirs, mine = ranks.letters(0), ranks.letters(1)
    theirs._boxes[1].outgoing[:4] = struct.pack("<I", size)
    theirs._tails[1] = tail
    mine.poll()
    assert (mine.rejected, ranks.taken[1]) == (1, [])
    assert not mine.poll()


def test_what_is_no_frame_is_counted_and_the_next_one_is_taken(ranks: Ranks) -> None:
    come_back(ranks)
    ranks.letters(0).put([1], (b"no frame at all",))
    ranks.letters(0).put([1], (b"",))
    assert send(ranks, 5)
    ranks.letters(1).poll()
    assert (ranks.letters(1).rejected, transfers(ranks)) == (2, [5])


def test_nobody_can_write_letters_in_the_name_of_another_rank() -> None:
    ranks = Ranks(3)
    come_back(ranks, 1)
    assert ranks.letters(2).put([1], letter(1, sender=0))
    ranks.letters(1).poll()
    assert (ranks.letters(1).rejected, ranks.taken[1]) == (1, [])


@pytest.mark.parametrize("head", [8, LETTER_RING_BYTES, 1 << 31, 0xFFFF_0000])
def test_a_reader_that_claims_to_have_read_what_was_not_written_gets_no_letters(ranks: Ranks, head: int) -> None:
    come_back(ranks)
    ranks.letters(1)._heads[0] = head
    assert not send(ranks, 1)


# Visits


def test_a_visitor_is_woken_by_a_letter(ranks: Ranks) -> None:
    letters = ranks.letters(1)
    thread = visiting(letters, lambda: len(ranks.taken[1]) == 3)
    for transfer in range(3):
        while letters._attention[0] != module._ASLEEP:
            assert thread.is_alive()
        assert send(ranks, transfer)
        while len(ranks.taken[1]) <= transfer:
            assert thread.is_alive() or len(ranks.taken[1]) == 3
    thread.join(WAIT_S)
    assert transfers(ranks) == [0, 1, 2]


def test_a_letter_that_comes_just_before_the_visitor_sleeps_does_not_wait_for_long(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there when the visitor looked last, and its sender has called before there was anybody to wake."""
    letters, syscall = ranks.letters(1), module._syscall
    sent: list[bool] = []
    slept_ns: list[int] = []  # at most: the clock would also count the time in which the thread gets no turn

    def late(number: int, address: int, operation: int, *rest: Any) -> int:
        if operation == module._FUTEX_WAIT:
            slept_ns.append(rest[1]._obj.nanoseconds)
            if not sent:
                sent.append(send(ranks, 1))
        assert syscall is not None
        return syscall(number, address, operation, *rest)

    monkeypatch.setattr(module, "_syscall", late)
    letters.visit(lambda: bool(ranks.taken[1]), time.monotonic() + WAIT_S, NoWork())
    assert sent == [True]
    assert transfers(ranks) == [1]
    assert sum(slept_ns) < SLEEP_S / 2 * 1e9


def test_a_visitor_is_woken_by_a_nudge(ranks: Ranks) -> None:
    letters, over = ranks.letters(1), threading.Event()
    thread = visiting(letters, over.is_set)
    while letters._attention[0] != module._ASLEEP:
        assert thread.is_alive()
    over.set()
    letters.nudge()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_nudge_that_comes_late_does_not_bring_back_who_is_away(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    letters, over, held, go_on = ranks.letters(1), threading.Event(), threading.Event(), threading.Event()
    visitor = visiting(letters, over.is_set)

    def slow() -> int:  # the thread stands still in the midst of a nudge
        if threading.get_ident() == nudger.ident:
            held.set()
            go_on.wait(WAIT_S)
        return threading.get_ident()

    nudger = threading.Thread(target=letters.nudge, daemon=True)
    monkeypatch.setattr(module, "threading", SimpleNamespace(get_ident=slow))
    nudger.start()
    assert held.wait(WAIT_S)
    over.set()
    visitor.join(WAIT_S)
    assert letters.away()
    go_on.set()
    nudger.join(WAIT_S)
    assert letters.is_away


def test_one_thread_visits_at_a_time(ranks: Ranks) -> None:
    letters, over = ranks.letters(1), threading.Event()
    thread = visiting(letters, over.is_set)
    assert not letters.visit(lambda: False, time.monotonic() + WAIT_S, NoWork())
    assert not letters.away()
    over.set()
    thread.join(WAIT_S)
    assert letters.visit(lambda: True, 0.0, NoWork())


@pytest.mark.parametrize("where", ["done", "work", "take"])
def test_a_visit_that_is_interrupted_is_over(ranks: Ranks, where: str) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    work: Any = NoWork()
    letters = come_back(ranks)
    assert send(ranks, 1)
    match where:
        case "work":
            work.push = interrupt
        case "take":
            letters._take = interrupt
    with pytest.raises(KeyboardInterrupt):
        letters.visit(interrupt if where == "done" else lambda: False, time.monotonic() + WAIT_S, work)
    assert not letters.has_visitor
    letters._take = ranks.taken[1].append
    assert send(ranks, 2)
    assert letters.visit(lambda: 2 in transfers(ranks), time.monotonic() + WAIT_S, NoWork())
    assert letters.away()


# Two threads that read


class Held:
    """A thread that reads letters and stands still in the midst of the first one."""

    def __init__(self, ranks: Ranks) -> None:
        self._reached, self.go_on = threading.Event(), threading.Event()
        letters = come_back(ranks)
        take = letters._take

        def slow(frame: Any) -> None:
            if not self._reached.is_set():
                self._reached.set()
                self.go_on.wait(WAIT_S)
            take(frame)

        letters._take = slow
        assert send(ranks, 1)
        self.thread = threading.Thread(target=letters.poll, daemon=True)
        self.thread.start()
        assert self._reached.wait(WAIT_S)
        assert send(ranks, 2)  # that thread does not know of this one


def test_who_goes_away_while_another_thread_reads_leaves_no_letter_behind(ranks: Ranks) -> None:
    held = Held(ranks)
    assert ranks.letters(1).away()
    held.go_on.set()
    held.thread.join(WAIT_S)
    assert transfers(ranks) == [1, 2]


def test_who_must_have_all_letters_waits_for_the_thread_that_reads(ranks: Ranks) -> None:
    held = Held(ranks)
    had: list[list[int]] = []

    def read() -> None:
        ranks.shared[1].read_letters(all_of_them=True)
        had.append(transfers(ranks))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(0.1)
    held.go_on.set()
    thread.join(WAIT_S)
    assert had == [[1, 2]]


# Who looks after the letters of a rank that is back soon


def test_letters_are_looked_after_until_the_rank_is_away(ranks: Ranks) -> None:
    port: Any = Port()
    letters = ranks.letters(1)
    progress = LetterProgress(letters, port, NoWork())
    for transfer in range(3):
        progress.pump(lambda: True, time.monotonic() + WAIT_S)
        assert not letters.is_away
        assert send(ranks, transfer)
        until_s = time.monotonic() + WAIT_S
        while port.cares:
            port.turn()
            assert time.monotonic() < until_s
        assert letters.is_away
        assert transfers(ranks) == list(range(transfer + 1))


def test_they_are_also_if_the_rank_goes_away_just_when_a_visit_begins(ranks: Ranks) -> None:
    port: Any = Port()
    letters = ranks.letters(1)
    progress = LetterProgress(letters, port, NoWork())
    progress.pump(lambda: True, time.monotonic() + WAIT_S)
    visit = letters.visit

    def late(*arguments: Any, **options: Any) -> bool:
        while not letters.is_away:
            port.turn()
        assert port.cares == []
        return visit(*arguments, **options)

    letters.visit = late  # type: ignore[method-assign]
    progress.pump(lambda: True, time.monotonic() + WAIT_S)
    assert not letters.is_away
    assert len(port.cares) == 1


def test_a_visitor_is_not_sent_away(ranks: Ranks) -> None:
    port: Any = Port()
    letters, over = ranks.letters(1), threading.Event()
    progress = LetterProgress(letters, port, NoWork())
    thread = threading.Thread(target=progress.pump, args=(over.is_set, time.monotonic() + WAIT_S), daemon=True)
    thread.start()
    until_s = time.monotonic() + 10 * BACK_SOON_S
    while not letters.has_visitor or time.monotonic() < until_s:
        port.turn()
    progress.resume()
    assert not letters.is_away
    over.set()
    progress.nudge()
    thread.join(WAIT_S)
    assert send(ranks, 1)
    progress.resume()  # something begins that nobody waits for
    assert letters.is_away
    assert transfers(ranks) == [1]


def test_a_visit_ends_in_time_also_when_there_is_always_something_to_do(ranks: Ranks) -> None:
    start_s = time.monotonic()
    work: Any = SimpleNamespace(idle=False, push=lambda: True)
    ranks.letters(1).visit(lambda: time.monotonic() > start_s + WAIT_S, start_s + 0.01, work)
    assert time.monotonic() < start_s + WAIT_S

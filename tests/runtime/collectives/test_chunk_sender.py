"""Payloads on their way out, chunk by chunk, by more than one thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sent_payload import Payload, free_slots
from shared_pair import Ranks

from gradbus.runtime.bus.raw_endpoints import Parts
from gradbus.runtime.bus.sender import Pause
from gradbus.runtime.collectives.link import ChunkSender, GroupLink
from gradbus.runtime.collectives.operation import Operation, OperationKey, OutgoingPart
from gradbus.runtime.errors import BusError
from gradbus.runtime.shm.layout import SLOTS
from gradbus.runtime.shm.transport import SharedMemoryTransport
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import CHUNK_BYTES
from gradbus.runtime.wire.messages import Identity

WAIT_S = 20.0


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def full(_: Parts) -> bool:
    return False


def test_each_chunk_is_written_once_and_the_end_is_told_once(ranks: Ranks) -> None:
    written: list[int] = []
    payload = Payload(ranks.shared[0].slots, written=written.append)
    assert payload.sender.advance()
    payload.write_rest()
    assert not payload.sender.advance()
    assert payload.numbers() == written == [0, 1, 2]
    assert payload.outcomes == [3 * CHUNK_BYTES]
    assert payload.sender.done


def test_the_writer_thread_tells_of_the_first_chunk_at_once_and_then_of_some_at_a_time(ranks: Ranks) -> None:
    written: list[int] = []
    payload = Payload(ranks.shared[0].slots, chunks=9, written=written.append)
    payload.write_rest()
    frames_sent = [frames.parse(b"".join(parts)) for parts in payload.sent]
    assert [(frame.seq, len(frame.data) // 8) for frame in frames_sent] == [(0, 1), (1, 3), (4, 3), (7, 2)]
    assert payload.numbers() == written == list(range(9))
    assert payload.outcomes == [9 * CHUNK_BYTES]


def test_chunks_that_do_not_follow_one_another_have_frames_of_their_own(ranks: Ranks) -> None:
    payload = Payload(ranks.shared[0].slots, chunks=9, only=(0, 2, 3, 5, 6, 8))
    payload.write_rest()
    frames_sent = [frames.parse(b"".join(parts)) for parts in payload.sent]
    assert [(frame.seq, len(frame.data) // 8) for frame in frames_sent] == [(0, 1), (2, 2), (5, 2), (8, 1)]


def test_the_writer_thread_tells_of_as_many_chunks_as_there_are_slots(ranks: Ranks) -> None:
    slots = ranks.shared[0].slots
    for _ in range(SLOTS - 3):
        slots.put((1,), np.zeros(1, np.uint8))
    payload = Payload(slots, chunks=9)
    samples = payload.sender.samples(lambda: False)
    found = [next(samples) for _ in range(3)]
    assert [None if isinstance(sample, Pause) else len(sample[1][1]) // 8 for sample in found] == [1, 2, None]
    assert payload.sender.cancel() == 3 * CHUNK_BYTES, "what was sent"
    assert free_slots(slots) == 0  # the reader was told


def test_the_writer_thread_leaves_all_chunks_to_a_visitor_who_is_at_it(ranks: Ranks) -> None:
    payload = Payload(ranks.shared[0].slots, chunks=4)

    def visitor_sends_one_more() -> bool:
        payload.sender.advance()
        return True

    assert payload.write_rest(visitor_sends_one_more) == 0
    assert payload.numbers() == [0, 1, 2, 3]
    assert payload.outcomes == [4 * CHUNK_BYTES]


def test_what_dds_does_not_take_now_is_written_next(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = Payload(ranks.shared[0].slots)
    with monkeypatch.context() as patch:
        patch.setattr(payload, "write", full)
        assert not payload.sender.advance()
    assert free_slots(ranks.shared[0].slots) == SLOTS - 1
    assert payload.sender.advance()
    assert payload.numbers() == [0]


def test_a_slot_that_was_not_announced_is_free_when_the_payload_is_cancelled(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2 * SLOTS):
        payload = Payload(ranks.shared[0].slots)
        monkeypatch.setattr(payload, "write", full)
        assert not payload.sender.advance()
        payload.sender.cancel()
        assert payload.sender.done
    assert free_slots(ranks.shared[0].slots) == SLOTS


@pytest.mark.parametrize("by", ["cancel", "outcome"])
def test_a_slot_of_a_frame_that_the_writer_thread_could_not_write_is_free_afterwards(ranks: Ranks, by: str) -> None:
    payload = Payload(ranks.shared[0].slots)
    job = payload.hand_over()
    job.pending = next(job.samples)
    if by == "cancel":
        payload.sender.cancel()
    else:
        payload.sender.note_outcome(TimeoutError("DDS takes nothing"))
        assert [type(outcome) for outcome in payload.outcomes] == [TimeoutError]
    assert free_slots(ranks.shared[0].slots) == SLOTS


def test_all_slots_of_a_frame_that_tells_of_some_chunks_are_free_when_nobody_gets_it(ranks: Ranks) -> None:
    payload = Payload(ranks.shared[0].slots, chunks=4)
    job = payload.hand_over()
    next(job.samples)
    job.pending = pending = next(job.samples)
    assert not isinstance(pending, Pause)
    assert len(pending[1][1]) == 3 * frames.DESCRIPTOR_BYTES
    payload.sender.cancel()
    assert free_slots(ranks.shared[0].slots) == SLOTS - 1  # one was told of


def test_a_frame_that_could_not_be_written_is_not_lost(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, or a signal, in the midst of writing."""
    payload = Payload(ranks.shared[0].slots)

    def interrupted(_: Parts) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(payload, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            payload.sender.advance()
    while payload.sender.advance():
        pass
    assert payload.numbers() == [0, 1, 2]
    assert payload.outcomes == [3 * CHUNK_BYTES]


def test_the_writer_thread_takes_over_what_another_thread_could_not_write(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when that finds out after the writer thread has seen that nothing else is left."""
    payload = Payload(ranks.shared[0].slots, chunks=1)
    write, writing, go_on = payload.write, threading.Event(), threading.Event()

    def slow_and_full_at_first(frame: Parts) -> bool:
        if writing.is_set():
            return write(frame)
        writing.set()
        return not go_on.wait(WAIT_S)

    monkeypatch.setattr(payload, "write", slow_and_full_at_first)
    threads = [threading.Thread(target=payload.sender.advance)]
    threads[0].start()
    assert writing.wait(WAIT_S)
    threads.append(threading.Thread(target=payload.write_rest))
    threads[1].start()
    threads[1].join(0.1)
    go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert payload.numbers() == [0]
    assert payload.outcomes == [CHUNK_BYTES]


def test_who_is_told_that_a_chunk_is_written_may_call_the_rest_off(ranks: Ranks) -> None:
    """The writer thread is at it at the same time."""
    cancelled = threading.Event()

    def call_off(_: int) -> None:
        if threading.current_thread() is visitor:
            at_work.wait(WAIT_S)
            payload.sender.cancel()
            cancelled.set()

    payload = Payload(ranks.shared[0].slots, chunks=4, written=call_off)
    at_work, job_ended = threading.Event(), threading.Event()
    visitor = threading.Thread(target=payload.sender.advance, daemon=True)
    job = payload.hand_over()

    def write_some() -> None:
        with job.writing:  # as the writer thread does
            at_work.set()
            payload.write_rest()
        job_ended.set()

    visitor.start()
    threading.Thread(target=write_some, daemon=True).start()
    assert cancelled.wait(WAIT_S)
    assert job_ended.wait(WAIT_S)


@pytest.mark.parametrize("is_shared", [True, False])
def test_nothing_reads_the_payload_when_it_is_called_off(ranks: Ranks, is_shared: bool) -> None:
    slots = copy(ranks.shared[0].slots) if is_shared else None
    payload = Payload(slots)
    read: list[weakref.ref[Any]] = [weakref.ref(one) for one in (payload.data, slots) if one is not None]
    del payload.data, slots
    samples = payload.sender.samples(lambda: False)
    next(samples)
    assert all(one() is not None for one in read)
    payload.sender.cancel()
    assert list(samples) == []
    assert not payload.sender.advance()
    assert (payload.sent, payload.outcomes) == ([], [])
    assert all(one() is None for one in read)


# Whoever waits sends meanwhile


def link_with(
    *pushing: ChunkSender, shared: SharedMemoryTransport | None = None, wake_sender: Callable[[], None] = lambda: None
) -> GroupLink:
    """One that has these to push, and is not on any bus."""
    sender = SimpleNamespace(wake=wake_sender)
    port: Any = SimpleNamespace(needs_crc=False, open_writer=lambda *_, **__: None, sender=sender)
    link = GroupLink(port, "world", Identity(0, 1), 1, shared)
    link._pushing.extend(pushing)  # noqa: SLF001 - send() would make senders whose frames go over DDS
    return link


def test_who_pushes_goes_on_with_the_next_payload(ranks: Ranks) -> None:
    payloads = [Payload(ranks.shared[0].slots), Payload(ranks.shared[0].slots)]
    link = link_with(*(payload.sender for payload in payloads))
    assert link.push()
    assert [payload.outcomes for payload in payloads] == [[3 * CHUNK_BYTES]] * 2
    assert link.idle


def test_payloads_take_turns_for_the_slots(ranks: Ranks) -> None:
    """Ranks hold the slots of a chunk until it has come from all: one payload must not take them from the others."""
    payloads = [Payload(ranks.shared[0].slots, chunks=SLOTS) for _ in range(2)]
    link = link_with(*(payload.sender for payload in payloads))
    assert link.push()
    assert [len(payload.sent) for payload in payloads] == [SLOTS // 2] * 2
    assert not link.push()


@pytest.mark.parametrize("is_left", [True, False])
def test_who_has_pushed_wakes_the_writer_thread_if_something_is_left_when_he_goes(is_left: bool) -> None:
    ranks, woken = Ranks(), list[int]()
    payload = Payload(ranks.shared[0].slots)
    link = link_with(*[payload.sender] * is_left, shared=ranks.shared[0], wake_sender=lambda: woken.append(1))
    link.poll_inline(lambda: True, time.monotonic() + WAIT_S)
    assert woken == [1] * is_left


def test_a_payload_whose_reader_gets_no_more_slots_does_not_hold_up_the_next_one() -> None:
    slots = Ranks(3).shared[0].slots
    payloads = [Payload(slots, chunks=SLOTS, to=to) for to in (1, 2)]
    link = link_with(*(payload.sender for payload in payloads))
    while payloads[0].sender.advance():
        pass
    assert link.push()
    assert [len(payload.sent) for payload in payloads] == [SLOTS - 1, 1]


def test_an_error_while_pushing_ends_that_payload_alone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Parts) -> bool:
        raise BusError("DDS write returned -1")

    ill, well = Payload(ranks.shared[0].slots), Payload(ranks.shared[0].slots)
    monkeypatch.setattr(ill, "write", broken)
    link = link_with(ill.sender, well.sender)
    while link.push():
        pass
    assert [type(outcome) for outcome in ill.outcomes] == [BusError]
    assert well.outcomes == [3 * CHUNK_BYTES]
    assert link.idle


def test_payloads_that_are_through_are_forgotten_also_when_two_threads_do_so(ranks: Ranks) -> None:
    class Raced(deque[Any]):
        """The other thread takes one just after this one has looked."""

        other: Callable[[], None] | None = None

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            other, self.other = self.other, None
            if other is not None:
                other()
            return found

    done, left = Payload(ranks.shared[0].slots), Payload(ranks.shared[0].slots)
    done.sender.cancel()
    entries = [done.sender, left.sender]
    for count in (1, 2):
        link = link_with()
        raced = link._pushing = Raced(entries[:count])  # noqa: SLF001 - between two steps of the other thread
        raced.other = raced.popleft
        link._forget_done()  # noqa: SLF001 - send() does so, and then adds one
        assert list(raced) == entries[1:count]


class SlowLink:
    """Sends at once, on the thread of the call, and takes its time."""

    def __init__(self) -> None:
        self.sending, self.go_on, self.sent = threading.Event(), threading.Event(), threading.Event()

    def send(self, key: OperationKey, outgoing: OutgoingPart, finished: Callable[[int | Exception], None]) -> None:
        self.sending.set()
        self.go_on.wait(WAIT_S)
        self.sent.set()
        finished(1)


class Sends(Operation):
    def post(self) -> None:
        self.send(None, 0, np.zeros(1, np.uint8))


def test_an_operation_that_fails_while_it_sends_at_once_has_let_go_of_its_memory() -> None:
    link, operation, had_sent = SlowLink(), Sends("sends", 0, 2), []

    def fail() -> None:
        operation.fail(TimeoutError())
        had_sent.append(link.sent.is_set())

    threads = [threading.Thread(target=operation.begin, args=(link,)), threading.Thread(target=fail)]
    threads[0].start()
    assert link.sending.wait(WAIT_S)
    threads[1].start()
    threads[1].join(0.1)
    link.go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert had_sent == [True]

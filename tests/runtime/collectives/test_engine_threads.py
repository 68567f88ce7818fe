"""Collectives that several threads start, feed and end at once."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from memory_link import GROUP_ID, INCARNATION, MAX_BYTES

from gradbus.runtime.collectives import data_movement
from gradbus.runtime.collectives.arithmetic import Arithmetic
from gradbus.runtime.collectives.engine import Engine, wire_name
from gradbus.runtime.collectives.operation import Finished, Operation, OperationKey, OutgoingPart
from gradbus.runtime.collectives.reductions import all_reduce
from gradbus.runtime.errors import PeerLost
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import FrameKey, Kind

WORLD, THREADS, CALLS = 3, 4, 30


class QueueLink:
    """Frames go straight into the queues of the others, whose receive threads take them out."""

    def __init__(self, rank: int, queues: list[queue.SimpleQueue[bytes | None]]) -> None:
        self.rank = rank
        self.queues = queues

    def send(self, key: OperationKey, outgoing: OutgoingPart, finished: Finished) -> None:
        to, part, payload, signature, meta, only, written = outgoing
        frame_key = FrameKey(
            Kind.COLLECTIVE,
            GROUP_ID,
            key.round_id,
            self.rank,
            INCARNATION + self.rank,
            key.call,
            wire_name(key.name, signature, meta),
            part,
        )
        size = 0
        for head, data in frames.split(frame_key, payload, world=len(self.queues), only=only):
            for other in range(len(self.queues)) if to is None else [to]:
                if other != self.rank:
                    self.queues[other].put(head + bytes(data))
            size += len(data)
        for number in only if only is not None else range(frames.chunk_count(len(payload))):
            if written is not None:
                written(number)
        finished(size)


@contextmanager
def engines() -> Iterator[list[Engine]]:
    """Engines of all ranks, each with a receive thread. Threads take turns a thousand times more often than usual."""
    queues: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(WORLD)]
    made = []
    for rank in range(WORLD):
        made.append(Engine("g", rank, WORLD, QueueLink(rank, queues), early_bytes=1 << 24, early_age_s=60.0))
        made[rank].set_members(GROUP_ID, {other: INCARNATION + other for other in range(WORLD)})

    def receive(rank: int) -> None:
        while (data := queues[rank].get()) is not None:
            made[rank].receive(frames.parse(data))

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in range(WORLD)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    try:
        for thread in threads:
            thread.start()
        yield made
    finally:
        sys.setswitchinterval(before)
        for box in queues:
            box.put(None)
        for thread in threads:
            thread.join(20)


def in_threads(work: Callable[[int, int], None]) -> None:
    """``work(rank, thread)``, all at once."""
    threads = [threading.Thread(target=work, args=(rank, number)) for rank in range(WORLD) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def wait_for(operations: list[Operation]) -> None:
    for operation in operations:
        ended = threading.Event()
        operation.on_end.append(lambda _, ended=ended: ended.set())  # type: ignore[misc]
        assert operation.done or ended.wait(30), f"rank {operation.rank} waits for {operation.missing}"
        if operation.error is not None:
            raise operation.error


def settle(ranks: list[Engine]) -> None:
    """An operation says that it is done just before its engine has forgotten it, on the thread that ended it."""
    until_s = time.monotonic() + 20
    while any(engine.pending for engine in ranks) and time.monotonic() < until_s:
        time.sleep(0.001)


def test_calls_of_many_threads_at_once_all_end_with_the_right_values_and_counts() -> None:
    results: list[Any] = []
    with engines() as ranks:

        def work(rank: int, number: int) -> None:
            mine: list[Operation] = []
            for call in range(CALLS):
                gather = data_movement.AllGatherOperation(bytes([rank, number, call]), rank, WORLD, MAX_BYTES)
                total = all_reduce(
                    torch.full((5,), rank + call), None, Arithmetic(torch.int64, "sum"), "shards", rank, WORLD
                )
                shared = data_movement.AllGatherOperation(bytes([rank]), rank, WORLD, MAX_BYTES)
                for operation, name in ((gather, f"gather {number}"), (total, f"sum {number}"), (shared, "shared")):
                    ranks[rank].start(operation, name, 0)
                    mine.append(operation)
            wait_for(mine)
            for call, (gather, total, shared) in enumerate(zip(*[iter(mine)] * 3, strict=True)):
                assert gather.value == [bytes([other, number, call]) for other in range(WORLD)]
                assert total.value.tolist() == [sum(range(WORLD)) + WORLD * call] * 5
                assert shared.value == [bytes([other]) for other in range(WORLD)]
            results.append(number)

        in_threads(work)
        assert len(results) == WORLD * THREADS
        calls = THREADS * CALLS
        settle(ranks)
        for engine in ranks:
            assert (engine.pending, engine.early_bytes) == (0, 0)
            assert not engine.dropped
        # Each gathers 3 bytes and 1 byte, and adds up shards of 2, 2 and 1 numbers of 8 bytes.
        assert [engine.traffic.received_bytes for engine in ranks] == [
            calls * (8 + 8 * (2 * 2 + 3)),
            calls * (8 + 8 * (2 * 2 + 3)),
            calls * (8 + 8 * (2 * 1 + 4)),
        ]
        assert [engine.traffic.sent_bytes for engine in ranks] == [
            calls * (4 + 8 * (3 + 2)),
            calls * (4 + 8 * (3 + 2)),
            calls * (4 + 8 * (4 + 1)),
        ]


@pytest.mark.parametrize("repetition", range(5))
def test_a_rank_lost_while_threads_start_collectives_ends_every_one_of_them(repetition: int) -> None:
    """Whether the loss comes before, while or after a collective is started: none is forgotten."""
    del repetition
    with engines() as ranks:
        lose = threading.Barrier(THREADS + 1)
        started: list[Operation] = []

        def work(number: int) -> None:
            lose.wait()
            for call in range(CALLS):
                operation = data_movement.AllGatherOperation(b"", 0, WORLD, MAX_BYTES)
                ranks[0].start(operation, f"{number}", call)
                started.append(operation)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        lose.wait()
        ranks[0].lose(2, "its process is gone")
        for thread in threads:
            thread.join(30)
        assert len(started) == THREADS * CALLS
        assert {type(operation.error) for operation in started} == {PeerLost}
        assert ranks[0].pending == 0

"""How collectives end in the engine: done, failed, called off, or with ranks that are lost or leave."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from memory_link import INCARNATION, MAX_BYTES, MemoryNet, frame, gather, net_of

from gradbus.runtime.collectives import data_movement, engine
from gradbus.runtime.collectives.arithmetic import Arithmetic
from gradbus.runtime.collectives.data_movement import NewPayload
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.reductions import (
    ALGORITHMS,
    Algorithm,
    ReduceScatterOperation,
    all_reduce,
    shard_bounds,
)
from gradbus.runtime.errors import BusClosed, CollectiveError, PeerLost, WriteTimeout
from gradbus.runtime.wire import frames

SUM = Arithmetic(torch.float32, "sum")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_collective_that_fails_leaves_nothing_behind(algorithm: Algorithm) -> None:
    """Not in the engine, and not in memory: neither its buffers nor frames of the others."""
    size = frames.CHUNK_BYTES + 40
    net = net_of(3, inline=0.0)
    tensors = [torch.ones(size // 4) for _ in range(3)]
    operations = [all_reduce(tensors[rank], None, SUM, algorithm, rank, 3) for rank in (0, 1)]
    for operation in operations:
        net.start(operation)
    for _ in range(3):
        net.step()
    for operation in operations:
        missing = operation.missing
        operation.fail(TimeoutError())
        assert operation.missing == missing != ()
        operation.fail(ValueError())  # too late
        assert isinstance(operation.error, TimeoutError)
    assert all(job.cancelled for job in net.jobs)
    net.settle()
    net.assert_nothing_is_left(but_early_frames_of=2)
    watched = [weakref.ref(thing) for thing in (*operations, *tensors)]
    del operation, operations, tensors
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_a_collective_that_is_done_holds_neither_its_payload_nor_frames() -> None:
    net = net_of(2)
    payload = np.ones(1000, np.uint8)
    operations = [data_movement.AllGatherOperation(payload.data, rank, 2, MAX_BYTES) for rank in range(2)]
    net.run(*operations)
    watched = [weakref.ref(payload), *map(weakref.ref, operations)]
    del payload, operations
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: data_movement.AllGatherOperation(b"", 0, 2, MAX_BYTES),
        lambda: data_movement.BroadcastOperation(None, 1, 0, 2, MAX_BYTES),
        lambda: data_movement.Gather(b"", 0, 0, 2, MAX_BYTES),
        lambda: data_movement.Scatter(None, 1, 0, 2, MAX_BYTES),
        lambda: data_movement.AllToAll([b"", b""], 0, 2, MAX_BYTES),
        lambda: data_movement.Receive(1, 0, 2, MAX_BYTES),
    ],
)
def test_one_that_has_failed_lets_go_of_what_has_come_so_far_although_its_handle_lives(
    make: Callable[[], Operation], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    class Watched(NewPayload):
        def __init__(self, max_bytes: int) -> None:
            super().__init__(max_bytes)
            made.append(weakref.ref(self))

    monkeypatch.setattr(data_movement, "NewPayload", Watched)
    operation = net_of(2).start(make())
    assert [ref() is None for ref in made] == [False]
    operation.fail(TimeoutError())
    gc.collect()
    assert [ref() is None for ref in made] == [True]


def test_no_more_collectives_than_the_bound_may_be_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_PENDING", 3)
    monkeypatch.setattr(engine, "MIN_PENDING", 1)
    net = net_of(2)
    first, *others = [net.start(gather(0), f"{number}") for number in range(3)]
    assert [operation.error for operation in (first, *others)] == [None] * 3
    refused = net.start(gather(0), "3")
    with pytest.raises(CollectiveError, match="3 collectives of group 'group' are pending"):
        raise refused.error  # type: ignore[misc]
    first.fail(TimeoutError())
    assert net.start(gather(0), "4").error is None


def test_data_that_cannot_be_sent_fails_the_collective_with_the_reason_of_the_link() -> None:
    net = net_of(2)
    net.links[0].refuses = WriteTimeout("topic", 30.0)
    operation = net.start(gather(0, b"payload"))
    net.settle()
    assert operation.error is net.links[0].refuses
    assert net.engines[0].pending == 0


def test_bytes_are_counted_once_although_a_collective_ends_while_it_is_being_started() -> None:
    net = net_of(2)
    operation = gather(0, b"1234")

    class Callbacks(list[Any]):
        """While the engine asks to be told of the end, the last frame comes on the receive thread."""

        def insert(self, *arguments: Any) -> None:
            super().insert(*arguments)
            net.engines[0].receive(frame())

    operation.on_end = Callbacks()
    net.start(operation)
    assert operation.value == [b"1234", b"payload"]
    traffic = net.engines[0].traffic
    assert (traffic.sent_bytes, traffic.received_bytes) == (4, 7)


def test_what_was_sent_of_a_payload_counts_once_although_the_collective_fails() -> None:
    net = net_of(2, inline=0.0)
    operation = net.start(gather(0, bytes(3 * frames.CHUNK_BYTES)))
    (job,) = net.jobs
    assert net.write(job)
    assert net.write(job)
    operation.fail(TimeoutError())
    net.settle()
    assert net.engines[0].traffic.sent_bytes == operation.traffic.sent_bytes == 2 * frames.CHUNK_BYTES


def test_one_that_has_failed_before_it_is_started_is_counted_and_sends_nothing_and_leaves_nothing() -> None:
    net = net_of(2)
    net.start(gather(1, b"early"))
    net.settle()
    operation = gather(0, b"1234")
    operation.fail(TimeoutError())
    net.start(operation)
    assert (net.jobs, net.flying) == ([], [])
    assert (net.engines[0].pending, net.engines[0].early_bytes, operation.missing) == (0, 0, ())
    assert net.start(gather(0)).key.call == 1


# Ranks that are lost, or leave


def test_a_lost_rank_ends_what_needs_it_now_and_later_and_nothing_else() -> None:
    net = net_of(3)
    pending = net.start(gather(0, world=3), "all")
    between = net.start(data_movement.Send(b"for one", 1, 0, 3), "between")
    net.engines[0].lose(2, "its process is gone")
    net.engines[1].lose(2, "its process is gone")
    for operation in (
        pending,
        net.start(gather(0, world=3), "later"),
        net.start(data_movement.Receive(2, 0, 3, 9), "from"),
    ):
        assert isinstance(operation.error, PeerLost)
        assert operation.error.ranks == (2,)
        assert operation.error.reasons == {2: "its process is gone"}
    assert net.engines[0].gone == {2: "its process is gone"}
    net.start(data_movement.Receive(0, 1, 3, MAX_BYTES), "between")
    net.settle()
    assert (between.done, between.error) == (True, None)


def test_a_rank_that_leaves_in_order_ends_only_what_it_still_owes_something_for() -> None:
    net = net_of(3)
    owed, given_ = net.start(gather(0, world=3), "owed"), net.start(gather(0, world=3), "given")
    net.start(gather(2, b"mine", world=3), "given")
    net.settle()
    net.engines[0].leave(2, "left: done")
    assert isinstance(owed.error, PeerLost)
    assert given_.missing == (1,)
    net.start(gather(1, world=3), "given")
    net.settle()
    assert given_.value == [b"", b"", b"mine"]
    later = net.start(gather(0, world=3), "later")
    assert isinstance(later.error, PeerLost)
    assert later.error.reasons == {2: "left: done"}
    net.engines[1].leave(2, "left: done")


def test_what_a_rank_gave_before_it_left_in_order_still_counts_for_a_call_that_comes_later() -> None:
    """Of two rows rank 2 gets none: it has given its part and is done before rank 0 calls at all."""
    net = net_of(3)
    bounds = shard_bounds(2, 3)
    calls = [
        ReduceScatterOperation(torch.ones(2), torch.empty(bounds[r + 1] - bounds[r]), bounds, SUM, r, 3)
        for r in range(3)
    ]
    for call in calls[1:]:
        net.start(call)
    net.settle()
    assert calls[2].done
    for here in net.engines[:2]:
        here.leave(2, "left: done")
    net.start(calls[0])
    net.settle()
    assert [call.value.tolist() for call in calls] == [[3.0], [3.0], []]


def test_a_closed_group_ends_everything_and_takes_nothing_more() -> None:
    net = net_of(2)
    net.start(gather(0, b"early"), "early")
    net.settle()
    here, error = net.engines[1], BusClosed("left")
    pending = net.start(gather(1))
    here.close(error)
    assert pending.error is error
    assert net.start(gather(1), "later").error is error
    here.receive(frame(sender=0, incarnation=INCARNATION, transfer=5))
    assert here.dropped == {"closed": 1}
    early_frames = len(here._unexpected)  # noqa: SLF001 - one without payload shows in no count of bytes
    assert (here.pending, here.early_bytes, early_frames) == (0, 0, 0)


@pytest.mark.parametrize("large_bytes", [0, 1 << 20])
def test_who_gets_nothing_but_cannot_give_what_it_has_names_those_who_do_not_take_it(large_bytes: int) -> None:
    """Of two rows rank 2 gets none. What is large waits until the others have called; one of them leaves meanwhile."""
    net = net_of(3, large_bytes=large_bytes)
    bounds = shard_bounds(2, 3)
    call = net.start(ReduceScatterOperation(torch.ones(2), torch.empty(0), bounds, SUM, 2, 3))
    net.settle()
    if large_bytes:
        assert call.done
        return
    assert call.missing == (0, 1)
    net.engines[2].leave(1, "left: done")
    assert isinstance(call.error, PeerLost)
    assert call.error.ranks == (1,)


def test_a_collective_that_a_signal_has_interrupted_ends_with_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk counts as here before it is in its place: it would never be put there again."""

    def interrupted(self: NewPayload, seq: int, offset: int, data: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(NewPayload, "chunk", interrupted)
    net = MemoryNet(2)
    calls = [net.start(gather(0)), net.start(gather(1))]
    with pytest.raises(KeyboardInterrupt):
        net.settle()
    (error,) = [call.error for call in calls if call.error is not None]
    assert isinstance(error, CollectiveError)
    assert "KeyboardInterrupt came while a frame was put in its place" in str(error)

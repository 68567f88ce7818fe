"""The engine alone: frames that come too early, too late, twice or from elsewhere, and calls that do not match."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from memory_link import GROUP_ID, INCARNATION, MAX_BYTES, frame, gather, net_of

from gradbus.runtime.collectives import data_movement, engine
from gradbus.runtime.collectives.arithmetic import Arithmetic
from gradbus.runtime.collectives.data_movement import Receive, Send
from gradbus.runtime.collectives.engine import wire_name
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.reductions import all_reduce
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import Flags, Frame

SUM = Arithmetic(torch.float32, "sum")


# Frames that come before the call


def test_frames_that_come_before_the_call_are_kept_for_it() -> None:
    net = net_of(2)
    first = net.start(gather(0, b"zero"))
    net.settle()
    assert net.engines[1].early_bytes == 4
    assert not first.done
    second = net.start(gather(1, b"one"))
    net.settle()
    assert (first.value, second.value) == ([b"zero", b"one"], [b"zero", b"one"])
    net.assert_nothing_is_left()


def test_early_frames_beyond_the_bound_are_dropped_and_the_call_for_them_fails_at_once() -> None:
    net = net_of(2, early_bytes=10)
    net.start(gather(0, b"8 bytes."), "fits")
    net.settle()
    net.start(gather(0, b"too many"), "does not fit")
    net.settle()
    assert net.engines[1].early_bytes == 8
    assert net.engines[1].dropped == {"early": 1}
    refused = net.start(gather(1), "does not fit")
    with pytest.raises(CollectiveError, match=r"'does not fit' came before this call.*early_bytes"):
        raise refused.error  # type: ignore[misc]
    assert net.start(gather(1), "fits").value == [b"8 bytes.", b""]
    assert net.start(gather(1), "does not fit").error is None  # said once
    assert net.engines[1].early_bytes == 0


def test_what_is_dropped_while_a_call_starts_fails_it_as_well() -> None:
    """Until a collective is set up its frames are put aside, too; where there is no room, it must not wait for them."""
    net = net_of(2, early_bytes=10)
    here, send = net.engines[0], net.links[0].send
    here.receive(frame(name=wire_name("another", "all_gather bytes", "")))
    assert here.early_bytes == len("payload")

    def send_while_a_frame_comes(*arguments: Any, **options: Any) -> Any:
        here.receive(frame())
        return send(*arguments, **options)

    net.links[0].send = send_while_a_frame_comes  # type: ignore[method-assign]
    operation = net.start(gather(0))
    assert here.dropped == {"early": 1}
    with pytest.raises(CollectiveError, match="no room was left"):
        raise operation.error  # type: ignore[misc]
    assert here.pending == 0


def test_frames_that_nobody_came_for_in_time_make_room_for_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(engine, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    net = net_of(2, early_bytes=10, early_age_s=60.0)
    net.start(gather(0, b"8 bytes."), "old")
    net.settle()
    now[0] += 59
    net.start(gather(0, b"8 bytes."), "newer")
    net.settle()
    assert net.engines[1].dropped == {"early": 1}
    now[0] += 2
    net.start(gather(0, b"8 bytes."), "newest")
    net.settle()
    assert net.engines[1].dropped == {"early": 2}  # the one that nobody came for counts as well
    assert net.engines[1].early_bytes == 8
    assert net.start(gather(1), "newest").value == [b"8 bytes.", b""]


def test_the_number_of_early_frames_is_bounded_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_EARLY_FRAMES", 3)
    net = net_of(2)
    for number in range(5):
        net.start(gather(0), f"{number}")
        net.settle()
    assert net.engines[1].dropped == {"early": 2}
    assert [net.start(gather(1), f"{number}").error is None for number in range(5)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_far_ahead_fill_no_more_than_half_of_the_room(seed: int) -> None:
    """In whatever order the late one calls then: what waits at the others comes when it is asked for."""
    world, early_bytes = 4, 1 << 17
    net = net_of(world, seed=seed, early_bytes=early_bytes, share_bytes=early_bytes // (2 * (world - 1)))
    names = [f"{number}" for number in range(300)]
    started = [net.start(gather(rank, bytes([rank]) * 1000, world), name) for name in names for rank in (1, 2, 3)]
    net.settle()
    late = net.engines[0]
    assert 0 < late.early_bytes <= early_bytes // 2
    net.rng.shuffle(names)
    started += [net.start(gather(0, b"late", world), name) for name in names]
    net.settle()
    for operation in started:
        assert operation.value == [b"late", *(bytes([rank]) * 1000 for rank in (1, 2, 3))]
    assert [engine.dropped["early"] for engine in net.engines] == [0] * world
    net.assert_nothing_is_left()


# Frames that tell of some pieces in shared memory


@pytest.mark.parametrize("early", [False, True])
def test_each_piece_is_let_go_of_before_the_next_one_is_used(early: bool) -> None:
    """Its place in memory is wanted again. What comes before the call is kept until then."""
    net = net_of(2, early_bytes=3 * frames.CHUNK_BYTES)
    here, sizes = net.engines[0], (frames.CHUNK_BYTES, frames.CHUNK_BYTES, 1)
    alive: list[int] = []

    def resolve_shared(told: Frame) -> list[Frame]:
        pieces = []
        for seq, size in enumerate(sizes):
            data = np.full(size, seq, np.uint8)
            alive.append(seq)
            weakref.finalize(data, alive.remove, seq)
            pieces.append(told._replace(seq=seq, offset=seq * sizes[0], size=size, data=data.data))
        return pieces

    here.resolve_shared = resolve_shared
    told = frame()._replace(flags=int(Flags.SHARED), seq_cnt=len(sizes), total_bytes=sum(sizes), size=sizes[0])
    if early:
        here.receive(told)
        assert here.early_bytes == sum(sizes)
    operation = net.start(gather(0))
    if not early:
        seen, feed = [], operation.feed

        def fed(*arguments: Any) -> None:
            seen.append(list(alive))
            feed(*arguments)

        operation.feed = fed  # type: ignore[method-assign]
        here.receive(told)
        assert seen == [[0, 1, 2], [1, 2], [2]]
    assert operation.value[1] == bytes(sizes[0]) + bytes([1]) * sizes[1] + bytes([2])
    assert alive == []


# Frames that are not used


def test_frames_of_a_collective_that_has_ended_here_are_stale_and_counted() -> None:
    net = net_of(2)
    late = net.start(gather(1), round_id=7)
    late.fail(TimeoutError())
    net.start(gather(0, b"too late"), round_id=7)
    net.settle()
    assert net.engines[1].dropped == {"stale": 1}
    assert net.engines[1].early_bytes == 0


def test_frames_that_come_twice_are_counted_and_change_nothing() -> None:
    net = net_of(3)
    operation = net.start(gather(0, world=3))
    for _ in range(3):
        net.engines[0].receive(frame(world=3))
    assert operation.missing == (2,)
    assert operation.traffic.received_bytes == 7
    net.engines[0].receive(frame(world=3, sender=2, incarnation=INCARNATION + 2))
    assert operation.value == [b"", b"payload", b"payload"]
    net.engines[0].receive(frame(world=3))
    assert net.engines[0].dropped == {"repeat": 2, "stale": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"job": GROUP_ID + 1}, "foreign group"),
        ({"job": 0}, "foreign group"),
        ({"incarnation": INCARNATION + 2}, "foreign sender"),  # of a former or later start
        ({"sender": 2}, "foreign sender"),
        ({"world": 3}, "foreign sender"),
    ],
)
def test_frames_of_another_group_sender_or_start_are_dropped_and_counted(changes: dict[str, Any], reason: str) -> None:
    net = net_of(2)
    operation = net.start(gather(0))
    net.engines[0].receive(frame(**changes))
    assert net.engines[0].dropped == {reason: 1}
    assert operation.missing == (1,)
    net.engines[0].receive(frame())
    assert operation.value == [b"", b"payload"]


def test_before_the_group_is_known_no_frame_is_taken() -> None:
    net = net_of(2)
    fresh = engine.Engine("group", 0, 2, net.links[0], early_bytes=100, early_age_s=1.0)
    fresh.receive(frame())
    fresh.receive(frame(job=0))
    assert fresh.dropped == {"foreign group": 2}


def test_a_group_that_forms_anew_takes_no_frames_of_the_former_one() -> None:
    net = net_of(2)
    here = net.engines[0]
    here.receive(frame())
    here.set_members(GROUP_ID + 1, {0: INCARNATION, 1: INCARNATION + 9})
    assert here.early_bytes == 0
    operation = net.start(gather(0))
    assert operation.missing == (1,)
    here.receive(frame())
    assert here.dropped == {"foreign group": 1}
    here.receive(frame(job=GROUP_ID + 1, incarnation=INCARNATION + 9))
    assert operation.value == [b"", b"payload"]


# Ranks that do not call the same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: gather(0), lambda: data_movement.Barrier(1, 2)),
        (lambda: gather(0), lambda: data_movement.AllGatherOperation(torch.ones(2), 1, 2, MAX_BYTES)),
        (
            lambda: all_reduce(torch.ones(3), None, SUM, "direct", 0, 2),
            lambda: all_reduce(torch.ones(4), None, SUM, "direct", 1, 2),
        ),
        (
            lambda: all_reduce(torch.ones(3), None, SUM, "direct", 0, 2),
            lambda: all_reduce(torch.ones(3), None, Arithmetic(torch.float32, "mean", 2), "direct", 1, 2),
        ),
        (
            lambda: all_reduce(torch.ones(3), None, SUM, "direct", 0, 2),
            lambda: all_reduce(torch.ones(3), None, SUM, "shards", 1, 2),
        ),
        (
            lambda: all_reduce(torch.ones(3), None, SUM, "direct", 0, 2),
            lambda: all_reduce(torch.ones(3, dtype=torch.int32), None, Arithmetic(torch.int32, "sum"), "direct", 1, 2),
        ),
        (
            lambda: data_movement.BroadcastOperation(b"a", 0, 0, 2, MAX_BYTES),
            lambda: data_movement.BroadcastOperation(b"b", 1, 1, 2, MAX_BYTES),
        ),
    ],
)
def test_ranks_that_do_not_call_the_same_are_told_of_both_calls(
    one: Callable[[], Operation], other: Callable[[], Operation]
) -> None:
    net = net_of(2)
    operations = [net.start(one()), net.start(other())]
    net.settle()
    for operation, its_peer in zip(operations, operations[::-1], strict=True):
        assert isinstance(operation.error, CollectiveError)
        text = f"'x': rank {its_peer.rank} calls {its_peer.signature!r} where this rank calls {operation.signature!r}"
        assert text in str(operation.error)
    net.assert_nothing_is_left()


def test_a_payload_larger_than_allowed_is_refused_before_memory_is_taken() -> None:
    for payload in (bytes(101), torch.zeros(101, dtype=torch.uint8)):
        net = net_of(2)
        receiver = net.start(data_movement.Receive(1, 0, 2, 100))
        net.start(data_movement.Send(payload, 0, 1, 2))
        net.settle()
        with pytest.raises(CollectiveError, match=r"rank 1 .*101.*100 are accepted \(max_payload_bytes\)"):
            raise receiver.error  # type: ignore[misc]


def test_a_part_that_nobody_expects_fails_the_collective_and_names_its_sender() -> None:
    net = net_of(2)
    operation = net.start(gather(0))
    net.engines[0].receive(frame(part=3))
    with pytest.raises(CollectiveError, match="rank 1 sent part 3"):
        raise operation.error  # type: ignore[misc]


# Names


@pytest.mark.parametrize(
    ("name", "round_id"),
    [("", 0), ("x" * 121, 0), ("ü" * 61, 0), ("a\0b", 0), ("\ud800", 0), ("x", -1), ("x", 1 << 32)],
)
def test_a_name_or_round_that_cannot_be_sent_is_refused_at_the_call(name: str, round_id: int) -> None:
    net = net_of(2)
    with pytest.raises(ValueError, match=r"name|round_id|surrogates"):
        net.start(gather(0), name, round_id)
    net.assert_nothing_is_left()


def test_the_longest_names_reach_the_other_side_with_the_longest_signatures() -> None:
    name, shape = "ü" * 60, (11, 1, 13, 1, 17, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    net = net_of(2)
    tensor = torch.ones(shape, dtype=torch.float8_e4m3fnuz)
    results = net.run(
        *(data_movement.BroadcastOperation(tensor.clone(), 0, rank, 2, MAX_BYTES) for rank in range(2)),
        name=name,
        round_id=2**32 - 1,
    )
    assert results[1].shape == shape


def test_calls_of_one_name_are_matched_by_their_number() -> None:
    net = net_of(2)
    ahead = [net.start(gather(0, bytes([number]))) for number in range(5)]
    net.settle()
    behind = [net.start(gather(1, bytes([10 + number]))) for number in range(5)]
    net.settle()
    for number, (one, other) in enumerate(zip(ahead, behind, strict=True)):
        assert one.value == other.value == [bytes([number]), bytes([10 + number])]


def test_messages_to_one_rank_do_not_part_the_counts_of_those_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many names are counted, and a rank that sends much has more of them than those that it sends little."""
    monkeypatch.setattr(engine, "MAX_COUNTED_NAMES", 8)
    monkeypatch.setattr(engine, "MIN_PAIR_NAMES", 2)
    net = net_of(3)

    def message(name: str, to: int) -> Any:
        net.start(Send(name.encode(), to, 0, 3), name)
        received = net.start(Receive(0, to, 3, MAX_BYTES), name)
        net.settle()
        assert received.done, f"{name} to rank {to}: the two ends count the calls of this name differently"
        return received.value

    assert message("x", 2) == b"x"
    assert [message(f"other {number}", 1) for number in range(9)] == [b"other %d" % number for number in range(9)]
    for rank in range(3):
        net.start(gather(rank, world=3))
    net.settle()
    assert message("x", 2) == b"x"
    assert [message(name, 2) for name in ("y", "z", "x")] == [b"y", b"z", b"x"]  # beyond the limit, at both ends
    net.assert_nothing_is_left()


def test_a_call_that_failed_counts_as_one_so_that_the_next_ones_still_match() -> None:
    net = net_of(2)
    net.start(gather(0, b"a")).fail(TimeoutError())
    again = net.start(gather(0, b"b"))
    net.settle()
    first, second = net.start(gather(1, b"c")), net.start(gather(1, b"d"))
    net.settle()
    assert first.value == [b"a", b"c"]  # sent before the other side gave up
    assert second.value == again.value == [b"b", b"d"]

"""Handles: what a collective gives back at once, and how it ends when the others do not come."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bus_helpers import Run
from group_node import as_ranks
from patience import eventually

from gradbus.runtime.collectives import CollectiveHandle, Group
from gradbus.runtime.errors import BarrierTimeout, CollectiveError, CollectiveTimeout

both_loops = pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)


@both_loops
def test_a_handle_says_what_is_owed_and_when_all_is_done(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        if group.rank == 0:
            before_s = time.perf_counter()
            handle = group.all_gather("late", b"1234")
            assert isinstance(handle, CollectiveHandle)
            assert (handle.name, handle.done(), handle.missing) == ("late", False, (1,))
            assert before_s <= handle.started_s <= time.perf_counter()
            assert handle.finished_s is None
            await group.barrier("called")
            assert await handle == [b"1234", b"67"]
            assert (handle.done(), handle.missing) == (True, ())
            assert handle.started_s <= handle.finished_s <= time.perf_counter()
            assert (handle.sent_bytes, handle.received_bytes) == (4, 2)
        else:
            await group.barrier("called")
            await group.all_gather("late", b"67")

    run(lambda: as_ranks(place, 2, script))


@both_loops
def test_a_handle_may_be_awaited_again_and_by_several_at_once(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        handle = group.all_gather("x", bytes([group.rank]))

        async def get() -> list[bytes]:
            return await handle

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(get()) for _ in range(3)]
        assert [task.result() for task in running] == [[b"\0", b"\1"]] * 3
        assert await handle is await handle

    run(lambda: as_ranks(place, 2, script))


@both_loops
def test_a_collective_goes_on_whether_it_is_awaited_or_not(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        out = torch.full((4,), float(group.rank))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a handle that is dropped while it runs warns
            group.all_reduce("nobody waits for it", out, out=out)
        await group.barrier()  # says nothing of the other collective, but that its frames are on their way
        await eventually(lambda: group.stats.pending == 0)
        assert out.tolist() == [1.0] * 4
        await group.barrier("end")

    run(lambda: as_ranks(place, 2, script))


@both_loops
def test_at_the_deadline_a_collective_names_the_silent_ranks_and_leaves_nothing_behind(
    run: Run, place: dict[str, Any]
) -> None:
    async def script(group: Group, limit_s: float) -> tuple[int, ...]:
        named: tuple[int, ...] = ()
        if group.rank != 2:
            start_s = time.monotonic()
            handle = group.all_reduce("x", torch.ones(3), timeout_s=limit_s)
            with pytest.raises(CollectiveTimeout) as caught:
                await handle
            named = caught.value.missing
            assert handle.missing == named
            assert f"'x': still waiting for ranks {list(named)} after {limit_s:g} s" in str(caught.value)
            assert (caught.value.name, caught.value.timeout_s) == ("x", limit_s)
            assert isinstance(caught.value, CollectiveError)
            assert isinstance(caught.value, TimeoutError)
            assert limit_s - 0.01 < time.monotonic() - start_s < limit_s + 10
            with pytest.raises(CollectiveTimeout):
                await handle  # again
            assert handle.done()
            assert group.stats.pending == 0
        await group.barrier("all ranks go on")
        total = await group.all_reduce("y", torch.ones(3))
        assert total.tolist() == [3.0] * 3
        assert group.stats.pending == 0
        return named

    for limit_s in (0.2, 5.0):  # the longer one where those who call did not hear each other within the shorter one
        named = run(lambda limit_s=limit_s: as_ranks(place, 3, lambda group: script(group, limit_s)))
        if named == [(2,), (2,), ()]:
            return
    raise AssertionError(named)


@pytest.mark.parametrize(
    "call",
    [
        lambda group, **limit: group.all_gather("x", b"1", **limit),
        lambda group, **limit: group.broadcast("x", torch.ones(2), root=0, **limit),
        lambda group, **limit: group.broadcast("x", b"1" if group.rank == 0 else None, **limit),
        lambda group, **limit: group.reduce("x", torch.ones(2), root=0, **limit),
        lambda group, **limit: group.reduce("x", torch.ones(2), root=1, **limit),
        lambda group, **limit: group.gather("x", b"1", root=1, **limit),
        lambda group, **limit: group.scatter("x", [b"1", b"2"] if group.rank == 0 else None, **limit),
        lambda group, **limit: group.reduce_scatter("x", torch.ones(2), **limit),
        lambda group, **limit: group.all_to_all("x", [b"1", b"2"], **limit),
        lambda group, **limit: group.send("x", b"1", to=1, **limit),
        lambda group, **limit: group.recv("x", source=1, **limit),
        lambda group, **limit: group.all_gather_object("x", 1, **limit),
        lambda group, **limit: group.all_reduce("x", torch.ones(3 << 20), **limit),  # large: waits for its receiver
        lambda group, **limit: group.all_gather("x", torch.ones(3 << 20), **limit),
    ],
)
def test_every_collective_names_who_does_not_call_it(
    run: Run, place: dict[str, Any], call: Callable[..., CollectiveHandle[Any]]
) -> None:
    async def script(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(CollectiveTimeout) as caught:
                await call(group, timeout_s=0.1)
            assert caught.value.missing == (1,)
            assert group.stats.pending == 0
        await group.barrier()

    run(lambda: as_ranks(place, 2, script))


@both_loops
def test_a_barrier_at_its_deadline_names_who_has_not_come_and_can_be_used_again(
    run: Run, place: dict[str, Any]
) -> None:
    async def script(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(
                BarrierTimeout, match=r"barrier 'b': 1 of 3 ready after 0.1 s, missing \[1, 2\]"
            ) as caught:
                await group.barrier("b", timeout_s=0.1)
            assert (caught.value.missing, caught.value.ready, caught.value.needed) == ((1, 2), 1, 3)
            await group.broadcast("it has given up", b"")
        else:
            await group.broadcast("it has given up")
            assert await group.barrier("b") == (0, 1, 2)
        for _ in range(20):
            assert await group.barrier("b") == (0, 1, 2)

    run(lambda: as_ranks(place, 3, script))


@both_loops
def test_a_cancelled_handle_ends_here_at_once_and_the_others_at_their_deadline(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        if group.rank == 0:
            out = torch.full((3 << 20,), 1.0)
            handle = group.all_reduce("x", out, out=out)
            handle.cancel()
            assert handle.done()
            assert group.stats.pending == 0
            out.fill_(7.0)  # it is ours again
            handle.cancel()
            with pytest.raises(asyncio.CancelledError):
                await handle
            assert handle.missing == (1,)
            await group.barrier("called off")
        else:
            await group.barrier("called off")
            with pytest.raises(CollectiveTimeout) as caught:
                await group.all_reduce("x", torch.ones(3 << 20), timeout_s=0.2)
            assert caught.value.missing == (0,)
        await group.barrier("end")
        if group.rank == 0:
            assert bool((out == 7.0).all())
            assert group.stats.dropped["stale"] >= 1

    run(lambda: as_ranks(place, 2, script))


@both_loops
def test_to_cancel_or_time_out_the_task_that_waits_ends_the_collective(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        if group.rank == 0:
            handle = group.all_gather("x", b"")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await handle
            assert handle.done()
            waiter = asyncio.ensure_future(_get(handle := group.all_gather("y", b"")))
            await asyncio.sleep(0)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            await asyncio.sleep(0)
            assert handle.done()
            assert group.stats.pending == 0
        await group.barrier()

    run(lambda: as_ranks(place, 2, script))


async def _get(handle: CollectiveHandle[Any]) -> Any:
    return await handle


@both_loops
def test_collectives_may_be_started_and_cancelled_in_other_threads(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        handles: list[CollectiveHandle[Any]] = []

        def work() -> None:  # as a hook of the backward pass does, in an order that differs from rank to rank
            numbers = range(20) if group.rank else range(19, -1, -1)
            for number in numbers:
                tensor = torch.full((number,), float(group.rank))
                handles.append(group.all_reduce(f"bucket {number}", tensor, out=tensor, round_id=number))

        thread = threading.Thread(target=work)
        thread.start()
        await asyncio.to_thread(thread.join)
        for handle in handles:
            assert set((await handle).tolist()) <= {3.0}
        if group.rank == 0:
            never = await asyncio.to_thread(lambda: group.all_gather("never", b"", timeout_s=15.0))
            await asyncio.to_thread(never.cancel)
            with pytest.raises(asyncio.CancelledError):
                await never
            late = await asyncio.to_thread(lambda: group.all_gather("never", b"", timeout_s=0.05))
            with pytest.raises(CollectiveTimeout):
                await late
        await group.barrier()
        assert group.stats.pending == 0

    run(lambda: as_ranks(place, 3, script))


@both_loops
def test_names_are_matched_in_any_order_and_may_be_used_again(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        names = [f"n{number}" for number in range(8)][:: 1 if group.rank else -1]
        for step in range(5):
            handles = {name: group.all_gather(name, f"{name} {step} {group.rank}".encode()) for name in names}
            for name in sorted(names):
                assert await handles[name] == [f"{name} {step} {rank}".encode() for rank in range(2)]
        rounds = range(5) if group.rank else range(4, -1, -1)
        by_round = {number: group.all_gather("r", bytes([number]), round_id=number) for number in rounds}
        for number, handle in by_round.items():
            assert await handle == [bytes([number])] * 2

    run(lambda: as_ranks(place, 2, script))


@pytest.mark.parametrize("size", [1000, 3 << 20])
def test_what_was_given_is_let_go_at_the_end_and_the_result_with_its_handle(
    run: Run, place: dict[str, Any], size: int
) -> None:
    """Also by the threads of the bus, which may have nothing else to do for a long time."""

    async def script(group: Group) -> None:
        for call in (
            lambda given: group.all_reduce("x", given),
            lambda given: group.all_gather("x", given),
            lambda given: group.all_reduce("x", given, algorithm="ring"),
            lambda given: group.broadcast("x", given, root=0),
            lambda given: group.all_to_all("x", [given, given]),
            lambda given: group.gather("x", given),
        ):
            given = torch.full((size,), float(group.rank))
            handle = call(given)
            value = await handle
            results = [
                weakref.ref(tensor) for tensor in (value if isinstance(value, list) else [value]) if tensor is not None
            ]
            source = weakref.ref(given)
            filled = value is given
            del given, value
            if not filled:
                await eventually(lambda source=source: source() is None)  # a thread may still be about to return
            del handle
            await eventually(lambda refs=(source, *results): all(ref() is None for ref in refs))
            await group.barrier()

    run(lambda: as_ranks(place, 2, script))


def test_ranks_that_call_different_things_are_told_at_once(run: Run, place: dict[str, Any]) -> None:
    async def script(group: Group) -> None:
        tensor = torch.ones(3 + group.rank)
        with pytest.raises(
            CollectiveError,
            match=rf"'x': rank {1 - group.rank} calls 'all_reduce direct sum .* {4 - group.rank}' where",
        ):
            await group.all_reduce("x", tensor)
        await group.barrier()

    run(lambda: as_ranks(place, 2, script))


def test_an_error_that_nobody_awaits_is_no_reason_for_a_complaint(run: Run, place: dict[str, Any]) -> None:
    complaints: list[dict[str, Any]] = []

    async def script(group: Group) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        handle = group.all_gather("x", b"", timeout_s=0.01)
        await eventually(handle.done)
        await asyncio.sleep(0)
        del handle
        gc.collect()

    run(lambda: as_ranks(place, 2, lambda group: script(group) if group.rank else asyncio.sleep(0.1)))
    assert complaints == []


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda group: group.all_reduce("x", [1.0]), "expected a tensor, got list"),
        (lambda group: group.all_reduce("x", torch.ones(2), op="prod"), "expected one of sum"),
        (lambda group: group.all_reduce("x", torch.ones(2, dtype=torch.int64), op="mean"), "op='sum'"),
        (lambda group: group.all_reduce("x", torch.ones(2), divisor=3), "divisor belongs to op='mean'"),
        (lambda group: group.all_reduce("x", torch.ones(2), op="mean", divisor=0), "divisor must be >= 1"),
        (lambda group: group.all_reduce("x", torch.ones(2), out=torch.ones(3)), "out must be"),
        (lambda group: group.all_reduce("x", torch.ones(2), out=torch.ones(2, dtype=torch.float64)), "out must be"),
        (lambda group: group.all_reduce("x", torch.ones(2), algorithm="tree"), "expected one of auto, direct"),
        (lambda group: group.all_reduce("x", torch.eye(2).to_sparse()), "sparse"),
        (lambda group: group.all_reduce("", torch.ones(2)), "1 to 120 bytes"),
        (lambda group: group.all_reduce("x", torch.ones(2), round_id=-1), "round_id"),
        (lambda group: group.all_reduce("x", torch.ones(2), timeout_s=0), "timeout_s must be > 0"),
        (lambda group: group.all_reduce("x", torch.ones(2), timeout_s=float("nan")), "timeout_s must be > 0"),
        (lambda group: group.reduce("x", torch.ones(2), root=2), "0 .. 1, got 2"),
        (lambda group: group.reduce_scatter("x", torch.tensor(1.0)), "scalar cannot be split"),
        (lambda group: group.all_gather("x", "text"), "expected bytes"),
        (lambda group: group.all_gather("x", 5), "expected bytes"),
        (lambda group: group.broadcast("x", b"1", root=1 - group.rank), "gets the payload of rank"),
        (lambda group: group.broadcast("x", root=group.rank), "must give a payload"),
        (lambda group: group.broadcast("x", b"1", root=-1), "root: expected a rank"),
        (lambda group: group.gather("x", b"1", root=9), "root: expected a rank"),
        (lambda group: group.scatter("x", [b"1"], root=group.rank), "expected 2 payloads"),
        (lambda group: group.scatter("x", [b"1", b"2"], root=1 - group.rank), "all others give None"),
        (lambda group: group.scatter("x", root=group.rank), "all others give None"),
        (lambda group: group.scatter("x", [b"1", torch.ones(1)], root=group.rank), "not mixed"),
        (lambda group: group.all_to_all("x", [b"1"]), "expected 2 payloads"),
        (lambda group: group.all_to_all("x", [b"1", torch.ones(1)]), "not mixed"),
        (lambda group: group.send("x", b"1", to=group.rank), "is this one"),
        (lambda group: group.send("x", b"1", to=2), "to: expected a rank"),
        (lambda group: group.recv("x", source=-1), "source: expected a rank"),
        (lambda group: group.subgroup([1 - group.rank]), "include this one"),
        (lambda group: group.subgroup([0, 1, 1]), "must be different"),
        (lambda group: group.subgroup([0, 1, 2]), "ranks: expected a rank"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_the_call(
    run: Run, place: dict[str, Any], call: Callable[[Group], Any], why: str
) -> None:
    async def script(group: Group) -> None:
        with pytest.raises(ValueError, match=why):
            call(group)
        assert await group.all_gather("x", b"1") == [b"1", b"1"]  # none of it has counted as a call
        assert group.stats.pending == 0

    run(lambda: as_ranks(place, 2, script))

"""Every driver runs every program to the same bits."""

from __future__ import annotations

import asyncio
from typing import Any

import program_case
import pytest
import torch
from dds_domains import new_domain
from group_node import as_ranks
from torch_node import play

from gradbus.commands.simulate.rank_programs import Deadlock, Mismatch
from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.requests import AllGather, AllReduce, Program, Swap
from gradbus.runtime.collectives import Group
from gradbus.runtime.collectives.programs import run_program
from gradbus.runtime.compute import ComputeThread

ROUNDED = {
    f"algorithms/{name}"
    for name in (
        "bytegrad",
        "bytegrad hierarchical",
        "qadam",
        "onebit-adam",
        "dense fp16",
        "dense bf16",
        "decentralized ring",
    )
}
PROGRAMS = {"requests": program_case.every_request, "algorithms": program_case.every_algorithm}


def in_lockstep(world: int) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other processes: products of matrices depend on it
    try:
        found = {
            name: Lockstep(world).run([make(rank, world) for rank in range(world)]) for name, make in PROGRAMS.items()
        }
    finally:
        torch.set_num_threads(threads)
    return [{name: found[name][rank] for name in PROGRAMS} for rank in range(world)]


def differences(here: dict[str, Any], there: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each tensor, by its name; only of those that are not bit-equal."""
    assert here.keys() == there.keys()
    return {
        f"{kind}/{name}": float((tensor.double() - there[kind][name].double()).abs().max())
        for kind in here
        for name, tensor in here[kind].items()
        if not torch.equal(tensor, there[kind][name])
    }


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_group_computes_the_bits_of_the_lockstep_driver(world: int) -> None:
    async def script(group: Group) -> dict[str, Any]:
        compute = ComputeThread(f"program-{group.rank}")
        try:
            return {
                name: await run_program(group, make(group.rank, group.world), name, compute=compute.run)
                for name, make in PROGRAMS.items()
            }
        finally:
            compute.close()

    found = asyncio.run(as_ranks({"job": "programs", "domain": new_domain()}, world, script))
    for here, there in zip(found, in_lockstep(world), strict=True):
        assert differences(here, there) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "world"), [("dds", 2), ("dds", 3), ("cpu:dds,cuda:gloo", 3), ("gloo", 2), ("gloo", 3)]
)
def test_torch_distributed_computes_the_same(backend: str, world: int) -> None:
    """Bit for bit on "dds"; gloo adds more than two numbers in an order of its own, and divides."""
    found = play("program_scenes", "every_program", world, backend)
    for here, there in zip(found, in_lockstep(world), strict=True):
        found_differences = differences(here, there)
        if "dds" in backend:
            assert found_differences == {}
        for name, difference in found_differences.items():
            is_rounded = name in ROUNDED  # a last bit may decide between two of their steps
            assert difference <= (0.1 if is_rounded else 1e-5), found_differences


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "expected"),
    [("dds", "torch.bfloat16"), ("cpu:dds,cuda:gloo", "torch.bfloat16"), ("gloo", "torch.float32")],
)
def test_half_precision_travels_as_such_where_the_backend_adds_it_in_float32(backend: str, expected: str) -> None:
    assert play("program_scenes", "half_on_the_way", 2, backend) == [expected] * 2


@pytest.mark.slow
def test_a_program_that_is_cancelled_or_fails_gives_its_buffers_back() -> None:
    async def script(group: Group) -> int:
        def waits_for_ever() -> Program[None]:
            yield Swap("never", {}, {1 - group.rank: torch.empty(3)})

        waiting = asyncio.create_task(run_program(group, waits_for_ever(), "waits"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        def fails() -> Program[None]:
            yield AllReduce("works", torch.ones(3))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await run_program(group, fails(), "fails")
        return group.stats.pending

    assert asyncio.run(as_ranks({"job": "programs", "domain": new_domain()}, 2, script)) == [0, 0]


def test_ranks_that_wait_for_each_other_are_told_what_for() -> None:
    def program(rank: int) -> Program[None]:
        yield Swap("turn", {}, {1 - rank: torch.empty(2)})

    with pytest.raises(Deadlock, match=r"rank 0 waits for Swap 'turn' from \[1\]; rank 1 waits for Swap 'turn'"):
        Lockstep(2).run([program(0), program(1)])

    def gathers(rank: int) -> Program[None]:
        if rank == 0:
            yield AllGather("all", torch.ones(1))

    with pytest.raises(Deadlock, match="rank 0 waits for AllGather 'all'; rank 1 has ended"):
        Lockstep(2).run([gathers(0), gathers(1)])


def test_requests_that_do_not_fit_are_told_by_name() -> None:
    def program(rank: int) -> Program[None]:
        yield AllReduce("grads", torch.ones(2 + rank))

    with pytest.raises(
        Mismatch, match=r"'grads': rank 0 asks for sum of \(2,\) torch.float32, rank 1 for sum of \(3,\)"
    ):
        Lockstep(2).run([program(0), program(1)])

    def sends(rank: int) -> Program[None]:
        yield Swap("rows", {1: torch.ones(2)} if rank == 0 else {}, {0: torch.ones(3)} if rank == 1 else {})

    with pytest.raises(Mismatch, match=r"rank 1 expects \(3,\) of torch.float32 by 'rows' from rank 0, got \(2,\)"):
        Lockstep(2).run([sends(0), sends(1)])

    def sends_alone(rank: int) -> Program[None]:
        yield Swap("rows", {1: torch.ones(2)} if rank == 0 else {})

    with pytest.raises(Mismatch, match="rank 1 never received 'rows', which rank 0 sent"):
        Lockstep(2).run([sends_alone(0), sends_alone(1)])


def test_a_thousand_ranks_take_seconds() -> None:
    world = 1024

    def ring(rank: int) -> Program[torch.Tensor]:
        x = torch.tensor([float(rank)])
        for _ in range(3):
            came = yield Swap("ring", {(rank + 1) % world: x}, {(rank - 1) % world: torch.empty(1)})
            x = x + came[(rank - 1) % world]
        return x

    found = Lockstep(world).run([ring(rank) for rank in range(world)])
    assert float(sum(found)) == 8 * sum(range(world))

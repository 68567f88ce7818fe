"""Several aggregators of a job over DDS: exact sums by each topology, with loss, and when any of them dies or hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from in_network_job import (
    Run,
    aggregators,
    are_totals,
    final_sum,
    job,
    let_hang,
    let_lie,
    options,
    serve,
    sums_while_a_node_dies,
    total_of,
    values,
    work,
)
from structlog.testing import capture_logs

from gradbus.runtime.collectives.in_network import InNetworkSum
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.in_network.packets import PacketKind
from gradbus.runtime.in_network.topology import AggregatorTopology

TOPOLOGIES = {
    "single": {},
    "two side by side": {"roots": 2},
    "tree": {"kind": "tree", "leaves": 2},
    "two trees": {"kind": "tree", "leaves": 2, "roots": 2},
    "chain": {"kind": "chain", "leaves": 2},
}


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(("world", "loss"), [(2, 0.1), (3, 0.01), (4, 0.0)])
def test_sums_are_exact_by_every_topology(place: dict[str, Any], run: Run, name: str, world: int, loss: float) -> None:
    topology = TOPOLOGIES[name]
    actors = aggregators(AggregatorTopology(**topology).num_nodes)  # type: ignore[arg-type]

    async def program(rank: int, sums: InNetworkSum) -> list[Any]:
        found = [await sums.all_reduce(values(rank, step, 4000)) for step in range(2)]
        assert sums.uses_aggregator
        return found

    async def main() -> list[Any]:
        return await job(place, world, actors, options(topology=topology, loss=loss, timeout_s=20.0), program)

    for found in run(main):
        for step, (total, overflowed) in enumerate(found):
            assert total.equal(total_of(world, step, 4000))
            assert not overflowed
    assert all(actor.free_slots == 64 for actor in actors)


@pytest.mark.parametrize(
    ("name", "node"), [("tree", 0), ("tree", 2), ("two trees", 3), ("chain", 0), ("chain", 1), ("two side by side", 1)]
)
def test_no_sum_is_lost_when_a_node_dies(place: dict[str, Any], run: Run, name: str, node: int) -> None:
    topology = TOPOLOGIES[name]
    nodes = AggregatorTopology(**topology).num_nodes  # type: ignore[arg-type]
    asked = options(topology=topology, retry_s=0.0)
    first, second = run(lambda: sums_while_a_node_dies(place, 2, asked, nodes, node))
    assert len(first) == len(second)
    assert are_totals(first, 2)
    assert are_totals(second, 2)


@pytest.mark.parametrize(("name", "hangs"), [("tree", 4), ("tree", 3), ("chain", 3)])
def test_a_node_that_hangs_is_noticed_by_all_workers(
    place: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch, name: str, hangs: int
) -> None:
    topology = TOPOLOGIES[name]
    let_hang(monkeypatch, hangs)

    async def main() -> list[Any]:
        actors = aggregators(AggregatorTopology(**topology).num_nodes)  # type: ignore[arg-type]
        return await job(place, 2, actors, options(topology=topology, timeout_s=0.4, retry_s=0.0), final_sum)

    assert all(total.equal(total_of(2)) for total in run(main))


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ({"kind": "tree", "leaves": 3}, "leaves: 3 of them, for 2 ranks"),
        ({"kind": "tree", "leaves": [[0, 2], [1]]}, r"expected each rank from 0 to 1 in one.*\[\[0, 2\], \[1\]\]"),
        ({"kind": "tree", "leaves": 2, "leaves_by": "host"}, "leaves: 2 of them, for 1 hosts"),
    ],
)
def test_a_topology_that_does_not_fit_the_workers_is_refused(
    place: dict[str, Any], run: Run, topology: dict[str, Any], message: str
) -> None:
    async def program(rank: int, sums: InNetworkSum) -> None:
        raise AssertionError("joined")

    async def main() -> None:
        nodes = AggregatorTopology(**topology).num_nodes
        serving = [
            asyncio.create_task(serve(place, actor, 2, at, nodes)) for at, actor in enumerate(aggregators(nodes))
        ]
        ends = await asyncio.gather(
            *(work(place, rank, 2, options(topology=topology), program) for rank in range(2)), return_exceptions=True
        )
        for one in serving:
            one.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        for end in ends:
            with pytest.raises(ConfigError, match=message):
                raise end  # type: ignore[misc]

    run(main)


def test_a_node_that_has_another_topology_is_refused_with_both(place: dict[str, Any], run: Run) -> None:
    """The workers have a chain of two; the nodes were started as three."""

    async def program(rank: int, sums: InNetworkSum) -> None:
        raise AssertionError("joined")

    async def main() -> None:
        chain = options(topology={"kind": "chain", "leaves": 2})
        ends = await asyncio.gather(
            *(work(place, rank, 2, chain, program) for rank in range(2)),
            *(serve(place, actor, 2, at, 3) for at, actor in enumerate(aggregators(2))),
            return_exceptions=True,
        )
        assert all(isinstance(end, ConfigError) for end in ends)
        assert "2 + 2 here: compare world and topology" in str(ends[0])
        assert "2 + 3 here: compare aggregator.world and aggregator.nodes" in str(ends[2])

    run(main)


def test_one_node_without_memory_refuses_the_job_for_all(place: dict[str, Any], run: Run) -> None:
    async def program(rank: int, sums: InNetworkSum) -> None:
        raise AssertionError("joined")

    actors = [*aggregators(2), *aggregators(1, slots=7)]

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"refuses \(node 2\).*need 8 slots in a row, 7 of 7 are free"):
            await job(place, 2, actors, options(topology=TOPOLOGIES["tree"]), program)

    run(main)
    assert [actor.free_slots for actor in actors] == [64, 64, 7]


@pytest.mark.parametrize("name", ["tree", "chain"])
def test_a_node_that_lies_changes_no_sum_and_is_not_asked_again(
    place: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # The first node passes on another sum than it has.
    let_lie(monkeypatch, lambda node, answer: node == 2 and answer.kind is PacketKind.CONTRIBUTION)
    topology = TOPOLOGIES[name]
    actors = aggregators(AggregatorTopology(**topology).num_nodes)  # type: ignore[arg-type]

    with capture_logs() as lines:
        found = run(lambda: job(place, 2, actors, options(topology=topology, retry_s=0.1), final_sum))
    assert all(total.equal(total_of(2)) for total in found)
    (lost, _) = [line for line in lines if line["event"] == "aggregator lost"]
    assert lost["next_try"] == "none"
    assert all(actor.free_slots == 64 for actor in actors)


def test_a_job_for_which_a_node_has_no_room_is_refused_and_the_others_go_on(place: dict[str, Any], run: Run) -> None:
    topology, actors = TOPOLOGIES["chain"], [*aggregators(1), *aggregators(1, slots=12)]
    second_is_refused = asyncio.Event()

    async def first(rank: int, sums: InNetworkSum) -> Any:
        totals = [(await sums.all_reduce(values(rank)))[0]]
        if rank == 0:
            has_begun.set()
        await second_is_refused.wait()
        return [*totals, (await sums.all_reduce(values(rank, 1)))[0]]

    async def second(rank: int, sums: InNetworkSum) -> None:
        raise AssertionError("joined")

    has_begun = asyncio.Event()

    async def main() -> list[Any]:
        begun = asyncio.create_task(job(place, 2, actors, options(topology=topology), first))
        await has_begun.wait()
        with pytest.raises(ConfigError, match=r"\(node 1\).*need 8 slots in a row, 4 of 12 are free"):
            await job({**place, "job": place["job"] + "-second"}, 2, actors, options(topology=topology), second)
        second_is_refused.set()
        return await begun

    for totals in run(main):
        assert [total.equal(total_of(2, step)) for step, total in enumerate(totals)] == [True, True]
    assert [actor.free_slots for actor in actors] == [64, 12]

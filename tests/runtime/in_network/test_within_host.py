"""Ranks of a host that add up before one of them sends: exact sums over DDS, with the faults of an aggregator."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch
from in_network_job import (
    ELEMS,
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
from patience import eventually
from structlog.testing import capture_logs

from gradbus.runtime.collectives import host_chain
from gradbus.runtime.collectives.in_network import InNetworkSum
from gradbus.runtime.errors import CollectiveError, ConfigError, PeerLost
from gradbus.runtime.in_network.packets import Packet, PacketKind
from gradbus.runtime.in_network.topology import AggregatorTopology, aggregators_of, neighbours
from gradbus.runtime.in_network.tree import TreeNode

# All ranks of a test are on one host: leaves make several chains of them.
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "single": {},
    "two side by side": {"roots": 2},
    "tree": {"kind": "tree", "leaves": [[0, 2], [1, 3]]},
    "two trees": {"kind": "tree", "leaves": 2, "roots": 2},
    "chain": {"kind": "chain", "leaves": 2},
    "chain with a rank by itself": {"kind": "chain", "leaves": [[3], [0, 1, 2]]},
}


def reducing(name: str) -> dict[str, Any]:
    return {**TOPOLOGIES[name], "within_host": "ring-reduce"}


def nodes_of(name: str) -> int:
    return AggregatorTopology(**reducing(name)).num_nodes


@pytest.fixture(autouse=True)
def _many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_chain, "PIECE_BYTES", 1)  # a group each


def test_the_last_rank_of_a_host_sends_for_all_of_it() -> None:
    nodes = AggregatorTopology(kind="chain", leaves=2, within_host="ring-reduce").nodes(
        ["a", "a", "a", "b", "c", "c"], window_groups=2
    )
    assert [dict(node.children or {}) for node in nodes.values()] == [
        {2: 0b000111},
        {6: 0b000111, 3: 0b001000, 5: 0b110000},
    ]
    assert [node.result_to for node in nodes.values()] == [(2,), (3, 5, 6)]
    assert [aggregators_of(nodes, rank) for rank in range(6)] == [(), (), (6,), (7,), (), (7,)]
    assert neighbours(nodes[6]) == [2, 7]
    single = AggregatorTopology(within_host="ring-reduce")
    assert single.host_chains(["a", "b", "a", "b"]) == [[0, 2], [1, 3]]
    assert single.nodes(["a", "b", "a", "b"], window_groups=2)[4].children == {2: 0b0101, 3: 0b1010}
    split = AggregatorTopology(kind="tree", leaves=[[0, 3], [1, 2]], within_host="ring-reduce")
    assert split.host_chains(["a"] * 4) == [[0, 3], [1, 2]], "ranks of one host at two leaves add up by leaf"


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_sums_are_exact_and_one_rank_of_a_host_sends(place: dict[str, Any], run: Run, name: str, loss: float) -> None:
    world, numel, actors = 4, 9000, aggregators(nodes_of(name), retransmit_s=0.02)
    asked = options(topology=reducing(name), loss=loss, timeout_s=20.0, retransmit_s=0.02)

    async def program(rank: int, sums: InNetworkSum) -> Any:
        found = [await sums.all_reduce(values(rank, step, numel)) for step in range(2)]
        assert sums.session is not None
        sends = sums.session.chain[-1] == rank
        assert (sums.session.streams.traffic.sent_bytes > 8 * numel) == sends
        return found

    for found in run(lambda: job(place, world, actors, asked, program)):
        for step, (total, overflowed) in enumerate(found):
            assert total.equal(total_of(world, step, numel))
            assert not overflowed
    assert all(actor.free_slots == 64 for actor in actors)


@pytest.mark.parametrize(
    ("name", "node"), [("single", 0), ("tree", 0), ("tree", 2), ("chain", 0), ("chain", 1), ("two side by side", 1)]
)
def test_no_sum_is_lost_when_a_node_dies(place: dict[str, Any], run: Run, name: str, node: int) -> None:
    asked = options(topology=reducing(name), retry_s=0.0)
    of_ranks = run(lambda: sums_while_a_node_dies(place, 4, asked, nodes_of(name), node))
    assert len({len(found) for found in of_ranks}) == 1
    assert all(are_totals(found, 4) for found in of_ranks)


@pytest.mark.parametrize(("name", "hangs"), [("single", 4), ("chain", 5), ("tree", 6)])
def test_a_node_that_hangs_is_noticed_by_all_ranks_of_the_host(
    place: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch, name: str, hangs: int
) -> None:
    let_hang(monkeypatch, hangs)
    asked = options(topology=reducing(name), timeout_s=0.4, retry_s=0.0)
    assert all(
        total.equal(total_of(4)) for total in run(lambda: job(place, 4, aggregators(nodes_of(name)), asked, final_sum))
    )


@pytest.mark.parametrize("name", ["single", "chain"])
def test_a_sum_of_which_a_part_is_known_is_finished_by_the_ranks(
    place: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The aggregators stop in the midst of it: first groups are handed on within the host, the rest is added."""
    receive, advance = TreeNode.receive, TreeNode.advance
    stopped = False

    def stopping(self: TreeNode, packet: Packet, now_s: float) -> list[Packet]:
        nonlocal stopped
        stopped |= packet.group >= 4  # of ten; two are under way at once, so the first ones are known by then
        return [] if stopped else receive(self, packet, now_s)

    monkeypatch.setattr(TreeNode, "receive", stopping)
    monkeypatch.setattr(TreeNode, "advance", lambda self, now_s: [] if stopped else advance(self, now_s))
    known: list[int] = []
    spread = host_chain.HostChain.spread

    async def spreading(self: host_chain.HostChain, total: torch.Tensor) -> None:
        known.append(len(total))
        await spread(self, total)

    monkeypatch.setattr(host_chain.HostChain, "spread", spreading)

    async def program(rank: int, sums: InNetworkSum) -> Any:
        return (await sums.all_reduce(values(rank)))[0]

    asked = options(topology=reducing(name), timeout_s=0.4, retry_s=0.0, verify=False)  # a part has no checksum
    found = run(lambda: job(place, 4, aggregators(nodes_of(name)), asked, program))
    assert known == [known[0]] * 4
    assert 0 < known[0] < 10
    assert all(total.equal(total_of(4)) for total in found)


@pytest.mark.parametrize("name", ["single", "chain"])
def test_a_node_that_lies_changes_no_sum_and_is_not_asked_again(
    place: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    let_lie(monkeypatch, lambda _, answer: answer.kind is PacketKind.RESULT and answer.group == 1)
    with capture_logs() as lines:
        asked = options(topology=reducing(name), retry_s=0.1)
        found = run(lambda: job(place, 4, aggregators(nodes_of(name)), asked, final_sum))
    assert all(total.equal(total_of(4)) for total in found)
    lost = [line for line in lines if line["event"] == "aggregator lost"]
    assert [line["next_try"] for line in lost] == ["none"] * 4


def test_a_sum_of_the_host_that_leaves_int32_is_told_to_all_and_one_of_parts_alone_is_exact(
    place: dict[str, Any], run: Run
) -> None:
    """2^31 - 1 and 1 of two ranks of the host leave int32; with -1 of the third the sum is in it again."""

    async def program(rank: int, sums: InNetworkSum) -> Any:
        found = []
        for third in (0, -1):
            own = values(rank)
            own[5] = (2**31 - 1, 1, third)[rank]
            found.append(await sums.all_reduce(own))
        assert sums.uses_aggregator
        return found

    asked = options(topology=reducing("single"))
    for (_, leaves), (total, stays) in run(lambda: job(place, 3, aggregators(), asked, program)):
        assert (leaves, stays) == (True, False)
        assert int(total[5]) == 2**31 - 1


def test_aggregators_that_come_back_are_used_again_by_all_ranks_of_the_host(place: dict[str, Any], run: Run) -> None:
    world, begun = 3, set()

    async def program(rank: int, sums: InNetworkSum) -> list[bool]:
        begun.add(rank)
        began_with: list[bool] = []
        while sums.returns == 0 or began_with[-3:] != [True] * 3:
            step = len(began_with)
            began_with.append(sums.uses_aggregator)
            assert (await sums.all_reduce(values(rank, step)))[0].equal(total_of(world, step))
        return began_with

    async def main() -> list[list[bool]]:
        asked, (actor,) = options(topology=reducing("single"), retry_s=0.4), aggregators()
        first = asyncio.create_task(serve(place, actor, world))
        workers = [asyncio.create_task(work(place, rank, world, asked, program)) for rank in range(world)]
        await eventually(lambda: len(begun) == world)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        second = asyncio.create_task(serve(place, actor, world))
        found = await asyncio.gather(*workers)
        await second
        return found

    found = run(main)
    assert found == [found[0]] * world
    assert False in found[0]


def test_a_rank_that_is_late_costs_its_host_no_aggregator(place: dict[str, Any], run: Run) -> None:
    late = asyncio.Event()

    async def program(rank: int, sums: InNetworkSum) -> Any:
        if rank == 0:
            await late.wait()
        elif rank == 3:
            asyncio.get_running_loop().call_later(1.0, late.set)
        total, _ = await sums.all_reduce(values(rank))
        return sums.uses_aggregator and total.equal(total_of(4))

    asked = options(topology=reducing("chain"), timeout_s=0.4)
    assert run(lambda: job(place, 4, aggregators(2), asked, program)) == [True] * 4


def test_a_piece_of_another_shape_is_refused_by_the_next_rank(
    place: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = host_chain._added  # noqa: SLF001 - what a rank with other code may send

    monkeypatch.setattr(host_chain, "_added", lambda came, own: (added(came, own)[0][:, :1], False))

    async def program(rank: int, sums: InNetworkSum) -> Any:
        try:
            await sums.all_reduce(values(rank))
        except CollectiveError as error:
            return str(error)
        return ""

    asked = options(topology=reducing("single"))
    found = run(lambda: job(place, 3, aggregators(), asked, program))
    assert f"expected int32 (1, 3, {ELEMS}) from a rank of this host" in found[2]
    assert all(found)


def test_a_rank_of_the_host_that_leaves_is_named_to_all_others(place: dict[str, Any], run: Run) -> None:
    async def program(rank: int, sums: InNetworkSum) -> Any:
        await sums.all_reduce(values(rank))
        if rank == 1:
            return None
        with pytest.raises(PeerLost) as lost:
            await sums.all_reduce(values(rank, 1))
        return 1 in lost.value.ranks  # one that has left after it may be among them

    async def main() -> list[Any]:
        return await job(place, 4, aggregators(2), options(topology=reducing("chain")), program)

    assert run(main) == [True, None, True, True]


@pytest.mark.parametrize("route", ["ra-ina", "ra-ina-inline"])
def test_a_ring_has_the_blocks_of_each_rank(place: dict[str, Any], run: Run, route: str) -> None:
    async def program(rank: int, sums: InNetworkSum) -> None:
        raise AssertionError("joined")

    async def main() -> None:
        with pytest.raises(ConfigError, match=f"within_host is for route ina, got route {route}"):
            await work(place, 0, 1, options(route, topology=reducing("single")), program)

    run(main)

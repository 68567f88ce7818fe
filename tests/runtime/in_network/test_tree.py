"""Trees and chains of aggregators: exact sums, all lanes free in the end, and no plan that cannot work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packet_network import SEEDS, Conditions, TreeNetwork

from gradbus.runtime.in_network.topology import AggregatorTopology, aggregators_of


@pytest.mark.parametrize("first", SEEDS[::40])
def test_all_workers_get_the_exact_sum_and_all_lanes_come_free(first: int) -> None:
    for seed in SEEDS[first - SEEDS[0] :][:40]:
        blocks = (None, 1, 3)[seed % 3]
        conditions = replace(Conditions.drawn(seed), worlds=(2 + seed % 5,), is_inline=False, group_blocks=blocks)
        TreeNetwork(conditions, seed).run()


def test_ranks_that_are_missing_or_named_twice_are_refused() -> None:
    for leaves in ([[0, 2]], [[0, 1], [1]], [[0, 1], []], [[0]]):
        with pytest.raises(ValueError, match="expected each rank"):
            AggregatorTopology(kind="tree", leaves=leaves).nodes(["a"] * 2, window_groups=2)


def test_a_tree_adds_by_leaves_and_a_chain_adds_on() -> None:
    by_leaf = AggregatorTopology(kind="tree", leaves=2).nodes(["a"] * 4, window_groups=2)
    assert {number: (node.covers, node.parent) for number, node in by_leaf.items()} == {
        4: (0b0011, 6),
        5: (0b1100, 6),
        6: (0b1111, None),
    }
    in_a_row = AggregatorTopology(kind="chain", leaves=2).nodes(["a"] * 4, window_groups=2)
    assert {number: (node.covers, node.parent) for number, node in in_a_row.items()} == {
        4: (0b0011, 5),
        5: (0b1111, None),
    }
    assert in_a_row[5].result_to == (2, 3, 4)
    assert [aggregators_of(by_leaf, rank) for rank in range(4)] == [(4,), (4,), (5,), (5,)]


def test_several_roots_share_the_groups_and_need_fewer_lanes_each() -> None:
    trees = AggregatorTopology(kind="tree", leaves=2, roots=3).nodes(["a"] * 2, window_groups=4)
    assert [(node.tree, node.parents, node.lanes) for node in trees.values()] == [
        (None, range(4, 7), 8),
        (None, range(4, 7), 8),
        (0, range(0), 3),
        (1, range(0), 3),
        (2, range(0), 3),
    ]
    side_by_side = AggregatorTopology(roots=2).nodes(["a"] * 2, window_groups=4)
    assert aggregators_of(side_by_side, 0) == (2, 3)


def test_ranks_of_a_host_share_a_leaf() -> None:
    topology = AggregatorTopology(kind="tree", leaves=2, leaves_by="host")
    assert topology.ranks_of_leaves(["a", "b", "a", "c"]) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match=r"leaves: 2 of them, for 1 hosts \(a\)"):
        topology.ranks_of_leaves(["a", "a"])

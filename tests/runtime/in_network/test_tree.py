"""Trees and chains of aggregators: exact sums, all lanes free in the end, and no plan that cannot work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packet_network import Conditions, TreeNetwork

from gradbus.runtime.in_network.tree import chain, leaf_of, tree


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_all_workers_get_the_exact_sum_and_all_lanes_come_free(first: int) -> None:
    for seed in range(first, first + 40):
        drawn = Conditions.drawn(seed)
        blocks = (None, 1, 3)[seed % 3]
        conditions = replace(drawn, worlds=(2 + seed % 5,), is_inline=False, crashes=0, group_blocks=blocks)
        TreeNetwork(conditions, seed).run()


def test_a_plan_with_too_few_lanes_is_refused_with_the_numbers() -> None:
    for build in (tree, chain):
        with pytest.raises(ValueError, match=r"a window of 4 groups needs 8 lanes, 3 slots each.*there are 7"):
            build([[0, 1], [2]], lanes=7, window_groups=4)


def test_ranks_that_are_missing_or_named_twice_are_refused() -> None:
    for leaves in ([[0, 2]], [[0, 1], [1]], [[0], []], []):
        with pytest.raises(ValueError, match="expected each rank"):
            tree(leaves, lanes=8, window_groups=2)


def test_a_tree_adds_by_leaves_and_a_chain_adds_on() -> None:
    by_leaf = tree([[0, 1], [2, 3]], lanes=4, window_groups=2)
    assert {number: (node.covers, node.parent) for number, node in by_leaf.items()} == {
        4: (0b0011, 6), 5: (0b1100, 6), 6: (0b1111, None),
    }  # fmt: skip
    in_a_row = chain([[0, 1], [2, 3]], lanes=4, window_groups=2)
    assert {number: (node.covers, node.parent) for number, node in in_a_row.items()} == {
        4: (0b0011, 5), 5: (0b1111, None),
    }  # fmt: skip
    assert in_a_row[5].result_to == (2, 3, 4)
    assert [leaf_of(by_leaf, rank) for rank in range(4)] == [4, 4, 5, 5]

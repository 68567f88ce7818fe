"""Packets that no honest member sends: they change nothing, and are counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from packet_network import Conditions, PacketNetwork, TreeNetwork

from gradbus.runtime.in_network.aggregator import Aggregator
from gradbus.runtime.in_network.packets import AGGREGATOR, Packet, PacketKind, RetransmissionTimes
from gradbus.runtime.in_network.slots import Slots
from gradbus.runtime.in_network.topology import AggregatorTopology
from gradbus.runtime.in_network.tree import TreeNode

ELEMS = 4
CHAIN = AggregatorTopology(kind="chain", leaves=[[0], [1]]).nodes(["host"] * 2, window_groups=2, block_elems=ELEMS)
FIRST, LAST = CHAIN[2], CHAIN[3]


def block(value: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.full(ELEMS, value, dtype=np.int32)


def contribution(rank: int, value: int, **others: int) -> Packet:
    return replace(
        Packet(PacketKind.CONTRIBUTION, 0, 0, 0, rank, AGGREGATOR, bitmap=1 << rank, values=block(value)), **others
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "forged",
    [
        contribution(0, 1, job=1),
        contribution(0, 1, epoch=1),
        contribution(0, 1, block=2),
        contribution(0, 1, block=-1),
        contribution(0, 1, group=-1),
        contribution(0, 1, bitmap=4),
        contribution(0, 1, bitmap=-1),
        replace(contribution(0, 1), values=None),
        replace(contribution(0, 1), values=np.zeros(ELEMS + 1, dtype=np.int32)),
        replace(contribution(0, 1), kind=PacketKind.REDUCE, values=None),
    ],
)
def test_a_node_drops_what_is_of_no_group_of_its_job(forged: Packet) -> None:
    node = TreeNode(FIRST)
    assert node.receive(forged, 0.0) == []
    assert (node.dropped, node.violations, node.is_idle) == (1, 0, True)


@pytest.mark.parametrize(
    "forged",
    [
        contribution(1, 1),  # not below this node
        contribution(0, 1, source=1),
        contribution(0, 1, bitmap=0),
        contribution(0, 1, bitmap=3),
        Packet(PacketKind.RESULT, 0, 0, 0, 0, 2, bitmap=3, values=block(1)),  # of a rank
        Packet(PacketKind.PROBE, 0, 0, 0, 1, AGGREGATOR),
    ],
)
def test_a_node_takes_sums_of_its_children_alone_and_results_of_those_above(forged: Packet) -> None:
    node = TreeNode(FIRST)
    assert node.receive(forged, 0.0) == []
    assert (node.violations, node.is_idle) == (1, True)


def test_a_node_takes_no_result_of_a_group_whose_own_sum_it_has_not_sent() -> None:
    node = TreeNode(FIRST)
    assert node.receive(Packet(PacketKind.RESULT, 0, 0, 0, 3, 2, bitmap=3, values=block(1)), 0.0) == []
    assert (node.dropped, node.is_idle) == (1, True)


def test_a_worker_that_sends_twice_is_added_once_whatever_it_sends_the_second_time() -> None:
    node = TreeNode(LAST)
    first = node.receive(contribution(1, 5), 0.0)
    again = node.receive(contribution(1, 1000), 0.0)
    assert [packet.kind for packet in (*first, *again)] == [PacketKind.AGGREGATOR_ACK] * 2
    _, *results = node.receive(contribution(2, 7, bitmap=1), 0.0)
    assert [(packet.destination, packet.values.tolist()) for packet in results if packet.values is not None] == [
        (1, [12] * ELEMS),
        (2, [12] * ELEMS),
    ]


def test_a_full_sum_is_not_added_over_a_part_of_it() -> None:
    slots = Slots(2, ELEMS)
    aggregator = Aggregator(slots, block_elems=ELEMS)
    aggregator.open_job(0, 2)
    aggregator.receive(Packet(PacketKind.RESERVE, 0, 0, 0, 0, AGGREGATOR), 0.0)
    aggregator.receive(contribution(0, 5), 0.0)
    full = Packet(PacketKind.GATHER, 0, 0, 0, 1, 0, bitmap=3, values=block(12))
    assert aggregator.receive(full, 0.0) == []
    assert aggregator.violations == 1
    assert slots[0].tolist() == [5] * ELEMS


def test_a_group_that_is_never_finished_is_found_with_those_that_it_waits_for() -> None:
    node = TreeNode(LAST)
    node.receive(contribution(1, 5), 0.0)
    assert node.stalled_groups(9.0, 10.0) == {}
    assert node.stalled_groups(10.0, 10.0) == {0: [1, 2]}  # rank 1's second block is missing, too
    waiting = TreeNode(FIRST)
    for number in range(2):
        waiting.receive(contribution(0, 5, block=number), 0.0)
    assert waiting.stalled_groups(10.0, 10.0) == {}  # it waits for the node above, whose own lease it is


@pytest.mark.parametrize("kind", [PacketNetwork, TreeNetwork])
def test_sums_that_leave_int32_are_marked_on_all_workers(kind: type[PacketNetwork]) -> None:
    for seed in range(5):
        conditions = Conditions(worlds=(3,), groups=2, slots=100 * (seed % 2), loss=0.1)
        network = kind(conditions, seed, has_exact_sums=False)
        for rank in range(3):
            network.inputs[0][rank, 1, 2, 0] = np.iinfo(np.int32).max
        network.run()
        assert [network.workers[0, rank].overflowed for rank in range(3)] == [{1}] * 3


@pytest.mark.parametrize("core", ["node of a tree", "aggregator with slots"])
def test_reminders_are_marked_so_that_a_stream_which_still_has_the_first_ones_does_not_collect_them(core: str) -> None:
    """A worker that is stopped for a minute would be sent its sums once for each second of it."""
    node: TreeNode | Aggregator
    if core == "node of a tree":
        node = TreeNode(AggregatorTopology().nodes(["host"] * 2, window_groups=2, block_elems=ELEMS)[2])
    else:
        node = Aggregator(Slots(2, ELEMS), block_elems=ELEMS)
        node.open_job(0, 2)
        node.receive(Packet(PacketKind.RESERVE, 0, 0, 0, 0, AGGREGATOR), 0.0)
    sums = [packet for rank in range(2) for packet in node.receive(contribution(rank, 1), 0.0)]
    assert not any(packet.is_repeated for packet in sums)
    reminders = node.advance(60.0)
    assert {packet.kind for packet in reminders} == {PacketKind.RESULT}
    assert all(packet.is_repeated for packet in reminders)


def test_a_worker_that_asks_for_slots_and_never_sends_has_no_more_than_its_part() -> None:
    slots = Slots(64, ELEMS)
    aggregator = Aggregator(slots, block_elems=ELEMS, max_groups_per_job=5)
    aggregator.open_job(0, 2)

    def reserve(rank: int, group: int) -> int:
        return len(aggregator.receive(Packet(PacketKind.RESERVE, 0, 0, group, rank, AGGREGATOR), 0.0))

    assert [reserve(0, group) for group in range(0, 20, 2)] == [1, 1, 1] + [0] * 7
    assert reserve(0, 1) == 0  # that group is for rank 1 to ask for
    assert aggregator.violations == 1
    assert [reserve(1, group) for group in range(1, 20, 2)] == [1, 1] + [0] * 8
    assert slots.free == 64 - 2 * 5
    aggregator.close_job(0)
    assert slots.free == 64


@pytest.mark.parametrize("core", ["node of a tree", "aggregator with slots"])
def test_a_reminder_of_a_sum_does_not_come_later_as_there_were_others_before_it(core: str) -> None:
    node: TreeNode | Aggregator
    if core == "node of a tree":
        node = TreeNode(
            AggregatorTopology().nodes(
                ["host"] * 2, window_groups=2, block_elems=ELEMS, times=RetransmissionTimes(0.1)
            )[2]
        )
    else:
        node = Aggregator(Slots(2, ELEMS), block_elems=ELEMS, times=RetransmissionTimes(0.1))
        node.open_job(0, 2)
        node.receive(Packet(PacketKind.RESERVE, 0, 0, 0, 0, AGGREGATOR), 0.0)
    for rank in range(2):
        node.receive(contribution(rank, 1), 0.0)
    now_s = 0.0
    for _ in range(6):  # the sum of block 0 is not acknowledged
        assert node.deadline_s is not None
        now_s = node.deadline_s
        assert node.advance(now_s)
    assert node.deadline_s is not None
    assert node.deadline_s - now_s == pytest.approx(1.0)
    for rank in range(2):
        node.receive(contribution(rank, 1, block=1), now_s)
    assert node.deadline_s - now_s == pytest.approx(0.1)

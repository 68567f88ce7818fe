"""Every block is added exactly once, whatever the network does: many runs, each drawn from its seed."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import packet_network
import pytest
from packet_network import SEEDS, Conditions, PacketNetwork, TreeNetwork, Violation

from gradbus.runtime.in_network import aggregator, packets, slots, topology, tree, worker


@pytest.mark.parametrize("first", SEEDS[::40])
def test_all_workers_get_the_exact_sum_and_all_slots_come_back(first: int) -> None:
    for seed in SEEDS[first - SEEDS[0] :][:40]:
        PacketNetwork(Conditions.drawn(seed), seed).run()


def test_the_sums_do_not_depend_on_the_slots() -> None:
    sums = []
    for count in (0, 3, 6, 100):
        network = PacketNetwork(Conditions(worlds=(3,), slots=count, loss=0.1), seed=1)
        network.run()
        sums.append(network.sums[0, 0])
    assert all((sums[0] == other).all() for other in sums[1:])


def test_one_worker_sends_nothing() -> None:
    network = PacketNetwork(Conditions(worlds=(1,)), seed=0)
    network.run()
    assert not network.channels
    assert (network.sums[0, 0] == network.inputs[0][0]).all()


@pytest.mark.parametrize(
    ("kind", "is_inline", "expected"),
    [
        (PacketNetwork, True, {"reduce": 12, "gather": 12, "contribution": 0}),
        (PacketNetwork, False, {"reduce": 12, "gather": 12, "contribution": 0}),
        (TreeNetwork, False, {"reduce": 0, "gather": 0, "contribution": 16}),
    ],
)
def test_without_loss_a_group_costs_what_the_model_says(
    kind: type[PacketNetwork], is_inline: bool, expected: dict[str, int]
) -> None:
    """What workers send of N blocks: N (N - 1) packets twice around a ring, or N * N to aggregators."""
    network = kind(Conditions(worlds=(4,), groups=1, slots=0, is_inline=is_inline, eager_timers=0.0), seed=3)
    counted: Counter[str] = Counter()
    post = network.post

    def counting(source: tuple[int, int], sent: Sequence[packets.Packet]) -> None:
        counted.update(packet.kind.value for packet in sent if packet.source == source[1] in range(4))
        post(source, sent)

    network.post = counting  # type: ignore[method-assign]
    network.run()
    assert {name: counted[name] for name in expected} == expected


MUTATIONS = {
    "a worker puts its block into two carriers (rule 1)": (
        worker, "        if not group.placed >> block & 1:\n            group.placed |= 1 << block\n            values",
        "        if True:\n            group.placed |= 1 << block\n            values",
    ),
    "a repeated packet of the ring is added (rule 2)": (aggregator, "elif packet.is_repeated and", "elif False and"),
    "a repeated packet of the ring takes slots (rule 2)": (
        aggregator, "held = None if packet.is_repeated else self._grab", "held = self._grab",
    ),
    "an acknowledgement does not name the contributors (rule 3)": (
        packets, "self.block, self.step, self.bitmap)", "self.block, self.step, 0)",
    ),
    "slots are given back when one worker knows the sums": (aggregator, "if all(known == full", "if any(known == full"),
    "a slot is used again without a new beginning": (aggregator, "if held.contributors[block]:", "if True:"),
    "a worker adds into the packet that it got": (worker, "values = values.copy()", "values = values"),
    "packets of another epoch count": (aggregator, "if packet.epoch != state.epoch:", "if False:"),
    "groups of another step are taken for those of this one": (
        aggregator, "key = packet.job, packet.group", "key = packet.job, packet.group % 4",
    ),
    "a worker takes packets of another epoch": (
        worker, "(packet.job, packet.epoch) == (config.job, config.epoch)", "packet.job == config.job",
    ),
    "a token that comes twice is passed on twice": (
        worker, "if not group.seen >> packet.block & 1 and", "if",
    ),
    "a contribution that comes late is not acknowledged": (
        aggregator, "case PacketKind.CONTRIBUTION | PacketKind.PROBE:", "case PacketKind.PROBE:",
    ),
    "a worker keeps what it knows to itself when the aggregator takes over": (
        worker, "if config.rank == (block - 1) % config.world:", "if False:",
    ),
    "a worker forgets a group as soon as it has finished": (
        worker, "self._groups.pop(self.first_unfinished - config.window_groups, None)",
        "self._groups.pop(self.first_unfinished, None)",
    ),
    "nobody is reminded": (aggregator, "if not missing:", "if False:"),
    "a lost packet is not sent again": (worker, "packets.append(one.again(now_s, times))", "one.again(now_s, times)"),
}  # fmt: skip


TREE_MUTATIONS = {
    "a lane is free when one receiver knows the results": (
        tree, "if not lane.unknowing:", "if lane.unknowing < len(lane.known):",
    ),
    "a contribution that comes twice is added twice": (
        tree, "if not bitmap & present:\n            overflows", "if True:\n            overflows",
    ),
    "a lane is used again without a new beginning": (tree, "            if present:\n", "            if True:\n"),
    "a node takes packets of another epoch": (
        tree, "(packet.job, packet.epoch) != (config.job, config.epoch)", "packet.job != config.job",
    ),
    "a node sends a sum before all of its ranks are in it": (
        tree, "and lane.contributors[block] == config.covers:", ":",
    ),
    "a node forgets which groups it has finished": (
        tree, "lane.group, lane.finished, lane.results = None, packet.group, 0", "lane.group, lane.results = None, 0",
    ),
    "a node does not send its sum again": (
        tree, "one.again(now_s, times) for one in self._unacknowledged.due(now_s)",
        "one.packet for one in self._unacknowledged.due(now_s) if one.again(now_s, times) and False",
    ),
    "a result is not sent again": (
        tree, "one in self._results(lane, block, missing)", "one in ()",
    ),
    "all groups go to one of several roots": (
        tree, "config.parents[lane.group % config.trees]", "config.parents[0]",
    ),
}  # fmt: skip

FIRST_SEEDS = {
    "a worker forgets a group as soon as it has finished": 680,
    **dict.fromkeys(
        (
            "a repeated packet of the ring is added (rule 2)", "packets of another epoch count",
            "a contribution that comes late is not acknowledged", "a node takes packets of another epoch",
        ),
        20,
    ),
}  # fmt: skip
"""Where to begin to look, for a mutation that few seeds show."""
MUTATED_STEPS = 10_000  # at most, of a run with a mutation: those of these seeds take up to 8,000 without one


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("PacketNetwork", name) for name in MUTATIONS), *(("TreeNetwork", name) for name in TREE_MUTATIONS)],
)
def test_a_mutation_of_the_protocol_is_noticed(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutated, before, after = (MUTATIONS if kind == "PacketNetwork" else TREE_MUTATIONS)[name]
    for module in (packets, slots, worker, aggregator, tree, topology, packet_network):  # each imports earlier ones
        source = inspect.getsource(module)
        if module is mutated:
            assert source.count(before) == 1, f"the mutation no longer fits {module.__name__}"
            source = source.replace(before, after)
        file = tmp_path / f"{module.__name__}.py"
        file.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(module.__name__, file)
        assert spec is not None
        assert spec.loader is not None
        fresh: Any = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module.__name__, fresh)
        spec.loader.exec_module(fresh)

    fresh.MAX_STEPS = MUTATED_STEPS

    def search() -> None:
        first = FIRST_SEEDS.get(name, 0)
        for seed in range(first, first + 400):
            conditions = fresh.Conditions.drawn(seed)
            if kind == "TreeNetwork":
                conditions = replace(conditions, worlds=(2 + seed % 5,), is_inline=False)
            getattr(fresh, kind)(conditions, seed).run()

    with pytest.raises((fresh.Violation, AssertionError, LookupError, ValueError)):
        search()


def test_a_network_that_changes_the_order_of_packets_to_an_inline_aggregator_is_noticed() -> None:
    """Rule 4: what a worker sends to an aggregator in the way of the ring stays in order, and comes once."""

    class Reordered(Conditions):
        keeps_order = False  # type: ignore[assignment]

    def search() -> None:
        for seed in range(600):
            drawn = Conditions.drawn(seed)
            fields = {name: getattr(drawn, name) for name in drawn.__dataclass_fields__}
            PacketNetwork(Reordered(**fields | {"is_inline": True, "reorders": True}), seed).run()

    with pytest.raises(Violation):
        search()


def test_the_answer_to_a_probe_moves_no_group_to_the_aggregator() -> None:
    worker_ = worker.RingWorker(worker.WorkerConfig(0, 2, block_elems=2, reserves=True))
    blocks = np.ones((1, 2, 2), dtype=np.int32)
    worker_.submit(blocks, np.zeros_like(blocks), 0.0)
    answer = packets.Packet(
        packets.PacketKind.AGGREGATOR_ACK, 0, 0, 0, packets.AGGREGATOR, 0, acked=packets.PacketKind.PROBE
    )
    assert worker_.receive(answer, 0.0) == []

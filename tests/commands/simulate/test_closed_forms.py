"""Closed forms: limits, what the proposal prints, and its tables of times; and what switches carry."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from doc_pages import rows, section

from gradbus.commands.simulate import closed_forms as forms
from gradbus.commands.simulate.closed_forms import Fabric
from gradbus.commands.simulate.deployment import chain_hosts, deployment, fat_tree_leaves, slot_bytes, tree_hosts
from gradbus.commands.simulate.topology import LinkSpec
from gradbus.experiments.studies import printed_forms

VGG19, RESNET50 = 574.8e6, 102.4e6
BLOCKS = 4096
WORLDS = [8, 16, 32, 64, 128, 256, 512, 1024]


def fabric_of(world: int, **more: object) -> Fabric:
    """100 Gbit/s everywhere but in hosts of 8 ranks, 16 hosts at a leaf."""
    given = {
        "network": LinkSpec(rate_bytes_s=12.5e9, latency_s=2e-6), "local": LinkSpec(rate_bytes_s=150e9, latency_s=1e-6),
        "uplink": LinkSpec(rate_bytes_s=12.5e9, latency_s=1e-6), "ranks_per_host": 8, "hosts_per_leaf": 16, **more,
    }  # fmt: skip
    return Fabric(world=world, **given)  # type: ignore[arg-type]


def slow_fabric_of(world: int) -> Fabric:
    """One rank on a host, 10 Gbit/s, uplinks of 40."""
    return fabric_of(
        world,
        network=LinkSpec(rate_bytes_s=1.25e9, latency_s=20e-6),
        ranks_per_host=1,
        uplink=LinkSpec(rate_bytes_s=5e9, latency_s=2e-6),
    )


def torus_s(size: float, fabric: Fabric) -> float:
    columns = 2 ** math.ceil(math.log2(fabric.world) / 2)
    return forms.torus_s(size, columns, fabric.world // columns, fabric.network)


def racks_s(size: float, fabric: Fabric) -> float:
    """One rank on a host: a ring in each rack, and between racks one for each part."""
    racks = Fabric(
        world=fabric.world, network=fabric.network, local=fabric.network, ranks_per_host=min(16, fabric.world)
    )
    return forms.hierarchical_ring_s(size, racks, rails=True)


def one_switch(fabric: Fabric) -> Fabric:
    return Fabric(world=fabric.world, network=fabric.network)


FORMS: dict[str, Callable[[float, Fabric], float]] = {
    "ring": lambda size, at: forms.ring_s(size, at.world, at.network),
    "doubling": lambda size, at: forms.recursive_doubling_s(size, at.world, at.network),
    "halving": lambda size, at: forms.halving_doubling_s(size, at.world, at.network),
    "torus": torus_s,
    "rails": lambda size, at: forms.hierarchical_ring_s(size, at, rails=True),
    "one nic": lambda size, at: forms.hierarchical_ring_s(size, at, rails=False),
    "racks": racks_s,
    "ps 1": lambda size, at: forms.parameter_server_s(size, at.world, at.network, servers=1, blocks=BLOCKS),
    "ps n": lambda size, at: forms.parameter_server_s(size, at.world, at.network, servers=at.world, blocks=BLOCKS),
    "ina": lambda size, at: forms.ina_s(size, BLOCKS, one_switch(at)),
    "hina": lambda size, at: forms.hina_s(size, BLOCKS, at),
    "cina": lambda size, at: forms.cina_s(size, BLOCKS, at),
}

# Milliseconds for N = 8 to 1,024, as the design of the simulator has them.
FAST = ("ring", "doubling", "halving", "torus", "rails", "one nic", "ps 1", "ps n", "ina", "hina", "cina")
SLOW = ("ring", "halving", "racks", "ps 1", "ps n", "ina", "hina", "cina")
TABLES = {
    (VGG19, fabric_of, FAST): """
        80.50 137.96 80.48 80.49 6.72 6.72 367.97 46.00 46.00 46.03 46.03
        86.28 183.94 86.24 86.24 12.47 52.71 735.93 46.00 46.00 46.03 46.03
        89.22 229.93 89.11 89.13 15.35 75.71 1471.85 46.00 46.00 46.03 46.03
        90.78 275.92 90.55 90.59 16.81 87.22 2943.70 46.00 46.00 46.03 46.03
        91.76 321.90 91.28 91.34 17.56 93.00 5887.39 46.00 46.00 46.03 46.03
        92.63 367.89 91.64 91.73 17.98 95.94 11774.78 46.00 46.00 46.05 46.05
        93.83 413.87 91.82 91.97 18.29 97.50 23549.56 46.00 46.00 46.05 46.08
        95.97 459.86 91.92 92.13 18.63 98.48 47099.12 46.00 46.00 46.05 46.13""",
    (RESNET50, fabric_of, FAST): """
        14.36 24.58 14.35 14.35 1.21 1.21 65.56 8.20 8.20 8.21 8.21
        15.42 32.78 15.38 15.38 2.24 9.40 131.11 8.20 8.20 8.21 8.21
        16.00 40.97 15.89 15.91 2.76 13.51 262.21 8.20 8.20 8.21 8.21
        16.38 49.16 16.15 16.18 3.03 15.57 524.42 8.20 8.20 8.21 8.21
        16.76 57.36 16.28 16.34 3.19 16.63 1048.84 8.20 8.20 8.21 8.21
        17.34 65.55 16.35 16.44 3.32 17.20 2097.67 8.20 8.20 8.22 8.22
        18.40 73.75 16.39 16.54 3.48 17.59 4195.33 8.20 8.20 8.22 8.23
        20.46 81.94 16.41 16.62 3.75 17.97 8390.66 8.20 8.20 8.22 8.25""",
    (VGG19, slow_fabric_of, SLOW): """
        805.0 804.8 805.0 3679.7 460.0 460.0 460.0 460.0
        862.8 862.4 862.8 7359.3 460.0 460.0 460.0 460.0
        892.2 891.1 891.6 14718.5 460.0 460.0 460.1 460.1
        907.8 905.5 906.0 29437.0 460.0 460.0 460.1 460.1
        917.6 912.8 913.4 58873.9 460.0 460.0 460.1 460.2
        926.3 916.4 917.3 117747.8 460.0 460.0 460.1 460.5
        938.3 918.2 919.7 235495.6 460.0 460.0 460.1 461.0
        959.7 919.2 921.9 470991.2 460.0 460.0 460.1 462.0""",
    (RESNET50, slow_fabric_of, SLOW): """
        143.6 143.5 143.6 655.6 82.0 82.0 82.0 82.0
        154.2 153.8 154.2 1311.1 82.0 82.0 82.0 82.0
        160.0 158.9 159.4 2622.1 82.0 82.0 82.0 82.0
        163.8 161.5 162.0 5244.2 82.0 82.0 82.0 82.0
        167.6 162.8 163.4 10488.4 82.0 82.0 82.0 82.1
        173.4 163.5 164.4 20976.7 82.0 82.0 82.0 82.1
        184.0 163.9 165.4 41953.3 82.0 82.0 82.0 82.3
        204.6 164.1 166.8 83906.6 82.0 82.0 82.0 82.6""",
}


@pytest.mark.parametrize(("given", "text"), TABLES.items(), ids=["vgg19", "resnet50", "vgg19 slow", "resnet50 slow"])
def test_times_are_those_of_the_tables(
    given: tuple[float, Callable[[int], Fabric], tuple[str, ...]], text: str
) -> None:
    size, fabric, names = given
    for world, row in zip(WORLDS, text.split("\n")[1:], strict=True):
        digits = len(row.split()[0].split(".")[1])
        for name, expected in zip(names, row.split(), strict=True):
            found_ms = 1e3 * FORMS[name](size, fabric(world))
            assert found_ms == pytest.approx(float(expected), abs=0.51 * 10**-digits), (world, name)


def test_one_rank_sends_nothing_to_itself() -> None:
    alone = fabric_of(1, ranks_per_host=1)
    for name in ("ring", "doubling", "halving", "torus", "rails", "one nic"):
        assert FORMS[name](VGG19, alone) == 0, name
    for form in (forms.star_s, forms.shards_s, forms.binomial_tree_s):
        assert form(VGG19, 1, alone.network) == 0
    assert forms.chain_in_host_s(VGG19, BLOCKS, alone) == 0


def test_one_leaf_makes_tree_chain_and_several_trees_equal_to_one_switch() -> None:
    one_leaf = fabric_of(64)
    expected = forms.ina_s(VGG19, BLOCKS, one_leaf)
    assert forms.hina_s(VGG19, BLOCKS, one_leaf) == forms.cina_s(VGG19, BLOCKS, one_leaf) == expected
    assert forms.mtina_s(VGG19, BLOCKS, one_leaf, trees=4) == expected


def test_with_many_blocks_there_remain_the_slowest_link_and_the_latencies() -> None:
    many = 10**12
    at = fabric_of(1024)
    slowest_s = VGG19 / 12.5e9
    assert forms.hina_s(VGG19, many, at) == pytest.approx(slowest_s + 2 * (7 * 1e-6 + 2e-6) + 2e-6, abs=1e-9)
    assert forms.cina_s(VGG19, many, at) == pytest.approx(slowest_s + 2 * (7 * 1e-6 + 2e-6) + 8 * 2e-6, abs=1e-9)
    assert forms.pipeline_s(VGG19, 1, [at.network] * 3) == pytest.approx(3 * (slowest_s + 2e-6))  # store and forward


def test_overhead_of_messages_makes_one_number_of_blocks_the_best() -> None:
    link = LinkSpec(rate_bytes_s=12.5e9, latency_s=2e-6, overhead_s=1e-6)
    best = forms.best_blocks(VGG19, 4, link)
    times = [forms.pipeline_s(VGG19, blocks, [link] * 4) for blocks in (best // 2, best - 1, best, best + 1, 2 * best)]
    assert min(times) == times[2]
    with pytest.raises(ValueError, match="set overhead_s"):
        forms.best_blocks(VGG19, 4, LinkSpec(rate_bytes_s=1e9))


def test_more_trees_help_only_where_the_uplink_is_the_slowest_link() -> None:
    fast, slow = fabric_of(1024), fabric_of(1024, uplink=LinkSpec(rate_bytes_s=2.5e9))
    assert forms.mtina_s(VGG19, BLOCKS, fast, trees=4) == pytest.approx(forms.hina_s(VGG19, BLOCKS, fast), rel=1e-3)
    ratio = forms.hina_s(VGG19, BLOCKS, slow) / forms.mtina_s(VGG19, BLOCKS, slow, trees=4)
    assert ratio == pytest.approx(4, rel=0.01)


# The proposal's formulas, as printed


def test_the_printed_parameter_server_does_not_know_how_many_workers_it_has() -> None:
    """It is the time of a switch, and of N servers."""
    at = fabric_of(1024)
    expected_s = printed_forms.parameter_server_s(VGG19, BLOCKS, at.network)
    assert expected_s == pytest.approx(FORMS["ps n"](VGG19, at)) == pytest.approx(FORMS["ina"](VGG19, at))
    assert FORMS["ps 1"](VGG19, at) == pytest.approx(1024 * expected_s, rel=1e-3)


def test_the_printed_ring_reduce_takes_time_for_one_rank_and_more_for_more_blocks() -> None:
    at = fabric_of(8)
    assert printed_forms.ring_reduce_s(VGG19, BLOCKS, fabric_of(8, ranks_per_host=1)) > 3.8e-3
    assert forms.chain_in_host_s(VGG19, BLOCKS, fabric_of(8, ranks_per_host=1)) == 0.0
    assert printed_forms.ring_reduce_s(VGG19, 10**6, at) > 1.0 > forms.chain_in_host_s(VGG19, 10**6, at)


def test_the_printed_overlap_is_negative_for_fast_links_in_the_host() -> None:
    at = fabric_of(8)
    for blocks, expected_ms in ((4096, 7.85), (64, -0.8), (8, -33.5)):
        assert 1e3 * printed_forms.overlap_s(VGG19, blocks, at) == pytest.approx(expected_ms, abs=0.05)
        assert forms.chain_overlap_s(VGG19, blocks, at) > 0
    # What cannot be hidden goes in front of the network's time, as the general formula has it.
    chain_s = forms.chain_in_host_s(VGG19, BLOCKS, at) - forms.chain_overlap_s(VGG19, BLOCKS, at)
    without = Fabric(world=1, network=at.network)
    assert forms.hina_s(VGG19, BLOCKS, at) == pytest.approx(2 * chain_s + forms.ina_s(VGG19, BLOCKS, without))


def test_the_printed_chain_forgets_latencies_and_the_way_back() -> None:
    at = fabric_of(1024, ranks_per_host=1, hosts_per_leaf=128)
    block_s = VGG19 / BLOCKS / 12.5e9
    forgotten_s = 8 * 2e-6 + block_s  # one rank on a host: no chain within it, whose overlap is wrong as well
    printed_s = printed_forms.cina_s(VGG19, BLOCKS, at)
    assert forms.cina_s(VGG19, BLOCKS, at) == pytest.approx(printed_s + forgotten_s)


def test_the_printed_tree_is_right_for_one_rank_on_a_host_and_two_layers() -> None:
    at = fabric_of(1024, ranks_per_host=1)
    assert forms.hina_s(VGG19, BLOCKS, at) == pytest.approx(printed_forms.hina_s(VGG19, BLOCKS, at))


def test_the_printed_time_of_several_trees_is_that_of_two_with_one_tree() -> None:
    """57.50 ms for S = 4, more than the 46.05 of one tree."""
    at = fabric_of(1024)
    for trees, expected_ms in ((1, 92.0), (4, 57.50), (10**6, 2046.0)):
        assert 1e3 * printed_forms.mtina_s(VGG19, BLOCKS, at, trees=trees) == pytest.approx(expected_ms, rel=1e-3)


def test_the_page_of_the_simulator_has_both_times_of_each_formula(root: Path) -> None:
    page = section((root / "docs" / "simulation.md").read_text(encoding="utf-8"), "Formulas")
    found = {row[0]: tuple(row[3:5]) for row in rows(page, "time of")}
    assert found == {pair.name: printed_forms.times_ms(pair) for pair in printed_forms.PAIRS}


# Memory, break-even and ports


def test_ring_assistance_lies_between_ring_and_switch() -> None:
    link = LinkSpec(rate_bytes_s=1.0)
    ring_assisted = [forms.ring_assisted_s(1.0, 8, link, memory=m) for m in (0, 0.1, 0.25, 0.5, 0.75, 1)]
    assert ring_assisted == pytest.approx([1.75, 1.63, 1.47, 1.27, 1.12, 1.0], abs=0.005)
    static = [forms.static_memory_s(1.0, link, memory=m) for m in (0.1, 0.25, 0.5, 0.75, 1, 2)]
    assert static == pytest.approx([10, 4, 2, 1.33, 1, 1], abs=0.005)
    crossing = 1 / forms.ring_factor(8)
    assert forms.static_memory_s(1.0, link, memory=crossing) == pytest.approx(ring_assisted[0])


@pytest.mark.parametrize(("world", "share"), [(4, math.inf), (6, 5.9), (8, 3.2), (16, 1.9)])
def test_57_percent_over_a_ring_take_a_large_share_of_exchange_and_more_than_four_ranks(
    world: int, share: float
) -> None:
    factor = forms.ring_factor(world)
    found = forms.exchange_share_for(1.57, factor)
    assert found == pytest.approx(share, rel=0.05)
    if math.isfinite(found):
        assert forms.speed_up(found, factor) == pytest.approx(1.57)


def test_an_aggregator_needs_about_half_the_rate_of_all_workers_together() -> None:
    assert [forms.aggregator_rate_for(n, 1.0) for n in (2, 4, 8, 16)] == pytest.approx(
        [2, 2.667, 4.571, 8.533], rel=1e-3
    )
    assert forms.aggregator_rate_for(16, 1.0, aggregators=16) == pytest.approx(16 / 30)
    assert forms.exchange_share_for(1.0, forms.ring_factor(2)) == 0


def test_ports_of_16_carry_3600_hosts_of_a_tree_and_14338_of_a_chain() -> None:
    assert tree_hosts(16) == 3600
    assert fat_tree_leaves(16) == 1024
    assert chain_hosts(16, fat_tree_leaves(16)) == 14_338
    assert (tree_hosts(32), chain_hosts(32, fat_tree_leaves(32))) == (30_752, 245_762)


def test_deployments_have_ports_for_all_hosts_and_no_switch_too_many() -> None:
    chain = deployment("cina", 1024, 16)
    assert chain_hosts(16, chain.adding) >= 1024 > chain_hosts(16, chain.adding - 1)
    assert chain.ports == 1024 + 2 * (chain.adding - 1) <= 16 * chain.adding
    assert deployment("hina", 3600, 16).adding == 1 + 16 + 16 * 15
    assert deployment("hina", 3600, 16).ports == 16 * (1 + 16 + 16 * 15)
    trees = deployment("mtina", 1024, 16, trees=4)
    assert trees.adding > deployment("hina", 1024, 16).adding > chain.adding
    assert deployment("ina", 16, 16).adding == deployment("cina", 16, 16).adding == 1
    with pytest.raises(ValueError, match="17 hosts do not fit on one switch of 16"):
        deployment("ina", 17, 16)
    with pytest.raises(ValueError, match="none for hosts"):
        deployment("mtina", 64, 4, trees=4)


def test_memory_of_a_chain_grows_with_its_length() -> None:
    link = LinkSpec(rate_bytes_s=12.5e9, latency_s=2e-6)
    for leaves, expected_mb in ((4, 0.25), (64, 3.25), (256, 12.85), (1024, 51.25)):
        chain = Fabric(world=leaves, network=link, hosts_per_leaf=1)
        assert slot_bytes("cina", chain, 0.0) == pytest.approx(1e6 * expected_mb)
    assert slot_bytes("hina", Fabric(world=1024, network=link, hosts_per_leaf=1), 0.0) == pytest.approx(100_000)

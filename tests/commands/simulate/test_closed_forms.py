"""Closed forms: limits, what the proposal prints, and its tables of times; and what switches carry."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from doc_pages import rows, section

from gradbus.commands.simulate import closed_forms as forms
from gradbus.commands.simulate.closed_forms import Fabric, slot_bytes
from gradbus.commands.simulate.topology import LinkSpec
from gradbus.experiments.figures.aggregation import aggregator_rate_for
from gradbus.experiments.figures.deployment import deployment
from gradbus.experiments.studies import printed_forms
from gradbus.experiments.studies.claims import exchange_share_for, static_memory_s

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


def one_switch(fabric: Fabric) -> Fabric:
    return Fabric(world=fabric.world, network=fabric.network)


FORMS: dict[str, Callable[[float, Fabric], float]] = {
    "ring": lambda size, at: forms.ring_s(size, at.world, at.network),
    "halving": lambda size, at: forms.halving_doubling_s(size, at.world, at.network),
    "ps 1": lambda size, at: forms.parameter_server_s(size, at.world, at.network, servers=1, blocks=BLOCKS),
    "ps n": lambda size, at: forms.parameter_server_s(size, at.world, at.network, servers=at.world, blocks=BLOCKS),
    "ina": lambda size, at: forms.ina_s(size, BLOCKS, one_switch(at)),
    "hina": lambda size, at: forms.hina_s(size, BLOCKS, at),
    "cina": lambda size, at: forms.cina_s(size, BLOCKS, at),
}

# Milliseconds for N = 8 to 1,024, as the design of the simulator has them.
WAYS = ("ring", "halving", "ps 1", "ps n", "ina", "hina", "cina")
TABLES = {
    (VGG19, fabric_of): """
        80.50 80.48 367.97 46.00 46.00 46.03 46.03
        86.28 86.24 735.93 46.00 46.00 46.03 46.03
        89.22 89.11 1471.85 46.00 46.00 46.03 46.03
        90.78 90.55 2943.70 46.00 46.00 46.03 46.03
        91.76 91.28 5887.39 46.00 46.00 46.03 46.03
        92.63 91.64 11774.78 46.00 46.00 46.05 46.05
        93.83 91.82 23549.56 46.00 46.00 46.05 46.08
        95.97 91.92 47099.12 46.00 46.00 46.05 46.13""",
    (RESNET50, fabric_of): """
        14.36 14.35 65.56 8.20 8.20 8.21 8.21
        15.42 15.38 131.11 8.20 8.20 8.21 8.21
        16.00 15.89 262.21 8.20 8.20 8.21 8.21
        16.38 16.15 524.42 8.20 8.20 8.21 8.21
        16.76 16.28 1048.84 8.20 8.20 8.21 8.21
        17.34 16.35 2097.67 8.20 8.20 8.22 8.22
        18.40 16.39 4195.33 8.20 8.20 8.22 8.23
        20.46 16.41 8390.66 8.20 8.20 8.22 8.25""",
    (VGG19, slow_fabric_of): """
        805.0 804.8 3679.7 460.0 460.0 460.0 460.0
        862.8 862.4 7359.3 460.0 460.0 460.0 460.0
        892.2 891.1 14718.5 460.0 460.0 460.1 460.1
        907.8 905.5 29437.0 460.0 460.0 460.1 460.1
        917.6 912.8 58873.9 460.0 460.0 460.1 460.2
        926.3 916.4 117747.8 460.0 460.0 460.1 460.5
        938.3 918.2 235495.6 460.0 460.0 460.1 461.0
        959.7 919.2 470991.2 460.0 460.0 460.1 462.0""",
    (RESNET50, slow_fabric_of): """
        143.6 143.5 655.6 82.0 82.0 82.0 82.0
        154.2 153.8 1311.1 82.0 82.0 82.0 82.0
        160.0 158.9 2622.1 82.0 82.0 82.0 82.0
        163.8 161.5 5244.2 82.0 82.0 82.0 82.0
        167.6 162.8 10488.4 82.0 82.0 82.0 82.1
        173.4 163.5 20976.7 82.0 82.0 82.0 82.1
        184.0 163.9 41953.3 82.0 82.0 82.0 82.3
        204.6 164.1 83906.6 82.0 82.0 82.0 82.6""",
}


@pytest.mark.parametrize(("given", "text"), TABLES.items(), ids=["vgg19", "resnet50", "vgg19 slow", "resnet50 slow"])
def test_times_are_those_of_the_tables(given: tuple[float, Callable[[int], Fabric]], text: str) -> None:
    size, fabric = given
    for world, row in zip(WORLDS, text.split("\n")[1:], strict=True):
        digits = len(row.split()[0].split(".")[1])
        for name, expected in zip(WAYS, row.split(), strict=True):
            found_ms = 1e3 * FORMS[name](size, fabric(world))
            assert found_ms == pytest.approx(float(expected), abs=0.51 * 10**-digits), (world, name)


def test_one_rank_sends_nothing_to_itself() -> None:
    alone = fabric_of(1, ranks_per_host=1)
    for name in ("ring", "halving"):
        assert FORMS[name](VGG19, alone) == 0, name
    for form in (forms.star_s, forms.shards_s):
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
        assert printed_forms.chain_overlap_s(VGG19, blocks, at) > 0
    # What cannot be hidden goes in front of the network's time, as the general formula has it.
    chain_s = forms.chain_in_host_s(VGG19, BLOCKS, at) - printed_forms.chain_overlap_s(VGG19, BLOCKS, at)
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
    static = [static_memory_s(1.0, link, memory=m) for m in (0.1, 0.25, 0.5, 0.75, 1, 2)]
    assert static == pytest.approx([10, 4, 2, 1.33, 1, 1], abs=0.005)
    crossing = 1 / forms.ring_factor(8)
    assert static_memory_s(1.0, link, memory=crossing) == pytest.approx(ring_assisted[0])


@pytest.mark.parametrize(("world", "share"), [(4, math.inf), (6, 5.9), (8, 3.2), (16, 1.9)])
def test_57_percent_over_a_ring_take_a_large_share_of_exchange_and_more_than_four_ranks(
    world: int, share: float
) -> None:
    factor = forms.ring_factor(world)
    found = exchange_share_for(1.57, factor)
    assert found == pytest.approx(share, rel=0.05)
    if math.isfinite(found):
        assert forms.speed_up(found, factor) == pytest.approx(1.57)


def test_an_aggregator_needs_about_half_the_rate_of_all_workers_together() -> None:
    assert [aggregator_rate_for(n, 1.0) for n in (2, 4, 8, 16)] == pytest.approx([2, 2.667, 4.571, 8.533], rel=1e-3)
    assert aggregator_rate_for(16, 1.0, aggregators=16) == pytest.approx(16 / 30)
    assert exchange_share_for(1.0, forms.ring_factor(2)) == 0


def test_deployments_have_ports_for_all_hosts_and_no_switch_too_many() -> None:
    chain = deployment("cina", 1024, 16)
    assert chain.adding * 14 + 2 >= 1024 > (chain.adding - 1) * 14 + 2  # two ports of each for its neighbours
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

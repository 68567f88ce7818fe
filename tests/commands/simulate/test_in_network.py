"""In-network aggregation on the model of a network: times against the closed forms, sums, slots and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gradbus.commands.simulate import closed_forms as forms
from gradbus.commands.simulate.closed_forms import Fabric
from gradbus.commands.simulate.in_network import simulate_aggregation
from gradbus.commands.simulate.rank_programs import Deadlock
from gradbus.commands.simulate.scenario import AggregationOutcome, Scenario
from gradbus.commands.simulate.topology import LinkSpec
from gradbus.experiments.studies.claims import static_memory_s

RESNET50 = 102_400_000
WIRE = LinkSpec(rate_bytes_s=12.5e9, latency_s=2e-6)
UPLINK = LinkSpec(rate_bytes_s=12.5e9, latency_s=1e-6)
LOCAL = LinkSpec(rate_bytes_s=150e9, latency_s=1e-6)


def fabric_of(world: int, **more: Any) -> Fabric:
    return Fabric(world=world, **{"network": WIRE, "uplink": UPLINK, "local": LOCAL, **more})


def simulated(kind: Any, fabric: Fabric, blocks: int, **more: Any) -> AggregationOutcome:
    return simulate_aggregation(
        Scenario(kind=kind, fabric=fabric, blocks=blocks, **{"gradient_bytes": RESNET50, **more})
    )


@pytest.mark.parametrize("ranks_per_host", [1, 4])
@pytest.mark.parametrize(("world", "blocks"), [(8, 128), (64, 32)])
def test_without_loss_times_are_those_of_the_closed_forms(world: int, blocks: int, ranks_per_host: int) -> None:
    fabric = fabric_of(world, ranks_per_host=ranks_per_host, hosts_per_leaf=4)
    assert simulated("ina", fabric, blocks).time_s == pytest.approx(forms.ina_s(RESNET50, blocks, fabric), rel=1e-4)
    assert simulated("hina", fabric, blocks).time_s == pytest.approx(forms.hina_s(RESNET50, blocks, fabric), rel=1e-4)
    assert simulated("cina", fabric, blocks).time_s == pytest.approx(forms.cina_s(RESNET50, blocks, fabric), rel=1e-4)


@pytest.mark.parametrize("world", [8, 32])
def test_a_ring_and_a_server_take_the_time_of_their_formulas(world: int) -> None:
    fabric, path = fabric_of(world), LinkSpec(rate_bytes_s=WIRE.rate_bytes_s, latency_s=2 * WIRE.latency_s)
    ring = simulated("ring", fabric, world)
    assert ring.time_s == pytest.approx(forms.ring_s(RESNET50, world, path), rel=1e-4)
    assert ring.in_network_share == 0
    expected = 2 * (world - 1) / world * RESNET50
    assert all(ring.bytes_by_link[f"{rank} up"] == pytest.approx(expected) for rank in range(world))
    server = simulated("ps", fabric, 32)
    formula = forms.parameter_server_s(RESNET50, world, WIRE, servers=1, blocks=32)
    assert server.time_s == pytest.approx(formula, rel=1e-3)
    assert server.bytes_by_link["server 0 down"] == server.bytes_by_link["server 0 up"] == world * RESNET50


def test_a_switch_sends_a_result_once_and_every_receiver_gets_it() -> None:
    fabric = fabric_of(16, hosts_per_leaf=4)
    outcome = simulated("hina", fabric, 64)
    assert outcome.packets["result"] == 64 * (1 + 4)  # by the spine, and by each of four leaves
    assert set(outcome.bytes_by_link.values()) == {RESNET50}
    assert outcome.in_network_share == 1
    assert outcome.retransmissions == outcome.lost == 0


def ring_assisted_s(world: int, memory: float, *, groups: int, grabs_late: bool = False) -> float:
    """With 16 groups under way, and slots for the share ``memory`` of them."""
    return simulated(
        "ra-ina",
        fabric_of(world),
        groups * world,
        slots=int(memory * 16) * world,
        window_blocks=16 * world,
        grabs_late=grabs_late,
    ).time_s


@pytest.mark.parametrize(
    ("world", "groups", "memories"),
    [(4, 128, (0, 0.25, 0.5, 0.625)), (8, 64, (0, 0.25, 0.5, 0.75, 1)), (16, 48, (0.5,))],
)
def test_ring_assisted_aggregation_takes_the_time_of_its_formula_for_the_slots_that_there_are(
    world: int, groups: int, memories: Sequence[float]
) -> None:
    """As the formula has it, where a group gets slots when it begins or not at all; where it may get them later it is
    faster, but with 4 ranks."""
    for memory in memories:
        expected = forms.ring_assisted_s(RESNET50, world, WIRE, memory=memory)
        found_s = ring_assisted_s(world, memory, groups=groups)
        assert found_s == pytest.approx(expected, rel=0.05), memory
        if memory == 0.5:
            late_s = ring_assisted_s(world, memory, groups=groups, grabs_late=True)
            assert late_s < found_s or (world == 4 and late_s == pytest.approx(found_s))


@pytest.mark.parametrize("world", [4, 16])
def test_a_ring_takes_at_most_twice_the_time_of_a_switch_that_adds(world: int) -> None:
    """2 (N - 1) / N times: that is how often a rank sends its gradient by a ring, and by a switch once."""
    fabric = fabric_of(world, network=LinkSpec(rate_bytes_s=12.5e9))
    ratio = simulated("ring", fabric, 8 * world).time_s / simulated("ina", fabric, 8 * world).time_s
    bound = forms.ring_factor(world)
    assert 0.95 * bound < ratio <= bound


def test_fixed_slots_for_a_part_of_the_round_trip_slow_a_switch_down_as_much() -> None:
    wire = LinkSpec(rate_bytes_s=12.5e9, latency_s=1e-4)
    blocks = 1024
    block_s = RESNET50 / blocks / wire.rate_bytes_s
    round_trip = 2 * (block_s + wire.latency_s) / block_s  # in blocks
    for memory in (0.25, 0.5, 0.75):
        pool = round(memory * round_trip)
        found = simulated("switchml", fabric_of(4, network=wire), blocks, slots=2 * pool)
        expected = static_memory_s(RESNET50, wire, memory=pool / round_trip)
        assert found.time_s == pytest.approx(expected, rel=0.05)


def test_a_late_rank_makes_all_wait_and_costs_no_packet() -> None:
    fabric = fabric_of(8)
    in_time, late = simulated("ina", fabric, 64), simulated("ina", fabric, 64, late_s={3: 0.01})
    assert late.time_s == pytest.approx(in_time.time_s + 0.01, rel=1e-3)
    assert late.packets == in_time.packets


def test_several_jobs_share_the_slots_of_a_switch_and_give_them_back() -> None:
    shared = {"jobs": 3, "iterations": 2, "compute_s": 2e-3, "starts_s": (0.0, 0.004, 0.008)}
    for kind in ("ra-ina", "switchml", "atp", "esa"):
        found = simulated(kind, fabric_of(4), 64, slots=24, window_blocks=16, **shared)
        assert len(found.job_s) == 3
        assert 0 < found.slot_share <= 1
        assert all(0 <= use.taken <= use.total == 24 for use in found.slots)
        assert 0 < found.in_network_share <= 1


def test_what_cannot_be_simulated_is_refused() -> None:
    fabric = fabric_of(4)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("expected one of ina", {"kind": "tree"}), ("blocks: expected at least 1", {"blocks": 0}),
        ("trees: ina has one", {"trees": 2}), ("a time for each of 2 jobs", {"jobs": 2, "starts_s": (0.0,)}),
        ("4 ranks do not fill hosts of 3", {"fabric": fabric_of(4, ranks_per_host=3)}),
        ("expected 1 for ring", {"kind": "ring", "fabric": fabric_of(4, ranks_per_host=2)}),
        ("need at least 2 each", {"jobs": 2, "slots": 3}),
        ("need at least 2 each", {"kind": "switchml", "jobs": 2, "slots": 3}),
    ]  # fmt: skip
    for message, change in refused:
        given: dict[str, Any] = {"kind": "ina", "fabric": fabric, "blocks": 8, **change}
        with pytest.raises(ValueError, match=message):
            simulated(**given)


def test_a_simulation_that_does_not_end_in_time_says_who_is_missing() -> None:
    with pytest.raises(Deadlock, match="4 ranks have not ended"):
        simulated("ina", fabric_of(4), 8, limit_s=1e-3)

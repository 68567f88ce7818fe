"""In-network aggregation on the model of a network: times against the closed forms, sums, slots and losses."""

from __future__ import annotations

from typing import Any

import pytest

from gradbus.experiments.simulate import closed_forms as forms
from gradbus.experiments.simulate.closed_forms import Fabric
from gradbus.experiments.simulate.in_network import simulate_aggregation
from gradbus.experiments.simulate.scenario import AggregationOutcome, Scenario
from gradbus.experiments.simulate.topology import LinkSpec

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

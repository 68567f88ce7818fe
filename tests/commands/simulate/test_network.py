"""The model of a network against formulas, and against the lockstep driver bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import program_case
import pytest
import torch
from torch import Tensor

from gradbus.commands.simulate.network import NetworkModel
from gradbus.commands.simulate.rank_programs import Deadlock, Mismatch
from gradbus.commands.simulate.sizes import size_only
from gradbus.commands.simulate.topology import LinkSpec, NetworkTopology, cluster
from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.base import Place
from gradbus.runtime.algorithms.requests import AllGather, AllReduce, Program, Swap
from gradbus.runtime.algorithms.routes import ROUTES

ALPHA_S, RATE = 1e-4, 25e6  # of a way between two hosts: latency, bytes a second
NUMEL = 1 << 20
SIZE = 4 * NUMEL
WIRE = LinkSpec(rate_bytes_s=RATE, latency_s=ALPHA_S / 2)


def all_reduce(place: Place, x: Tensor) -> Program[Tensor]:
    total: Tensor = yield AllReduce("sum", x)
    return total


def seconds_of(route: Callable[[Place, Tensor], Program[Tensor]], topology: NetworkTopology, x: Tensor) -> float:
    network = NetworkModel(topology)
    places = [Place(rank, topology.world, topology.hosts) for rank in range(topology.world)]
    network.run([route(place, x) for place in places])
    return float(network.env.now)


FORMULAS: dict[str, tuple[Callable[[Place, Tensor], Program[Tensor]], Callable[[int], float], int]] = {
    "ring": (ROUTES["ring"], lambda n: 2 * (n - 1) * (ALPHA_S + SIZE / n / RATE), 64),
    "halving-doubling": (
        ROUTES["halving-doubling"],
        lambda n: 2 * math.log2(n) * ALPHA_S + 2 * (n - 1) / n * SIZE / RATE,
        1024,
    ),
    "star": (ROUTES["star"], lambda n: 2 * (ALPHA_S + (n - 1) * SIZE / RATE), 1024),
    "shards": (all_reduce, lambda n: 2 * (ALPHA_S + (n - 1) / n * SIZE / RATE), 64),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_route_takes_the_time_of_its_formula(name: str) -> None:
    route, formula, most = FORMULAS[name]
    for world in (8, 16, 64, 1024):
        if world <= most:
            found_s = seconds_of(route, cluster(world, network=WIRE), size_only(NUMEL))
            assert found_s == pytest.approx(formula(world), rel=0.01), world


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 4), (8, 8), (16, 4)])
def test_hierarchical_takes_the_time_of_its_formula_and_sends_a_ring_between_hosts(hosts: int, ranks: int) -> None:
    """The rails of a host share its link: while the part of one is on its way, the parts of the others follow."""
    local = LinkSpec(rate_bytes_s=100 * RATE, latency_s=1e-7)
    topology = cluster(hosts * ranks, network=WIRE, ranks_per_host=ranks, local=local)
    found_s = seconds_of(ROUTES["hierarchical"], topology, size_only(NUMEL))
    within_s = 2 * (2e-7 + (ranks - 1) * SIZE / ranks / (100 * RATE))
    part_s = SIZE / hosts / ranks / RATE
    assert found_s == pytest.approx(within_s + 2 * (hosts - 1) * max(ranks * part_s, part_s + ALPHA_S), rel=0.01)
    expected = 2 * (hosts - 1) / hosts * SIZE
    for host in range(hosts):
        assert topology.links[f"host {host} up"].bytes_carried == pytest.approx(expected, rel=1e-3)
        assert topology.links[f"host {host} down"].bytes_carried == pytest.approx(expected, rel=1e-3)


def test_a_ring_over_racks_takes_the_latencies_of_its_longest_way() -> None:
    far = LinkSpec(rate_bytes_s=RATE, latency_s=1e-3)
    topology = cluster(16, network=WIRE, hosts_per_rack=4, uplink=far)
    found_s = seconds_of(ROUTES["ring"], topology, size_only(NUMEL))
    # A part passes each of the four borders between racks about twice; the ring is never faster than without them.
    assert found_s == pytest.approx(30 * (ALPHA_S + SIZE / 16 / RATE) + 8 * 2e-3, rel=0.05)
    assert topology.links["switch 0 up"].bytes_carried == pytest.approx(30 * SIZE / 16, rel=1e-3)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_results_are_those_of_the_lockstep_driver_bit_by_bit(world: int) -> None:
    makers = [program_case.every_request, *([program_case.every_algorithm] if world == 3 else [])]
    for make in makers:
        topology = cluster(world, network=WIRE)
        found = NetworkModel(topology).run([make(rank, world) for rank in range(world)])
        expected = Lockstep(world).run([make(rank, world) for rank in range(world)])
        for here, there in zip(found, expected, strict=True):
            assert here.keys() == there.keys()
            for name, tensor in here.items():
                assert torch.equal(tensor, there[name]), name


def test_sizes_alone_take_the_time_that_values_take() -> None:
    for route in (*ROUTES.values(), all_reduce):
        taken = []
        for x in (torch.ones(1001), size_only(1001)):
            local = LinkSpec(rate_bytes_s=1e9)
            taken.append(seconds_of(route, cluster(6, network=WIRE, ranks_per_host=2, local=local), x))
        assert taken[0] == taken[1]


def test_loss_takes_time_that_depends_on_the_seed_alone_and_changes_no_result() -> None:
    def run(loss: float, seed: int) -> tuple[float, list[Tensor]]:
        wire = LinkSpec(rate_bytes_s=RATE, latency_s=ALPHA_S / 2, loss=loss)
        network = NetworkModel(cluster(4, network=wire), seed=seed, frame_bytes=1000, resend_s=0.002)
        found = network.run([ROUTES["ring"](Place(r, 4), torch.arange(40_000.0) + r) for r in range(4)])
        return network.env.now, found

    without_s, expected = run(0.0, 0)
    with_s, found = run(0.1, 0)
    assert run(0.1, 0)[0] == with_s != run(0.1, 1)[0]
    assert with_s > 1.1 * without_s + 6 * 0.002  # a tenth of the bytes again, and at least one wait in each step
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_an_actor_on_a_switch_uses_the_same_links() -> None:
    """Adds up blocks of all ranks and sends the sums to all: (k + 1) / k K / B + 2 alpha, as in a pipeline."""
    world, blocks = 8, 64
    network = NetworkModel(cluster(world, network=WIRE))
    there = [0] * blocks
    ended_s = [0.0] * world

    def at_the_switch(block: int) -> None:
        there[block] += 1
        if there[block] == world:
            for rank in range(world):
                network.send("switch 0", rank, SIZE // blocks, lambda rank=rank: at_a_rank(rank))  # type: ignore[misc]

    def at_a_rank(rank: int) -> None:
        ended_s[rank] = network.env.now

    for rank in range(world):
        for block in range(blocks):
            network.send(rank, "switch 0", SIZE // blocks, lambda block=block: at_the_switch(block))  # type: ignore[misc]
    network.run_all()
    assert ended_s == pytest.approx([(blocks + 1) / blocks * SIZE / RATE + ALPHA_S] * world, rel=0.001)


def test_ranks_that_wait_for_each_other_and_what_does_not_fit_are_told() -> None:
    def waits(rank: int) -> Program[None]:
        yield Swap("turn", {}, {1 - rank: torch.empty(2)})

    def gathers(rank: int) -> Program[None]:
        if rank == 0:
            yield AllGather("all", torch.ones(1))

    def sends(rank: int, back: bool) -> Program[None]:
        yield Swap("rows", {1: torch.ones(2)} if rank == 0 else {}, {0: torch.ones(3)} if back and rank == 1 else {})

    pair = cluster(2, network=WIRE)
    with pytest.raises(Deadlock, match=r"rank 0 waits for Swap 'turn' from \[1\]; rank 1 waits for Swap 'turn'"):
        NetworkModel(pair).run([waits(0), waits(1)])
    with pytest.raises(Deadlock, match="rank 0 waits for AllGather 'all'"):
        NetworkModel(pair).run([gathers(0), gathers(1)])
    with pytest.raises(Mismatch, match=r"rank 1 expects \(3,\) of torch.float32 by 'rows' from rank 0, got \(2,\)"):
        NetworkModel(pair).run([sends(0, True), sends(1, True)])
    with pytest.raises(Mismatch, match="rank 1 never received"):
        NetworkModel(pair).run([sends(0, False), sends(1, False)])
    with pytest.raises(ValueError, match="do not fill hosts of 4"):
        cluster(6, network=WIRE, ranks_per_host=4, local=WIRE)

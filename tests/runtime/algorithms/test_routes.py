"""Ways of an all-reduce against NumPy, with all ranks in one process: each in its own order, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.experiments.simulate.lockstep import Lockstep
from gradbus.runtime.algorithms.base import Place
from gradbus.runtime.algorithms.routes import ROUTES, Route
from gradbus.runtime.errors import ConfigError

Array = NDArray[Any]


def added(vectors: list[Array]) -> Array:
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total = total + vector
    return total


def ring_order(vectors: list[Array]) -> Array:
    """Part j is added from rank j on around the ring; the newest value is the second operand of each addition."""
    world = len(vectors)
    parts = [np.array_split(vector, world) for vector in vectors]
    return np.concatenate([added([parts[(j + i) % world][j] for i in range(world)]) for j in range(world)])


def halving_order(vectors: list[Array]) -> Array:
    """Ranks beyond a power of two are added to their partners first; then pairs, the most distant ones first."""
    power = 1 << (len(vectors).bit_length() - 1)
    sums = [vectors[r] + vectors[r + power] if r + power < len(vectors) else vectors[r] for r in range(power)]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[r] + sums[r + half] for r in range(half)]
    return sums[0]


def hierarchical_order(vectors: list[Array], hosts: tuple[str, ...]) -> Array:
    groups = [[r for r, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)]
    rails = min(map(len, groups))
    parts = [np.array_split(vector, rails) for vector in vectors]
    return np.concatenate(
        [ring_order([added([parts[r][rail] for r in group]) for group in groups]) for rail in range(rails)]
    )


ORACLES: dict[Route, Callable[[list[Array]], Array]] = {"star": added, "ring": ring_order, "halving": halving_order}


def run(route: Route, vectors: list[Tensor], hosts: tuple[str, ...] = ()) -> tuple[list[Tensor], Lockstep]:
    world = len(vectors)
    lockstep = Lockstep(world)
    return lockstep.run([ROUTES[route](Place(r, world, hosts), x) for r, x in enumerate(vectors)]), lockstep


def vectors_of(world: int, numel: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(100 * world + numel)
    return [torch.randn(numel, generator=random) * 10**r for r in range(world)]


@pytest.mark.parametrize("world", range(1, 10))
@pytest.mark.parametrize("route", ORACLES)
def test_a_route_adds_in_its_order_for_all_lengths(route: Route, world: int) -> None:
    for numel in range(41):
        vectors = vectors_of(world, numel)
        expected = ORACLES[route]([vector.numpy() for vector in vectors])
        for rank, found in enumerate(run(route, vectors)[0]):
            assert found.numpy().tobytes() == expected.tobytes(), f"rank {rank}, {numel} values"


def host_shapes(most: int) -> Iterator[tuple[int, ...]]:
    """Numbers of ranks of each host, of at most so many ranks in all."""
    for count in range(1, most + 1):
        for shape in itertools.product(range(1, most + 1), repeat=count):
            if sum(shape) <= most:
                yield shape


@pytest.mark.parametrize("interleaved", [False, True])
def test_hierarchical_adds_host_by_host_for_all_shapes_of_up_to_eight_ranks(interleaved: bool) -> None:
    for shape in host_shapes(8):
        hosts = [f"host {number}" for number, count in enumerate(shape) for _ in range(count)]
        if interleaved:
            hosts = hosts[::2] + hosts[1::2]
        vectors = vectors_of(len(hosts), 13)
        expected = hierarchical_order([vector.numpy() for vector in vectors], tuple(hosts))
        for found in run("hierarchical", vectors, tuple(hosts))[0]:
            assert found.numpy().tobytes() == expected.tobytes(), shape


def test_bytes_are_those_of_the_table() -> None:
    numel = 960
    size = 4 * numel
    for world in (2, 4, 8):
        sent = {route: run(route, vectors_of(world, numel))[1].cost.bytes_out for route in ORACLES}
        assert max(sent["star"]) == (world - 1) * size
        assert sent["ring"] == sent["halving"] == [2 * (world - 1) * size // world] * world


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (2, 4), (4, 2)])
def test_between_hosts_go_the_bytes_of_a_ring_over_the_rails(hosts: int, ranks: int) -> None:
    world, numel = hosts * ranks, 960
    places = [Place(r, world, tuple(f"host {rank // ranks}" for rank in range(world))) for r in range(world)]
    between = 0

    def counted(rank: int, program: Any) -> Any:
        nonlocal between
        answer = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as end:
                return end.value
            between += sum(4 * t.numel() for peer, t in request.send.items() if peer // ranks != rank // ranks)
            answer = yield request

    vectors = vectors_of(world, numel)
    Lockstep(world).run([counted(r, ROUTES["hierarchical"](place, vectors[r])) for r, place in enumerate(places)])
    assert between == world * 2 * (hosts - 1) * 4 * numel // (hosts * ranks)


def test_hierarchical_needs_the_hosts() -> None:
    with pytest.raises(ConfigError, match="needs the host of each rank"):
        run("hierarchical", vectors_of(2, 3))

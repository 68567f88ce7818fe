"""Ways of an all-reduce against NumPy, with all ranks in one process: each in its own order, bit by bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.base import Place, Step, bucket_of, make_algorithm
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


def tree_order(vectors: list[Array]) -> Array:
    """Neighbours first, then pairs of pairs; a rank without a partner waits for the next ones."""
    sums = list(vectors)
    while len(sums) > 1:
        sums = [sums[r] + sums[r + 1] if r + 1 < len(sums) else sums[r] for r in range(0, len(sums), 2)]
    return sums[0]


def hierarchical_order(vectors: list[Array], hosts: tuple[str, ...], racks: tuple[str, ...] = ()) -> Array:
    """Within hosts; of the sums of hosts, rail by rail, within racks; then around the ring."""
    groups = [[r for r, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)]
    rails = min(map(len, groups))
    parts = [np.array_split(vector, rails) for vector in vectors]
    sums = [[added([parts[r][rail] for r in group]) for group in groups] for rail in range(rails)]
    if racks:
        of_hosts = tuple(racks[group[0]] for group in groups)
        return np.concatenate([hierarchical_order(one, of_hosts) for one in sums])
    return np.concatenate([ring_order(one) for one in sums])


ORACLES: dict[Route, Callable[[list[Array]], Array]] = {
    "star": added,
    "tree": tree_order,
    "ring": ring_order,
    "halving-doubling": halving_order,
}


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
        assert sent["ring"] == sent["halving-doubling"] == [2 * (world - 1) * size // world] * world


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


def ranks_of(racks: list[list[int]], *, rails: bool = False) -> list[dict[str, Any]]:
    """The entries of a topology: numbers of ranks of each host, rack by rack."""
    return [
        {"host": f"host {rack} {host}", "rack": f"rack {rack}"} | ({"rail": count - 1 - rail} if rails else {})
        for rack, hosts in enumerate(racks)
        for host, count in enumerate(hosts)
        for rail in range(count)
    ]


def mean_by(options: dict[str, Any], vectors: list[Tensor], hosts: tuple[str, ...] = ()) -> list[Array]:
    """What dense leaves on each rank."""
    world = len(vectors)
    buckets = [bucket_of({"w": vector}) for vector in vectors]
    ranks = [make_algorithm("dense", Place(rank, world, hosts), options) for rank in range(world)]
    Lockstep(world).run([one.exchange(b, Step(0, active=world)) for one, b in zip(ranks, buckets, strict=True)])
    return [bucket.flat.numpy() for bucket in buckets]


@pytest.mark.parametrize("route", ["auto", "direct", "shards", *ROUTES])
def test_dense_takes_the_way_of_its_option(route: str) -> None:
    vectors, hosts = vectors_of(5, 23), ("a", "a", "b", "b", "b")
    arrays = [vector.numpy() for vector in vectors]
    by_hosts = route == "hierarchical"
    total = hierarchical_order(arrays, hosts) if by_hosts else ORACLES.get(route, added)(arrays)  # type: ignore[call-overload]
    for found in mean_by({"route": route}, vectors, hosts):
        assert found.tobytes() == (total * np.float32(1 / 5)).tobytes()


@pytest.mark.parametrize("racks", [[[1, 1], [1, 1]], [[2, 2], [2, 2]], [[2, 3], [2]], [[1], [1], [1]], [[4]]])
@pytest.mark.parametrize("rails", [False, True])
def test_a_topology_adds_rack_by_rack(racks: list[list[int]], rails: bool, tmp_path: Path) -> None:
    ranks = ranks_of(racks, rails=rails)
    order = sorted(range(len(ranks)), key=lambda rank: (ranks[rank].get("rail", 0), rank))
    (tmp_path / "topology.json").write_text(json.dumps({"ranks": ranks}))
    vectors = vectors_of(len(ranks), 29)
    expected = hierarchical_order(
        [vectors[rank].numpy() for rank in order],
        tuple(ranks[rank]["host"] for rank in order),
        tuple(ranks[rank]["rack"] for rank in order),
    )
    options = {"route": "hierarchical", "topology": str(tmp_path / "topology.json")}
    for found in mean_by(options, vectors):
        assert found.tobytes() == (expected * np.float32(1 / len(ranks))).tobytes()


def test_ranks_with_other_topologies_have_other_options(tmp_path: Path) -> None:
    """So they are told so before the first step, though the files may have equal names."""
    path = tmp_path / "topology.json"
    found = []
    for host in ("a", "b"):
        path.write_text(json.dumps({"ranks": [{"host": "a"}, {"host": host}]}))
        options = {"route": "hierarchical", "topology": str(path)}
        found.append(make_algorithm("dense", Place(0, 2), options).options.model_dump(mode="json"))
    assert found[0] != found[1]
    again = make_algorithm("dense", Place(0, 2), found[0]).options  # as settings that were saved
    assert again.model_dump(mode="json") == found[0]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"ranks": []}', "ranks"),
        ('{"ranks": [{"host": "a", "rock": "b"}]}', "rock"),
        ('{"ranks": [{"host": "a", "rack": "x"}, {"host": "b"}]}', "rank 1 has no rack, others have"),
        ('{"ranks": [{"host": "a", "rack": "x"}, {"host": "a", "rack": "y"}]}', "host 'a' is in rack 'x' at rank 0"),
        ('{"ranks": [{"host": "a", "rail": 0}, {"host": "a", "rail": 0}]}', r"rails \[0, 0\], expected 0 to 1"),
        ('{"ranks": ', "topology.json"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_wrong_topology_is_refused_with_the_reason(content: str | None, error: str, tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=error):
        make_algorithm("dense", Place(0, 2), {"route": "hierarchical", "topology": str(path)})


def test_what_a_route_cannot_work_with_is_refused_at_the_start() -> None:
    sgd = torch.optim.SGD([torch.ones(2)], lr=0.1)
    with pytest.raises(ConfigError, match="needs the host of each of the 2 ranks"):
        make_algorithm("dense", Place(0, 2), {"route": "hierarchical"}).check({}, sgd)
    topology = {"ranks": [{"host": "a"}] * 3}
    with pytest.raises(ConfigError, match="the topology has 3 ranks, expected 2"):
        make_algorithm("dense", Place(0, 2), {"route": "hierarchical", "topology": topology}).check({}, sgd)
    with pytest.raises(ConfigError, match="rounds half precision at each hop"):
        make_algorithm("dense", Place(0, 2), {"route": "ring", "wire": "fp16"})
    with pytest.raises(ConfigError, match="topology is for route 'hierarchical'"):
        make_algorithm("dense", Place(0, 2), {"topology": topology})
    with pytest.raises(ConfigError, match="needs the host of each of the 2 ranks"):
        make_algorithm("bytegrad", Place(0, 2), {"hierarchical": True}).check({}, sgd)
    with pytest.raises(ConfigError, match="the topology has 3 ranks, expected 2"):
        make_algorithm("bytegrad", Place(0, 2), {"hierarchical": True, "topology": topology}).check({}, sgd)
    with pytest.raises(ConfigError, match="topology is for hierarchical=true"):
        make_algorithm("bytegrad", Place(0, 2), {"topology": topology})


def test_hierarchical_needs_the_hosts() -> None:
    with pytest.raises(ConfigError, match="needs the host of each of the 2 ranks, 0 are known"):
        run("hierarchical", vectors_of(2, 3))

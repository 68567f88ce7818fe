"""Ways to sum gradients that can be compared: each is simulated, and has a closed form.

| way | simulated as |
|---|---|
| ring, star, halving-doubling, hierarchical | rank programs, those of the bus: `runtime/algorithms/routes.py` |
| ps-n | as many parameter servers as ranks: each rank is one for its share of the gradient, as the bus does by itself |
| ps-1 | one parameter server, on a host of its own |
| ina, hina, mtina, cina | one switch that adds, a tree of them, several trees, a chain of leaves |
| ra-ina | a ring through one switch, which takes those blocks that it has slots for |
| ring-packets | the same ring without the switch: packets that are acknowledged, and sent again one by one |
| switchml, atp, esa | baselines of one switch: fixed slots; hashed ones and a server, without and with priorities |

Trees and chains have the hosts at leaf switches. The others have all hosts at one switch, so that nothing between racks
holds them up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias, cast

import numpy as np
from torch import Tensor

from gradbus.commands.simulate import closed_forms as forms
from gradbus.commands.simulate.closed_forms import Fabric, slot_bytes
from gradbus.commands.simulate.in_network import simulate_aggregation
from gradbus.commands.simulate.network import NetworkModel
from gradbus.commands.simulate.scenario import AggregationOutcome, Kind, Scenario
from gradbus.commands.simulate.sizes import size_only
from gradbus.commands.simulate.topology import LinkSpec, NetworkTopology, cluster
from gradbus.runtime.algorithms.base import Place
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.algorithms.routes import ROUTES

Way: TypeAlias = Literal[
    "ring",
    "star",
    "halving-doubling",
    "hierarchical",
    "ps-1",
    "ps-n",
    "ina",
    "hina",
    "mtina",
    "cina",
    "ra-ina",
    "ring-packets",
    "switchml",
    "atp",
    "esa",
]
TREES = ("hina", "mtina", "cina")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedExchange:
    """Holds what is summed, how often, and by whom.

    Attributes:
        fabric: hosts, switches and links of one job. gradient_bytes: of a rank. blocks: that these are cut in.
        memory: slots of a switch, in multiples of :func:`slots_needed`; None: enough. jobs: that share the switches.
        iterations: gradients, one after the other, each after ``compute_s``. trees: of ``mtina``.
        window_blocks, retransmit_s: see :class:`~.scenario.Scenario`. seed: of losses, and of when jobs begin.
    """

    way: Way
    fabric: Fabric
    gradient_bytes: int
    blocks: int
    memory: float | None = None
    jobs: int = 1
    iterations: int = 1
    compute_s: float = 0.0
    trees: int = 1
    window_blocks: int | None = None
    retransmit_s: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTimes:
    """Holds what a simulation of an exchange has found.

    Attributes:
        job_s: mean of the jobs, from the start of a job to its end. exchange_s: of one gradient, without computing.
        bytes_out: of one gradient, that the busiest rank's link has carried to the network.
        slot_share: of the slots, mean share that is taken. in_network_share: of the blocks, whose sum a switch made.
    """

    job_s: float
    exchange_s: float
    bytes_out: float
    slot_share: float = 0.0
    in_network_share: float = 0.0
    retransmissions: int = 0


def _shards(place: Place, x: Tensor) -> Program[Tensor]:
    total: Tensor = yield AllReduce("sum", x)
    return total


PROGRAMS: dict[str, Callable[[Place, Tensor], Program[Tensor]]] = {**dict(ROUTES.items()), "ps-n": _shards}


def is_program(way: Way) -> bool:
    """Whether it is a rank program, for which switches have no slots."""
    return way in PROGRAMS


def messages_of(exchange: SimulatedExchange) -> int:
    """About so many messages are simulated."""
    world, log = exchange.fabric.world, math.ceil(math.log2(max(2, exchange.fabric.world)))
    if is_program(exchange.way):
        per_rank = {"star": 2, "halving-doubling": 2 * log}.get(exchange.way, 2 * (world - 1))
        return world * per_rank * exchange.iterations
    turns = 2 * world if exchange.way in ("ra-ina", "ring-packets") else 2
    return exchange.jobs * exchange.iterations * exchange.blocks * world * turns


def slots_needed(exchange: SimulatedExchange) -> int:
    """Slots of one switch that keep the links of one job busy: two for each block that is sent until its sum is back,
    as its results are acknowledged while the next block is added."""
    block_bytes = exchange.gradient_bytes / exchange.blocks
    needed_bytes = slot_bytes("cina" if exchange.way == "cina" else "hina", _own(exchange), block_bytes)
    return 2 * math.ceil(needed_bytes / block_bytes)


def closed_form_s(exchange: SimulatedExchange) -> float | None:
    """The time of one exchange by its closed form; None: there is none, as with loss."""
    fabric, size, blocks = _own(exchange), exchange.gradient_bytes, exchange.blocks
    link, world, way = fabric.network, fabric.world, exchange.way
    path = replace(link, latency_s=2 * link.latency_s)
    if link.loss or way in ("atp", "esa", "ring-packets"):
        return None
    if way == "ps-1":
        return forms.parameter_server_s(size, world, path, servers=1, blocks=blocks)
    share = 1.0 if exchange.memory is None else min(1.0, exchange.memory / exchange.jobs)
    if way == "ra-ina" and share < 1:
        return forms.ring_assisted_s(size, world, link, memory=share)
    among_ranks: dict[str, Callable[[float, int, LinkSpec], float]] = {
        "ring": forms.ring_s, "star": forms.star_s, "halving-doubling": forms.halving_doubling_s,
        "ps-n": forms.shards_s,
    }  # fmt: skip
    by_switches: dict[str, Callable[[float, int, Fabric], float]] = {
        "hina": forms.hina_s,
        "cina": forms.cina_s,
        "mtina": partial(forms.mtina_s, trees=exchange.trees),
    }
    if way in among_ranks:
        return among_ranks[way](size, world, path)
    if way == "hierarchical":
        return _hierarchical_s(size, fabric)
    return by_switches.get(way, forms.ina_s)(size, blocks, fabric) / share if share else None


def _hierarchical_s(size: float, fabric: Fabric) -> float:
    """All ranks of a host on one link: its parts follow one another, unless the latency is longer than all of them."""
    ranks, hosts, link = fabric.ranks_per_host, fabric.world // fabric.ranks_per_host, fabric.network
    part_s, latency_s = size / (hosts * ranks * link.rate_bytes_s), 2 * link.latency_s
    within_s = 0.0
    if ranks > 1 and fabric.local is not None:
        within_s = forms.shards_s(size, ranks, replace(fabric.local, latency_s=2 * fabric.local.latency_s))
    return within_s + 2 * (hosts - 1) * max(ranks * part_s, part_s + latency_s)


def simulate_exchange(exchange: SimulatedExchange) -> ExchangeTimes:
    """Simulate it.

    Raises:
        ValueError: slots that are too few for any block, or ranks that do not fill hosts. Deadlock: see
            :func:`~.in_network.simulate_aggregation`.
    """
    if is_program(exchange.way):
        return _program(exchange)
    fabric, way = exchange.fabric, exchange.way
    random = np.random.default_rng((exchange.seed, 2))
    turn_s = exchange.compute_s + exchange.gradient_bytes / fabric.network.rate_bytes_s
    starts_s = (0.0, *(turn_s * random.random(exchange.jobs - 1)).tolist()) if exchange.jobs > 1 else ()
    slots, window = None, exchange.window_blocks
    if exchange.memory is not None:
        needed = slots_needed(exchange)
        slots = round(exchange.memory * needed)
        if window is None:  # around a ring a rank has one block of a group under way
            window = max(1, needed // 2) * (fabric.world if way == "ra-ina" else 1)
    outcome = simulate_aggregation(
        Scenario(
            kind=_KINDS.get(way) or cast(Kind, way),
            fabric=_own(exchange),
            gradient_bytes=exchange.gradient_bytes,
            blocks=exchange.blocks,
            trees=exchange.trees if way == "mtina" else 1,
            jobs=exchange.jobs,
            starts_s=starts_s,
            slots=slots,
            window_blocks=window,
            iterations=exchange.iterations,
            compute_s=exchange.compute_s,
            retransmit_s=exchange.retransmit_s,
            seed=exchange.seed,
        )
    )
    return ExchangeTimes(
        job_s=sum(outcome.job_s) / len(outcome.job_s),
        exchange_s=outcome.time_s,
        bytes_out=_busiest(outcome) / exchange.iterations,
        slot_share=outcome.slot_share,
        in_network_share=outcome.in_network_share,
        retransmissions=outcome.retransmissions,
    )


_KINDS: dict[str, Kind] = {"ps-1": "ps", "ring-packets": "ring"}


def _own(exchange: SimulatedExchange) -> Fabric:
    """The network of a way: without leaf switches where it is not for these."""
    fabric = exchange.fabric
    return fabric if exchange.way in TREES else replace(fabric, hosts_per_leaf=None, uplink=None)


def _busiest(outcome: AggregationOutcome) -> int:
    ups = [count for name, count in outcome.bytes_by_link.items() if name.removesuffix(" up").isdigit()]
    return max(ups, default=0)


def _program(exchange: SimulatedExchange) -> ExchangeTimes:
    """A rank program. Its jobs have nothing in common, so one is simulated, and each of its gradients alone."""
    topology = topology_of(_own(exchange))
    network = NetworkModel(topology, seed=exchange.seed)
    numel = max(1, exchange.gradient_bytes // 4)
    route = PROGRAMS[exchange.way]
    ends_s = [0.0]
    for iteration in range(exchange.iterations if topology.loses else 1):
        places: Sequence[Place] = [Place(rank, topology.world, topology.hosts) for rank in range(topology.world)]
        network.run([route(place, size_only(numel)) for place in places], name=f"{iteration}")
        ends_s.append(float(network.env.now))
    exchange_s = ends_s[-1] / (len(ends_s) - 1)
    return ExchangeTimes(
        job_s=exchange.iterations * (exchange.compute_s + exchange_s),
        exchange_s=exchange_s,
        bytes_out=max(network.bytes_out) / (len(ends_s) - 1),
    )


def topology_of(fabric: Fabric) -> NetworkTopology:
    """Return the same hosts and links for rank programs. Raises ValueError: the ranks do not fill the hosts."""
    local: LinkSpec | None = fabric.local if fabric.ranks_per_host > 1 else None
    return cluster(
        fabric.world,
        network=fabric.network,
        ranks_per_host=fabric.ranks_per_host,
        local=local,
        hosts_per_rack=fabric.hosts_per_leaf,
        uplink=fabric.uplink,
    )

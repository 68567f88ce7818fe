"""Closed forms of the time that an all-reduce takes, by a ring, a parameter server or aggregating switches.

K is ``gradient_bytes`` of one rank, N the number of ranks (``world``), B and a the rate and latency of a link, o its
overhead for each message, k the number of ``blocks`` that the gradient is cut in, n the ranks of a host, M the hosts,
L the leaf switches. Links are full duplex, adding up takes no time, and nothing is lost.

A link of a pipeline is one hop, from one node to the next. For an algorithm among ranks ``path`` is the whole way from
rank to rank: the smallest rate of it and the sum of its latencies.

Aggregation by switches is a pipeline: a block is on one link while the block behind it is on the link before. So there
is one formula for all of it, :func:`pipeline_s`, and a list of links for each topology. The proposal of
RA-INA, CINA and MTINA that this project follows has formulas of its own; where they are wrong the docstrings say
how, and ``experiments/studies/printed_forms.py`` has them as printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gradbus.commands.simulate.topology import LinkSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Hosts at leaf switches, leaf switches at spine switches.

    Attributes:
        network: between a host and its leaf. local: from a rank to the next one of its host; needed where there are
            several. uplink: between a leaf and a spine; None: as ``network``.
        hosts_per_leaf: None: all hosts are at one switch.
    """

    world: int
    network: LinkSpec
    local: LinkSpec | None = None
    uplink: LinkSpec | None = None
    ranks_per_host: int = 1
    hosts_per_leaf: int | None = None

    @property
    def leaves(self) -> int:
        """Number of leaf switches, L."""
        hosts = -(-self.world // self.ranks_per_host)
        return 1 if self.hosts_per_leaf is None else -(-hosts // self.hosts_per_leaf)

    @property
    def within_host(self) -> list[LinkSpec]:
        """The chain of n - 1 links by which the last rank of a host gets the sum of all. Raises ValueError: no link."""
        if self.ranks_per_host > 1 and self.local is None:
            raise ValueError("ranks of one host need a link within it: local")
        return [self.local] * (self.ranks_per_host - 1) if self.local is not None else []

    @property
    def to_spine(self) -> LinkSpec:
        """From a leaf to a spine."""
        return self.uplink or self.network


def pipeline_s(gradient_bytes: float, blocks: int, links: Sequence[LinkSpec]) -> float:
    """Blocks follow one another over links: ``sum(K / (k b) + o + a) + (k - 1) max(K / (k b) + o)``.

    One block is stored and forwarded by each node. With more and more blocks, and without overhead, what remains is
    the time on the slowest link and all latencies.
    """
    on_link_s = [gradient_bytes / (blocks * link.rate_bytes_s) + link.overhead_s for link in links]
    return sum(on_link_s) + sum(link.latency_s for link in links) + (blocks - 1) * max(on_link_s, default=0.0)


# Among ranks


def ring_s(gradient_bytes: float, world: int, path: LinkSpec) -> float:
    """``2 (N - 1) (K / (N B) + a + o)``: Patarasuk and Yuan, JPDC 2009. The proposal has the same."""
    return 2 * (world - 1) * (gradient_bytes / (world * path.rate_bytes_s) + path.latency_s + path.overhead_s)


def star_s(gradient_bytes: float, world: int, path: LinkSpec) -> float:
    """Rank 0 adds up and sends back: ``2 ((N - 1) (K / B + o) + a)``."""
    if world == 1:
        return 0.0
    return 2 * ((world - 1) * (gradient_bytes / path.rate_bytes_s + path.overhead_s) + path.latency_s)


def halving_doubling_s(gradient_bytes: float, world: int, path: LinkSpec) -> float:
    """``2 log2 N (a + o) + 2 (N - 1) / N K / B`` for powers of two (Rabenseifner; Thakur et al., IJHPCA 2005, 4.4).

    In other worlds the ranks beyond the largest power of two P give their vectors away first and get the sum last:
    ``2 (K / B + a)`` and the time of P.
    """
    power = 1 << (world.bit_length() - 1)
    fold_s = 2 * (gradient_bytes / path.rate_bytes_s + path.latency_s + path.overhead_s) if world > power else 0.0
    on_path_s = 2 * (power - 1) / power * gradient_bytes / path.rate_bytes_s
    return 2 * math.log2(power) * (path.latency_s + path.overhead_s) + on_path_s + fold_s


# Parameter servers


def parameter_server_s(gradient_bytes: float, world: int, path: LinkSpec, *, servers: int, blocks: int) -> float:
    """Servers on machines of their own, each with a share of the gradient: ``max(N / S, 1) K / B (k + 1) / k + 2 a``.

    The proposal has ``(k + 1) K / (k B) + 2 a``, without N: that is the time of a server whose link is N times as
    fast as a worker's, or of N servers, and not of the bottleneck that its text speaks of.
    """
    load = max(world / servers, 1.0)
    return load * gradient_bytes / path.rate_bytes_s * (blocks + 1) / blocks + 2 * path.latency_s


def shards_s(gradient_bytes: float, world: int, path: LinkSpec) -> float:
    """Each rank serves one share of the gradient, ``2 ((N - 1) (K / (N B) + o) + a)``: the bytes of a ring, two
    latencies. The bus reduces so."""
    if world == 1:
        return 0.0
    on_path_s = gradient_bytes / (world * path.rate_bytes_s) + path.overhead_s
    return 2 * ((world - 1) * on_path_s + path.latency_s)


# Aggregation by switches


def chain_in_host_s(gradient_bytes: float, blocks: int, fabric: Fabric) -> float:
    """The last rank of a host gets the sum of all: ``(n + k - 2) (K / (k B) + a)`` with a for each hop alone.

    The proposal charges a for each block as well, so its formula grows without bound with k, and it is not 0 for one
    rank. The text beside it describes a reduce-scatter, after which each rank has another part.
    """
    return pipeline_s(gradient_bytes, blocks, fabric.within_host)


def ina_s(gradient_bytes: float, blocks: int, fabric: Fabric) -> float:
    """One switch adds for all: ``(k + 1) K / (k B) + 2 a``, and the chains of the hosts. N is not in it."""
    ends = [*fabric.within_host, fabric.network]
    return pipeline_s(gradient_bytes, blocks, ends + ends[::-1])


def hina_links(fabric: Fabric) -> list[LinkSpec]:
    """The way of a block in a tree of switches: host, leaf, spine, leaf, host."""
    ends = [*fabric.within_host, fabric.network]
    over = [fabric.to_spine] * 2 if fabric.leaves > 1 else []
    return ends + over + ends[::-1]


def hina_s(gradient_bytes: float, blocks: int, fabric: Fabric) -> float:
    """Leaves add for their hosts, and a spine for the leaves: :func:`pipeline_s` over :func:`hina_links`.

    The proposal's form is this one where the link of the host is the slowest, without the broadcast within the host.
    """
    return pipeline_s(gradient_bytes, blocks, hina_links(fabric))


def mtina_s(gradient_bytes: float, blocks: int, fabric: Fabric, *, trees: int) -> float:
    """S trees, each for 1 / S of the blocks: as HINA, but all uplinks of a leaf together are S times as fast.

    The proposal has ``(k + 1) (S + 1) K / (k S B) + (S + 1) a``. With S = 1 that is twice the time of one tree, and
    with S it grows without bound. A host sends K once, by whichever tree, so more trees only help where the uplink is
    slower than the link of a host.
    """
    uplink = fabric.to_spine
    faster = replace(uplink, rate_bytes_s=trees * uplink.rate_bytes_s, overhead_s=uplink.overhead_s / trees)
    on_one_s = gradient_bytes / (blocks * uplink.rate_bytes_s) + uplink.overhead_s  # each block takes one of them
    more_s = 2 * on_one_s * (1 - 1 / trees) if fabric.leaves > 1 else 0.0
    return hina_s(gradient_bytes, blocks, replace(fabric, uplink=faster)) + more_s


def cina_links(fabric: Fabric) -> list[LinkSpec]:
    """The way of the first leaf's blocks along the chain of leaves, through the spine, and back to the hosts."""
    ends = [*fabric.within_host, fabric.network]
    hop = replace(fabric.to_spine, latency_s=2 * fabric.to_spine.latency_s)  # leaf, spine, leaf
    chain = [hop] * fabric.leaves if fabric.leaves > 1 else []  # L - 1 hops along it, and one back to all
    return ends + chain + ends[::-1]


def cina_s(gradient_bytes: float, blocks: int, fabric: Fabric) -> float:
    """Each leaf adds its hosts to what the leaf before it sends: :func:`pipeline_s` over :func:`cina_links`.

    The proposal leaves out the latencies of the L - 1 hops, the way back of the sum from the last leaf through the
    spine, and the broadcast within the host.
    """
    return pipeline_s(gradient_bytes, blocks, cina_links(fabric))


# Little memory in the switch, and what an aggregator is worth


def slot_bytes(way: Literal["hina", "cina"], fabric: Fabric, block_bytes: float) -> float:
    """Memory of each switch that keeps the link of a host busy: what is sent until the sum of a block is back.

    ``B`` times the latencies and the time of a block on each link of the way there and back. Blocks that are under way
    hold their slots in every switch.
    """
    links = (hina_links if way == "hina" else cina_links)(fabric)
    round_trip_s = sum(link.latency_s + link.overhead_s + block_bytes / link.rate_bytes_s for link in links)
    return min(link.rate_bytes_s for link in links) * round_trip_s


def ring_factor(world: int) -> float:
    """c = ``2 (N - 1) / N``: how often a rank sends its gradient by a ring. By an aggregator it sends it once."""
    return 2 * (world - 1) / world


def ring_assisted_s(gradient_bytes: float, world: int, link: LinkSpec, *, memory: float) -> float:
    """RA-INA: what finds no slot goes around the ring, ``(K / B) c / (1 + m (c - 1))``, with m up to 1.

    A byte that the switch adds takes the link of a rank once, one of the ring c times; the link is always busy.
    """
    c = ring_factor(world)
    return gradient_bytes / link.rate_bytes_s * c / (1 + min(memory, 1.0) * (c - 1))


def speed_up(exchange_share: float, factor: float) -> float:
    """Return the speed-up of an iteration without overlap, when an exchange of c K / B becomes one of K / B:
    ``(1 + r c) / (1 + r)``.

    Args:
        exchange_share: r = (K / B) / T_compute. factor: c, of a ring :func:`ring_factor`.
    """
    return (1 + exchange_share * factor) / (1 + exchange_share)

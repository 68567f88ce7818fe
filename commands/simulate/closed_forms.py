"""Closed forms of the time that an all-reduce takes, by a ring, a parameter server or aggregating switches.

K is ``gradient_bytes`` of one rank, N the number of ranks (``world``), B and a the rate and latency of a link, o its
overhead for each message, k the number of ``blocks`` that the gradient is cut in, n the ranks of a host, M the hosts,
L the leaf switches. Links are full duplex, adding up takes no time, and nothing is lost.

A link of a pipeline is one hop, from one node to the next. For an algorithm among ranks ``path`` is the whole way from
rank to rank: the smallest rate of it and the sum of its latencies.

Aggregation by switches is a pipeline: a block is on one link while the block behind it is on the link before. So there
is one formula for all of it, :func:`pipeline_s`, and a list of links for each topology. The proposal of
RA-INA, CINA and MTINA that this project follows has formulas of its own; where they are wrong the docstrings say
how, and ``tests/commands/simulate/test_closed_forms.py`` has them as printed, with what they get wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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


def best_blocks(gradient_bytes: float, hops: int, link: LinkSpec) -> int:
    """The number of blocks for which a pipeline of equal links is fastest: ``sqrt((hops - 1) K / (B o))``.

    Without overhead there is none: more blocks are always faster. Raises ValueError then.
    """
    if link.overhead_s <= 0:
        raise ValueError("without overhead of a message more blocks are always faster: set overhead_s")
    return max(1, round(math.sqrt((hops - 1) * gradient_bytes / (link.rate_bytes_s * link.overhead_s))))


# Among ranks


def ring_s(gradient_bytes: float, world: int, path: LinkSpec) -> float:
    """``2 (N - 1) (K / (N B) + a + o)``: Patarasuk and Yuan, JPDC 2009. The proposal has the same."""
    return 2 * (world - 1) * (gradient_bytes / (world * path.rate_bytes_s) + path.latency_s + path.overhead_s)


def star_s(gradient_bytes: float, world: int, path: LinkSpec) -> float:
    """Rank 0 adds up and sends back: ``2 ((N - 1) (K / B + o) + a)``."""
    if world == 1:
        return 0.0
    return 2 * ((world - 1) * (gradient_bytes / path.rate_bytes_s + path.overhead_s) + path.latency_s)


def recursive_doubling_s(gradient_bytes: float, world: int, path: LinkSpec) -> float:
    """Whole vectors, ``ceil(log2 N) (K / B + a + o)``: Thakur et al., IJHPCA 2005. For small K."""
    steps = math.ceil(math.log2(world))
    return steps * (gradient_bytes / path.rate_bytes_s + path.latency_s + path.overhead_s)


def halving_doubling_s(gradient_bytes: float, world: int, path: LinkSpec) -> float:
    """``2 log2 N (a + o) + 2 (N - 1) / N K / B`` for powers of two (Rabenseifner; Thakur et al., IJHPCA 2005, 4.4).

    In other worlds the ranks beyond the largest power of two P give their vectors away first and get the sum last:
    ``2 (K / B + a)`` and the time of P.
    """
    power = 1 << (world.bit_length() - 1)
    fold_s = 2 * (gradient_bytes / path.rate_bytes_s + path.latency_s + path.overhead_s) if world > power else 0.0
    on_path_s = 2 * (power - 1) / power * gradient_bytes / path.rate_bytes_s
    return 2 * math.log2(power) * (path.latency_s + path.overhead_s) + on_path_s + fold_s


def binomial_tree_s(gradient_bytes: float, world: int, path: LinkSpec) -> float:
    """Reduce and broadcast, not cut in blocks: twice :func:`recursive_doubling_s`."""
    return 2 * recursive_doubling_s(gradient_bytes, world, path)


def torus_s(gradient_bytes: float, columns: int, rows: int, path: LinkSpec) -> float:
    """Reduce-scatter in rows of X, all-reduce in columns of Y, gather in rows:
    ``2 (X - 1) (K / (X B) + a) + 2 (Y - 1) (K / (X Y B) + a)``."""
    return ring_s(gradient_bytes, columns, path) + ring_s(gradient_bytes / columns, rows, path)


def hierarchical_ring_s(gradient_bytes: float, fabric: Fabric, *, rails: bool) -> float:
    """A ring in each host, then one between hosts:
    ``2 (n - 1) (K / (n B_local) + a_local) + 2 (M - 1) (K / (M n B) + a)``.

    Args:
        rails: each rank of a host has a network interface of its own, so that n rings go at once, each with K / n; else
            one interface carries K, and the n in the second term is 1.
    """
    ranks, hosts = fabric.ranks_per_host, fabric.world // fabric.ranks_per_host
    within_s = ring_s(gradient_bytes, ranks, fabric.local) if ranks > 1 and fabric.local else 0.0
    return within_s + ring_s(gradient_bytes / (ranks if rails else 1), hosts, fabric.network)


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


def chain_overlap_s(gradient_bytes: float, blocks: int, fabric: Fabric) -> float:
    """Return how much of :func:`chain_in_host_s` can be hidden behind the network, where the network is slower: all but
    the time until the first block has gone through the host.

    The proposal subtracts this time on the link of the host, not on the links within it, and so gets less than 0 where
    those within it are much faster.
    """
    first_s = pipeline_s(gradient_bytes / blocks, 1, fabric.within_host)
    return chain_in_host_s(gradient_bytes, blocks, fabric) - first_s


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


def ring_factor(world: int) -> float:
    """c = ``2 (N - 1) / N``: how often a rank sends its gradient by a ring. By an aggregator it sends it once."""
    return 2 * (world - 1) / world


def static_memory_s(gradient_bytes: float, link: LinkSpec, *, memory: float) -> float:
    """A switch with fixed slots, SwitchML: ``K / (B min(m, 1))``.

    Args:
        memory: m, the slots that a job has, as a share of those that keep its link busy.
    """
    return gradient_bytes / (link.rate_bytes_s * min(memory, 1.0))


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


def exchange_share_for(wanted: float, factor: float) -> float:
    """The r from which on :func:`speed_up` is at least ``wanted``: ``(s - 1) / (c - s)``.

    Infinity where none is enough: no speed-up reaches c.
    """
    if wanted <= 1:
        return 0.0
    return (wanted - 1) / (factor - wanted) if factor > wanted else math.inf


def aggregator_rate_for(world: int, rate_bytes_s: float, *, aggregators: int = 1) -> float:
    """The rate, in and out, that an aggregator needs to be as fast as a ring: ``N B / (A c)``, but never less than
    ``B / c``.

    It takes ``N K / A`` in and sends as much, which is to be done in the ``c K / B`` that a ring takes.
    """
    return max(world / aggregators, 1.0) * rate_bytes_s / ring_factor(world)

"""Formulas of the thesis that proposes RA-INA, CINA and MTINA, as they are printed there, beside those of this project.

Some are wrong; ``docs/simulation.md`` says how, with the times that both give. Nothing computes with them but that
table and its test. Symbols as in :mod:`gradbus.commands.simulate.closed_forms`; where the thesis writes a bound, it is
taken with equality.

    python -m gradbus.experiments.studies.printed_forms
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradbus.commands.simulate import closed_forms as forms
from gradbus.commands.simulate.closed_forms import Fabric
from gradbus.commands.simulate.topology import LinkSpec

TREES = 4


def parameter_server_s(gradient_bytes: float, blocks: int, path: LinkSpec) -> float:
    """``(k + 1) K / (k B) + 2 a``."""
    return (blocks + 1) * gradient_bytes / (blocks * path.rate_bytes_s) + 2 * path.latency_s


def ring_reduce_s(gradient_bytes: float, blocks: int, fabric: Fabric) -> float:
    """``(n + k - 2) (K / (k B_local) + a_local)``. Raises ValueError: the fabric has no link within hosts."""
    return (fabric.ranks_per_host + blocks - 2) * _block_s(gradient_bytes, blocks, _local(fabric))


def overlap_s(gradient_bytes: float, blocks: int, fabric: Fabric) -> float:
    """``T_RR - (n - 1) (K / (k B_host) + a_host)``."""
    exposed_s = (fabric.ranks_per_host - 1) * _block_s(gradient_bytes, blocks, fabric.network)
    return ring_reduce_s(gradient_bytes, blocks, fabric) - exposed_s


def hina_s(gradient_bytes: float, blocks: int, fabric: Fabric) -> float:
    """``T_RR - T_ov + K / B_host + a_host + 2 (K / (k B_leaf) + a_leaf) + K / (k B) + a``."""
    up = 2 * _block_s(gradient_bytes, blocks, fabric.to_spine)
    return _to_leaf_s(gradient_bytes, blocks, fabric) + up + _block_s(gradient_bytes, blocks, fabric.network)


def cina_s(gradient_bytes: float, blocks: int, fabric: Fabric) -> float:
    """``T_RR - T_ov + K / B_host + a_host + (L - 1) K / (k B_leaf) + K / (k B) + a``."""
    along = (fabric.leaves - 1) * gradient_bytes / (blocks * fabric.to_spine.rate_bytes_s)
    return _to_leaf_s(gradient_bytes, blocks, fabric) + along + _block_s(gradient_bytes, blocks, fabric.network)


def mtina_s(gradient_bytes: float, blocks: int, fabric: Fabric, *, trees: int) -> float:
    """``(k + 1) (S + 1) K / (k S B) + (S + 1) a``."""
    link = fabric.network
    on_links_s = (blocks + 1) * (trees + 1) * gradient_bytes / (blocks * trees * link.rate_bytes_s)
    return on_links_s + (trees + 1) * link.latency_s


def _local(fabric: Fabric) -> LinkSpec:
    if fabric.local is None:
        raise ValueError("ranks of one host need a link within it: local")
    return fabric.local


def _block_s(gradient_bytes: float, blocks: int, link: LinkSpec) -> float:
    return gradient_bytes / (blocks * link.rate_bytes_s) + link.latency_s


def _to_leaf_s(gradient_bytes: float, blocks: int, fabric: Fabric) -> float:
    """``T_RR - T_ov + K / B_host + a_host``."""
    exposed_s = ring_reduce_s(gradient_bytes, blocks, fabric) - overlap_s(gradient_bytes, blocks, fabric)
    return exposed_s + gradient_bytes / fabric.network.rate_bytes_s + fabric.network.latency_s


# Both, side by side


def chain_overlap_s(gradient_bytes: float, blocks: int, fabric: Fabric) -> float:
    """Return how much of the chain within a host can be hidden behind a network that is slower: all but the time until
    the first block has gone through the host.

    The proposal subtracts this time on the link of the host, not on the links within it, and so gets less than 0 where
    those within it are much faster.
    """
    first_s = forms.pipeline_s(gradient_bytes / blocks, 1, fabric.within_host)
    return forms.chain_in_host_s(gradient_bytes, blocks, fabric) - first_s


VGG19_BYTES = 574.8e6
BLOCKS = 4096
FABRIC = Fabric(
    world=1024,
    network=LinkSpec(rate_bytes_s=12.5e9, latency_s=2e-6),
    ranks_per_host=8,
    hosts_per_leaf=16,
    local=LinkSpec(rate_bytes_s=150e9, latency_s=1e-6),
    uplink=LinkSpec(rate_bytes_s=12.5e9, latency_s=1e-6),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One time, as printed and as it is here: functions of K, k and the fabric."""

    name: str
    printed: Callable[[float, int, Fabric], float]
    corrected: Callable[[float, int, Fabric], float]


PAIRS = (
    Pair("ring", *[lambda size, k, at: forms.ring_s(size, at.world, at.network)] * 2),
    Pair(
        "parameter server", lambda size, k, at: parameter_server_s(size, k, at.network),
        lambda size, k, at: forms.parameter_server_s(size, at.world, at.network, servers=1, blocks=k),
    ),
    Pair("ring-reduce in a host", ring_reduce_s, forms.chain_in_host_s),
    Pair("overlap", overlap_s, chain_overlap_s),
    Pair("HINA", hina_s, forms.hina_s),
    Pair("CINA", cina_s, forms.cina_s),
    Pair(
        f"MTINA, S = {TREES}", lambda size, k, at: mtina_s(size, k, at, trees=TREES),
        lambda size, k, at: forms.mtina_s(size, k, at, trees=TREES),
    ),
)  # fmt: skip


def times_ms(pair: Pair) -> tuple[str, str]:
    """Return the milliseconds that the table of docs/simulation.md has: printed, corrected."""
    printed, corrected = (1e3 * form(VGG19_BYTES, BLOCKS, FABRIC) for form in (pair.printed, pair.corrected))
    return f"{printed:,.2f}", f"{corrected:,.2f}"


def main() -> None:
    """Print both times of each formula."""
    for pair in PAIRS:
        print(pair.name, *times_ms(pair), sep="\t")


if __name__ == "__main__":
    main()

"""What aggregation by switches takes: switches that add, by the ports that they have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["ina", "hina", "mtina", "cina"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Holds what a way takes for so many hosts.

    Attributes:
        adding: switches that add. forwarding: switches that only forward. ports: used ports of those that add.
    """

    way: Way
    hosts: int
    adding: int
    forwarding: int
    ports: int


def deployment(way: Way, hosts: int, ports: int, *, trees: int = 4) -> Deployment:
    """The fewest switches of so many ports for so many hosts.

    Args:
        way: ``ina``: one switch. ``hina``: a tree that adds in every switch. ``mtina``: leaves, and a tree above them
            for each of ``trees``; a leaf has a port up for each. ``cina``: leaves that add, joined to a chain by spines
            that forward: two ports of each leaf but for the ends.

    Raises:
        ValueError: one switch has too few ports; or the switch has no more ports than trees.
    """
    if way == "ina" and hosts > ports:
        raise ValueError(f"{hosts} hosts do not fit on one switch of {ports} ports: use a tree or a chain")
    if hosts <= ports:
        return Deployment(way=way, hosts=hosts, adding=1, forwarding=0, ports=hosts)
    if way == "cina":
        leaves = -(-(hosts - 2) // (ports - 2))
        used = 2 * (leaves - 1)
        return Deployment(way=way, hosts=hosts, adding=leaves, forwarding=_tree(used, ports, 1)[0], ports=hosts + used)
    up = trees if way == "mtina" else 1
    if ports - up < 2:
        raise ValueError(f"a leaf of {ports} ports has none for hosts beside those for {up} trees")
    leaves = -(-hosts // (ports - up))
    above, links = _tree(leaves, ports, 1)
    return Deployment(
        way=way, hosts=hosts, adding=leaves + up * above, forwarding=0, ports=hosts + up * (leaves + links)
    )


def _tree(below: int, ports: int, up: int) -> tuple[int, int]:
    """Switches of a tree over so many nodes, and the ports that they use."""
    switches, used = 0, 0
    while below > 1:
        if below <= ports:
            return switches + 1, used + below
        layer = -(-below // (ports - up))
        switches, used, below = switches + layer, used + below + up * layer, layer
    return switches, used

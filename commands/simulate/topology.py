"""Hosts, racks and the links between them, for the model of a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Node: TypeAlias = int | str
"""A rank by its number; a host or a switch by its name."""
_MAX_ROUTES = 1 << 16  # that are kept: all of a ring, not the million of 1,024 ranks that all talk to all


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One direction of a link.

    Attributes:
        rate_bytes_s: that it carries. latency_s: from one end to the other, beside the time of the bytes.
        overhead_s: of each message, during which it carries no bytes.
        loss: share of the frames that are lost.
    """

    rate_bytes_s: float
    latency_s: float = 0.0
    overhead_s: float = 0.0
    loss: float = 0.0


@dataclass(slots=True, eq=False)
class LinkUse:
    """One direction of a link, and what it has carried. Messages pass it one after the other.

    Attributes:
        free_s: when it has carried what has come so far.
        busy_s: seconds for which it had something to carry. bytes_carried: with those that were sent again.
    """

    name: str
    spec: LinkSpec
    free_s: float = 0.0
    busy_s: float = 0.0
    bytes_carried: int = 0
    messages: int = 0


class Uplink(NamedTuple):
    """A node's place below another one: its links there (``up``) and from there (``down``)."""

    parent: Node
    up: LinkSpec
    down: LinkSpec


@dataclass(slots=True, eq=False)
class NetworkTopology:
    """A tree of nodes. What two nodes exchange goes up to the nearest node above both, and down.

    Attributes:
        wires: links of their own from one node to another, beside the tree; the one from A to B is called "A > B".
        hosts: the host of each rank, in rank order, as for :class:`~gradbus.runtime.algorithms.base.Place`.
        loses: whether any link has loss.
        links: all links: the one from a node to that above it is called "NODE up", the other way "NODE down".
    """

    uplinks: Mapping[Node, Uplink]
    hosts: tuple[str, ...]
    wires: Mapping[tuple[Node, Node], LinkSpec] = field(default_factory=dict)
    links: dict[str, LinkUse] = field(init=False)
    loses: bool = field(init=False)
    _routes: dict[tuple[Node, Node], list[LinkUse]] = field(init=False, default_factory=dict)
    _above: dict[Node, tuple[Node, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError: a node is above itself."""
        self.links = {}
        for node, uplink in self.uplinks.items():
            for way, spec in (("up", uplink.up), ("down", uplink.down)):
                self.links[f"{node} {way}"] = LinkUse(f"{node} {way}", spec)
        for (source, target), spec in self.wires.items():
            self.links[f"{source} > {target}"] = LinkUse(f"{source} > {target}", spec)
        self.loses = any(link.spec.loss for link in self.links.values())

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    def route(self, source: Node, target: Node) -> list[LinkUse]:
        """The links from one node to another, in the order of the way; none to the node itself."""
        found = self._routes.get((source, target))
        if found is not None:
            return found
        if (source, target) in self.wires:
            return [self.links[f"{source} > {target}"]]
        up, down = self._path(source), self._path(target)
        shared = 1  # nodes that both paths end with: all of them end at the root
        while shared < min(len(up), len(down)) and up[-1 - shared] == down[-1 - shared]:
            shared += 1
        found = [self.links[f"{node} up"] for node in up[:-shared]]
        found += [self.links[f"{node} down"] for node in reversed(down[:-shared])]
        if len(self._routes) < _MAX_ROUTES:
            self._routes[source, target] = found
        return found

    def _path(self, node: Node) -> tuple[Node, ...]:
        """The node itself and all above it, the root last."""
        path = self._above.get(node)
        if path is None:
            found = [node]
            while (uplink := self.uplinks.get(found[-1])) is not None:
                if uplink.parent in found:
                    raise ValueError(f"node {uplink.parent!r} of the topology is above itself")
                found.append(uplink.parent)
            path = self._above[node] = tuple(found)
        return path


def cluster(
    world: int,
    *,
    network: LinkSpec,
    ranks_per_host: int = 1,
    local: LinkSpec | None = None,
    hosts_per_rack: int | None = None,
    uplink: LinkSpec | None = None,
) -> NetworkTopology:
    """Hosts with equal numbers of ranks, which follow one another, at the switch of their rack; racks at a core switch.

    Args:
        network: each host's link to its switch, shared by its ranks.
        local: each rank's link within its host; needed where a host has several.
        hosts_per_rack: None: there is one switch for all. uplink: of a rack to the core switch; None: as ``network``.

    Raises:
        ValueError: the ranks do not fill the hosts, or ``local`` is missing.
    """
    if world < 1 or ranks_per_host < 1 or world % ranks_per_host:
        raise ValueError(f"{world} ranks do not fill hosts of {ranks_per_host}")
    if ranks_per_host > 1 and local is None:
        raise ValueError("ranks of one host need a link within it: local")
    count = world // ranks_per_host
    racks = 1 if hosts_per_rack is None else -(-count // hosts_per_rack)
    uplinks: dict[Node, Uplink] = {}
    for host in range(count):
        rack = f"switch {host // hosts_per_rack if hosts_per_rack else 0}"
        if local is None or ranks_per_host == 1:
            uplinks[host] = Uplink(rack, network, network)
            continue
        uplinks[f"host {host}"] = Uplink(rack, network, network)
        for rank in range(host * ranks_per_host, (host + 1) * ranks_per_host):
            uplinks[rank] = Uplink(f"host {host}", local, local)
    if racks > 1:
        for number in range(racks):
            uplinks[f"switch {number}"] = Uplink("core", uplink or network, uplink or network)
    return NetworkTopology(uplinks, tuple(f"host {rank // ranks_per_host}" for rank in range(world)))

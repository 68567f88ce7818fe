"""All-reduce by other ways than the bus's own: a star, a tree, the textbook ring, halving and doubling, host by host.

Each is a program that returns the sum of float32 vectors of equal length, bit-equal on all ranks. Where a sum is taken
in another order than that of the ranks its last bits differ from the bus's; no way here is chosen by itself. K is the
size of the vector, N the number of ranks.

A program names ranks, not network interfaces: which one a message leaves by is up to the transport of a rank. Where a
host has several, give it a rank for each: the ways between hosts ("rails") are then one for each rank of a host, and
``rail`` in a topology file says which ranks are on a common one.

| way | steps | bytes that the busiest rank sends | order of the sum |
|---|---|---|---|
| star | 2 | (N - 1) K | that of the ranks |
| tree | 2 log2 N, rounded up | log2 N K, rounded up | pairs, then pairs of pairs |
| ring | 2 (N - 1) | 2 (N - 1) / N K | of part j: rank j, j + 1, ... around the ring |
| halving-doubling | 2 log2 N | 2 (N - 1) / N K, for powers of two | pairs, then pairs of pairs |
| hierarchical | 2 + 2 (M - 1) | between M hosts of n ranks 2 (M - 1) / M K / n | within hosts, (racks,) then around |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from gradbus.runtime.algorithms.base import Place
from gradbus.runtime.algorithms.requests import Program, Swap
from gradbus.runtime.errors import ConfigError

Route: TypeAlias = Literal["star", "tree", "ring", "halving-doubling", "hierarchical"]


class OuterRoute(Protocol):
    """An all-reduce among some ranks."""

    def __call__(self, place: Place, x: Tensor, members: Sequence[int], name: str) -> Program[Tensor]:
        """``members``: these ranks, this one among them. ``name``: of all requests."""


def star(place: Place, x: Tensor) -> Program[Tensor]:
    """Rank 0 adds all vectors up, in rank order, and sends the sum to all. The baseline: its link is N times busier."""
    if place.rank:
        yield Swap("star up", {0: x})
        total = torch.empty_like(x)
        yield Swap("star down", {}, {0: total})
        return total
    others = range(1, place.world)
    came = yield Swap("star up", {}, {peer: torch.empty_like(x) for peer in others})
    total = x.clone()
    for peer in others:
        total += came[peer]
    yield Swap("star down", dict.fromkeys(others, total))
    return total


def tree(place: Place, x: Tensor) -> Program[Tensor]:
    """Reduce and broadcast along a binomial tree: Thakur, Rabenseifner and Gropp, "Optimization of collective
    communication operations in MPICH", IJHPCA 2005, sections 4.1 and 4.4.

    Whole vectors travel, so it is for short ones: then the steps count, which are fewer than those of a ring.
    """
    rank, world, total = place.rank, place.world, x.clone()
    distance = 1
    while distance < world and not rank & distance:
        if rank + distance < world:
            came = yield Swap("tree up", {}, {rank + distance: torch.empty_like(x)})
            total += came[rank + distance]
        distance *= 2
    if rank:  # distance is the lowest bit of the rank: the parent is the rank without it
        yield Swap("tree up", {rank - distance: total})
        total = torch.empty_like(x)
        yield Swap("tree down", {}, {rank - distance: total})
    while distance > 1:
        distance //= 2
        if rank + distance < world:
            yield Swap("tree down", {rank + distance: total})
    return total


def ring(place: Place, x: Tensor, members: Sequence[int] | None = None, name: str = "ring") -> Program[Tensor]:
    """Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

    In step i of the first half position p sends part p - i and adds part p - i - 1, which comes from the left; in step
    i of the second half it sends part p - i + 1 and takes part p - i.

    Args:
        members: the ranks around the ring, this one among them; None: all.
    """
    around = list(range(place.world)) if members is None else list(members)
    count, at = len(around), around.index(place.rank)
    right, left = around[(at + 1) % count], around[(at - 1) % count]
    parts = [part.clone() for part in x.tensor_split(count)]
    for step in range(count - 1):
        send, add = (at - step) % count, (at - step - 1) % count
        came = yield Swap(name, {right: parts[send]}, {left: torch.empty_like(parts[add])})
        parts[add] = came[left] + parts[add]
    for step in range(count - 1):
        send, take = (at - step + 1) % count, (at - step) % count
        came = yield Swap(name, {right: parts[send]}, {left: torch.empty_like(parts[take])})
        parts[take] = came[left]
    return torch.cat(parts)


def halving_doubling(place: Place, x: Tensor) -> Program[Tensor]:
    """Recursive halving and doubling: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", IJHPCA 2005, section 4.4.

    Ranks beyond the largest power of two give their vector to a partner first, and get the sum from it at the end.
    """
    power = 1 << (place.world.bit_length() - 1)
    extra = place.world - power
    rank = place.rank
    if rank >= power:
        yield Swap("fold", {rank - power: x})
        total = torch.empty_like(x)
        yield Swap("unfold", {}, {rank - power: total})
        return total
    total = x.clone()
    if rank < extra:
        came = yield Swap("fold", {}, {rank + power: torch.empty_like(x)})
        total += came[rank + power]
    spans = [(0, total.numel())]
    distance = power // 2
    while distance:  # each keeps the half that its bit names
        start, stop = spans[-1]
        middle = (start + stop) // 2
        peer, is_upper = rank ^ distance, bool(rank & distance)
        kept, given = ((middle, stop), (start, middle)) if is_upper else ((start, middle), (middle, stop))
        came = yield Swap("halve", {peer: total[slice(*given)].clone()}, {peer: total.new_empty(kept[1] - kept[0])})
        mine = total[slice(*kept)]
        total[slice(*kept)] = came[peer] + mine if is_upper else mine + came[peer]  # the lower rank's first
        spans.append(kept)
        distance //= 2
    distance = 1
    while distance < power:
        (start, stop), kept = spans[-2], spans.pop()
        peer = rank ^ distance
        other = (kept[1], stop) if kept[0] == start else (start, kept[0])
        came = yield Swap("double", {peer: total[slice(*kept)].clone()}, {peer: total.new_empty(other[1] - other[0])})
        total[slice(*other)] = came[peer]
        distance *= 2
    if rank < extra:
        yield Swap("unfold", {rank + power: total})
    return total


def known_hosts(place: Place) -> tuple[str, ...]:
    """The host of each rank. Raises ConfigError: they are not known."""
    if len(place.hosts) != place.world:
        raise ConfigError(
            f"a way by hosts needs the host of each of the {place.world} ranks, {len(place.hosts)} are known: form a "
            f"group, or give a topology file"
        )
    return place.hosts


def hierarchical(
    place: Place,
    x: Tensor,
    levels: Sequence[Sequence[str]] | None = None,
    members: Sequence[int] | None = None,
    outermost: OuterRoute = ring,
    name: str = "hierarchical",
) -> Program[Tensor]:
    """Reduce-scatter within each host, an all-reduce between hosts for each part, gather within each host.

    With n ranks on each of M hosts each rank has a ring ("rail") of its own between the hosts, for 1 / n of the vector.
    Hosts with other numbers of ranks share the rails of the smallest host. The order: within the host by rank, then
    around the ring of the hosts, which are in the order of their first rank.

    Args:
        levels: the host of each rank; then, if need be, the rack of each rank: between hosts of a rack goes what goes
            between ranks of a host, and only between racks a ring. None: the hosts of ``place``.
        members: the ranks, in the order that they are taken in within a host; None: all.
        outermost: the all-reduce between those that the last level leaves.

    Raises:
        ConfigError: the hosts of the ranks are not known.
    """
    levels = (known_hosts(place),) if levels is None else levels
    members = range(place.world) if members is None else members
    if len(members) == 1:
        return x.clone()
    if not levels:
        return (yield from outermost(place, x, members, name))
    labels = levels[0]
    groups = [[r for r in members if labels[r] == one] for one in dict.fromkeys(labels[r] for r in members)]
    mine = next(ranks for ranks in groups if place.rank in ranks)
    rails = min(len(ranks) for ranks in groups)
    parts = list(x.tensor_split(rails))
    owners, rail = mine[:rails], mine.index(place.rank)
    # To the rail's owner within the host.
    send = {owner: parts[number] for number, owner in enumerate(owners) if owner != place.rank}
    others = [rank for rank in mine if rank != place.rank]
    receive = {peer: torch.empty_like(parts[rail]) for peer in others} if rail < rails else {}
    came = yield Swap(f"{name} within", send, receive)
    total = x  # of an owner its part
    if rail < rails:
        came[place.rank] = parts[rail]
        total = came[mine[0]].clone()
        for rank in mine[1:]:
            total += came[rank]
        between = [ranks[rail] for ranks in groups]
        total = yield from hierarchical(place, total, levels[1:], between, outermost, f"{name} between")
    back = {owner: torch.empty_like(parts[number]) for number, owner in enumerate(owners) if owner != place.rank}
    came = yield Swap(f"{name} back", dict.fromkeys(others, total) if rail < rails else {}, back)
    return torch.cat([total if owner == place.rank else came[owner] for owner in owners])


ROUTES: dict[Route, Callable[[Place, Tensor], Program[Tensor]]] = {
    "star": star,
    "tree": tree,
    "ring": ring,
    "halving-doubling": halving_doubling,
    "hierarchical": hierarchical,
}

"""Which aggregators a job has, and which of its workers send to which.

``single`` aggregators have all workers below them: static in-network aggregation. A ``tree`` has leaves, which add
their workers' blocks, and roots, which add the leaves' sums (hierarchical in-network aggregation, HINA). With several
roots each one adds some of the groups of blocks: there are as many trees with the same leaves (MTINA); of ``single``
ones likewise. A ``chain`` adds along its nodes, and the last one sends the results to its own workers and to all other
nodes (CINA).

Ranks of a host may add up first, along a chain from the first to the last of them (ring-reduce): then the last one
alone sends blocks to an aggregator, those of all of them, and gets the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from gradbus.runtime.in_network.tree import NodeConfig

TopologyKind: TypeAlias = Literal["single", "tree", "chain"]
Ranks: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, lt=64)]], Field(max_length=64)]
Leaves: TypeAlias = Annotated[int, Field(ge=1, le=64)] | Annotated[list[Ranks], Field(min_length=1, max_length=64)]
Roots: TypeAlias = Annotated[int, Field(ge=1, le=16)]
WithinHost: TypeAlias = Literal["none", "ring-reduce"]


class AggregatorTopology(BaseModel):
    """Aggregators of a job, the same on all of its workers.

    Attributes:
        kind: what is connected with what.
        leaves: leaves of a tree or nodes of a chain: a number, or the ranks at each. leaves_by: with a number: ranks
            that follow one another share a node, or those of a host do, and never two nodes a host.
        roots: of a tree, or how many single ones there are; each adds some of the groups.
        within_host: whether ranks of a host that share a leaf add up first, and only the last of them sends.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    kind: TopologyKind = "single"
    leaves: Leaves = 1
    leaves_by: Literal["rank", "host"] = "rank"
    roots: Roots = 1
    within_host: WithinHost = "none"

    @property
    def num_nodes(self) -> int:
        """Aggregators in all."""
        leaves = self.leaves if isinstance(self.leaves, int) else len(self.leaves)
        return {"single": self.roots, "tree": leaves + self.roots, "chain": leaves}[self.kind]

    def ranks_of_leaves(self, hosts: Sequence[str]) -> list[list[int]]:
        """The ranks of each leaf.

        Args:
            hosts: by rank, the name of its host.

        Raises:
            ValueError: there are more leaves than ranks or hosts.
        """
        if not isinstance(self.leaves, int):
            return [list(ranks) for ranks in self.leaves]
        together: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            together.setdefault(host if self.leaves_by == "host" else str(rank), []).append(rank)
        if self.leaves > len(together):
            raise ValueError(
                f"leaves: {self.leaves} of them, for {len(together)} {self.leaves_by}s ({', '.join(together)}). Each "
                f"needs a {self.leaves_by} of its own"
            )
        units, count = list(together.values()), self.leaves
        cuts = [len(units) * at // count for at in range(count + 1)]
        return [[rank for unit in units[a:b] for rank in unit] for a, b in pairwise(cuts)]

    def host_chains(self, hosts: Sequence[str]) -> list[list[int]]:
        """Return the ranks that add up before the last of each sends to an aggregator, in the order of the sum.

        Without ``within_host`` each rank is by itself, and so it is where it is alone on its host. Ranks of a host that
        are at different leaves add up by leaf.

        Args:
            hosts: by rank, the name of its host.

        Raises:
            ValueError: as :meth:`ranks_of_leaves`.
        """
        if self.within_host == "none":
            return [[rank] for rank in range(len(hosts))]
        leaves = [list(range(len(hosts)))] if self.kind == "single" else self.ranks_of_leaves(hosts)
        together: dict[tuple[int, str], list[int]] = {}
        for number, leaf in enumerate(leaves):
            for rank in leaf:
                if 0 <= rank < len(hosts):  # others are refused where the nodes are made
                    together.setdefault((number, hosts[rank]), []).append(rank)
        return [sorted(ranks) for ranks in together.values()]

    def nodes(self, hosts: Sequence[str], *, window_groups: int, **options: Any) -> Nodes:
        """All nodes, by number.

        Args:
            hosts: as :meth:`ranks_of_leaves`. window_groups: groups that workers have under way, at least 1.
            options: of :class:`NodeConfig`, the same on all nodes.

        Raises:
            ValueError: ranks are missing, or named twice.
        """
        # A window of groups is being summed, and the results of one more may not be acknowledged by all.
        world, lanes = len(hosts), 2 * window_groups
        # By the rank that sends: bits of the ranks whose blocks it sends.
        senders = {ranks[-1]: sum(1 << rank for rank in ranks) for ranks in self.host_chains(hosts)}
        if self.kind == "single":
            return _roots(world, dict(sorted(senders.items())), world, self.roots, lanes, options)
        leaves = self.ranks_of_leaves(hosts)
        if sorted(rank for leaf in leaves for rank in leaf) != list(range(world)) or not all(leaves):
            raise ValueError(f"leaves: expected each rank from 0 to {world - 1} in one, and none empty, got {leaves}")
        children_of = [{rank: senders[rank] for rank in leaf if rank in senders} for leaf in leaves]
        if self.kind == "chain":
            return _chain(world, children_of, lanes, options)
        first_root = world + len(leaves)
        nodes = {
            number: NodeConfig(
                number,
                world,
                sum(children.values()),
                first_root,
                tuple(children),
                lanes,
                children=children,
                trees=self.roots,
                **options,
            )
            for number, children in enumerate(children_of, start=world)
        }
        children = {number: node.covers for number, node in nodes.items()}
        return nodes | _roots(world, children, first_root, self.roots, lanes, options)


SINGLE = AggregatorTopology()
Nodes: TypeAlias = dict[int, NodeConfig]


def aggregators_of(nodes: Mapping[int, NodeConfig], rank: int) -> tuple[int, ...]:
    """The nodes that a rank sends its blocks to: those of group g to the one at g mod their number."""
    return tuple(number for number, node in sorted(nodes.items()) if node.children and rank in node.children)


def neighbours(node: NodeConfig) -> list[int]:
    """Ranks and nodes that a node exchanges packets with."""
    return sorted({*(node.children or ()), *node.result_to, *node.above})


def _roots(
    world: int, children: Mapping[int, int], first: int, count: int, lanes: int, options: Mapping[str, Any]
) -> Nodes:
    """Nodes that share the groups; each one needs so many lanes fewer."""
    everyone = (1 << world) - 1
    return {
        first + at: NodeConfig(
            first + at,
            world,
            everyone,
            None,
            tuple(children),
            -(-lanes // count),
            children=children,
            trees=count,
            tree=at,
            **options,
        )
        for at in range(count)
    }


def _chain(world: int, senders_of: Sequence[Mapping[int, int]], lanes: int, options: Mapping[str, Any]) -> Nodes:
    """``senders_of``: by node, bits of the ranks whose blocks each of its ranks sends."""
    last, nodes = world + len(senders_of) - 1, {}
    before: dict[int, int] = {}
    for number, senders in enumerate(senders_of, start=world):
        children = before | dict(senders)
        is_last = number == last
        nodes[number] = NodeConfig(
            number,
            world,
            sum(children.values()),
            None if is_last else number + 1,
            (*senders, *(range(world, last) if is_last else ())),
            lanes,
            children=children,
            results_from=None if is_last else last,
            **options,
        )
        before = {number: nodes[number].covers}
    return nodes

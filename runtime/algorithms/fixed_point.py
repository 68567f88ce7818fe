"""The mean in 32-bit fixed point: bits that do not depend on the order of the sum, also through an aggregator.

Source: the shared scale of in-network aggregation, as in SwitchML (Sapio et al., NSDI 2021, section 3.7), with

    q_i = round(g_i 2^(30 - ceil(log2 N) - e)),   g = 2^-(30 - ceil(log2 N) - e) / n  sum_i q_i

for N ranks, n of them with data, and e the least exponent with |g_i| < 2^e on all ranks, of each chunk.

Differs from the paper: the exponent is that of this step, agreed beforehand, in place of the one before; its scale is a
power of two and leaves room for N, so that nothing overflows (theirs overflows by one from N = 256 on).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from gradbus.codecs.fixed_point import exponents, from_fixed, to_fixed
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Scope, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.in_network.options import InNetworkOptions
from gradbus.runtime.in_network.topology import AggregatorTopology, Leaves, Roots, TopologyKind, WithinHost


class FixedPoint(Algorithm):
    """The mean of whole gradients, added as 32-bit integers: in any order, and in the network, to the same bits."""

    choice = "fixed-point"
    # All gradients in one sum: an aggregator counts groups of blocks, so all ranks have to send them in one order.
    scope: ClassVar[Scope] = "step"
    may_change = frozenset(
        {
            "route",
            "topology",
            "leaves",
            "leaves_by",
            "roots",
            "within_host",
            "block_elems",
            "window_groups",
            "aggregator_timeout_s",
            "aggregator_retry_s",
            "without_aggregator",
            "verify",
        }
    )

    class Options(base.Options):
        """Options of ``fixed-point``."""

        route: Literal["direct", "ina", "ra-ina", "ra-ina-inline"] = "direct"
        """Who adds. `direct`: the ranks. `ina`: an aggregator (`gradbus aggregator`), which has fixed memory for the
        job. `ra-ina`: a ring, and the aggregator what it has room for. `ra-ina-inline`: the same with an aggregator in
        the way of the ring's packets, as a switch is: for experiments. When the aggregator dies, the ranks add."""
        topology: TopologyKind = "single"
        """Of route `ina`: which aggregators there are. `single`: one, or `roots` of them. `tree`: leaves, each for some
        of the ranks, and behind them the roots, which add the leaves' sums. `chain`: each one adds its ranks' blocks to
        the sum of the one before."""
        leaves: Leaves = 1
        """Leaves of a tree or aggregators of a chain: how many, or a list of the ranks at each."""
        leaves_by: Literal["rank", "host"] = "rank"
        """With a number of leaves: each has ranks that follow one another; or all ranks of one host, or several."""
        roots: Roots = 1
        """Roots of a tree, or how many single aggregators there are: groups of blocks are dealt to them."""
        within_host: WithinHost = "none"
        """Of route `ina`. `ring-reduce`: ranks of a host that share a leaf add up first, one after the other, and only
        the last of them sends to the aggregators, and hands on what comes back."""
        chunk_elems: Annotated[int, Field(ge=1, le=1 << 24)] = 4096
        """Entries that share an exponent, which all ranks agree on first, in 4 bytes."""
        block_elems: Annotated[int, Field(ge=64, le=1 << 22)] = 1 << 16
        """Entries of a slot of the aggregator, the same there."""
        window_groups: Annotated[int, Field(ge=1, le=64)] = 4
        """Groups of one block for each rank that are under way at once."""
        aggregator_timeout_s: Annotated[float, Field(gt=0)] = 5.0
        """Seconds of silence after which the ranks go on without the aggregator."""
        aggregator_retry_s: Annotated[float, Field(ge=0)] = 30.0
        """Seconds after which the ranks look for an aggregator that was lost, and use it again when it is back; twice
        as long after each loss. 0: never."""
        without_aggregator: Literal["fail", "direct"] = "fail"
        """What a run does that finds no aggregator within timeouts.join_s: `fail`, or go on `direct`ly, until it is
        there."""
        verify: bool = True
        """Whether sums are checked by a checksum that the aggregator does not know."""

        @model_validator(mode="after")
        def _topology_of_ina(self) -> FixedPoint.Options:
            if self.route not in ("direct", "ina") and (self.topology != "single" or self.roots > 1):
                raise ValueError(
                    f"route {self.route} has one aggregator, got topology {self.topology} with {self.roots} roots: "
                    f"several are for route ina"
                )
            if self.route != "ina" and self.within_host != "none":
                raise ValueError(f"within_host is for route ina, got route {self.route}")
            if self.topology == "single" and self.leaves != 1:
                raise ValueError(f"leaves are of a tree or a chain, got {self.leaves} with topology single")
            if self.topology == "chain" and self.roots > 1:
                raise ValueError(f"a chain has one end, got {self.roots} roots")
            return self

    options: Any

    @property
    def in_network(self) -> InNetworkOptions | None:
        options = self.options
        if options.route == "direct" or self.place.world == 1:
            return None
        topology = AggregatorTopology(
            kind=options.topology,
            leaves=options.leaves,
            leaves_by=options.leaves_by,
            roots=options.roots,
            within_host=options.within_host,
        )
        return InNetworkOptions(
            options.route,
            options.block_elems,
            options.window_groups,
            topology,
            options.aggregator_timeout_s,
            options.without_aggregator,
            options.aggregator_retry_s,
            verify=options.verify,
        )

    @property
    def any_device(self) -> bool:
        return self.in_network is None  # an aggregator is sent memory of the CPU

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        flat, world, chunk = bucket.flat, self.place.world, self.options.chunk_elems
        common = exponents(flat, chunk)
        yield AllReduce("exponents", common, "max", out=common)
        fixed = to_fixed(flat, common, world=world, chunk_elems=chunk)
        yield AllReduce("sum", fixed, "sum", out=fixed, route="in-network")
        flat.copy_(from_fixed(fixed, common, flat.numel(), world=world, divisor=step.active))

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
from pydantic import Field

from gradbus.codecs.fixed_point import exponents, from_fixed, to_fixed
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Scope, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.in_network.options import InNetworkOptions


class FixedPoint(Algorithm):
    """The mean of whole gradients, added as 32-bit integers: in any order, and in the network, to the same bits."""

    choice = "fixed-point"
    # All gradients in one sum: an aggregator counts groups of blocks, so all ranks have to send them in one order.
    scope: ClassVar[Scope] = "step"
    may_change = frozenset({"route", "block_elems", "window_groups", "aggregator_timeout_s", "verify"})

    class Options(base.Options):
        """Options of ``fixed-point``."""

        route: Literal["direct", "ina", "ra-ina", "ra-ina-inline"] = "direct"
        """Who adds. `direct`: the ranks. `ina`: an aggregator (`gradbus aggregator`), which has fixed memory for the
        job. `ra-ina`: a ring, and the aggregator what it has room for. `ra-ina-inline`: the same with an aggregator in
        the way of the ring's packets, as a switch is: for experiments. A run needs the aggregator to start; when it
        dies later, the ranks add."""
        chunk_elems: Annotated[int, Field(ge=1, le=1 << 24)] = 4096
        """Entries that share an exponent, which all ranks agree on first, in 4 bytes."""
        block_elems: Annotated[int, Field(ge=64, le=1 << 22)] = 1 << 16
        """Entries of a slot of the aggregator, the same there."""
        window_groups: Annotated[int, Field(ge=1, le=64)] = 4
        """Groups of one block for each rank that are under way at once."""
        aggregator_timeout_s: Annotated[float, Field(gt=0)] = 5.0
        """Seconds of silence after which the ranks go on without the aggregator."""
        verify: bool = True
        """Whether sums are checked by a checksum that the aggregator does not know."""

    options: Any

    @property
    def in_network(self) -> InNetworkOptions | None:
        options = self.options
        if options.route == "direct" or self.place.world == 1:
            return None
        return InNetworkOptions(
            options.route, options.block_elems, options.window_groups, options.aggregator_timeout_s,
            verify=options.verify,
        )  # fmt: skip

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

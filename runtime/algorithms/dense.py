"""Whole gradients: the mean over all ranks, in float32 or in half precision on the wire, by a way of one's choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.algorithms.routes import ROUTES, hierarchical, known_hosts
from gradbus.runtime.algorithms.topology import TopologyFile

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Dense(Algorithm):
    """The mean of whole gradients.

    With ``wire`` fp16 or bf16 each rank's gradient is rounded once, the sum is taken in float32 and rounded once: half
    of the bytes, and an error of at most two roundings. A value beyond 65,504 becomes infinite in fp16, so that all
    ranks skip the step.
    """

    choice = "dense"
    may_change = frozenset({"route", "topology"})

    class Options(base.Options):
        """Options of ``dense``."""

        wire: Literal["fp32", "fp16", "bf16"] = "fp32"
        """Format of the values on the wire."""
        route: Literal["auto", "direct", "shards", "star", "tree", "ring", "halving-doubling", "hierarchical"] = "auto"
        """How the sum is made: `auto` takes `direct` or `shards` by size, which add in rank order, to the same bits.
        The others add in an order of their own (docs/algorithms.md), and are for float32."""
        topology: TopologyFile | None = None
        """For route hierarchical: a JSON file with the host, rack and rail of each rank, or its content. null: the
        hosts that the ranks have told each other."""

        @model_validator(mode="after")
        def _fit_together(self) -> Dense.Options:
            if self.route in ROUTES and self.wire != "fp32":
                raise ValueError(
                    f"route {self.route!r} rounds half precision at each hop: set wire=fp32, or route=auto"
                )
            if self.topology is not None and self.route != "hierarchical":
                raise ValueError(f"topology is for route 'hierarchical', this is {self.route!r}")
            return self

    options: Any

    @property
    def any_dtype(self) -> bool:
        return self.options.wire == "fp32" and self.options.route not in ROUTES

    @property
    def any_device(self) -> bool:
        return self.options.route not in ROUTES  # which move parts from rank to rank in memory of the CPU

    @property
    def by_hosts(self) -> bool:
        return bool(self.options.route == "hierarchical")

    def check(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        super().check(parameters, optimizer)
        if self.options.topology is not None:
            self.options.topology.check_world(self.place.world)
        elif self.options.route == "hierarchical":
            known_hosts(self.place)

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        flat, route, topology = bucket.flat, self.options.route, self.options.topology
        dtype = _DTYPES[self.options.wire]
        if route in ROUTES:
            if topology is not None:
                total = yield from hierarchical(self.place, flat, topology.levels, topology.order)
            else:
                total = yield from ROUTES[route](self.place, flat)
            torch.mul(total, 1 / step.active, out=flat)
        elif dtype is torch.float32:
            yield AllReduce("mean", flat, "mean", out=flat, divisor=step.active, route=route)
        else:
            half = flat.to(dtype)
            yield AllReduce("mean", half, "mean", out=half, divisor=step.active, route=route)
            flat.copy_(half)

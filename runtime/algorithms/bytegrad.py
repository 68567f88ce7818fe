"""ByteGrad: 8-bit gradients in a scatter-reduce, quantized once by each rank and once more after the sum.

Gan et al., "BAGUA: scaling up distributed learning with system relaxations", VLDB 2022 (arXiv:2107.01499), section 3.4,
"centralized low-precision synchronous".

Rank r is sent part r of every rank's gradient as bytes, adds the parts up in rank order in float32, and sends the mean
to all as bytes: 2 (N - 1) / N bytes for each entry, a quarter of the dense 8 (N - 1) / N at any N. All ranks decode the
same bytes, those of their own part too, so that replicas stay equal.

With ``hierarchical`` ranks of one host add up in float32, and bytes go between hosts alone: 2 (M - 1) / M / n bytes for
each entry, rank and host, with M hosts of n ranks; with racks in a ``topology``, bytes go between these alone. Where
all ranks are on one host, or in one rack, nothing is quantized.

Differs from the authors' code: the distance from the smallest value is rounded, not the value (see
:mod:`gradbus.codecs.bytegrad`), and there is a smallest and largest value for each ``chunk_elems`` entries; with
``hierarchical``, which is off here by default, each rank of a host quantizes and sends 1 / n of the vector, where they
have one leader of a host do all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradbus.codecs.bytegrad import min_max_bytes
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket
from gradbus.runtime.algorithms.parts import dequantized, quantized
from gradbus.runtime.algorithms.requests import AllGather, AllReduce, Program, Swap
from gradbus.runtime.algorithms.routes import hierarchical, known_hosts
from gradbus.runtime.algorithms.topology import TopologyFile


class ByteGrad(Algorithm):
    """8-bit gradients, without memory."""

    choice = "bytegrad"

    class Options(base.Options):
        """Options of ``bytegrad``."""

        chunk_elems: int = Field(default=8192, ge=1, le=1 << 24)
        """Number of entries that share a smallest and a largest value."""
        hierarchical: bool = False
        """Whether ranks of one host add up in float32, so that bytes go between hosts alone."""
        topology: TopologyFile | None = None
        """With hierarchical: a JSON file with the host, rack and rail of each rank, or its content; with racks, bytes
        go between these alone. null: the hosts that the ranks have told each other."""

        @model_validator(mode="after")
        def _fit_together(self) -> ByteGrad.Options:
            if self.topology is not None and not self.hierarchical:
                raise ValueError("topology is for hierarchical=true")
            return self

    options: Any

    @property
    def by_hosts(self) -> bool:
        return bool(self.options.hierarchical)

    def check(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        super().check(parameters, optimizer)
        if self.options.topology is not None:
            self.options.topology.check_world(self.place.world)
        elif self.options.hierarchical:
            known_hosts(self.place)

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        flat, topology, members = bucket.flat, self.options.topology, range(self.place.world)
        if not self.options.hierarchical:
            total = yield from self._in_bytes(self.place, flat, members, "bytes")
        else:
            levels = (known_hosts(self.place),) if topology is None else topology.levels
            if len(set(levels[-1])) == 1:  # one host, or one rack
                yield AllReduce("mean", flat, "mean", out=flat, divisor=step.active)
                return
            order = members if topology is None else topology.order
            total = yield from hierarchical(self.place, flat, levels, order, self._in_bytes)
        torch.mul(total, 1 / step.active, out=flat)

    def _in_bytes(self, place: Place, x: Tensor, members: Sequence[int], name: str) -> Program[Tensor]:
        """The sum of the vectors of some ranks, quantized before and after it."""
        chunk = self.options.chunk_elems
        parts = x.tensor_split(len(members))
        others = [peer for peer in members if peer != place.rank]
        own = parts[members.index(place.rank)]
        memory = {peer: torch.empty(min_max_bytes(own.numel(), chunk), dtype=torch.uint8) for peer in others}
        sent = {peer: quantized(part, chunk) for peer, part in zip(members, parts, strict=True)}
        came = yield Swap(f"{name} parts", {peer: sent[peer] for peer in others}, memory)
        came[place.rank] = sent[place.rank]
        total = dequantized(came[members[0]], own.numel(), chunk)
        for peer in members[1:]:
            total += dequantized(came[peer], own.numel(), chunk)
        message = quantized(total, chunk)
        if len(members) == place.world:
            gathered = yield AllGather(f"{name} sums", message)
            sums = [gathered[peer] for peer in members]
        else:
            memory = {
                peer: torch.empty(min_max_bytes(part.numel(), chunk), dtype=torch.uint8)
                for peer, part in zip(members, parts, strict=True)
                if peer != place.rank
            }
            came = yield Swap(f"{name} sums", dict.fromkeys(others, message), memory)
            came[place.rank] = message
            sums = [came[peer] for peer in members]
        return torch.cat([dequantized(one, part.numel(), chunk) for one, part in zip(sums, parts, strict=True)])

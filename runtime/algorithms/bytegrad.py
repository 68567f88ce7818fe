"""ByteGrad: 8-bit gradients in a scatter-reduce, quantized once by each rank and once more after the sum.

Gan et al., "BAGUA: scaling up distributed learning with system relaxations", VLDB 2022 (arXiv:2107.01499), section 3.4,
"centralized low-precision synchronous".

Rank r is sent part r of every rank's gradient as bytes, adds the parts up in rank order in float32, and sends the mean
to all as bytes: 2 (N - 1) / N bytes for each entry, a quarter of the dense 8 (N - 1) / N at any N. All ranks decode the
same bytes, those of their own part too, so that replicas stay equal.

Differs from the authors' code: the distance from the smallest value is rounded, not the value (see
:mod:`gradbus.codecs.bytegrad`), and there is a smallest and largest value for each ``chunk_elems`` entries.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from gradbus.codecs.bytegrad import min_max_bytes
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.parts import dequantized, quantized
from gradbus.runtime.algorithms.requests import AllGather, Program, Swap


class ByteGrad(Algorithm):
    """8-bit gradients, without memory."""

    choice = "bytegrad"

    class Options(base.Options):
        """Options of ``bytegrad``."""

        chunk_elems: int = Field(default=8192, ge=1, le=1 << 24)
        """Number of entries that share a smallest and a largest value."""

    options: Any

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        chunk = self.options.chunk_elems
        flat, (rank, world) = bucket.flat, (self.place.rank, self.place.world)
        parts = list(flat.tensor_split(world))
        others = [peer for peer in range(world) if peer != rank]
        own = parts[rank]
        memory = {peer: torch.empty(min_max_bytes(own.numel(), chunk), dtype=torch.uint8) for peer in others}
        came = yield Swap("parts", {peer: quantized(parts[peer], chunk) for peer in others}, memory)
        messages = {**came, rank: quantized(own, chunk)}
        total = dequantized(messages[0], own.numel(), chunk)
        for peer in range(1, world):
            total += dequantized(messages[peer], own.numel(), chunk)
        means = yield AllGather("means", quantized(total.mul_(1 / step.active), chunk))
        for part, message in zip(parts, means, strict=True):
            part.copy_(dequantized(message, part.numel(), chunk))

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
from torch import Tensor

from gradbus.codecs.bytegrad import MinMax, dequantize_min_max, min_max_bytes, quantize_min_max
from gradbus.codecs.quantize import num_chunks
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
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
        flat, (rank, world) = bucket.flat, (self.place.rank, self.place.world)
        parts = list(flat.tensor_split(world))
        others = [peer for peer in range(world) if peer != rank]
        own = parts[rank]
        memory = {peer: torch.empty(self._size(own.numel()), dtype=torch.uint8) for peer in others}
        came = yield Swap("parts", {peer: self.encoded(parts[peer]) for peer in others}, memory)
        messages = {**came, rank: self.encoded(own)}
        total = self.decoded(messages[0], own.numel())
        for peer in range(1, world):
            total += self.decoded(messages[peer], own.numel())
        means = yield AllGather("means", self.encoded(total.mul_(1 / step.active)))
        for part, message in zip(parts, means, strict=True):
            part.copy_(self.decoded(message, part.numel()))

    def _size(self, numel: int) -> int:
        return min_max_bytes(numel, self.options.chunk_elems)

    def encoded(self, values: Tensor) -> Tensor:
        """The bytes of a part: uint8, shape (bytes,): smallest values, steps, one byte for each entry."""
        lows, steps, q = quantize_min_max(values.contiguous(), self.options.chunk_elems)
        return torch.cat([lows.view(torch.uint8), steps.view(torch.uint8), q])

    def decoded(self, message: Tensor, numel: int) -> Tensor:
        """The inverse: float32, shape (numel,)."""
        count = 4 * num_chunks(numel, self.options.chunk_elems)
        lows, steps, q = message.split_with_sizes([count, count, numel])
        parts = MinMax(lows.clone().view(torch.float32), steps.clone().view(torch.float32), q)
        return dequantize_min_max(parts, self.options.chunk_elems)

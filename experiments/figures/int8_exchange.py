"""The baseline that compressed training was first compared with: int8, one scale per tensor, sent to everybody.

Its arithmetic is that of ``q8`` with a whole tensor as the chunk: ``scale = max(abs(x)) / 127``, and ``x / scale`` is
rounded half to even. Every rank takes the mean of the decoded gradients of all ranks, its own included, in rank order;
what rounding loses is forgotten. All tensors of a step travel in one message, where the original sent one for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradbus.actors.data_parallel.exchanges.dense import DenseExchange
from gradbus.codecs.base import are_finite
from gradbus.codecs.quantize import quantize
from gradbus.runtime.collectives import CollectiveHandle, Group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CollectiveError


class Int8Exchange(DenseExchange):
    """``torch.optim.SGD`` on the mean of quantized gradients. An Exchange of gradbus.

    A message is the scales, float32, one for each parameter, and then all values, int8, in the order of the model. With
    NaN or infinity in the loss or in a gradient all scales are NaN, and all ranks skip the step.
    """

    name = choice = "int8"

    def __init__(self, config: DataParallelConfig, group: Group, parameters: Mapping[str, Tensor]) -> None:
        """``parameters``: those that are trained, by name, in the order of the model; on the CPU."""
        # It sends when all gradients are there.
        super().__init__(config, group, parameters, overlap=False)
        self._parameters = list(parameters.values())
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._handle: CollectiveHandle[list[bytes]] | None = None

    @property
    def in_flight(self) -> Sequence[CollectiveHandle[Any]]:
        return () if self._handle is None else (self._handle,)

    def begin(self, step: int, active: int) -> None:
        super().begin(step, active)
        self._handle = None

    def send(self, *, has_data: bool) -> Sequence[CollectiveHandle[Any]]:
        payload = self._encode(
            [it.grad if has_data and it.grad is not None else torch.zeros_like(it) for it in self._parameters]
        )
        self._handle = self._group.all_gather(
            "int8", payload, round_id=self._step, timeout_s=self._config.timeouts.collective_s
        )
        return [self._handle]

    def _encode(self, gradients: Sequence[Tensor]) -> bytes:
        scales = np.full(len(self._sizes), np.nan, dtype="<f4")
        values = np.zeros(sum(self._sizes), dtype=np.int8)
        if are_finite(gradients) and (self._not_finite is None or not self._not_finite):
            starts = np.cumsum([0, *self._sizes])
            for index, (gradient, size) in enumerate(zip(gradients, self._sizes, strict=True)):
                q, scale = quantize(gradient.detach().reshape(-1).contiguous(), max(1, size))
                scales[index] = scale.item() if size else 1.0
                values[starts[index] : starts[index + 1]] = q.numpy()
        return scales.tobytes() + values.tobytes()

    @torch.no_grad()
    def decode(self, results: Sequence[Any]) -> tuple[int, ...] | None:
        """Raises CollectiveError: a rank's message has another length."""
        count, total = len(self._sizes), sum(self._sizes)
        mean = torch.zeros(total)
        skipped_by = []
        for rank, payload in enumerate(results[0]):
            if len(payload) != 4 * count + total:
                raise CollectiveError(
                    f"step {self._step}: int8 message of rank {rank}: expected {4 * count + total} bytes, "
                    f"got {len(payload)}"
                )
            scales = np.frombuffer(payload, dtype="<f4", count=count)
            if not np.isfinite(scales).all():
                skipped_by.append(rank)
                continue
            values = torch.from_numpy(np.frombuffer(payload, dtype=np.int8, offset=4 * count).astype(np.float32))
            for part, of_sum, scale in zip(self._split(values), self._split(mean), scales, strict=True):
                of_sum.add_(part, alpha=float(scale))
        if skipped_by:
            return tuple(skipped_by)
        mean.mul_(1.0 / self._active)
        for parameter, part in zip(self._parameters, self._split(mean), strict=True):
            parameter.grad = part.view_as(parameter)
        return None

    def _split(self, flat: Tensor) -> Iterator[Tensor]:
        """Views, one for each parameter."""
        return iter(torch.split(flat, self._sizes))

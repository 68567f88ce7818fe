"""The baseline that compressed training was first compared with: int8, one scale per tensor, sent to everybody.

Its arithmetic is that of ``q8`` with a whole tensor as the chunk: ``scale = max(abs(x)) / 127``, and ``x / scale`` is
rounded half to even. Every rank takes the mean of the decoded gradients of all ranks, its own included, in rank order;
what rounding loses is forgotten. All tensors of a step travel in one message, where the original sent one for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gradbus.actors.data_parallel.exchanges.base import OwnState, load_optimizer_tensors, optimizer_tensors
from gradbus.codecs.base import are_finite
from gradbus.codecs.quantize import quantize
from gradbus.runtime.collectives import CollectiveHandle, Group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CollectiveError


class Int8Exchange:
    """``torch.optim.SGD`` on the mean of quantized gradients. An Exchange of gradbus.

    A message is the scales, float32, one for each parameter, and then all values, int8, in the order of the model. With
    NaN or infinity in the loss or in a gradient all scales are NaN, and all ranks skip the step.
    """

    name = "int8"
    density = 1.0
    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: DataParallelConfig, group: Group, parameters: Mapping[str, Tensor]) -> None:
        """``parameters``: those that are trained, by name, in the order of the model; on the CPU."""
        self._config = config
        self._group = group
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._step, self._active = 0, group.world
        self._finite: Tensor | None = None  # the loss of this step, on this rank
        self._handle: CollectiveHandle[list[bytes]] | None = None
        self._optimizer = torch.optim.SGD(
            self._parameters, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )  # fmt: skip

    @property
    def in_flight(self) -> Sequence[CollectiveHandle[list[bytes]]]:
        return () if self._handle is None else (self._handle,)

    def start_epoch(self, epoch: int) -> None:
        """Nothing depends on the epoch."""

    def begin(self, step: int, active: int) -> None:
        self._step, self._active, self._handle, self._finite = step, active, None, None
        for parameter in self._parameters:
            parameter.grad = None

    def enable_overlap(self, finite: Tensor | None = None) -> None:
        """Nothing is sent before all gradients are there."""
        self._finite = finite

    @property
    def own_is_finite(self) -> bool:
        """Always true here: the messages carry it."""
        return True

    def send(self, *, has_data: bool) -> Sequence[CollectiveHandle[list[bytes]]]:
        payload = self._encode([parameter.grad if has_data else None for parameter in self._parameters])
        self._handle = self._group.all_gather(
            "int8", payload, round_id=self._step, timeout_s=self._config.collective_timeout_s
        )
        return [self._handle]

    def _encode(self, gradients: Sequence[Tensor | None]) -> bytes:
        scales = np.ones(len(self._sizes), dtype="<f4")
        values = np.zeros(sum(self._sizes), dtype=np.int8)
        start = 0
        present = [gradient for gradient in gradients if gradient is not None]
        if not are_finite(present) or (self._finite is not None and not self._finite):
            scales[:] = np.nan
            return scales.tobytes() + values.tobytes()
        for index, (gradient, size) in enumerate(zip(gradients, self._sizes, strict=True)):
            if gradient is not None and size:
                q, scale = quantize(gradient.detach().reshape(-1).contiguous(), size)
                scales[index], values[start : start + size] = scale.item(), q.numpy()
            start += size
        return scales.tobytes() + values.tobytes()

    @torch.no_grad()
    def decode(self, results: Sequence[list[bytes]]) -> tuple[int, ...] | None:
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
        start = 0
        for size in self._sizes:
            yield flat[start : start + size]
            start += size

    def apply(self) -> None:
        self._optimizer.step()

    def shared_state(self) -> dict[str, Tensor]:
        return optimizer_tensors(self._optimizer, self._names)

    def load_shared_state(self, tensors: Mapping[str, Tensor]) -> None:
        load_optimizer_tensors(self._optimizer, self._names, tensors)

    def own_state(self) -> OwnState:
        return OwnState()

    def load_own_state(self, state: OwnState) -> None:
        """There is no residual."""

    def close(self) -> None:
        """No hooks: nothing to let go of."""

"""Whole gradients: buckets are averaged over the ranks while the backward pass goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradbus.actors.data_parallel.buckets import GradientBuckets
from gradbus.actors.data_parallel.exchanges.base import OwnState, load_optimizer_tensors, optimizer_tensors
from gradbus.codecs.base import are_finite
from gradbus.runtime.choices import Options
from gradbus.runtime.collectives import CollectiveHandle, Group
from gradbus.runtime.config.data_parallel import DataParallelConfig

_MIB = 1 << 20


class DenseOptions(Options):
    """Options of the dense exchange."""

    overlap: bool = True
    """Whether a bucket is sent as soon as its gradients are there, during the backward pass."""
    bucket_bytes: Annotated[int, Field(ge=1)] = 25 * _MIB
    """Size, in bytes, at which a bucket is closed."""
    first_bucket_bytes: Annotated[int, Field(ge=1)] = _MIB
    """The same size for the first bucket, which holds the last layers. A small one makes sending start early."""
    route: Literal["auto", "direct", "ring", "shards"] = "auto"
    """Algorithm of the all-reduce; see docs/collectives.md."""


class DenseExchange:
    """``torch.optim.SGD`` on the mean of all ranks' gradients. See :class:`.base.Exchange`.

    Bits are those of one process that adds up the gradients in rank order, multiplies by 1 / active and steps. A
    parameter that no rank has a gradient for counts as one with a gradient of zero: momentum and weight decay go on.

    NaN and infinity need no message of their own: a sum with one of them in it is not finite either, and its bits are
    equal on all ranks, so all find the same. A rank whose loss is not finite, but whose gradients are, sends NaN.
    """

    name = choice = "dense"
    density = 1.0
    options: ClassVar[Mapping[str, Any]] = {}

    Options = DenseOptions

    def __init__(
        self, config: DataParallelConfig, group: Group, parameters: Mapping[str, Tensor], **options: Any
    ) -> None:  # fmt: skip
        """``parameters``: those that are trained, by name, in the order of the model. ``options``: as in Options."""
        self._config, self._options = config, self.Options(**options)
        self._group = group
        self._names = list(parameters)
        self._step, self._active = 0, group.world
        self._not_finite: Tensor | None = None  # the loss of this step, on this rank
        self._looks = False  # at the own gradients, before they are summed: from the first step on that was skipped
        self.own_is_finite = True
        self._buckets = GradientBuckets(
            list(parameters.values()), self._launch, bucket_bytes=self._options.bucket_bytes,
            first_bucket_bytes=self._options.first_bucket_bytes,
        )  # fmt: skip
        sgd = config.optimizer
        self._optimizer = torch.optim.SGD(
            parameters.values(), lr=sgd.lr, momentum=sgd.momentum, nesterov=sgd.nesterov,
            weight_decay=sgd.weight_decay,
        )  # fmt: skip

    def _launch(self, index: int, flat: Tensor) -> CollectiveHandle[Tensor]:
        if self._looks:
            self.own_is_finite = are_finite([flat]) and self.own_is_finite
        if self._not_finite is not None:
            flat[:1].masked_fill_(self._not_finite.to(flat.device), math.nan)  # a model may lie on several devices
        return self._group.all_reduce(
            f"grad/{index}", flat, op="mean", out=flat, divisor=self._active, algorithm=self._options.route,
            round_id=self._step, timeout_s=self._config.timeouts.collective_s,
        )  # fmt: skip

    @property
    def in_flight(self) -> Sequence[CollectiveHandle[Tensor]]:
        return self._buckets.launched

    def start_epoch(self, epoch: int) -> None:
        """Nothing depends on the epoch."""

    def begin(self, step: int, active: int) -> None:
        self._step, self._active = step, active
        self._not_finite, self.own_is_finite = None, True
        self._buckets.begin()

    def enable_overlap(self, finite: Tensor | None = None) -> None:
        self._not_finite = None if finite is None else ~finite
        if self._options.overlap:
            self._buckets.enable_overlap()

    def send(self, *, has_data: bool) -> Sequence[CollectiveHandle[Tensor]]:
        return self._buckets.flush()

    def decode(self, results: Sequence[Tensor]) -> tuple[int, ...] | None:
        """The means came in place; what is left is to look at them, and to clip them. A sum does not tell by whom it
        is not finite."""
        flats = [bucket.flat for bucket in self._buckets.buckets]
        if not are_finite(flats):
            self._looks = True
            return ()
        if self._config.optimizer.clip_norm is not None:
            self._clip(flats, self._config.optimizer.clip_norm)
        return None

    @staticmethod
    @torch.no_grad()
    def _clip(flats: Sequence[Tensor], limit: float) -> None:
        """By the norm over all parameters, in float64: so processors of different kinds round to one scale, too."""
        squares = [torch.linalg.vector_norm(flat, dtype=torch.float64).cpu() for flat in flats]
        norm = float(torch.stack(squares).norm())
        if norm > limit:
            for flat in flats:
                flat.mul_(limit / norm)

    def apply(self) -> None:
        self._optimizer.step()

    def shared_state(self) -> dict[str, Tensor]:
        return optimizer_tensors(self._optimizer, self._names)

    def load_shared_state(self, tensors: Mapping[str, Tensor]) -> None:
        load_optimizer_tensors(self._optimizer, self._names, tensors)

    def own_state(self) -> OwnState:
        return OwnState()

    def load_own_state(self, state: OwnState) -> None:
        """There is no residual: all that is computed is sent."""

    def close(self) -> None:
        self._buckets.close()

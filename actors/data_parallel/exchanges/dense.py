"""Whole gradients in buckets, which are averaged over the ranks while the backward pass goes on.

A few large messages take less time than one per parameter. The backward pass reaches the last layers first, so buckets
are filled in reverse order of the parameters. The gradients *are* the buckets: ``p.grad`` is a view into
``bucket.flat``, and nothing is copied on its way out or back in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

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


def assign_buckets(
    parameters: Sequence[Tensor], *, bucket_bytes: int, first_bucket_bytes: int | None = None
) -> list[list[int]]:
    """Assign parameters to buckets: positions in ``parameters``, in the order in which gradients come.

    A bucket is closed as soon as it holds its limit, so it may pass it by less than one parameter: what it waits for is
    then already there, and a large layer is on its way while the layers before it still compute. A parameter of
    ``bucket_bytes`` or more has a bucket of its own, so that small ones need not wait for it. A bucket is of one dtype
    and device, and none is empty.

    Args:
        bucket_bytes: limit of a bucket.
        first_bucket_bytes: limit of the first one of each kind; by default the same.

    Raises:
        ValueError: a limit below 1.
    """
    first_bucket_bytes = bucket_bytes if first_bucket_bytes is None else first_bucket_bytes
    if bucket_bytes < 1 or first_bucket_bytes < 1:
        raise ValueError(f"limits of buckets must be >= 1 byte, got {bucket_bytes} and {first_bucket_bytes}")
    buckets: list[list[int]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}  # positions, bytes
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for position in reversed(range(len(parameters))):
        parameter = parameters[position]
        kind, size = (parameter.dtype, parameter.device), parameter.nbytes
        if size >= bucket_bytes:
            open_ones.pop(kind, None)
        if kind not in open_ones:
            open_ones[kind] = ([], 0)
            buckets.append(open_ones[kind][0])
        members, held = open_ones[kind]
        members.append(position)
        open_ones[kind] = (members, held + size)
        if held + size >= limits.get(kind, first_bucket_bytes):
            del open_ones[kind]
            limits[kind] = bucket_bytes
    return buckets


@dataclass(slots=True, eq=False)
class Bucket:
    """Gradients that travel together.

    Attributes:
        index: its number, the same on all ranks. flat: shape (n,), all of them. parameters: those they belong to.
        views: one per parameter, into ``flat``. waits_for: gradients that are not there yet in this step.
        handle: of its exchange; None before it is launched.
    """

    index: int
    flat: Tensor
    parameters: list[Tensor]
    views: list[Tensor]
    waits_for: set[int]
    handle: CollectiveHandle[Tensor] | None = None


class GradientBuckets:
    """The buckets of one model. All methods but :meth:`close` are for the thread that computes.

        buckets.begin()                     # gradients are zero
        backward of all batches but the last
        buckets.enable_overlap()            # from here on a bucket that is full is launched at once
        backward of the last one
        handles = buckets.flush()           # a parameter without a gradient counts as zeros

    A step that ends in an exception needs no cleanup: the next :meth:`begin` starts afresh.
    """

    def __init__(
        self, parameters: Sequence[Tensor], launch: Callable[[int, Tensor], CollectiveHandle[Tensor]], *,
        bucket_bytes: int, first_bucket_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """Make the buckets and put hooks on the parameters.

        Args:
            parameters: those that are trained, in the order of the model, the same on all ranks.
            launch: ``(index, flat)`` starts the exchange of a bucket. It may be called by a hook, in the midst of the
                backward pass, and must not wait.
        """
        self._launch = launch
        self._overlaps = False
        plan = assign_buckets(parameters, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes)
        self.buckets = [self._make(index, [parameters[at] for at in members]) for index, members in enumerate(plan)]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, at))  # type: ignore[no-untyped-call]
            for bucket in self.buckets
            for at, parameter in enumerate(bucket.parameters)
        ]

    @staticmethod
    def _make(index: int, parameters: list[Tensor]) -> Bucket:
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        views = [part.view(p.shape) for part, p in zip(torch.split(flat, sizes), parameters, strict=True)]
        return Bucket(index, flat, parameters, views, set())

    def close(self) -> None:
        """Take the hooks off. Gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin(self) -> None:
        """Start a step: every gradient is zero, and lies in its bucket whatever was done to ``p.grad`` meanwhile."""
        self._overlaps = False
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.handle = None
            bucket.waits_for = set(range(len(bucket.parameters)))
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def enable_overlap(self) -> None:
        """The next backward pass is the last one of this step."""
        self._overlaps = True

    def flush(self) -> Sequence[CollectiveHandle[Tensor]]:
        """Launch the buckets that are not complete; returns the handles of all buckets, by index."""
        self._overlaps = False
        for bucket in self.buckets:
            if bucket.handle is None:
                self._complete(bucket)
        return self.launched

    @property
    def launched(self) -> Sequence[CollectiveHandle[Tensor]]:
        """Handles of this step so far: what to cancel when it fails."""
        return [bucket.handle for bucket in self.buckets if bucket.handle is not None]

    def _hook(self, bucket: Bucket, at: int) -> Callable[[Tensor], None]:
        def gradient_is_there(_: Tensor) -> None:
            if not self._overlaps:
                return
            if bucket.handle is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(bucket.parameters[at].shape)} got a gradient after its bucket was "
                    f"sent: it has several in one backward pass (reentrant checkpointing?). Set overlap=false"
                )
            bucket.waits_for.discard(at)
            if not bucket.waits_for:
                self._complete(bucket)

        return gradient_is_there

    @torch.no_grad()
    def _complete(self, bucket: Bucket) -> None:
        """Launch a bucket. Copies gradients into it that something has put elsewhere: ``zero_grad()`` does, for one."""
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        bucket.handle = self._launch(bucket.index, bucket.flat)


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

"""Gradients in buckets: a few large messages instead of one per parameter, sent while the backward pass goes on.

The backward pass reaches the last layers first, so buckets are filled in reverse order of the parameters. The gradients
*are* the buckets: ``p.grad`` is a view into ``bucket.flat``, and nothing is copied on its way out or back in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

H = TypeVar("H")


def assign_buckets(
    parameters: Sequence[Tensor], *, bucket_bytes: int, first_bucket_bytes: int | None = None
) -> list[list[int]]:
    """Which parameter goes into which bucket: positions in ``parameters``, in the order in which gradients come.

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
    open_ones: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for position in reversed(range(len(parameters))):
        parameter = parameters[position]
        kind = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
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
class Bucket(Generic[H]):
    """Gradients that travel together.

    Attributes:
        index: its number, the same on all ranks. flat: shape (n,), all of them. parameters: whose they are.
        views: one per parameter, into ``flat``. waits_for: gradients that are not there yet in this step.
        handle: what the launch gave; None before it.
    """

    index: int
    flat: Tensor
    parameters: list[Tensor]
    views: list[Tensor]
    waits_for: set[int]
    handle: H | None = None


class GradientBuckets(Generic[H]):
    """The buckets of one model. All methods but :meth:`close` are for the thread that computes.

        buckets.begin()                     # gradients are zero
        backward of all batches but the last
        buckets.enable_overlap()                       # from here on a bucket that is full is launched at once
        backward of the last one
        handles = buckets.flush()     # what has no gradient counts as zeros

    A step that ends in an exception needs no cleanup: the next :meth:`begin` starts afresh.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        launch: Callable[[int, Tensor], H],
        *,
        bucket_bytes: int,
        first_bucket_bytes: int | None = None,
    ) -> None:
        """Make the buckets and put hooks on the parameters.

        Args:
            parameters: those that are trained, in the order of the model, the same on all ranks.
            launch: ``(index, flat)`` starts the exchange of a bucket. It may be called by a hook, in the midst of the
                backward pass, and must not wait.
        """
        self._launch = launch
        self._armed = False
        plan = assign_buckets(parameters, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes)
        self.buckets = [self._make(index, [parameters[at] for at in members]) for index, members in enumerate(plan)]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, at))  # type: ignore[no-untyped-call]
            for bucket in self.buckets
            for at, parameter in enumerate(bucket.parameters)
        ]

    @staticmethod
    def _make(index: int, parameters: list[Tensor]) -> Bucket[H]:
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
        """A new step: every gradient is zero, and lies in its bucket whatever was done to ``p.grad`` meanwhile."""
        self._armed = False
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.handle = None
            bucket.waits_for = set(range(len(bucket.parameters)))
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def enable_overlap(self) -> None:
        """The next backward pass is the last one of this step."""
        self._armed = True

    def flush(self) -> list[H]:
        """Launch what no gradient came for; returns the handles of all buckets, by index."""
        self._armed = False
        for bucket in self.buckets:
            if bucket.handle is None:
                for at in range(len(bucket.parameters)):
                    self._copy_into_bucket(bucket, at)
                bucket.handle = self._launch(bucket.index, bucket.flat)
        return [bucket.handle for bucket in self.buckets if bucket.handle is not None]

    @property
    def launched(self) -> list[H]:
        """Handles of this step so far: what to cancel when it fails."""
        return [bucket.handle for bucket in self.buckets if bucket.handle is not None]

    def _hook(self, bucket: Bucket[H], at: int) -> Callable[[Tensor], None]:
        def gradient_is_there(_: Tensor) -> None:
            if not self._armed:
                return
            if bucket.handle is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(bucket.parameters[at].shape)} got a gradient after its bucket was "
                    f"sent: it has several in one backward pass (reentrant checkpointing?). Set overlap=false"
                )
            bucket.waits_for.discard(at)
            if not bucket.waits_for:
                for one in range(len(bucket.parameters)):
                    self._copy_into_bucket(bucket, one)
                bucket.handle = self._launch(bucket.index, bucket.flat)

        return gradient_is_there

    @staticmethod
    def _copy_into_bucket(bucket: Bucket[H], at: int) -> None:
        """Copy a gradient into its bucket if something has put it elsewhere: ``zero_grad()`` does, for one."""
        parameter, view = bucket.parameters[at], bucket.views[at]
        if parameter.grad is view:
            return
        with torch.no_grad():
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        parameter.grad = view

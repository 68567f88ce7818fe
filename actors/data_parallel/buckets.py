"""Gradients in buckets, whose exchange starts while the backward pass goes on.

A few large messages take less time than one per parameter. The backward pass reaches the last layers first, so buckets
are filled in reverse order of the parameters. The gradients *are* the buckets: ``p.grad`` is a view into
``bucket.flat``, and nothing is copied on its way out or back in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import TensorBucket, views_of

Launch = Callable[[TensorBucket], object]


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


def gradients_are_finite(buckets: Sequence[TensorBucket]) -> bool:
    """Return whether the gradients in these buckets are finite, as they are now."""
    return are_finite([bucket.flat for bucket in buckets])


@dataclass(slots=True, eq=False)
class Bucket:
    """Gradients that travel together.

    Attributes:
        sets: the memory: one set is filled while those of steps before are still exchanged. Names are those of the
            parameters. current: the set of this step. parameters: those they belong to.
        waits_for: gradients that are not there yet in this step. is_launched: whether all are, and are on their way.
    """

    sets: list[TensorBucket]
    current: TensorBucket
    parameters: list[Tensor]
    waits_for: set[int]
    is_launched: bool = False


class GradientBuckets:
    """The buckets of one model. All methods but :meth:`close` are for the thread that computes.

        buckets.begin(launch=...)           # gradients are zero
        backward of all batches but the last
        buckets.mark_unless(finite)         # a bucket of a loss that is not finite says so to all ranks
        buckets.enable_overlap()            # from here on a bucket that is full is launched at once
        backward of the last one
        buckets.flush()                     # a parameter without a gradient counts as zeros

    A step that ends in an exception needs no cleanup: the next :meth:`begin` starts afresh.

    Attributes:
        are_finite: whether all buckets of this step were, as far as somebody has looked.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, assignment: Sequence[Sequence[int]], sets: int = 1) -> None:
        """Make the buckets and put hooks on the parameters.

        Args:
            parameters: those that are trained, by name, in the order of the model, the same on all ranks.
            assignment: positions of the parameters in each bucket, as :func:`assign_buckets` gives them.
            sets: of memory.
        """
        self._launch: Launch | None = None  # of this step, as the next three
        self._looks = False
        self._loss_is_finite: Tensor | None = None
        self.are_finite = True
        self._overlaps = False
        names, tensors = list(parameters), list(parameters.values())
        self._buckets = [
            self._make(index, {names[at]: tensors[at] for at in members}, sets)
            for index, members in enumerate(assignment)
        ]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, at))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for at, parameter in enumerate(bucket.parameters)
        ]

    @staticmethod
    def _make(index: int, parameters: Mapping[str, Tensor], sets: int) -> Bucket:
        like = next(iter(parameters.values()))
        made: list[TensorBucket] = []
        for _ in range(sets):
            flat = torch.zeros(sum(p.numel() for p in parameters.values()), dtype=like.dtype, device=like.device)
            made.append(TensorBucket(index, flat, views_of(flat, parameters)))
        return Bucket(made, made[0], list(parameters.values()), set())

    def close(self) -> None:
        """Take the hooks off. Gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin(self, number: int = 0, launch: Launch | None = None, *, looks: bool = False) -> list[TensorBucket]:
        """Start a step: every gradient is zero, and lies in its bucket whatever was done to ``p.grad`` meanwhile.

        Args:
            number: of the set of memory to use.
            launch: starts the exchange of a bucket. It may be called by a hook, in the midst of the backward pass, and
                must not wait. None: buckets are not launched.
            looks: find out whether each bucket is finite before it is launched, see ``are_finite``.

        Returns:
            The buckets in it.
        """
        self._launch, self._looks = launch, looks
        self._loss_is_finite, self.are_finite = None, True
        self._overlaps = False
        for bucket in self._buckets:
            bucket.current = bucket.sets[number]
            bucket.current.flat.zero_()
            bucket.is_launched = False
            bucket.waits_for = set(range(len(bucket.parameters)))
        self.use(number)
        return [bucket.current for bucket in self._buckets]

    def use(self, number: int) -> None:
        """Make a set of memory the gradients of the parameters, as it is."""
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.sets[number].tensors.values(), strict=True):
                parameter.grad = view

    def mark_unless(self, is_finite: Tensor) -> None:
        """Have NaN put into each bucket that is launched from now on, if this is False: bool, shape (). What all ranks
        make of it is not finite then."""
        self._loss_is_finite = is_finite

    def enable_overlap(self) -> None:
        """The next backward pass is the last one of this step."""
        self._overlaps = True

    def flush(self) -> None:
        """Launch the buckets that are not complete."""
        self._overlaps = False
        for bucket in self._buckets:
            if not bucket.is_launched:
                self._complete(bucket)

    def _hook(self, bucket: Bucket, at: int) -> Callable[[Tensor], None]:
        def gradient_is_there(_: Tensor) -> None:
            if not self._overlaps:
                return
            if bucket.is_launched:
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
        for parameter, view in zip(bucket.parameters, bucket.current.tensors.values(), strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        bucket.is_launched = True
        flat = bucket.current.flat
        if self._looks:
            self.are_finite = are_finite([flat]) and self.are_finite
        if self._loss_is_finite is not None:  # it is not read, which would wait for the device
            not_finite = ~self._loss_is_finite.to(flat.device)  # a model may lie on several
            flat[:1].masked_fill_(not_finite, math.nan)
        if self._launch is not None:
            self._launch(bucket.current)

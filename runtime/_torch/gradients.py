"""The gradients of one optimizer on their way to the other ranks and back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gradbus.torch.functions import Handle, start_reduction
from gradbus.torch.name_matched import NamedCalls, check_on_cpu, current

GRADIENTS = "gradient"  # space of names

_CHANGED = (
    "the gradient of {name!r} was changed or replaced while it was on its way to the other ranks. Before whatever "
    "changes gradients (clipping, GradScaler.unscale_, zero_grad of the model) call optimizer.synchronize()"
)
_TOO_OFTEN = (
    "the gradient of {name!r} was computed more than backward_passes_per_step ({passes}) times before step(). To add "
    "up those of more passes, raise backward_passes_per_step"
)
_TWO_OWNERS = (
    "parameter {name!r} belongs to two distributed optimizers, so its gradient would be combined twice. Let go of the "
    "older one (and of its schedulers, which hold it), or give each optimizer parameters of its own"
)


class Compression(Protocol):
    """How gradients travel. Horovod's compressors are such objects, too."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """What is combined in place of the tensor, of one dtype and shape on all ranks; and what undoes it."""

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """The combined gradient from what was combined."""


class AsDtype:
    """Floating point gradients travel in another dtype. The engine adds halves in float32 and rounds once."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(self._dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        return tensor.to(context)


class AsItIs:
    """No compression."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        return tensor


_COMPRESSIONS: dict[str | None, Compression] = {
    None: AsItIs(), "fp16": AsDtype(torch.float16), "bf16": AsDtype(torch.bfloat16),
}  # fmt: skip


def compression_of(given: Any) -> Compression:
    """Raises ValueError: it is none."""
    if given is None or isinstance(given, str):
        if given not in _COMPRESSIONS:
            raise ValueError(
                f"compression {given!r}: expected None, 'fp16', 'bf16' or an object with compress and decompress"
            )
        return _COMPRESSIONS[given]
    for method in ("compress", "decompress"):
        if not callable(getattr(given, method, None)):
            raise ValueError(f"compression: {type(given).__name__} has no method {method}")
    return cast(Compression, given)


@dataclass(slots=True)
class _Sent:
    """A gradient on its way.

    Attributes:
        gradient: as it was when it started, and its ``version`` then.
        buffer: what is combined: the gradient itself, or what it was compressed to. context: undoes that.
    """

    handle: Handle[Tensor]
    gradient: Tensor
    version: int
    buffer: Tensor
    context: Any


class GradientReduction:
    """The gradients of one optimizer: which are on their way, which are still to come."""

    def __init__(self, names: dict[Tensor, str], compression: Compression, op: str, passes: int, dense: bool) -> None:
        """
        Args:
            names: of parameters, those of other optimizers perhaps among them.
            passes: backward passes for each step.
            dense: make sparse gradients dense.
        """
        self.skips = False  # step() leaves the gradients alone
        self.fresh = False  # synchronised, and not changed by a backward pass since
        self._names = names
        self._compression = compression
        self._op = op
        self._passes = passes
        self._dense = dense
        self._left: dict[Tensor, int] = {}  # backward passes to come, by parameter
        self._sent: dict[Tensor, _Sent] = {}
        self._hooks: list[Any] = []
        self._number: tuple[weakref.ref[NamedCalls], int] | None = None
        self._calls_and_number()  # says at once if there is no process group

    def add(self, parameters: Iterable[Tensor], fallback: str) -> None:
        """Take parameters in. ``fallback``: start of the names of those that have none."""
        accumulated = partial(_accumulated, weakref.ref(self))
        for number, parameter in enumerate(parameters):
            if not parameter.requires_grad:
                continue
            name = self._names.setdefault(parameter, f"{fallback}.{number}")
            check_on_cpu(parameter, f"parameter {name!r}")
            self._left[parameter] = self._passes
            _owners[id(parameter)] = self
            leaf: Any = parameter  # this method has no types
            self._hooks.append(leaf.register_post_accumulate_grad_hook(accumulated))

    def accumulated(self, parameter: Tensor) -> None:
        """A backward pass has added to this gradient. Raises RuntimeError: once too often, or for two optimizers."""
        if _owners.setdefault(id(parameter), self) is not self:
            raise RuntimeError(_TWO_OWNERS.format(name=self._names[parameter]))
        if parameter in self._sent:
            raise RuntimeError(_TOO_OFTEN.format(name=self._names[parameter], passes=self._passes))
        self.fresh = False
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._start(parameter)

    @property
    def busy(self) -> bool:
        """Whether gradients have come that are not combined yet."""
        return bool(self._sent) or any(left < self._passes for left in self._left.values())

    def synchronize(self) -> None:
        """Combine all gradients. Those that are not on their way yet are sent as they are; who has none sends zeros."""
        for parameter in self._left:
            if parameter not in self._sent and parameter.requires_grad:  # it may be frozen by now
                self._start(parameter)
        first: Exception | None = None
        for parameter, sent in self._sent.items():  # all of them, so that none is written to when this returns
            try:
                if parameter.grad is not sent.gradient or sent.gradient._version != sent.version:
                    first = first or RuntimeError(_CHANGED.format(name=self._names[parameter]))
                sent.handle.wait()
                combined = self._compression.decompress(sent.buffer, sent.context)
                if combined is not sent.gradient:
                    with torch.no_grad():
                        sent.gradient.copy_(combined)
            except Exception as error:
                first = first or error
        self._sent.clear()
        self._left = dict.fromkeys(self._left, self._passes)
        if first is not None:
            raise first
        self.fresh = True

    def _start(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.is_sparse and self._dense:
            gradient = gradient.to_dense()
        parameter.grad = gradient
        buffer, context = self._compression.compress(gradient)
        calls, number = self._calls_and_number()
        name = self._names[parameter]
        # The same memory with a version of its own: that of the gradient tells whether somebody else writes to it.
        memory = buffer if buffer.is_sparse else buffer.data
        handle = start_reduction(calls, memory, f"{GRADIENTS} {number}", name, self._op)
        self._sent[parameter] = _Sent(handle, gradient, gradient._version, buffer, context)

    def _calls_and_number(self) -> tuple[NamedCalls, int]:
        """The process group, and which of its optimizers this is: names are those of each optimizer alone."""
        calls = current()
        if self._number is None or self._number[0]() is not calls:
            self._number = weakref.ref(calls), calls.next_optimizer()
        return calls, self._number[1]

    def __del__(self) -> None:
        for hook in getattr(self, "_hooks", ()):
            hook.remove()


# Who took a parameter last, by its id: as long as the exchange lives, the parameter does.
_owners: weakref.WeakValueDictionary[int, GradientReduction] = weakref.WeakValueDictionary()


def _accumulated(reference: weakref.ref[GradientReduction], parameter: Tensor) -> None:
    """The parameters outlive the optimizer, and must not keep it."""
    exchange = reference()
    if exchange is not None:
        exchange.accumulated(parameter)

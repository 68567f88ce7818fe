"""Any optimizer of torch, made distributed: its gradients are combined over the ranks while backward goes on.

Each gradient is a collective of its own that ranks match by name, in whatever order their backward passes come to it,
as Horovod does. So it is no rank program: on ``torch.distributed`` these need one order of requests on all ranks, and
the whole of such a program would be one request. For algorithms see :func:`gradbus.torch.with_algorithm`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradbus.torch.backend import DdsBackend
from gradbus.torch.compression import Compressor, compression_of
from gradbus.torch.functions import Handle, check_reachable, current, gather_objects, start_reduction
from gradbus.torch.whole_gradients import check_whole, check_zero


class ReductionOptions(NamedTuple):
    """How the gradients of an optimizer are combined; see :func:`DistributedOptimizer`."""

    compression: Compressor
    op: str
    passes: int
    sparse_as_dense: bool
    predivide: float


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
    """The gradients of one optimizer: which are on their way, which are still to come.

    In each step all ranks compare which parameters they train, while the gradients are on their way: a parameter may be
    frozen or unfrozen between two steps, on all ranks, and a rank that does so alone is named on each of them.

    Attributes:
        skips: step() leaves the gradients alone.
        fresh: they are synchronised, and not changed by a backward pass since.
    """

    def __init__(self, names: dict[Tensor, str], options: ReductionOptions) -> None:
        """``names``: of parameters, those of other optimizers perhaps among them."""
        self.skips = False
        self.fresh = False
        self._names = names
        self._options = options
        self._known: list[Tensor] = []  # all parameters, those that are frozen among them
        self._trained: tuple[list[str], int] = [], 0  # the names that ranks agreed on last, and a hash of them
        self._left: dict[Tensor, int] = {}  # backward passes to come, by parameter; of those with a hook
        self._sent: dict[Tensor, _Sent] = {}
        self._hooks: list[Any] = []
        self._group: tuple[weakref.ref[DdsBackend], int] | None = None
        if "gradbus.torch.elastic" not in sys.modules:  # its run makes the process group, later
            self._backend_and_space()  # raises at once if there is none

    def add(self, parameters: Iterable[Tensor], fallback: str) -> None:
        """Take parameters in. ``fallback``: start of the names of those that have none."""
        for number, parameter in enumerate(parameters):
            self._names.setdefault(parameter, f"{fallback}.{number}")
            self._known.append(parameter)
            if parameter.requires_grad:
                self._hook(parameter)

    def _hook(self, parameter: Tensor) -> None:
        """torch takes no hook for a parameter that is frozen; once there, a hook stays while it is frozen."""
        check_reachable(parameter, f"parameter {self._names[parameter]!r}")
        self._left[parameter] = self._options.passes
        _owners[id(parameter)] = self
        leaf: Any = parameter  # this method has no types
        self._hooks.append(leaf.register_post_accumulate_grad_hook(partial(_accumulated, weakref.ref(self))))

    def accumulated(self, parameter: Tensor) -> None:
        """A backward pass has added to this gradient. Raises RuntimeError: once too often, or for two optimizers."""
        name = self._names[parameter]
        if _owners.setdefault(id(parameter), self) is not self:
            raise RuntimeError(
                f"parameter {name!r} belongs to two distributed optimizers, so its gradient would be combined twice. "
                f"Let go of the older one (and of its schedulers, which hold it), or give each optimizer parameters of "
                f"its own"
            )
        if parameter in self._sent:
            raise RuntimeError(
                f"the gradient of {name!r} was computed more than backward_passes_per_step ({self._options.passes}) "
                f"times before step(). To add up those of more passes, raise backward_passes_per_step"
            )
        self.fresh = False
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._start(parameter)

    def reset(self) -> None:
        """Forget what is on its way: its process group has failed, and the gradients are not used."""
        self._sent.clear()
        self._left = dict.fromkeys(self._left, self._options.passes)
        self.fresh = self.skips = False

    @property
    def busy(self) -> bool:
        """Whether gradients have come that are not combined yet."""
        return bool(self._sent) or any(left < self._options.passes for left in self._left.values())

    def synchronize(self) -> None:
        """Combine all gradients. Those that are not on their way yet are sent as they are, or as zeros.

        Raises:
            RuntimeError: ranks train different parameters. All of them raise it, and combine no others.
        """
        trained = [one for one in self._known if one.requires_grad or one in self._sent]
        names, agreement = [self._names[one] for one in trained], self._start_agreement(trained)
        for parameter in trained:
            if parameter in self._left and parameter not in self._sent:
                self._start(parameter)
        first: Exception | None = None
        try:
            if of_ranks := self._disagreement(agreement, names):
                common = set(names).intersection(*of_ranks)  # no other rank will ever send the gradients of the others
                self._sent = {one: sent for one, sent in self._sent.items() if self._names[one] in common}
                raise RuntimeError(_difference(of_ranks))
            for parameter in trained:
                if parameter not in self._left:  # it was frozen until now
                    self._hook(parameter)
                    self._start(parameter)
        except Exception as error:
            first = error
        for parameter, sent in self._sent.items():  # all of them, so that none is written to when this returns
            try:
                self._finish(parameter, sent)
            except Exception as error:
                first = first or error
        self._sent.clear()
        self._left = dict.fromkeys(self._left, self._options.passes)
        if first is not None:
            raise first
        self.fresh = True

    def _start_agreement(self, trained: Iterable[Tensor]) -> Handle[Tensor]:
        """Start to compare a hash of the names of these parameters: its smallest and its largest value on any rank."""
        names = [self._names[one] for one in trained]
        if names != self._trained[0]:
            digest = hashlib.blake2b("\0".join(sorted(names)).encode(), digest_size=7).digest()
            self._trained = names, int.from_bytes(digest)
        own = torch.tensor([self._trained[1], -self._trained[1]])
        backend, space = self._backend_and_space()
        return start_reduction(backend, own, f"trained {space}", "the parameters that are trained", "min")

    def _disagreement(self, agreement: Handle[Tensor], names: Sequence[str]) -> list[list[str]]:
        """The names of what each rank trains, in rank order, if they differ; else nothing."""
        least, most = agreement.wait().tolist()
        if least == -most:
            return []
        backend, space = self._backend_and_space()
        what = "the names of the parameters that are trained"
        return gather_objects(backend, list(names), (f"trained {space}", what), what)

    def _finish(self, parameter: Tensor, sent: _Sent) -> None:
        unchanged = parameter.grad is sent.gradient and _version_of(sent.gradient) == sent.version
        sent.handle.wait()
        if not unchanged:
            raise RuntimeError(
                f"the gradient of {self._names[parameter]!r} was changed or replaced while it was on its way to the "
                f"other ranks. Before whatever changes gradients (clipping, GradScaler.unscale_, zero_grad of the "
                f"model) call optimizer.synchronize()"
            )
        if self._options.predivide != 1.0:  # the sum of what was divided before
            sent.buffer *= self._options.predivide / current().group.world
        combined = self._options.compression.decompress(sent.buffer, sent.context)
        if combined is not sent.gradient:
            with torch.no_grad():
                sent.gradient.copy_(combined)

    def _start(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.is_sparse and self._options.sparse_as_dense:
            gradient = gradient.to_dense()
        parameter.grad = gradient
        buffer, context = self._options.compression.compress(gradient)
        backend, space = self._backend_and_space()
        if self._options.predivide != 1.0:
            buffer = buffer / self._options.predivide
        # The same memory with a version of its own: that of the gradient shows whether the program writes to it.
        memory = buffer if buffer.is_sparse else buffer.data
        op = self._options.op if self._options.predivide == 1.0 else "sum"
        handle = start_reduction(backend, memory, space, self._names[parameter], op)
        self._sent[parameter] = _Sent(handle, gradient, _version_of(gradient), buffer, context)

    def _backend_and_space(self) -> tuple[DdsBackend, str]:
        """The process group, and the space of names of this one of its optimizers: the same on all ranks, as they make
        theirs in the same order."""
        backend = current()
        if self._group is None or self._group[0]() is not backend:
            self._group = weakref.ref(backend), next(backend.optimizers)
        return backend, f"gradient {self._group[1]}"

    def __del__(self) -> None:
        for hook in getattr(self, "_hooks", ()):
            hook.remove()


def _difference(of_ranks: Sequence[Sequence[str]]) -> str:
    """The text of an error: which parameters only some ranks train. ``of_ranks``: the names, in rank order."""
    trained = [set(names) for names in of_ranks]
    differing = sorted(name for name in set[str]().union(*trained) if not all(name in one for one in trained))
    name, more = differing[0], len(differing) - 1
    on = [rank for rank, names in enumerate(trained) if name in names]
    off = [rank for rank, names in enumerate(trained) if name not in names]
    also = f" (and {more} more parameters)" if more else ""
    return (
        f"ranks {on} train parameter {name!r}{also}, and ranks {off} do not: there it is frozen (requires_grad=False), "
        f"or not in the optimizer. Freeze, unfreeze and add parameters on all ranks before the same step, and start "
        f"the ranks again"
    )


def _version_of(tensor: Tensor) -> int:
    """torch's count of the writes to a tensor."""
    return tensor._version  # noqa: SLF001 - torch has no public name for it


# The reduction that took a parameter last, by its id: as long as it lives, the parameter does.
_owners: weakref.WeakValueDictionary[int, GradientReduction] = weakref.WeakValueDictionary()


def _accumulated(reference: weakref.ref[GradientReduction], parameter: Tensor) -> None:
    """The parameters outlive the optimizer, and must not keep it."""
    reduction = reference()
    if reduction is not None:
        reduction.accumulated(parameter)


class Distributed(Optimizer):
    """Holds what an optimizer can do beside its own things. Its class is made of this one and its former one."""

    _reduction: GradientReduction | None = None  # a copy of the optimizer has none

    def synchronize(self) -> None:
        """Wait until the gradients are those of all ranks: for clipping and the like, before :meth:`step`.

        Raises:
            DistBackendError: a rank is lost, or late. RuntimeError: a gradient was changed meanwhile.
        """
        if self._reduction is not None:
            self._reduction.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In here :meth:`step` takes the gradients as they are. Without it, too, it does not combine them twice."""
        reduction = self._reduction
        if reduction is None:
            yield
            return
        reduction.skips = True
        try:
            yield
        finally:
            reduction.skips = False

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that has failed, as a rank was lost: the next backward pass begins anew."""
        if self._reduction is not None:
            self._reduction.reset()
        super().zero_grad(set_to_none=True)

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Raises RuntimeError: gradients are on their way."""
        if self._reduction is not None and self._reduction.busy:
            raise RuntimeError(
                "zero_grad() between backward() and step(): the other ranks wait for these gradients, and they are "
                "being written to. Call step() or synchronize() first"
            )
        super().zero_grad(*arguments, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """All ranks must add equal ones."""
        super().add_param_group(param_group)
        if self._reduction is not None:
            number = len(self.param_groups) - 1
            self._reduction.add(self.param_groups[number]["params"], f"group.{number}")


_classes: dict[Any, type[Distributed]] = {}


def _reduction_of(optimizer: Any) -> GradientReduction | None:
    reduction: GradientReduction | None = optimizer._reduction  # noqa: SLF001 - a user's optimizer shows no more than it must
    return reduction


def _before_step(optimizer: Any, arguments: Any, options: Any) -> tuple[Any, Any] | None:
    """With a closure the gradients come later, and perhaps several times."""
    reduction = _reduction_of(optimizer)
    if reduction is None or reduction.skips:
        return None
    closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)

    def combined() -> Any:
        loss = None if closure is None else closure()
        if not reduction.fresh:
            reduction.synchronize()
        return loss

    if closure is None:
        combined()
        return None
    if "closure" in options:
        return arguments, {**options, "closure": combined}
    return (arguments[0], combined, *arguments[2:]), options


def _after_step(optimizer: Any, arguments: Any, options: Any) -> None:
    if (reduction := _reduction_of(optimizer)) is not None:
        reduction.fresh = False


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor | Literal["fp16", "bf16"] | None = None,
    op: Literal["mean", "sum"] = "mean",
    backward_passes_per_step: int = 1,
    *,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
) -> Distributed:
    """Make an optimizer combine its gradients over all ranks: each as soon as backward has it, and wait in ``step``.

    All ranks must make their distributed optimizers in the same order. Gradients may come in another order on each.
    Parameters may be frozen and unfrozen between two steps, on all ranks: if one rank trains others, ``step`` raises
    RuntimeError on all.

    Args:
        optimizer: of any class. It is changed itself, and keeps its state and its place in schedulers and scalers.
        named_parameters: ``model.named_parameters()``; without them names are numbers, in the order of the optimizer.
        compression: None, ``"fp16"``, ``"bf16"``, one of :class:`.Compression`, or an object with ``compress`` and
            ``decompress``.
        op: ``"mean"`` (``Average``) or ``"sum"`` (``Sum``) over the ranks.
        backward_passes_per_step: gradients of so many passes are added up before they are combined.
        sparse_as_dense: make sparse gradients dense first. Needed where some ranks may have none.
        gradient_predivide_factor: with ``"mean"``, divide gradients by this before they are added up, after their
            compression, and multiply the sum by ``gradient_predivide_factor / size()``. Against sums that are too
            large for fp16.

    Returns:
        The same object, with ``synchronize()`` and ``skip_synchronize()`` beside what it had.

    Raises:
        ValueError: arguments that do not fit, or an optimizer that is distributed already.
        ConfigError: gradients are not whole on each rank, as with FSDP, or the optimizer has a hook of its own.
        RuntimeError: there is no process group of this backend.
    """
    if isinstance(optimizer, Distributed):
        raise ValueError("this optimizer is distributed already: its gradients would be combined twice")
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"expected an optimizer of torch, got {type(optimizer).__name__}")
    if op not in ("mean", "sum"):
        raise ValueError(f"op {op!r}: expected 'mean' or 'sum'")
    if not (0.0 < gradient_predivide_factor < math.inf):
        raise ValueError(f"gradient_predivide_factor must be positive and finite, got {gradient_predivide_factor}")
    if gradient_predivide_factor != 1.0 and op != "mean":
        raise ValueError(f"gradient_predivide_factor splits the division of a mean: expected op 'mean', got {op!r}")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be >= 1, got {backward_passes_per_step}")
    listed = [one for group in optimizer.param_groups for one in group["params"]]
    named_parameters = None if named_parameters is None else list(named_parameters)
    names = {id(one): name for name, one in named_parameters or ()}
    check_whole(((names.get(id(one), str(number)), one) for number, one in enumerate(listed)), "DistributedOptimizer")
    check_zero([optimizer], "DistributedOptimizer", exchanges_weights=False)
    options = ReductionOptions(
        compression_of(compression), op, backward_passes_per_step, sparse_as_dense, gradient_predivide_factor
    )
    reduction = GradientReduction(_names(optimizer, named_parameters), options)
    for number, group in enumerate(optimizer.param_groups):
        reduction.add(group["params"], f"group.{number}")
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    kind: Any = type(optimizer)
    if kind not in _classes:
        _classes[kind] = type(f"Distributed{kind.__name__}", (Distributed, kind), {"__doc__": kind.__doc__})
    optimizer.__class__ = _classes[kind]
    distributed = cast(Distributed, optimizer)
    distributed._reduction = reduction  # noqa: SLF001 - no initialiser of this class is called
    return distributed


def _names(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {}
    seen: set[str] = set()
    if named is None:
        return names
    for name, parameter in named:
        if name in seen:
            raise ValueError(f"named_parameters has two parameters of the name {name!r}")
        seen.add(name)
        names.setdefault(parameter, name)
    unnamed = sum(parameter not in names for group in optimizer.param_groups for parameter in group["params"])
    if unnamed:
        raise ValueError(
            f"{unnamed} parameters of the optimizer are not among named_parameters: give model.named_parameters() of "
            f"the whole model"
        )
    return names

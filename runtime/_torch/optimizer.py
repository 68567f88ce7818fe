"""Any optimizer of torch, made distributed: its gradients are combined over the ranks while backward goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal, cast

from torch import Tensor
from torch.optim import Optimizer

from gradbus.torch.gradients import Compression, GradientReduction, compression_of


class Distributed(Optimizer):
    """What an optimizer can do beside its own things. Its class is made of this one and its former one."""

    _exchange: GradientReduction | None = None  # a copy of the optimizer has none

    def synchronize(self) -> None:
        """Wait until the gradients are those of all ranks: for clipping and the like, before :meth:`step`.

        Raises:
            DistBackendError: a rank is lost, or late. RuntimeError: a gradient was changed meanwhile.
        """
        if self._exchange is not None:
            self._exchange.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In here :meth:`step` takes the gradients as they are. Without it, too, it does not combine them twice."""
        exchange = self._exchange
        if exchange is None:
            yield
            return
        exchange.skips = True
        try:
            yield
        finally:
            exchange.skips = False

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Raises RuntimeError: gradients are on their way."""
        if self._exchange is not None and self._exchange.busy:
            raise RuntimeError(
                "zero_grad() between backward() and step(): the other ranks wait for these gradients, and they are "
                "being written to. Call step() or synchronize() first"
            )
        super().zero_grad(*arguments, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """All ranks must add equal ones."""
        super().add_param_group(param_group)
        if self._exchange is not None:
            number = len(self.param_groups) - 1
            self._exchange.add(self.param_groups[number]["params"], f"group.{number}")


_classes: dict[Any, type[Distributed]] = {}


def _class_for(kind: Any) -> type[Distributed]:
    if kind not in _classes:
        _classes[kind] = type(f"Distributed{kind.__name__}", (Distributed, kind), {"__doc__": kind.__doc__})
    return _classes[kind]


def _before_step(optimizer: Any, arguments: Any, options: Any) -> tuple[Any, Any] | None:
    """With a closure the gradients come later, and perhaps several times."""
    exchange = optimizer._exchange
    if exchange is None or exchange.skips:
        return None
    closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)
    if closure is None:
        if not exchange.fresh:
            exchange.synchronize()
        return None

    def combined() -> Any:
        loss = closure()
        if not exchange.fresh:
            exchange.synchronize()
        return loss

    if "closure" in options:
        return arguments, {**options, "closure": combined}
    return (arguments[0], combined, *arguments[2:]), options


def _after_step(optimizer: Any, arguments: Any, options: Any) -> None:
    if optimizer._exchange is not None:
        optimizer._exchange.fresh = False


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compression | Literal["fp16", "bf16"] | None = None, op: Literal["mean", "sum"] = "mean",
    backward_passes_per_step: int = 1, *, sparse_as_dense: bool = False,
) -> Distributed:  # fmt: skip
    """Make an optimizer combine its gradients over all ranks: each as soon as backward has it, and wait in ``step``.

    All ranks must make their distributed optimizers in the same order. Gradients may come in another order on each.

    Args:
        optimizer: of any class. It is changed itself, and keeps its state and its place in schedulers and scalers.
        named_parameters: ``model.named_parameters()``; without them names are numbers, in the order of the optimizer.
        compression: None, ``"fp16"``, ``"bf16"``, or an object with ``compress`` and ``decompress``.
        op: ``"mean"`` or ``"sum"`` over the ranks.
        backward_passes_per_step: gradients of so many passes are added up before they are combined.
        sparse_as_dense: make sparse gradients dense first. Needed where some ranks may have none.

    Returns:
        The same object, with ``synchronize()`` and ``skip_synchronize()`` beside what it had.

    Raises:
        ValueError: arguments that do not fit, or an optimizer that is distributed already.
        RuntimeError: there is no process group of this backend.
    """
    if isinstance(optimizer, Distributed):
        raise ValueError("this optimizer is distributed already: its gradients would be combined twice")
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"expected an optimizer of torch, got {type(optimizer).__name__}")
    if op not in ("mean", "sum"):
        raise ValueError(f"op {op!r}: expected 'mean' or 'sum'")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be >= 1, got {backward_passes_per_step}")
    names = _names(optimizer, named_parameters)
    exchange = GradientReduction(names, compression_of(compression), op, backward_passes_per_step, sparse_as_dense)
    for number, group in enumerate(optimizer.param_groups):
        exchange.add(group["params"], f"group.{number}")
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    optimizer.__class__ = _class_for(type(optimizer))
    distributed = cast(Distributed, optimizer)
    distributed._exchange = exchange
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

"""Lets the optimizers of torch make steps without loading torch's compiler, in programs that compile nothing.

The methods of ``torch.optim`` that change or read an optimizer tell the compiler, Dynamo, to keep out of them, and for
that import it: with the first optimizer of a process come Dynamo, Inductor, SymPy and Triton. That takes 2 s of a core
and 150 MB, more than all of gradbus, and does nothing unless something is compiled.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

_COMPILER = "torch._dynamo"
_lock = threading.Lock()  # tasks are prepared on several threads
_is_done = False


def defer_compiler() -> None:
    """Have the methods of torch's optimizer classes do without the compiler for as long as nothing else has loaded it.

    From then on they are torch's own again, whatever is compiled. Nothing changes where it is loaded already, or where
    this version of torch has made these methods in another way. The bits of a step are the same.
    """
    global _is_done
    with _lock:
        if _is_done or _COMPILER in sys.modules:
            return
        _is_done = True
        for kind in {one for one in vars(torch.optim).values() if inspect.isclass(one) and issubclass(one, Optimizer)}:
            for name, method in list(vars(kind).items()):
                if isinstance(method, FunctionType) and (plain := _without_compiler(method)) is not None:
                    setattr(kind, name, _chosen_at_each_call(method, plain))


def _without_compiler(method: FunctionType) -> Callable[..., Any] | None:
    """Return what a method does beside telling the compiler to keep out; None: it does not tell it."""
    inner = getattr(method, "__wrapped__", None)
    if inner is None:
        return None
    match method.__code__.co_filename, method.__code__.co_name:
        # torch._disable_dynamo
        case file, "inner" if file == torch._compile.__file__:  # noqa: SLF001 - no public call tells what it has made
            return inner  # type: ignore[no-any-return]
        case file, "_use_grad" if file == sys.modules[Optimizer.__module__].__file__:  # _use_grad_for_differentiable
            return _with_gradients_as_the_optimizer_wants(inner)
    return None


def _with_gradients_as_the_optimizer_wants(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def step(self: Optimizer, *arguments: Any, **keywords: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            return inner(self, *arguments, **keywords)
        finally:
            torch.set_grad_enabled(before)

    return step


def _chosen_at_each_call(original: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*arguments: Any, **keywords: Any) -> Any:
        return (original if _COMPILER in sys.modules else plain)(*arguments, **keywords)

    return method

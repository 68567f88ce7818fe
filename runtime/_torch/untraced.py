"""Keeps torch.compile out of the backend: its calls run as they are, in the middle of what is compiled.

torch's C++ code calls the methods of process group, backend and works also while a compiled model runs. Then Dynamo
gets each Python frame to compile, those of these methods, too, and ends with an error: to it a process group has no
members but those of torch's own. So these methods are marked here; those of gloo are C++, which it never sees.

``torch.compiler.disable`` would do, but it imports Dynamo, which takes longer than torch itself, in programs that
compile nothing. So the code is marked in the interpreter, as that function does at its end.
"""

from __future__ import annotations

import types
from typing import TypeVar

import torch

_REASON = "a collective of gradbus"

T = TypeVar("T")


def untraced(thing: T) -> T:
    """A function, or a class with its own methods and properties, that torch.compile neither compiles nor looks into,
    nor anything that they call. Nothing else about it changes, and a call takes no longer."""
    if isinstance(thing, type):
        for member in vars(thing).values():
            untraced(member)
    elif isinstance(thing, property):
        for function in (thing.fget, thing.fset, thing.fdel):
            untraced(function)
    elif isinstance(thing, staticmethod | classmethod):
        untraced(thing.__func__)
    elif isinstance(thing, types.FunctionType):
        _mark(thing)
    return thing


def _mark(function: types.FunctionType) -> None:
    # A trace of a call of it from outside ends here. This is what torch.compiler.disable notes.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - see the top of this file
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]  # noqa: SLF001 - likewise
    # For frames that are called from C++: they, and what they call, are not compiled.
    frames = torch._C._dynamo.eval_frame  # noqa: SLF001 - the public call imports Dynamo, see the top of this file
    skip = frames._FrameAction.SKIP  # noqa: SLF001 - what the call below takes has no other name
    strategy = frames._FrameExecStrategy(skip, skip)  # noqa: SLF001 - likewise
    frames.set_code_exec_strategy(function.__code__, strategy)

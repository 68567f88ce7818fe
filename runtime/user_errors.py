"""Errors of a user's own code: where in it they were raised, in one line, and a traceback that a person can read.

A training function, a model or a data loader is called from deep inside of gradbus, and calls deep into torch. What its
author needs is the line of theirs in between.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import site
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gradbus.runtime.errors import GradbusError
from gradbus.runtime.needs import requirements

MAX_MESSAGE = 1000  # characters of an error's message in one line

_PACKAGES = ("actors", "codecs", "commands", "experiments", "models", "runtime", "torch")
_TOOLS = {
    "_pytest",
    "pluggy",
    "pydantic_core",
    "click",
    "PIL",
}  # in site-packages, under another name than their project


@dataclass(frozen=True, slots=True)
class UserError:
    """An exception in one line.

    Attributes:
        kind: name of the exception's class. message: its text, on one line.
        place: ``file:line in function`` of the innermost line of the user's; of a library where none was involved.
        is_own: whether a line of the user's was.
    """

    kind: str
    message: str
    place: str
    is_own: bool

    def __str__(self) -> str:
        return f"{self.what}, at {self.place}" if self.place else self.what

    @property
    def what(self) -> str:
        """Without the place."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


class WrongResult(TypeError):
    """A function of the user's has returned what cannot be used, or has left something in such a state.

    It is raised by the caller, so no line of theirs is in its traceback: their function is named instead.

    Attributes:
        place: ``file:line in function``, where the function begins; empty: it has no file.
    """

    def __init__(self, text: str, function: Callable[..., Any]) -> None:
        """``function``: whose result it is."""
        super().__init__(text)
        self.place = place_of(function)


def place_of(function: Callable[..., Any]) -> str:
    """Return ``file:line in name`` of where a function begins; empty: it has no file, as one that is built in."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{_shown(code.co_filename)}:{code.co_firstlineno} in {code.co_name}"


def user_error(error: BaseException) -> UserError:
    """Describe an exception by the innermost line of the user's own code that led to it."""
    message = " ".join(str(error).split())
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}..."
    if isinstance(error, WrongResult) and error.place:
        return UserError(type(error).__name__, message, error.place, True)
    if isinstance(error, SyntaxError) and error.filename:
        message = " ".join(str(error.msg).split())
        return UserError(type(error).__name__, message, f"{_shown(error.filename)}:{error.lineno}", True)
    frames = traceback.extract_tb(error.__traceback__)
    own = _innermost(frames)
    cause = error.__cause__
    while own is None and cause is not None:  # an error of gradbus that another one, of their code, has led to
        own, cause = _innermost(traceback.extract_tb(cause.__traceback__)), cause.__cause__
    last = own or (frames[-1] if frames else None)
    place = "" if last is None else f"{_shown(last.filename)}:{last.lineno} in {last.name}"
    return UserError(type(error).__name__, message, place, own is not None)


def summary_of(error: BaseException) -> str:
    """Describe an exception in one line, with its place. The text of an error of gradbus needs none, unless a line of
    the user's has led to it."""
    what = user_error(error)
    return what.what if isinstance(error, GradbusError) and not what.is_own else str(what)


def readable_traceback(error: BaseException, *, full: bool = False) -> str:
    """The traceback of an exception and of those that led to it, without the lines of gradbus, torch and Python.

    Where none of the lines is the user's, or with ``full``, nothing is left out.
    """
    report = traceback.TracebackException.from_exception(error)
    if not full and user_error(error).is_own:
        _shorten(report)
    return "".join(report.format())


def traceback_with_place(error: BaseException, *, full: bool = False) -> str:
    """The same, with the place in its last line, which then says it all."""
    if isinstance(error, WrongResult) and not full:
        return str(user_error(error))
    report = readable_traceback(error, full=full).rstrip("\n")
    what = user_error(error)
    head, line_end, last = report.rpartition("\n")
    if last == what.what:
        report = head
    return f"{report}{line_end}{what}"


def _shorten(report: traceback.TracebackException) -> None:
    kept = [frame for frame in report.stack if _whose(frame.filename) != _LIBRARY]
    if kept:
        report.stack = traceback.StackSummary.from_list(kept)
    for inner in (report.__cause__, report.__context__):
        if inner is not None:
            _shorten(inner)


_LIBRARY, _OTHER, _USER = 0, 1, 2


def _innermost(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame of the user's own files; else that of an installed package which gradbus does not need."""
    found: traceback.FrameSummary | None = None
    whose = _OTHER
    for frame in frames:
        if (owner := _whose(frame.filename)) >= whose:
            found, whose = frame, owner
    return found


@cache
def _whose(filename: str) -> int:
    """Whether a file is the user's, a library's that gradbus or Python brings, or of some other installed package."""
    if filename.startswith("<"):  # <frozen importlib>, <__array_function__ internals>
        return _USER if filename in ("<stdin>", "<string>") else _LIBRARY
    if filename.endswith(".pyx"):  # compiled, as uvloop's loop: the path is that of its build
        return _LIBRARY
    path = os.path.realpath(filename)
    if any(path.startswith(folder) for folder in _our_folders()):
        return _LIBRARY
    for folder in _site_folders():
        if path.startswith(folder):
            top = path[len(folder) :].split(os.sep, 1)[0].removesuffix(".py")
            return _LIBRARY if top.lower() in _dependencies() else _OTHER
    return _LIBRARY if any(path.startswith(folder) for folder in _stdlib_folders()) else _USER


@cache
def _our_folders() -> tuple[str, ...]:
    found = (importlib.util.find_spec(name) for name in ("gradbus", *(f"gradbus.{part}" for part in _PACKAGES)))
    folders = [folder for spec in found if spec is not None for folder in spec.submodule_search_locations or ()]
    return tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)


@cache
def _site_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    paths.add(site.getusersitepackages())
    return tuple(f"{os.path.realpath(path)}{os.sep}" for path in paths if path)


@cache
def _stdlib_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
    return tuple(f"{os.path.realpath(path)}{os.sep}" for path in paths if path)


@cache
def _dependencies() -> frozenset[str]:
    """Top-level names of what gradbus is built on."""
    return frozenset({*requirements(), *(name.lower() for name in _TOOLS)})


def _shown(filename: str) -> str:
    """A path as short as it can be named from the current directory."""
    path = Path(filename)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)

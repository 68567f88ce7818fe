"""The guard of pure tests: those of tests/pure.txt, by file or folder, start no process and join no DDS domain.

``make check`` runs them. They are quick because they compute, and wait for nothing outside of their process. One that
does more fails with what it did, in any run of the tests, also if it hides the error.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "pure.txt"
_LOOK_UP = ("ctypes.util", "platform")


class NotPure(Exception):
    """A test of tests/pure.txt has done what a pure test does not."""


@functools.cache
def listed() -> frozenset[Path]:
    """Return the paths of tests/pure.txt, one a line."""
    return frozenset(ROOT / line for line in LIST.read_text(encoding="utf-8").splitlines())


@functools.cache
def is_listed(path: Path) -> bool:
    """Return whether the tests of a file are to be pure."""
    return not listed().isdisjoint((path, *path.parents))


class Guard:
    """Bars what is not pure from this process, while a test runs."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._patches = pytest.MonkeyPatch()

    def bar(self) -> None:
        """Have every call that is not pure fail, and be remembered."""
        for owner, name, deed in _barred():
            self._patches.setattr(owner, name, self._refusal(deed, getattr(owner, name)))

    def lift(self) -> None:
        """Allow such calls again. Raises NotPure if there was one since :meth:`bar`."""
        self._patches.undo()
        done, self._done = self._done, []
        if done:
            raise NotPure(done[0])

    def _refusal(self, deed: str, allowed: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **options: Any) -> Any:
            if _is_lookup():
                return allowed(*args, **options)
            self._done.append(
                f"this test {deed}, and tests/pure.txt names its file or folder, whose tests do not. Take that off the "
                f"list, or move the test into a file that is not on it"
            )
            raise NotPure(self._done[-1])

        return refuse


def _is_lookup() -> bool:
    """Return whether the standard library looks for a library or the processor's name, as packages are imported."""
    return any(frame.f_globals.get("__name__") in _LOOK_UP for frame, _ in traceback.walk_stack(None))


@functools.cache
def _barred() -> tuple[tuple[Any, str, str], ...]:
    from cyclonedds.domain import Domain, DomainParticipant  # takes a while, and not all tests need it

    return (
        (subprocess.Popen, "_execute_child", "starts a program"),
        (multiprocessing.process.BaseProcess, "start", "starts a process"),
        (os, "fork", "forks"),
        (os, "posix_spawn", "starts a program"),
        (Domain, "__init__", "makes a DDS domain"),
        (DomainParticipant, "__init__", "joins a DDS domain"),
    )

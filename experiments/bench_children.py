"""Processes of a benchmark: of one torch thread each, forked from a server that has imported everything.

Imports are no part of any figure, and take seconds: so eight processes start in one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from inspect import iscoroutinefunction
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import torch

from gradbus.runtime import logs

_context = multiprocessing.get_context("forkserver")
# torch._dynamo: the first optimizer of a process imports it, which takes seconds.
_context.set_forkserver_preload(["gradbus.actors", "gradbus.models", "gradbus.runtime.bus.bus", "torch._dynamo"])


class ChildFailed(RuntimeError):
    """A process ended with an error, or took too long."""


class Processes:
    """Processes that do not outlive the ``with`` block."""

    def __init__(self) -> None:
        self._started: list[BaseProcess] = []
        self._pipes: dict[Connection, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._started:
            process.join(5.0 if kind is None else 0.0)
            if process.is_alive():
                process.kill()
                process.join()

    def start(self, name: str, work: Callable[..., Any], *arguments: Any, dies: bool = False) -> int:
        """Start one that does ``work(*arguments)``, a function or coroutine function of a module.

        Args:
            dies: it ends itself on the way, and reports nothing.

        Returns:
            the process id.
        """
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_live, args=(theirs, work, arguments), name=name)
        process.start()
        self._started.append(process)
        theirs.close()
        if not dies:
            self._pipes[ours] = name
        assert process.pid is not None
        return process.pid

    def results(self, timeout_s: float) -> list[Any]:
        """What the work of each has returned, in the order in which they were started.

        Raises:
            ChildFailed: one of them failed or died, or some have not ended in time.
        """
        until_s = time.monotonic() + timeout_s
        waiting = dict(self._pipes)
        found: dict[Any, Any] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, until_s - time.monotonic()))
            if not ready:
                raise ChildFailed(f"{', '.join(waiting.values())}: not ended after {timeout_s:g} s")
            failures = []
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                name = waiting.pop(pipe)
                failed_s, found[pipe] = _received(pipe)
                if failed_s is not None:
                    failures.append((failed_s, f"{name} failed: {found[pipe]}"))
            if failures:
                raise ChildFailed(min(failures)[1])  # those that fail later mostly fail because of it
        return [found[pipe] for pipe in self._pipes]


def _received(pipe: Connection) -> tuple[float | None, Any]:
    """When it failed, and why; or None, and what its work has returned."""
    with pipe:
        try:
            told: tuple[float | None, Any] = pipe.recv()
        except EOFError:
            return 0.0, "it died"
        return told


def _live(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The whole life of such a process."""
    logs.configure(level="error")
    torch.set_num_threads(1)
    told: tuple[float | None, Any]
    try:
        told = None, asyncio.run(work(*arguments)) if iscoroutinefunction(work) else work(*arguments)
    except BaseException:
        told = time.monotonic(), traceback.format_exc()
    with pipe:
        pipe.send(told)
    os._exit(0)  # torch's teardown takes its time and is nobody's figure

"""The one server that tests fork their processes from: it has loaded all that they need, and runs nothing else.

Python keeps one fork server for a process, whoever asks, and what it preloads is what was asked for last: with a list
in each helper, most processes of a whole run loaded half of their modules themselves, for 0.3 s each.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_PATH = "PYTHONPATH"
_output = tempfile.TemporaryFile("ab+")  # noqa: SIM115 - of the server and all processes that it forks
fcntl.fcntl(_output, fcntl.F_SETFL, os.O_APPEND)  # the mode is that of Python's object alone
atexit.register(_output.close)


def start() -> None:
    """Start the server, unless it runs; does not wait until it has loaded everything."""
    terminal = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(_output.fileno(), number)
    try:
        _start()
    finally:
        for number, kept in zip((1, 2), terminal, strict=True):
            os.dup2(kept, number)
            os.close(kept)


def output() -> str:
    """What processes have written to stdout and stderr since this was asked last."""
    size = os.fstat(_output.fileno()).st_size
    text = os.pread(_output.fileno(), size, 0).decode(errors="replace")
    _output.truncate(0)  # all append to it
    return text


def _start() -> None:
    _context.set_forkserver_preload(["warm_modules"])
    before = os.environ.get(_PATH)
    # The server knows sys.path only with Python 3.13, and would pass over a module that it does not find.
    os.environ[_PATH] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[_PATH]
        else:
            os.environ[_PATH] = before


def fork(target: Callable[..., object], *arguments: object) -> Any:
    """A process that runs this function of some module, started.

    Returns:
        ``multiprocessing``'s process.
    """
    start()
    process = _context.Process(target=target, args=arguments)
    process.start()
    return process


def pipe(*, both_ways: bool = False) -> tuple[Connection, Connection]:
    """An end for this process, and one that can be given to :func:`fork`."""
    return _context.Pipe(duplex=both_ways)


def fork_that_tells(
    target: Callable[..., object], spec: dict[str, Any], *, both_ways: bool = False
) -> tuple[Any, Connection, Iterable[dict[str, Any]]]:
    """A process that runs ``target(spec, pipe)`` and sends events into the pipe.

    Returns:
        the process, this end of the pipe, and its events, until the process closes the other end. Who reads them all
        closes the pipe, unless it goes ``both_ways``.
    """
    ours, theirs = pipe(both_ways=both_ways)
    process = fork(target, spec, theirs)
    theirs.close()

    def events() -> Iterable[dict[str, Any]]:
        try:
            while True:
                yield ours.recv()
        except (EOFError, OSError):
            if not both_ways:
                ours.close()

    return process, ours, events()


def look(spec: dict[str, Any], pipe: Connection) -> None:
    """For the test of this module: what a process has as it begins."""
    pipe.send(
        {
            "has": sorted(spec["modules"] & sys.modules.keys()),
            "threads": len(os.listdir("/proc/self/task")),
            "server_threads": len(os.listdir(f"/proc/{os.getppid()}/task")),
            "path": os.environ.get(_PATH, ""),
        }
    )

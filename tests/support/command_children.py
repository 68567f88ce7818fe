"""``gradbus`` commands that a command of :mod:`commands` starts: they are forked from it, which has torch loaded.

The launcher's ranks and the demo's clients are its own children, as those that it would start by ``exec``: it has their
numbers, pipes, signals and exit codes from the kernel.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import structlog
import torch

_COMMAND = (sys.executable, "-P", "-m", "gradbus")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_execute = asyncio.create_subprocess_exec
_context = multiprocessing.get_context("fork")


class Child:
    """What the product uses of ``asyncio.subprocess.Process``."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None as long as it runs."""
        code: int | None = self._process.exitcode
        return code

    async def wait(self) -> int:
        """Wait until it ends. Returns its exit code."""
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, has_ended.set)
        try:
            await has_ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError: it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def fork_commands() -> None:
    """From now on this process forks the commands of ``gradbus`` that it starts. Others it executes, as ever."""
    asyncio.create_subprocess_exec = _start  # type: ignore[assignment]


async def _start(*command: str, **options: Any) -> Any:
    if command[: len(_COMMAND)] != _COMMAND:
        return await _execute(*command, **options)
    assert options.pop("stdin") == DEVNULL
    given = [options.pop(name) for name in ("stdout", "stderr")]
    outputs = [output if isinstance(output, int) else output.fileno() for output in given]
    import_module("gradbus.commands.run.federated")  # the demo has a thread load it: a child would find it locked
    process = _context.Process(target=_run, args=(command[len(_COMMAND) :], outputs), kwargs=options)
    # Until the child has its own handlers, this process's would be told of signals that are meant for the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    return Child(process)


def _run(
    arguments: Sequence[str],
    outputs: Sequence[int],
    *,
    env: Mapping[str, str],
    start_new_session: bool,
    preexec_fn: Callable[[], None] | None = None,
) -> None:
    """What ``exec`` would leave nothing of is set back: signals, output, settings and the state of modules."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    for number, output in enumerate([os.open(os.devnull, os.O_RDONLY), *outputs]):
        os.dup2(output, number)
    if start_new_session:
        os.setsid()
    if preexec_fn is not None:
        preexec_fn()
    os.environ.clear()
    os.environ |= env
    for file in (sys.stdout, sys.stderr):
        file.reconfigure(line_buffering="PYTHONUNBUFFERED" in env)  # type: ignore[union-attr]
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", torch.get_num_threads())))
    # Not before: a program may have loaded gradbus anew.
    from gradbus.commands import lifecycle
    from gradbus.commands.cli.main import main

    structlog.reset_defaults()
    lifecycle.stopping.clear()
    lifecycle.before_abort.clear()
    sys.argv = ["gradbus", *arguments]
    main()

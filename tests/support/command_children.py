"""What a forked command starts with this Python: ``gradbus`` commands and programs are forked from it, which has torch
loaded.

The launcher's ranks and the demo's clients are its own children, as those that it would start by ``exec``: it has their
numbers, pipes, signals and exit codes from the kernel. A program runs as the main module and ends as one: uncaught
errors reach ``sys.excepthook``, and what was registered with ``atexit`` is called.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import itertools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import structlog
import torch

_COMMAND = (sys.executable, "-P", "-m", "gradbus")
_OPTIONS = ("-P", "-u")  # of Python, which forks know as well
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
    """From now on this process forks what it starts with its own Python and with files for its output: commands of
    ``gradbus``, scripts, and modules with ``-m``. Others it executes, as ever."""
    asyncio.create_subprocess_exec = _start  # type: ignore[assignment]


async def _start(*command: str, **options: Any) -> Any:
    given = [options.get(name) for name in ("stdout", "stderr")]
    main = None if None in given or PIPE in given else _main_of(command)
    if main is None:
        return await _execute(*command, **options)
    assert options.pop("stdin") == DEVNULL
    del options["stdout"], options["stderr"]
    outputs = [output if isinstance(output, int) else output.fileno() for output in given]
    import_module("gradbus.commands.run.federated")  # the demo has a thread load it: a child would find it locked
    return Child(_forked(main, outputs, **options))


def fork_ranks_of_torchrun() -> None:
    """From now on torchrun's agent, which is this process, forks ranks that run a script or a module."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    popen = SubprocessHandler._popen  # noqa: SLF001 - torch has no other place for it

    def start(handler: Any, command: tuple[str, ...], env: dict[str, str]) -> Any:
        if (main := _main_of(command)) is None:
            return popen(handler, command, env)
        given = handler._stdout, handler._stderr  # noqa: SLF001 - as above
        outputs = [number if file is None else file.fileno() for number, file in enumerate(given, start=1)]
        return RankOfAgent(_forked(main, outputs, env=env, start_new_session=True))

    SubprocessHandler._popen = start  # type: ignore[method-assign]  # noqa: SLF001 - as above


def fork_modules() -> None:
    """From now on this process forks modules that it starts with ``subprocess.Popen([..., "-m", ...], stdout=PIPE)``,
    of whose output it then has text."""
    popen = subprocess.Popen

    def start(command: Any, *, stdout: Any = None, text: bool = False, env: Any = None, **options: Any) -> Any:
        if options or stdout != subprocess.PIPE or "-m" not in command[:4] or (main := _main_of(command)) is None:
            return popen(command, stdout=stdout, text=text, env=env, **options)
        reading, writing = os.pipe()
        process = _forked(main, [writing, 2], env=os.environ if env is None else env, start_new_session=False)
        os.close(writing)
        return ReadModule(process, open(reading, encoding="utf-8"))

    subprocess.Popen = start  # type: ignore[assignment,misc]


class ReadModule:
    """What the simulation uses of ``subprocess.Popen``."""

    def __init__(self, process: Any, stdout: TextIO) -> None:
        self._process, self._stdout = process, stdout
        self.returncode: int | None = None

    def communicate(self) -> tuple[str, None]:
        """Wait until it ends. Returns what it has written."""
        with self._stdout:
            text = self._stdout.read()
        self._process.join()
        self.returncode = self._process.exitcode
        return text, None


class RankOfAgent:
    """What torchrun's agent uses of ``subprocess.Popen``."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None as long as it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout_s: float) -> None:
        """Wait until it ends. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout_s)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("rank", timeout_s)


def _forked(main: Callable[[], None], outputs: Sequence[int], **options: Any) -> Any:
    """Return a child of this process that runs ``main``; its options are those of :func:`_run`."""
    process = _context.Process(target=_run, args=(main, outputs), kwargs=options)
    # Until the child has its own handlers, this process's would be told of signals that are meant for the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    return process


def _main_of(command: Sequence[str]) -> Callable[[], None] | None:
    """Return what a fork of this process runs instead of the command, or None if it must be executed."""
    python, *arguments = command
    if python != sys.executable or not arguments:
        return None
    if command[: len(_COMMAND)] == _COMMAND:
        return partial(_be_command, command[len(_COMMAND) :])
    options = list(itertools.takewhile(_OPTIONS.__contains__, arguments))
    arguments = arguments[len(options) :]
    if arguments[0] == "-m" or arguments[0].endswith(".py"):
        return partial(_be_program, arguments, options)
    return None


def _run(
    main: Callable[[], None],
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
    structlog.reset_defaults()
    if lifecycle := sys.modules.get("gradbus.commands.lifecycle"):
        lifecycle.stopping.clear()
        lifecycle.before_abort.clear()
    main()


def _be_command(arguments: Sequence[str]) -> None:
    from gradbus.commands.cli.main import main

    sys.argv = ["gradbus", *arguments]
    main()


def _be_program(arguments: Sequence[str], options: Collection[str]) -> None:
    """Run a script, or a module after ``-m``, as Python does that is started for it. Does not return."""
    if "-u" in options:
        for file in (sys.stdout, sys.stderr):
            file.reconfigure(write_through=True)  # type: ignore[union-attr]
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    code = 0
    try:
        folder = os.getcwd() if arguments[0] == "-m" else str(Path(arguments[0]).parent.absolute())
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [folder][: "-P" not in options] + [name for name in given if name]
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = _code_of(end)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for threads, as an interpreter does that ends
    atexit._run_exitfuncs()  # noqa: SLF001 - as there
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(code)


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1

"""``gradbus`` commands as processes that start in a moment: forked from a server that has torch loaded.

The command itself is the real one, with its arguments, in a process, a folder and an environment of its own.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch
import warm
from command_children import fork_commands, fork_modules, fork_ranks_of_torchrun
from patience import PATIENT

_TORCHRUN = Path(torch.__file__).parent / "distributed" / "run.py"


class Commands(AbstractContextManager["Commands"]):
    """Starts commands in one folder and one DDS domain, and ends those that are left."""

    def __init__(self, folder: Path, domain: int, columns: int = 120) -> None:
        self._folder = folder
        self._environment = {**PATIENT, "GRADBUS_BUS__DOMAIN": str(domain), "COLUMNS": str(columns)}
        self._started: list[tuple[str, Any, Path]] = []

    def start(self, arguments: Sequence[str]) -> None:
        """A command, as after the word ``gradbus``."""
        output = self._folder / f"output-{len(self._started)}.txt"
        process = warm.fork(run_forked, list(arguments), self._folder, output, self._environment)
        self._started.append((" ".join(arguments), process, output))

    def outputs(self, timeout_s: float = 100.0) -> list[str]:
        """What each of them wrote, when all have ended well."""
        told = []
        for name, process, output in self._started:
            process.join(timeout_s)
            text = output.read_text(encoding="utf-8")
            assert process.exitcode == 0, f"gradbus {name}: exit code {process.exitcode}; {text}"
            told.append(text)
        return told

    def __exit__(self, *_: object) -> None:
        for _, process, _ in self._started:
            if process.is_alive():
                process.kill()
            process.join()


class Forked:
    """One command, with what tests use of ``subprocess.Popen``; its stdout and stderr are pipes, of text.

    Args:
        program: a Python program to run instead, whose arguments these are. It imports gradbus anew, so that what is
            read of the environment at that import is what is read here; torchrun does not.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], *, program: Path | None = None
    ) -> None:
        (ours_out, theirs_out), (ours_err, theirs_err) = warm.pipe(), warm.pipe()
        self._process = warm.fork(
            _run_with_pipes, program, list(arguments), folder, dict(environment), theirs_out, theirs_err
        )
        self.pid: int = self._process.pid
        self.stdout, self.stderr = _text_of(ours_out), _text_of(ours_err)
        theirs_out.close()
        theirs_err.close()

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None as long as it runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """If it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """What it goes on to say, until its end. Raises subprocess.TimeoutExpired."""
        until_s = time.monotonic() + timeout
        said = ["", ""]

        def read(number: int, file: TextIO) -> None:
            said[number] = file.read()

        readers = [
            threading.Thread(target=read, args=(number, file), daemon=True)
            for number, file in enumerate((self.stdout, self.stderr))
            if not file.closed
        ]
        for reader in readers:
            reader.start()
        for waits in (*readers, self._process):
            waits.join(max(0.0, until_s - time.monotonic()))
        if self.returncode is None or any(reader.is_alive() for reader in readers):
            raise subprocess.TimeoutExpired("gradbus", timeout)
        self.stdout.close()
        self.stderr.close()
        return said[0], said[1]


def torchrun(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Forked:
    """torchrun, with torch loaded. It forks ranks that run a script or a module, and executes other commands."""
    return Forked(arguments, folder, environment, program=_TORCHRUN)


def _text_of(pipe: Connection) -> TextIO:
    with pipe:
        return open(os.dup(pipe.fileno()), encoding="utf-8")


def _run_with_pipes(
    program: Path | None, arguments: list[str], folder: Path, environment: dict[str, str], *pipes: Connection
) -> None:
    for number, pipe in enumerate(pipes, start=1):
        with pipe:
            os.dup2(pipe.fileno(), number)
    os.environ.clear()
    if program is None:
        _be(arguments, folder, environment)
    else:
        _be_program(program, arguments, folder, environment)


def run_forked(arguments: list[str], folder: Path, output: Path, environment: dict[str, str]) -> None:
    """Entry of a forked process: stdout and stderr go to a file."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _be(arguments, folder, environment)


def _be(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ |= environment
    sys.argv = ["gradbus", *arguments]
    fork_commands()
    from gradbus.commands.cli.main import main

    main()


def _be_program(program: Path, arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ |= environment
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))  # torch has been loaded
    if program == _TORCHRUN:
        fork_ranks_of_torchrun()
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "gradbus"]:
            del sys.modules[name]
    sys.path[:0] = [name for name in environment.get("PYTHONPATH", "").split(os.pathsep) if name]
    sys.argv = [str(program), *arguments]
    fork_commands()
    if program.name == "__main__.py":  # the package starts itself again for a share of its work
        fork_modules()
    runpy.run_path(str(program), run_name="__main__")

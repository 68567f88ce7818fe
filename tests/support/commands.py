"""``gradbus`` commands as processes that start in a moment: forked from a server that has torch loaded.

The command itself is the real one, with its arguments, in a process, a folder and an environment of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["gradbus.actors", "gradbus.models", "torch._dynamo"])


class Commands(AbstractContextManager["Commands"]):
    """Starts commands in one folder and one DDS domain, and ends those that are left."""

    def __init__(self, folder: Path, domain: int, columns: int = 120) -> None:
        self._folder = folder
        self._environment = {"GRADBUS_BUS__DOMAIN": str(domain), "COLUMNS": str(columns)}
        self._started: list[tuple[str, multiprocessing.process.BaseProcess, Path]] = []

    def start(self, arguments: Sequence[str]) -> None:
        """A command, as after the word ``gradbus``."""
        output = self._folder / f"output-{len(self._started)}.txt"
        process = _context.Process(target=run_forked, args=(list(arguments), self._folder, output, self._environment))
        process.start()
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


def run_forked(arguments: list[str], folder: Path, output: Path, environment: dict[str, str]) -> None:
    """Entry of a forked process: stdout and stderr go to a file."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ |= environment
    sys.argv = ["gradbus", *arguments]
    from gradbus.experiments.cli import main

    main()

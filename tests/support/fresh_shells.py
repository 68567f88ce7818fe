"""Shells as a reader of the documentation has them: no variable of this process's, in the folder of a clone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NOT_IN_A_CLONE = {".git", ".venv", "runs", "build", "dist"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def command_lines(text: str) -> list[str]:
    """Lines of the blocks of shell of a page, with their comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def write_mnist(folder: Path, count: int = 128) -> None:
    """The files of MNIST with so many images each, below ``MNIST/raw``."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = bytes(index % 251 for index in range(count * 784))
    for part in ("train", "t10k"):
        head = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images)
        labels = bytes(index % 10 for index in range(count))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, count) + labels)


class Clone(AbstractContextManager["Clone"]):
    """What ``git clone`` and ``make setup`` leave, in another folder; what is written there stays there.

    Args:
        folder: is made. prefix: starts a command on another host. variables: of all shells.
    """

    def __init__(self, folder: Path, prefix: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._prefix = list(prefix)
        self._home = folder.parent / f"{folder.name}-home"
        self._variables = {"PATH": _PATH, "HOME": str(self._home), **(variables or {})}
        self._running: list[tuple[str, subprocess.Popen[str]]] = []
        self._home.mkdir(parents=True)
        folder.mkdir(parents=True)
        for entry in ROOT.iterdir():
            if entry.name not in _NOT_IN_A_CLONE:
                (folder / entry.name).symlink_to(entry)
        (folder / ".venv").mkdir()
        for entry in (ROOT / ".venv").iterdir():
            if entry.name != ".set-up":
                (folder / ".venv" / entry.name).symlink_to(entry)
        (folder / ".venv" / ".set-up").touch()  # newer than what it is made of: make has nothing to do

    def start(self, line: str) -> None:
        """Have a shell of its own run a line. :meth:`outputs` waits for it."""
        given = [f"{name}={value}" for name, value in self._variables.items()]
        command = [*self._prefix, "env", "-i", *given, "bash", "--noprofile", "--norc", "-c", line]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._running.append((line, process))

    def outputs(self, timeout_s: float = 200.0, *, codes: tuple[int, ...] = (0,)) -> list[str]:
        """What each of the lines wrote, once all have ended with one of these exit codes."""
        running, texts = list(self._running), []
        for line, process in running:
            text, _ = process.communicate(timeout=timeout_s)
            assert process.returncode in codes, f"$ {line}\nexit code {process.returncode}\n{text}"
            texts.append(text)
            self._running.remove((line, process))
        return texts

    def run(self, line: str) -> str:
        """Run a line to its end. Returns what it wrote."""
        self.start(line)
        return self.outputs()[-1]

    def __exit__(self, *_: object) -> None:
        for _line, process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its ranks
            try:
                process.communicate(timeout=30.0)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

"""What a process has done, line by line, for a checker that reads it when all is over.

One file for each process, ``controller.jsonl``, ``client-3.jsonl``, ``rank-0.jsonl``, in one directory for a run. Each
line is one JSON object and one ``write``: who is killed leaves whole lines, and at most one that was cut short. Starts
of the same process append to the same file, and each begins with its own ``started``; the number of the process tells
them apart where two of one name run at the same time.

It is written at once, and not by a thread with a queue: what counts is noted before its client hears so, and what is
offered before it is, else a checker would find faults in whatever a killed process had still to write. What comes with
each update, round or step is noted on the thread that computes it, so that the event loop waits for no disk.

It tells what was decided, not how: an update was counted, a round committed. What the invariants of such histories are
is in :mod:`gradbus.commands.history.invariants`.

A :class:`Probe` is this journal of a process together with its fail points: what tests and checkers have of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
import zlib
from pathlib import Path
from typing import Any

from gradbus.runtime.foreign_files import clear_way, open_to_append
from gradbus.runtime.logs import get_logger
from gradbus.runtime.private_folder import make_private
from gradbus.runtime.testing.failpoints import ENVIRONMENT, FailPoint

log = get_logger("history")


class History:
    """Appends events to a file, from any thread. Without a directory it does nothing.

    A disk that is full, or gone, ends the history and not the run.

    Attributes:
        on: whether events are kept. keeps_payloads: whether the bytes of updates and models are kept as well.
    """

    def __init__(self, directory: Path | None, who: str, *, payloads: bool = False) -> None:
        """``who``: names the file, which is made with the first event."""
        self.on = directory is not None
        self.keeps_payloads = payloads and self.on
        self._directory = directory or Path()
        self._who = who
        self._lock = threading.Lock()
        self._file = -1

    def _open(self) -> None:
        make_private(self._directory)
        path = self._directory / f"{self._who}.jsonl"
        self._file = open_to_append(path, 0o600)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # of the start before, cut short
            os.write(self._file, b"\n")

    def note(self, event: str, **facts: Any) -> None:
        """Something has happened. ``facts`` are plain data; the time, by two clocks, is added."""
        if self.on:
            now = {"at_s": round(time.monotonic(), 6), "time": round(time.time(), 3), "pid": os.getpid()}
            line = {"event": event, **now, **facts}
            self._write(json.dumps(line, allow_nan=False, default=str).encode() + b"\n")

    def keep(self, name: str, payload: Any) -> None:
        """Keep bytes as ``payloads/NAME``. They are read when this is called."""
        if self.keeps_payloads:
            try:
                folder = self._directory / "payloads"
                make_private(folder, inside=self._directory)
                temporary = folder / f"{name}.{self._who}.tmp"
                clear_way(temporary)
                temporary.write_bytes(payload)
                temporary.replace(folder / name)
            except OSError as error:
                self._give_up(error)

    def _write(self, line: bytes) -> None:
        with self._lock:
            try:
                if self._file < 0 and self.on:
                    self._open()
                if self._file >= 0 and os.write(self._file, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # what comes next would not be a line
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.on = self.keeps_payloads = False
        log.warning("history ends", who=self._who, directory=str(self._directory), reason=error.strerror)

    def close(self) -> None:
        """Nothing more is noted."""
        with self._lock:
            file, self._file = self._file, -1
            self.on = self.keeps_payloads = False  # and it is not opened again
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def checksum(self, payload: Any) -> int:
        """CRC-32 of bytes; 0, and no work, where no history is kept."""
        return zlib.crc32(payload) if self.on else 0


class Probe:
    """Has the history of one process, and the places at which it can be made to die. Without a directory and a fail
    point it does nothing."""

    def __init__(
        self, who: str, history_dir: Path | None = None, *, payloads: bool = False, fail_at: str | None = None
    ) -> None:
        """``who``: controller, client-3, rank-1. ``fail_at``: by default from the environment. Raises ValueError: it is
        no fail point."""
        places = fail_at if fail_at is not None else os.environ.get(ENVIRONMENT)
        self.fail = FailPoint(places, who=who) if places else None
        self.history = History(history_dir, who, payloads=payloads)

    def reached(self, place: str, number: int) -> None:
        """The program is at this place in this round or step; see :mod:`.failpoints`."""
        if self.fail is not None:
            self.fail.reached(place, number)

    @property
    def is_armed(self) -> bool:
        """Return whether there is a place left at which the process is to die."""
        return self.fail is not None and self.fail.is_armed

    def note(self, event: str, **facts: Any) -> None:
        """Something has happened; see :meth:`History.note`."""
        self.history.note(event, **facts)

    def end(self, **facts: Any) -> None:
        """The process, or its part in the run, ends gracefully."""
        self.history.note("ended", **facts)
        self.history.close()


def no_probe() -> Probe:
    """For what is used by itself."""
    return Probe("", fail_at="")


def update_name(round_id: int, client_id: int, incarnation: int, transfer: int) -> str:
    """Under which the bytes of an update are kept."""
    return f"update-{round_id:06d}-{client_id}-{incarnation:016x}-{transfer}.bin"


def weights_name(run_id: int, round_id: int) -> str:
    """Under which the weights are kept that a start of the controller begins with."""
    return f"weights-{run_id:016x}-{round_id:06d}.bin"


def model_name(run_id: int, round_id: int) -> str:
    """Under which the message that brings clients to the model after a round is kept."""
    return f"model-{run_id:016x}-{round_id:06d}.bin"

"""What the ranks of a launch print, on its way to the terminal: whole lines, each with the rank before it.

Nothing here ever waits for whoever reads the output: a terminal that was stopped with Ctrl-S must not stop a training.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable

LINE_BYTES = 16 * 1024
"""Longer lines are broken."""

_TAIL_LINES = 200
_TAIL_BYTES = 32 * 1024
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI, without red, which means trouble
_TRACEBACKS = (b"Traceback (most recent call last)", b"Fatal Python error")


class LineSplitter:
    """Bytes as they come out of a pipe to lines without their ends.

    What a carriage return has overwritten (a progress bar) is left out, as on a terminal. Memory: ``limit`` bytes.
    """

    def __init__(self, limit: int = LINE_BYTES) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [piece for line in whole for piece in self._pieces(_as_shown(line))]
        if len(rest) > self._limit:
            *broken, rest = self._pieces(_as_shown(rest))
            lines += broken
        self._rest = rest
        return lines

    def close(self) -> list[bytes]:
        """The last line, where its end is missing."""
        rest, self._rest = self._rest, b""
        return self._pieces(_as_shown(rest)) if rest else []

    def _pieces(self, line: bytes) -> list[bytes]:
        pieces: list[bytes] = []
        while len(line) > self._limit:
            cut = self._limit
            while cut > self._limit - 4 and line[cut] & 0xC0 == 0x80:  # not inside of a UTF-8 character
                cut -= 1
            pieces.append(line[:cut])
            line = line[cut:]
        return [*pieces, line]


def _as_shown(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def prefix(rank: int, *, colour: bool) -> bytes:
    """What stands before each line of this rank."""
    name = f"[rank {rank}]"
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{name}\x1b[0m " if colour else f"{name} ").encode()


class Tail:
    """The last lines of a rank, for when it turns out to be the one that failed."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._bytes = 0

    def add(self, line: bytes) -> None:
        self._lines.append(line)
        self._bytes += len(line)
        while len(self._lines) > _TAIL_LINES or self._bytes > _TAIL_BYTES:
            self._bytes -= len(self._lines.popleft())

    @property
    def has_traceback(self) -> bool:
        """Whether the last lines hold one."""
        return any(map(_is_traceback, self._lines))

    def excerpt(self, *, with_traceback: int = 100, without: int = 15) -> list[bytes]:
        """From the first traceback in the last lines on, so many lines at most; a few lines where there is none."""
        lines = list(self._lines)[-with_traceback:]
        for number, line in enumerate(lines):
            if _is_traceback(line):
                return lines[max(0, number - 1) :]
        return lines[-without:]


def _is_traceback(line: bytes) -> bool:
    return any(start in line for start in _TRACEBACKS)


class Sink:
    """Writes to a file descriptor from a thread of its own.

    What is waiting to be written is bounded: what does not fit is left out, and the reader is told so when he reads on.
    """

    def __init__(self, fd: int, *, on_broken: Callable[[], object] = lambda: None, limit: int = 16 << 20) -> None:
        """``on_broken`` is called, from the thread, when nobody will ever read (a pipe that was closed)."""
        self._fd = fd
        self._on_broken = on_broken
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._left_out = 0
        self._on_closed: Callable[[], object] | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name=f"gradbus-out-{fd}", daemon=True)

    def start(self) -> None:
        """Begin to write; what was put before waits until then."""
        self._thread.start()

    def put(self, line: bytes) -> None:
        """One line, without its end. Never waits."""
        with self._changed:
            if self._bytes + len(line) > self._limit:
                self._left_out += 1
                return
            if self._left_out:
                self._push(b"gradbus run: %d lines left out here: nobody read them" % self._left_out)
                self._left_out = 0
            self._push(line)
            self._changed.notify()

    def _push(self, line: bytes) -> None:
        self._waiting.append(line + b"\n")
        self._bytes += len(line) + 1

    def close(self, on_closed: Callable[[], object]) -> None:
        """Write what is left, then call ``on_closed`` from the thread."""
        with self._changed:
            if self._left_out:
                self._push(b"gradbus run: %d lines left out here: nobody read them" % self._left_out)
            self._on_closed = on_closed
            self._changed.notify()

    def _write_all(self) -> None:
        readable = True
        while True:
            with self._changed:
                while not self._waiting and self._on_closed is None:
                    self._changed.wait()
                data = b"".join(self._waiting)
                self._waiting.clear()
                if not data and self._on_closed is not None:
                    self._on_closed()
                    return
            if readable:
                readable = self._write(data)
            with self._changed:
                self._bytes -= len(data)

    def _write(self, data: bytes) -> bool:
        """False: nobody will read it."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view[: 64 * 1024]) :]
            except BlockingIOError:  # somebody else who has this terminal made it non-blocking
                select.select([], [self._fd], [])
            except BrokenPipeError:
                self._on_broken()
                return False
            except OSError:  # the terminal is gone, or the disk is full: the training goes on without
                return False
        return True

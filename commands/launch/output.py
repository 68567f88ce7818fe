"""The output of ranks on its way to the terminal: whole lines, each with its rank before it.

No rank waits for the reader of the output: a terminal that was stopped with Ctrl-S must not stop training.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable

LINE_BYTES = 16 * 1024  # longer lines are broken
_TAIL_LINES, _TAIL_BYTES = 200, 32 * 1024
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI, without red, which means trouble
_TRACEBACKS = (b"Traceback (most recent call last)", b"Fatal Python error")


def prefix(rank: int, name: str, *, colour: bool) -> bytes:
    """The text before each line of a rank, which has this name."""
    text = f"[{name}]"
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if colour else f"{text} ").encode()


class LineSplitter:
    """Turns the bytes that come out of a pipe into lines without their ends, in ``limit`` bytes of memory.

    As on a terminal, text that a carriage return has overwritten (a progress bar) is left out.
    """

    def __init__(self, limit: int = LINE_BYTES) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [piece for line in whole for piece in self._pieces(line)]
        if len(rest) > self._limit:
            *broken, rest = self._pieces(rest)
            lines += broken
        self._rest = rest
        return lines

    def close(self) -> list[bytes]:
        """The last line, where its end is missing."""
        rest, self._rest = self._rest, b""
        return self._pieces(rest) if rest else []

    def _pieces(self, line: bytes) -> list[bytes]:
        line = line.rstrip(b"\r").rpartition(b"\r")[2]
        pieces: list[bytes] = []
        while len(line) > self._limit:
            cut = self._limit
            while cut > self._limit - 4 and line[cut] & 0xC0 == 0x80:  # not inside of a UTF-8 character
                cut -= 1
            pieces.append(line[:cut])
            line = line[cut:]
        return [*pieces, line]


class Tail:
    """The last lines of a rank, to be shown again if it is the one that failed."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._bytes = 0

    def add(self, line: bytes) -> None:
        """Keep a line, and drop the oldest ones beyond the limit."""
        self._lines.append(line)
        self._bytes += len(line)
        while len(self._lines) > _TAIL_LINES or self._bytes > _TAIL_BYTES:
            self._bytes -= len(self._lines.popleft())

    @property
    def has_traceback(self) -> bool:
        """Whether the last lines hold one."""
        return any(map(_begins_traceback, self._lines))

    def excerpt(self) -> list[bytes]:
        """At most 100 lines, from the first traceback in them on; the last 15 lines where there is none."""
        lines = list(self._lines)[-100:]
        begins = next((number for number, line in enumerate(lines) if _begins_traceback(line)), None)
        return lines[-15:] if begins is None else lines[max(0, begins - 1) :]


def _begins_traceback(line: bytes) -> bool:
    return any(start in line for start in _TRACEBACKS)


class OutputWriter:
    """Writes lines to a file descriptor from a thread of its own.

    Lines wait in at most ``limit`` bytes. Those that do not fit are left out, and counted in a line of their own.
    """

    def __init__(self, fd: int, *, on_broken: Callable[[], object] = lambda: None, limit: int = 16 << 20) -> None:
        """``on_broken`` is called from the thread when the other end of a pipe was closed."""
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
        """Begin to write; lines that were put before wait until then."""
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Take one line, without its end. Never waits."""
        with self._changed:
            if self._bytes + len(line) > self._limit:
                self._left_out += 1
            else:
                self._push(line)

    def close(self, on_closed: Callable[[], object]) -> None:
        """Write the lines that wait, then call ``on_closed`` from the thread."""
        with self._changed:
            self._on_closed = on_closed
            self._push()

    def _push(self, *lines: bytes) -> None:
        if self._left_out:
            lines = (b"gradbus run: %d lines left out here: they were not read" % self._left_out, *lines)
            self._left_out = 0
        self._waiting.extend(line + b"\n" for line in lines)
        self._bytes += sum(len(line) + 1 for line in lines)
        self._changed.notify()

    def _write_all(self) -> None:
        has_reader = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._on_closed is not None)
                data = b"".join(self._waiting)
                self._waiting.clear()
            if not data and self._on_closed is not None:
                self._on_closed()
                return
            has_reader = has_reader and self._write(data)
            with self._changed:
                self._bytes -= len(data)

    def _write(self, data: bytes) -> bool:
        """Returns False where nothing can be written to the descriptor any more."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view[: 64 * 1024]) :]
            except BlockingIOError:  # another program with this terminal made it non-blocking
                select.select([], [self._fd], [])
            except BrokenPipeError:
                self._on_broken()
                return False
            except OSError:  # the terminal is gone, or the disk is full: the training goes on without
                return False
        return True

"""What Cyclone DDS has to say goes into the log of gradbus, and not without end.

Cyclone writes warnings to the C library's ``stderr``: a line for each malformed packet, which anybody can send by the
thousand. It offers no other place for them: the wheel does not export ``dds_set_log_sink``, and a callback would need
the GIL on threads of DDS besides. But it remembers the stream that is ``stderr`` when a domain is made, so
that is a pipe meanwhile. Nobody waits for the pipe: when it is full, lines are lost, and buses read so much of it a
second and no more. Where the C library does not have such a variable, Cyclone goes on writing to stderr.

Lost with it is what Cyclone writes just before it ends the process itself. A failed assertion is not among that.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import os
import re
import threading
import time
from collections.abc import Iterator

from gradbus.runtime.logs import get_logger

READ_BYTES = 16 << 10  # at a time; buses read once a second
LINES, WINDOW_S = 5, 60.0  # so many are logged in such a time
MAX_LINE = 300
_REST_BYTES = 4 * MAX_LINE  # of a line whose end is still to come: enough for its header and what is logged
_TURN_S = 1.0  # to wait for another thread that reads or logs
_HEADER = re.compile(r"^\s*\d+\.\d+ \[\d*\]\s+\S+: ")

log = get_logger("dds")


class DdsLog:
    """There is one of these (:data:`dds_log`), as there is one ``stderr``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading = threading.RLock()  # held while what was read is used: threads must not mix lines
        self._read = -1
        self._file: int | None = None  # address of the C library's stream; 0: there can be none
        self._rest = b""
        self._window_s, self._told, self._untold = 0.0, 0, 0

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """While a domain is made."""
        with self._lock:
            if self._file is None:
                self._file = self._open()
            if not self._file:
                yield
                return
            stream = ct.c_void_p.in_dll(ct.CDLL(None), "stderr")
            before, stream.value = stream.value, self._file
            try:
                yield
            finally:
                stream.value = before

    def _open(self) -> int:
        try:
            library = ct.CDLL(None)
            ct.c_void_p.in_dll(library, "stderr")
            fdopen = ct.CFUNCTYPE(ct.c_void_p, ct.c_int, ct.c_char_p)(("fdopen", library))
            self._read, write = os.pipe()
            os.set_blocking(self._read, False)
            os.set_blocking(write, False)
        except (OSError, ValueError, AttributeError):
            return 0
        return fdopen(write, b"w") or 0

    def lines(self) -> list[str]:
        """Return what has been said since this was asked, or the first part of it."""
        if self._read < 0 or not self._reading.acquire(timeout=_TURN_S):
            return []
        try:
            *whole, rest = (self._rest + os.read(self._read, READ_BYTES)).split(b"\n")
            self._rest = rest[:_REST_BYTES]
        except OSError:  # nothing
            return []
        finally:
            self._reading.release()
        return [_HEADER.sub("", line.decode("utf-8", "replace"))[:MAX_LINE] for line in whole]

    def tell(self) -> None:
        """Log the first lines, and how many there were besides. Any thread may ask, now and then."""
        if not self._reading.acquire(blocking=False):  # another bus does it
            return
        try:
            self._tell_new(self.lines(), time.monotonic())
        finally:
            self._reading.release()

    def _tell_new(self, lines: list[str], now_s: float) -> None:
        if now_s > self._window_s + WINDOW_S:
            if self._untold:
                self._log("Cyclone DDS has said more", lines=self._untold, effect="lines beyond a few are left out")
            self._window_s, self._told, self._untold = now_s, 0, 0
        for line in lines:
            if self._told < LINES:
                self._told += 1
                self._log("Cyclone DDS says", text=line)
            else:
                self._untold += 1

    def _log(self, event: str, **facts: object) -> None:
        with contextlib.suppress(Exception):  # it is the host's
            log.warning(event, **facts)


dds_log = DdsLog()
"""Of this process."""

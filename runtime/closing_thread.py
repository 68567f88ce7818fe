"""Threads that close things, which a program may do as late as while its interpreter ends.

Python 3.12 and newer start no thread from then on: ``Thread.start`` raises RuntimeError. A thread that the system
starts may still run Python code until the interpreter is torn down, which is after the last function of ``atexit``
(CPython 3.11 to 3.13). On Windows, which has other calls for it, the RuntimeError stays.
"""

from __future__ import annotations

import ctypes as ct
import os
import threading
from collections.abc import Callable

_START_ROUTINE = ct.CFUNCTYPE(ct.c_void_p, ct.c_void_p)


class ClosingThread:
    """Runs a function on a thread of its own, also while the interpreter ends.

    ``daemon``: whether the interpreter may end before the function has. A thread that is started while it ends is one.
    """

    def __init__(self, target: Callable[[], object], name: str, *, daemon: bool = True) -> None:
        self._target = target
        self._thread = threading.Thread(target=target, name=name, daemon=daemon)
        self._is_started = False
        self._ended: threading.Event | None = None  # there is one if the system has started the thread

    def start(self) -> None:
        """Start the thread. Raises RuntimeError: it was started before, or neither Python nor the system starts one."""
        if self._is_started:
            raise RuntimeError("threads can only be started once")
        self._is_started = True
        try:
            self._thread.start()
        except RuntimeError:
            self._ended = threading.Event()
            if not _start_by_the_system(self._run):
                self._ended = None
                raise

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread, which has been started, has ended, for at most ``timeout_s``."""
        if self._ended is None and self._thread.ident is not None:
            self._thread.join(timeout_s)
        elif self._ended is not None:
            self._ended.wait(timeout_s)

    def is_running(self) -> bool:
        """Return whether the thread, which has been started, has not ended yet."""
        return self._thread.is_alive() if self._ended is None else not self._ended.is_set()

    def _run(self) -> None:
        assert self._ended is not None
        try:
            self._target()
        finally:
            self._ended.set()


def _start_by_the_system(run: Callable[[], None]) -> bool:
    """Return whether a thread was started by POSIX's pthread_create."""
    if os.name != "posix":
        return False

    def routine(_: int | None) -> None:
        run()

    called = _START_ROUTINE(routine)
    ct.pythonapi.Py_IncRef(
        ct.py_object(called)
    )  # never freed: the thread returns through it after its last Python code
    library, thread = ct.CDLL(None), ct.c_void_p()
    library.pthread_create.argtypes = (ct.c_void_p, ct.c_void_p, _START_ROUTINE, ct.c_void_p)
    library.pthread_detach.argtypes = (ct.c_void_p,)
    if library.pthread_create(ct.byref(thread), None, called, None):
        return False
    library.pthread_detach(thread)
    return True

"""Gives large memory back to the system on a thread.

The last view on a model is often dropped on an event loop, which would wait for the kernel: 2 to 50 ms for 100 MB, and
longer on a busy machine.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from gradbus.runtime import forks

LARGE_BYTES = 16 << 20  # less is given back in less than a millisecond
MAX_WAITING = (
    64  # mappings; whoever drops another one gives it back itself, or memory would fill faster than it empties
)

_waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # may be put into by destructors, at any point
_lock = forks.ForkLock()
_thread: threading.Thread | None = None  # one for the process, which stays


def _forget() -> None:
    global _thread, _waiting
    _thread, _waiting = None, queue.SimpleQueue()  # a lock in it may have been held


forks.in_child(_forget)


def start() -> None:
    """Start the thread, if it does not run. For whoever makes memory: a destructor should start none. Where the system
    starts none, as at the end of the interpreter, memory is given back by whoever drops it."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_run, name="gradbus-unmap", daemon=True)
            with contextlib.suppress(RuntimeError):
                _thread.start()


def unmap_later(unmap: Callable[[], object]) -> None:
    """Call ``unmap`` on the thread; here, where there is none, or where it is far behind."""
    if _thread is None or not _thread.is_alive() or _waiting.qsize() >= MAX_WAITING:
        unmap()
    else:
        _waiting.put(unmap)


def _run() -> None:
    waiting = _waiting
    while True:
        waiting.get()()

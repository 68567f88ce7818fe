"""The thread of an object: what the writer thread and the receive thread of a bus have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable


class OwnThread:
    """Runs a function, of a class that is derived from this one, on a daemon thread.

    It holds its thread rather than being one: a subclass of :class:`threading.Thread` shares the names of its private
    attributes with Python's own, which change from release to release.
    """

    def __init__(self, run: Callable[[], object], name: str) -> None:
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, for at most ``timeout_s``."""
        self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    @property
    def ident(self) -> int | None:
        """Return the number of the thread, as :func:`threading.get_ident` does there; None before its start."""
        return self._thread.ident

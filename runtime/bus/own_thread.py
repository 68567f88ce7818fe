"""Work in steps, on a thread: what the sender and the wait loop of a bus have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from gradbus.runtime import drive


class OwnThread(ABC):
    """Does its work step by step on the thread that :meth:`start` starts; see :mod:`gradbus.runtime.drive`."""

    stopping: bool

    def __init__(self, run: Callable[[], object], name: str) -> None:
        """``run``: calls the steps until there is no more to do, and :meth:`finish`; for the thread of this name."""
        self._driver = drive.driver(self, run, name)

    @abstractmethod
    def step(self) -> float:
        """Do what is due, and return the seconds until something is due again."""

    @abstractmethod
    def finish(self) -> None:
        """Let go of what is left, after the last step, on the thread that has called it."""

    def fail(self, error: BaseException) -> None:
        """Take note that a step raised: there will be no further one."""
        self.stopping = True

    def start(self) -> None:
        """Start the thread."""
        self._driver.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, for at most ``timeout_s``."""
        self._driver.join(timeout_s)

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._driver.is_alive()

    @property
    def ident(self) -> int | None:
        """Return the number of the thread, as :func:`threading.get_ident` does there; None before its start."""
        return self._driver.ident

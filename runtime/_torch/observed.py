"""What the backend tells whoever measures: nothing, as long as nobody does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

R = TypeVar("R")


class CollectiveObserver(Protocol):
    """Gets the times of collectives, by ``time.perf_counter``. Called on any thread; it must not wait."""

    def submitted(self) -> None:
        """The calling thread has handed over a collective, or a bucket of gradients."""

    def exchanged(self, what: str, started_s: float, ended_s: float) -> None:
        """A collective has ended, well or not."""

    def computed(self, took_s: float) -> None:
        """An algorithm has computed for this long, on a thread of its own: compressed, or the inverse."""

    def waiting(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager in which the calling thread waits for the others."""


class Observed:
    """Who measures in this process.

    Attributes:
        observer: None: nobody. :func:`gradbus.torch.profile` sets it. Read it once for each use: the thread that trains
            may take it away while another one reports.
    """

    def __init__(self) -> None:
        self.observer: CollectiveObserver | None = None

    def while_waiting(self, wait: Callable[..., R], *arguments: Any) -> R:
        """Call a function that waits for the others, and have that measured. Returns what it returns."""
        observer = self.observer
        if observer is None:
            return wait(*arguments)
        with observer.waiting():
            return wait(*arguments)


observed = Observed()

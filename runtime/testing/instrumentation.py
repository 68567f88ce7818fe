"""What tests and checkers have of a process: the history it writes, and the places at which it can be made to die."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gradbus.runtime.testing.failpoints import ENVIRONMENT, FailPoint
from gradbus.runtime.testing.journal import History


class Probe:
    """Both of them, for one process. Without a directory and a fail point it does nothing."""

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
        """Something has happened; see :meth:`.journal.History.note`."""
        self.history.note(event, **facts)

    def end(self, **facts: Any) -> None:
        """The process, or its part in the run, ends gracefully."""
        self.history.note("ended", **facts)
        self.history.close()


def no_probe() -> Probe:
    """For what is used by itself."""
    return Probe("", fail_at="")

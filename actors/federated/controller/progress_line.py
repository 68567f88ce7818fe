"""One line that shows how far a federated run is: in a terminal and in a notebook, in place of a log of its rounds."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from gradbus.actors.federated.controller.report import RoundReport
from gradbus.runtime.plain_text import plain_line

_BAR = 20  # characters


class ProgressLine:
    """A callback of the Controller that keeps one line up to date.

    Where stderr is neither a terminal nor a notebook, only the last one is written.
    """

    def __init__(self, rounds: int | None = None) -> None:
        """Begin the line. ``rounds``: of the run; None: unknown."""
        self._rounds = rounds
        self._began_s = time.monotonic()
        self._text = self._line(0, "starting")
        self._show, self._finish = _in_notebook(self._text) or _in_terminal(self._text)

    def on_report(self, report: RoundReport) -> None:
        """Show a round that is done."""
        found = {"loss": report.loss, **report.named()}
        numbers = "  ".join(
            f"{plain_line(name)} {value:.4g}" for name, value in list(found.items())[:3] if _is_finite(value)
        )
        self._text = self._line(report.round_id, f"clients {len(report.clients)}/{report.expected}  {numbers}".rstrip())
        self._show(self._text)

    def on_end(self, end: Any) -> None:
        """Leave the last line as it is."""
        self.close()

    def close(self) -> None:
        """End the line. Does nothing the second time."""
        finish, self._finish = self._finish, lambda _: None
        finish(self._text)

    def _line(self, round_id: int, facts: str) -> str:
        passed = time.monotonic() - self._began_s
        if not self._rounds:
            return f"round {round_id}  {facts}  {_clock(passed)}"
        done = min(1.0, round_id / self._rounds)
        bar = "━" * round(done * _BAR) + " " * (_BAR - round(done * _BAR))
        left = f" < {_clock(passed / done - passed)}" if 0 < done < 1 else ""
        return f"round {round_id}/{self._rounds} [{bar}]  {facts}  {_clock(passed)}{left}"


_Shown = tuple[Callable[[str], object], Callable[[str], object]]  # what shows a line, and what shows the last one


def _in_notebook(text: str) -> _Shown | None:
    """An output of the cell that runs, which each line replaces; None: this is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

    handle = display({"text/plain": text}, raw=True, display_id=True)
    return lambda line: handle.update({"text/plain": line}, raw=True), lambda line: None


def _in_terminal(text: str) -> _Shown:
    """A line of the terminal, by rich."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    live = Live(Text(text, no_wrap=True, overflow="ellipsis"), console=Console(stderr=True), auto_refresh=False)
    live.start(refresh=live.console.is_terminal)

    def show(line: str) -> None:
        live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=live.console.is_terminal)

    return show, lambda _: live.stop()


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"

"""What ranks show of a data-parallel run: a plain line per epoch, or, on rank 0, a table that follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradbus.experiments.amounts import number, percent, size
from gradbus.experiments.run.live import fitted_table, head, warning
from gradbus.experiments.run.logfile import LogFile

if TYPE_CHECKING:
    from gradbus.actors import Worker
    from gradbus.actors.data_parallel.report import EpochReport

_REFRESH_PER_S = 5
_OTHER_LINES = 10  # of the screen, besides epochs


class EpochDisplay(Protocol):
    """Shows a run from entering to leaving."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def epoch_done(self, report: EpochReport) -> None:
        """All ranks have gone through an epoch."""


class NoDisplay:
    """Where each epoch is a line of the log."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def epoch_done(self, report: EpochReport) -> None:
        """Nothing is shown: the log has it."""


class EpochLines(NoDisplay):
    """One line per epoch, for files, pipes and ``--no-live``."""

    def __init__(self, console: Console, epochs: int) -> None:
        self._console = console
        self._epochs = epochs

    def epoch_done(self, report: EpochReport) -> None:
        skipped = f", {report.skipped_steps} steps skipped" if report.skipped_steps else ""
        text = (
            f"epoch {report.epoch + 1}/{self._epochs}: step {report.step}, loss {number(report.loss, 4)}, "
            f"accuracy {percent(report.accuracy)}, step {_milliseconds(report.step_s_mean)} ms, "
            f"wait {_milliseconds(report.wait_s_mean)} ms, sent {size(round(report.bytes_out_per_step))} per step, "
            f"density {share(report.density)}{skipped}, epoch {report.seconds:.2f} s"
        )
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class RankLines(NoDisplay):
    """One short line per epoch, of a rank other than 0: what is its own. The rest is said by rank 0."""

    def __init__(self, console: Console, epochs: int) -> None:
        self._console = console
        self._epochs = epochs

    def epoch_done(self, report: EpochReport) -> None:
        skipped = f", {report.skipped_steps} steps skipped" if report.skipped_steps else ""
        text = (
            f"epoch {report.epoch + 1}/{self._epochs}: loss {number(report.loss, 4)}, "
            f"step {_milliseconds(report.step_s_mean)} ms, wait {_milliseconds(report.wait_s_mean)} ms, "
            f"sent {size(round(report.bytes_out_per_step))} per step{skipped}"
        )
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class EpochTable:
    """A table that is drawn anew five times a second, by a thread of rich's, which only reads."""

    def __init__(self, console: Console, worker: Worker, log: LogFile, title: str, epochs: int) -> None:
        self._console = console
        self._worker = worker
        self._log = log
        self._title = title
        self._epochs = epochs
        self._reports: list[EpochReport] = []
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=_REFRESH_PER_S)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def epoch_done(self, report: EpochReport) -> None:
        self._reports.append(report)

    def render(self) -> RenderableType:
        """The picture of this moment."""
        done = [report for report in self._reports if report.finished]
        top = head(self._title, done[-1].epoch + 1 if done else 0, self._epochs, "epochs", self._console.width)
        room = max(3, self._console.height - _OTHER_LINES)
        now = Text(f"step {self._worker.step}", style="cyan")
        shown = epochs_table(self._reports[-room:], self._console.width)
        return Group(top, shown, now, *map(warning, list(self._log.warnings)))


def epochs_table(reports: list[EpochReport], width: int | None = None) -> Table:
    """The epochs as a table, one row each. ``width``: characters there are; columns that do not fit are left out."""
    columns: dict[str, Callable[[EpochReport], str]] = {
        "epoch": lambda report: str(report.epoch + 1),
        "step": lambda report: str(report.step),
        "loss": lambda report: number(report.loss, 4),
        "accuracy": lambda report: percent(report.accuracy),
        "step ms": lambda report: _milliseconds(report.step_s_mean),
        "wait ms": lambda report: _milliseconds(report.wait_s_mean),
        "sent per step": lambda report: size(round(report.bytes_out_per_step)),
        "density": lambda report: share(report.density),
        "epoch s": lambda report: f"{report.seconds:.2f}",
    }
    return fitted_table(columns, reports, width, spare=("density", "step", "epoch s", "wait ms", "loss", "step ms"))


def share(part: float) -> str:
    """0.001 as 0.1 %."""
    return f"{100 * part:.3g} %"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"

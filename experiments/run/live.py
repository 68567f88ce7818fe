"""What a user sees while rounds run: a table that follows the controller, or one plain line per round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gradbus.experiments.amounts import number, percent, ranges, size
from gradbus.experiments.run.logfile import LogFile
from gradbus.runtime.plain_text import plain_line

if TYPE_CHECKING:
    from gradbus.actors.federated.report import Progress, RoundReport

_REFRESH_PER_S = 5
_OTHER_LINES = 13  # of the screen, besides rounds
_BAR_WIDTH = 24
_FEW_CLIENTS = 8  # that a person counts at a glance

R = TypeVar("R")


class Display(Protocol):
    """Shows a run from entering to leaving."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def round_done(self, report: RoundReport) -> None:
        """A round was committed."""


class PlainLines:
    """One line per round, for files, pipes and ``--no-live``."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def round_done(self, report: RoundReport) -> None:
        shared = f" ({size(report.bytes_shared)} of it in memory)" if report.bytes_shared else ""
        text = (
            f"round {report.round_id}/{self._progress.rounds}: clients {report.updates}/{report.expected}, "
            f"loss {number(report.loss, 4)}, accuracy {percent(report.accuracy)}, "
            f"up {size(report.bytes_up)}, down {size(report.bytes_down)}{shared}, train {report.train_s:.2f} s, "
            f"wire {report.wire_s:.2f} s, aggregate {report.aggregate_s:.3f} s, total {report.seconds:.2f} s"
        )
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveTable:
    """A table that is drawn anew five times a second, by a thread of rich's: the event loop never waits for the
    terminal. The thread only reads what the loop changes, and each value stands for itself."""

    def __init__(self, console: Console, progress: Progress, log: LogFile, title: str, clients: int) -> None:
        self._console = console
        self._progress = progress
        self._log = log
        self._title = title
        self._clients = clients
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=_REFRESH_PER_S)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def round_done(self, report: RoundReport) -> None:
        """The next refresh shows it."""

    def render(self) -> RenderableType:
        """The picture of this moment."""
        progress = self._progress
        room = max(3, self._console.height - _OTHER_LINES)
        parts: list[RenderableType] = [
            head(self._title, len(progress.reports), progress.rounds, "rounds", self._console.width),
            rounds_table(progress.reports[-room:], self._console.width),
            _now(progress, self._clients, self._console.width),
        ]
        dropped = dict(progress.dropped)
        if dropped:
            parts.append(warning("not counted: " + ", ".join(f"{why} {n}" for why, n in dropped.items())))
        if progress.out:
            parts.append(warning(f"kept out for bad updates: {ranges(progress.out)}"))
        parts += map(warning, list(self._log.warnings))
        return Group(*parts)


def head(title: str, done: int, total: int, unit: str, width: int) -> RenderableType:
    """One line: what runs, and how far it is. A long title gives way."""
    row = Table.grid(padding=(0, 1))
    count = f"{done}/{total} {unit}"
    row.add_column(no_wrap=True, overflow="ellipsis", max_width=max(8, width - _BAR_WIDTH - len(count) - 3))
    row.add_row(
        Text(plain_line(title), style="bold"), ProgressBar(total=max(1, total), completed=done, width=_BAR_WIDTH), count
    )
    return row


def warning(line: str) -> Text:
    """One line, whatever its length."""
    return Text(plain_line(line), style="yellow", overflow="ellipsis", no_wrap=True)


def _now(progress: Progress, clients: int, width: int) -> Text:
    count = len(progress.clients)
    here = f"{f'{count} ' if count > _FEW_CLIENTS else ''}clients here: {ranges(progress.clients) or 'none'}"
    text = Text(progress.phase, style="cyan", no_wrap=True, overflow="ellipsis")
    if progress.phase in ("starting", "waiting"):
        wanted = max(clients, progress.minimum)
        text.append(f" for clients: {count}/{wanted} (min {progress.minimum})")
    if progress.phase in ("aggregating", "evaluating"):
        text.append(f" round {progress.round_id}" if progress.round_id else " the initial model")
    if progress.phase == "training":
        text.append(
            f" round {progress.round_id}: updates {progress.ready}/{progress.expected} (min {progress.minimum})"
        )
    fits = len(text) + 3 + len(here) <= width
    return text.append(f" | {here}" if fits else f"\n{here}", style="default")


def rounds_table(reports: Sequence[RoundReport], width: int | None = None) -> Table:
    """The rounds as a table, one row each. ``width``: characters there are; columns that do not fit are left out."""
    columns: dict[str, Callable[[RoundReport], str]] = {
        "round": lambda report: str(report.round_id),
        "clients": lambda report: f"{report.updates}/{report.expected}",
        "loss": lambda report: number(report.loss, 4),
        "accuracy": lambda report: percent(report.accuracy),
        "up": lambda report: size(report.bytes_up),
        "down": lambda report: size(report.bytes_down),
        "in memory": lambda report: size(report.bytes_shared),
        "train s": lambda report: f"{report.train_s:.2f}",
        "wire s": lambda report: f"{report.wire_s:.2f}",
        "aggregate s": lambda report: f"{report.aggregate_s:.3f}",
        "total s": lambda report: f"{report.seconds:.2f}",
    }
    spare = ["in memory", "aggregate s", "wire s", "down", "train s", "loss"]
    if not any(report.bytes_shared for report in reports):
        del columns["in memory"], spare[0]
    return fitted_table(columns, reports, width, spare=spare)


def fitted_table(
    columns: Mapping[str, Callable[[R], str]], reports: Sequence[R], width: int | None, *, spare: Sequence[str]
) -> Table:
    """A table without rules. Where it is wider than ``width``, ``spare`` columns are left out, one after the other: a
    number that is cut off is worse than none."""
    cells = {name: [cell(report) for report in reports] for name, cell in columns.items()}
    for name in spare:
        wide = sum(max(map(len, (title, *column))) + 2 for title, column in cells.items())
        if width is not None and wide > width:
            del cells[name]
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    return table

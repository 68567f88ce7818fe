"""What a user sees while rounds run: a table that follows the controller, or one plain line per round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gradbus.experiments.logfile import LogFile

if TYPE_CHECKING:
    from gradbus.actors.report import Progress, RoundReport

_REFRESH_PER_S = 5
_OTHER_LINES = 13  # of the screen, besides rounds


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
        text = (
            f"round {report.round_id}/{self._progress.rounds}: clients {len(report.clients)}/{report.expected}, "
            f"loss {number(report.loss, 4)}, accuracy {percent(report.accuracy)}, "
            f"up {size(report.bytes_up)}, down {size(report.bytes_down)}, train {report.train_s:.2f} s, "
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
        parts: list[RenderableType] = [_head(self._title, progress), rounds_table(progress.reports[-room:])]
        parts.append(_now(progress, self._clients))
        dropped = dict(progress.dropped)
        if dropped:
            parts.append(Text("not counted: " + ", ".join(f"{why} {n}" for why, n in dropped.items()), style="yellow"))
        parts += [Text(line, style="yellow", overflow="ellipsis", no_wrap=True) for line in list(self._log.warnings)]
        return Group(*parts)


def _head(title: str, progress: Progress) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(
        Text(title, style="bold"),
        ProgressBar(total=max(1, progress.rounds), completed=len(progress.reports), width=24),
        Text(f"{len(progress.reports)}/{progress.rounds} rounds"),
    )
    return row


def _now(progress: Progress, clients: int) -> Text:
    present = ", ".join(str(client) for client in progress.clients[:16]) or "none"
    more = f" and {len(progress.clients) - 16} more" if len(progress.clients) > 16 else ""
    text = Text(progress.phase, style="cyan")
    if progress.phase in ("starting", "waiting"):
        wanted = max(clients, progress.minimum)
        text.append(f" for clients: {len(progress.clients)}/{wanted} (min {progress.minimum})")
    if progress.phase == "training":
        text.append(
            f" round {progress.round_id}: updates {progress.ready}/{progress.expected} (min {progress.minimum})"
        )
    return text.append(f" | clients here: {present}{more}", style="default")


def rounds_table(reports: Iterable[RoundReport]) -> Table:
    """The rounds as a table, one row each."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    columns: dict[str, Callable[[RoundReport], str]] = {
        "round": lambda report: str(report.round_id),
        "clients": lambda report: f"{len(report.clients)}/{report.expected}",
        "loss": lambda report: number(report.loss, 4),
        "accuracy": lambda report: percent(report.accuracy),
        "up": lambda report: size(report.bytes_up),
        "down": lambda report: size(report.bytes_down),
        "train s": lambda report: f"{report.train_s:.2f}",
        "wire s": lambda report: f"{report.wire_s:.2f}",
        "aggregate s": lambda report: f"{report.aggregate_s:.3f}",
        "total s": lambda report: f"{report.seconds:.2f}",
    }
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        table.add_row(*(cell(report) for cell in columns.values()))
    return table


def number(value: float | None, digits: int) -> str:
    """With so many digits behind the point, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """0.9876 as 98.76 %."""
    return "-" if share is None else f"{100 * share:.2f} %"


def size(count: int) -> str:
    """Bytes as a person reads them; decimal units, as networks count."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"

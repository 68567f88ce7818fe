"""The display of a run that goes on: a table that follows it, or one plain line per round or epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gradbus.commands.amounts import number, percent, ranges, size
from gradbus.commands.report.shown_metrics import MAX_SHOWN_METRICS, Evaluated, client_metric_names
from gradbus.commands.run.console import LogFile, Screen
from gradbus.runtime.plain_text import plain_line

if TYPE_CHECKING:
    from gradbus.actors import Controller, Site
    from gradbus.actors.data_parallel.report import EpochReport, StepProgress
    from gradbus.actors.federated.client_names import ClientNames
    from gradbus.actors.federated.controller.evaluation import CrossSite
    from gradbus.actors.federated.controller.report import Progress, RoundReport

_REFRESH_PER_S = 5
_BAR_WIDTH = 24
_FEW_CLIENTS = 8  # that a person counts at a glance

R = TypeVar("R")


class Display(Generic[R]):
    """Shows a run from entering to leaving. This one shows nothing: the log has it all."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def done(self, report: R) -> None:
        """A round was committed, or all ranks have gone through an epoch."""

    def progressed(self, report: StepProgress) -> None:
        """A rank has come to a step after which it reports how training goes."""


class Lines(Display[R]):
    """One line per report, for files, pipes and ``--no-live``."""

    def __init__(
        self,
        console: Console,
        line_of: Callable[[R], str],
        progress_line_of: Callable[[StepProgress], str] | None = None,
    ) -> None:
        self._console = console
        self._line_of = line_of
        self._progress_line_of = progress_line_of

    def done(self, report: R) -> None:
        self._print(self._line_of(report))

    def progressed(self, report: StepProgress) -> None:
        if self._progress_line_of is not None:
            self._print(self._progress_line_of(report))

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveTable(Display[R]):
    """A table that is drawn anew five times a second by a thread of rich: the event loop never waits for the terminal.

    The thread only reads what the loop changes, and each value stands for itself.
    """

    def __init__(self, console: Console, log: LogFile, title: str) -> None:
        self._console = console
        self._log = log
        self._title = title
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=_REFRESH_PER_S)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        """The picture of this moment."""
        return Group(*self._parts(), *map(warning, list(self._log.warnings)))

    @abstractmethod
    def _parts(self) -> Iterable[RenderableType]:
        """Return what stands above the warnings."""

    def _rows(self, reports: Sequence[R], other_lines: int) -> Sequence[R]:
        """The newest reports, as many as there is room for beside so many lines."""
        return reports[-max(3, self._console.height - other_lines) :]


# -- a federated run ---------------------------------------------------------------------------------------------------


def round_line(report: RoundReport, rounds: int) -> str:
    """A round as one line. ``rounds``: of the whole run."""
    shared = f" ({size(report.bytes_shared)} of it in memory)" if report.bytes_shared else ""
    stale = f"stale {report.staleness:.1f} (at most {report.max_staleness}), " if report.max_staleness else ""
    return (
        f"round {report.round_id}/{rounds}: clients {report.updates}/{report.expected}, {stale}"
        f"loss {number(report.loss, 4)}, {quality(report)}, {''.join(f'{one}, ' for one in client_quality(report))}"
        f"up {size(report.bytes_up)}, down {size(report.bytes_down)}{shared}, train {report.train_s:.2f} s, "
        f"wire {report.wire_s:.2f} s, aggregate {report.aggregate_s:.3f} s, total {report.seconds:.2f} s"
    )


class RoundTable(LiveTable["RoundReport"]):
    """The rounds, where the controller stands, and what did not count."""

    def __init__(self, console: Console, log: LogFile, title: str, progress: Progress, clients: int) -> None:
        """``clients``: how many are expected."""
        self._progress = progress
        self._clients = clients
        super().__init__(console, log, title)  # which draws once

    def _parts(self) -> Iterable[RenderableType]:
        progress, width = self._progress, self._console.width
        yield head(self._title, len(progress.reports), progress.rounds, "rounds", width)
        yield rounds_table(self._rows(progress.reports, 13), width)
        yield _now(progress, self._clients, width)
        if dropped := dict(progress.dropped):
            yield warning("not counted: " + ", ".join(f"{why} {n}" for why, n in dropped.items()))
        if progress.out:
            yield warning(f"kept out for bad updates: {_clients(progress.out, progress.names)}")


def round_display(
    screen: Screen, log: LogFile, title: str, clients: int
) -> Callable[[Controller | Site], Display[RoundReport]]:
    """Makes the display of a controller: a table on a terminal, else lines."""
    console = screen.console
    if screen.table:
        return lambda controller: RoundTable(console, log, title, controller.progress, clients)
    return lambda controller: Lines(console, lambda report: round_line(report, controller.progress.rounds))


def rounds_table(reports: Sequence[RoundReport], width: int | None = None) -> Table:
    """The rounds as a table, one row each. ``width``: characters there are; columns that do not fit are left out."""
    columns: dict[str, Callable[[RoundReport], str]] = {
        "round": lambda report: str(report.round_id),
        "clients": lambda report: f"{report.updates}/{report.expected}",
        "stale": lambda report: f"{report.staleness:.1f}",
        "loss": lambda report: number(report.loss, 4),
        **train_columns(reports),
        **quality_columns(reports),
        **client_columns(reports),
        "up": lambda report: size(report.bytes_up),
        "down": lambda report: size(report.bytes_down),
        "in memory": lambda report: size(report.bytes_shared),
        "train s": lambda report: f"{report.train_s:.2f}",
        "wire s": lambda report: f"{report.wire_s:.2f}",
        "aggregate s": lambda report: f"{report.aggregate_s:.3f}",
        "total s": lambda report: f"{report.seconds:.2f}",
    }
    spare = [
        "in memory",
        "aggregate s",
        "wire s",
        "down",
        "train s",
        *reversed(list(train_columns(reports))),
        *reversed(list(client_columns(reports))),
        *reversed(list(quality_columns(reports))[1:]),
        "loss",
    ]
    if not any(report.max_staleness for report in reports):
        del columns["stale"]
    if not any(report.bytes_shared for report in reports):
        del columns["in memory"], spare[0]
    return _fitted_table(columns, reports, width, spare=spare)


def _clients(ids: Collection[int], names: ClientNames) -> str:
    """Few clients with their names, many as ranges of ids."""
    return ", ".join(map(names.label, ids)) if names and len(ids) <= _FEW_CLIENTS else ranges(ids)


def _now(progress: Progress, clients: int, width: int) -> Text:
    count = len(progress.clients)
    named = _clients(progress.clients, progress.names) or "none"
    here = f"{f'{count} ' if count > _FEW_CLIENTS else ''}clients here: {named}"
    text = Text(progress.phase, style="cyan", no_wrap=True, overflow="ellipsis")
    if progress.phase in ("starting", "waiting"):
        wanted = max(clients, progress.minimum)
        text.append(f" for clients: {count}/{wanted} (min {progress.minimum})")
    if progress.phase in ("unmasking", "aggregating", "evaluating"):
        text.append(f" round {progress.round_id}" if progress.round_id else " the initial model")
    if progress.phase == "training":
        text.append(
            f" round {progress.round_id}: updates {progress.ready}/{progress.expected} (min {progress.minimum})"
        )
    fits = len(text) + 3 + len(here) <= width
    return text.append(f" | {here}" if fits else f"\n{here}", style="default")


# -- a data-parallel run -----------------------------------------------------------------------------------------------


def epoch_line(report: EpochReport, epochs: int, *, of_all: bool = True) -> str:
    """An epoch as one line. ``of_all``: with what is the same on all ranks; else what is this rank's own."""
    skipped = f", {report.skipped_steps} steps skipped" if report.skipped_steps else ""
    parts = [
        *([f"step {report.step}"] if of_all else []),
        f"loss {number(report.loss, 4)}",
        *([quality(report)] if of_all else []),
        f"step {_milliseconds(report.step_s_mean)} ms",
        f"wait {_milliseconds(report.wait_s_mean)} ms",
        f"sent {size(report.bytes_out_per_step)} per step",
        *([f"density {_share(report.density)}{skipped}", f"epoch {report.seconds:.2f} s"] if of_all else []),
    ]
    return f"epoch {report.epoch + 1}/{epochs}: {', '.join(parts)}{'' if of_all else skipped}"


def progress_line(report: StepProgress, epochs: int) -> str:
    """How training goes in the midst of an epoch, as one line."""
    parts = [
        f"loss {number(report.loss, 4)}",
        f"step {_milliseconds(report.step_s_mean)} ms",
        f"wait {_milliseconds(report.wait_s_mean)} ms",
        f"sent {size(report.bytes_out_per_step)} per step",
    ]
    return f"epoch {report.epoch + 1}/{epochs}, step {report.step}: {', '.join(parts)}"


class Stepping(Protocol):
    """A worker, of either kind."""

    @property
    def progress(self) -> str:
        """Return where the run is."""


class EpochTable(LiveTable["EpochReport"]):
    """The epochs, and the step that rank 0 has come to."""

    def __init__(self, console: Console, log: LogFile, title: str, worker: Stepping, epochs: int) -> None:
        self._worker = worker
        self._epochs = epochs
        self._reports: list[EpochReport] = []
        super().__init__(console, log, title)  # which draws once

    def done(self, report: EpochReport) -> None:
        self._reports.append(report)

    def _parts(self) -> Iterable[RenderableType]:
        done = [report.epoch + 1 for report in self._reports if report.finished]
        yield head(self._title, done[-1] if done else 0, self._epochs, "epochs", self._console.width)
        yield epochs_table(self._rows(self._reports, 10), self._console.width)
        yield Text(self._worker.progress, style="cyan")


def epochs_table(reports: Sequence[EpochReport], width: int | None = None) -> Table:
    """The epochs as a table, one row each. ``width``: characters there are; columns that do not fit are left out."""
    columns: dict[str, Callable[[EpochReport], str]] = {
        "epoch": lambda report: str(report.epoch + 1),
        "step": lambda report: str(report.step),
        "loss": lambda report: number(report.loss, 4),
        **quality_columns(reports),
        "step ms": lambda report: _milliseconds(report.step_s_mean),
        "wait ms": lambda report: _milliseconds(report.wait_s_mean),
        "sent per step": lambda report: size(report.bytes_out_per_step),
        "density": lambda report: _share(report.density),
        "epoch s": lambda report: f"{report.seconds:.2f}",
    }
    more = list(quality_columns(reports))[1:]
    return _fitted_table(
        columns, reports, width, spare=("density", "step", "epoch s", "wait ms", *reversed(more), "loss", "step ms")
    )


def quality(report: Evaluated) -> str:
    """Return how good the model is, in words."""
    return ", ".join(f"{name} {cell(report)}" for name, cell in quality_columns([report]).items())


def quality_columns(reports: Sequence[Evaluated]) -> dict[str, Callable[[Evaluated], str]]:
    """Return how good the models are: the accuracy, unless the task has other metrics alone, and these by name."""
    names = list(dict.fromkeys(name for report in reports for name in report.metrics))[:MAX_SHOWN_METRICS]
    columns: dict[str, Callable[[Evaluated], str]] = {}
    if not names or any(report.accuracy is not None for report in reports):
        columns["accuracy"] = lambda report: percent(report.accuracy)
    for name in names:
        columns[plain_line(name)] = partial(_metric, name)
    return columns


def train_columns(reports: Sequence[RoundReport]) -> dict[str, Callable[[RoundReport], str]]:
    """Return the means of what clients have announced of their training, by name."""
    names = list(dict.fromkeys(name for report in reports for name in report.train_metrics))[:MAX_SHOWN_METRICS]
    return {f"{plain_line(name)} in training": partial(_train_metric, name) for name in names}


def client_columns(reports: Sequence[RoundReport]) -> dict[str, Callable[[RoundReport], str]]:
    """Return what clients have found on data of their own: of each metric the mean, the standard deviation and the
    median."""
    return {f"clients' {plain_line(name)}": partial(_over_clients, name) for name in client_metric_names(reports)}


def client_quality(report: RoundReport) -> list[str]:
    """Return the same of one round in words, with median and range over clients; empty: they have not evaluated it."""
    found = report.by_clients
    if not found.asked:
        return []
    shown = [
        f"{plain_line(name)} {number(one.mean, 4)} (median {number(one.median, 4)}, {number(one.min, 4)} to "
        f"{number(one.max, 4)})"
        for name, one in list(found.metrics.items())[:MAX_SHOWN_METRICS]
    ]
    return [f"on data of {found.answered}/{found.asked} clients: {' '.join(shown) or 'nothing'}"]


def _over_clients(name: str, report: RoundReport) -> str:
    one = report.by_clients.metrics.get(name)
    if one is None:
        return number(None, 4)
    return f"{number(one.mean, 4)} +-{number(one.std, 4)}, median {number(one.median, 4)}"


def _metric(name: str, report: Evaluated) -> str:
    return number(report.metrics.get(name), 4)


def _train_metric(name: str, report: RoundReport) -> str:
    return number(report.train_metrics.get(name), 4)


def _share(part: float) -> str:
    """0.001 as 0.1 %."""
    return f"{100 * part:.3g} %"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


# -- a cross-site evaluation -------------------------------------------------------------------------------------------

_MAX_COLUMNS = 16  # clients of a printed table; the files have all


def cross_site_table(found: CrossSite, name: str) -> Table:
    """One metric of each model on the data of each client; the first clients, where there are very many."""
    clients = found.clients[:_MAX_COLUMNS]
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for head_of in ("model of", *map(str, clients)):
        table.add_column(head_of, justify="right", no_wrap=True)
    for row in found.rows[: _MAX_COLUMNS + 1]:
        cells = [number(row.results.get(one, {}).get(name), 3) for one in clients]
        table.add_row("global" if row.model is None else str(row.model), *cells)
    return table


# -- pieces of tables --------------------------------------------------------------------------------------------------


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


def _fitted_table(
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

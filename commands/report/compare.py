"""The report on several runs of one kind, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gradbus.commands.amounts import DASH, duration, number, percent, size
from gradbus.commands.report import figures as draw
from gradbus.commands.report import parallel, style
from gradbus.commands.report.page import Page, PageFigure, PageTable, Section, text_of
from gradbus.commands.report.shown_metrics import Evaluated
from gradbus.commands.report.style import Look
from gradbus.commands.rundir.reading import RunFiles
from gradbus.commands.rundir.whole_run import WholeRun
from gradbus.runtime.config.settings import flat
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.plain_text import plain_line

IGNORED = {"run_dir", "federated.checkpoint.dir", "parallel.checkpoint.dir", "bus.job", "bus.domain", "rank"}
"""Settings of the place of a run."""

MAX_LABEL = 24  # letters

Measure = tuple[str, Callable[[RunFiles], float | None], Callable[[float], str]]


def page_of(runs: Sequence[RunFiles]) -> Page:
    """All of them on one page.

    Raises:
        ConfigError: some are federated, some data parallel.
    """
    if len({run.kind for run in runs}) > 1:
        kinds = ", ".join(
            f"{run.path} is {'federated' if run.kind == 'federated' else 'data parallel'}" for run in runs
        )
        raise ConfigError(f"only runs of one kind can be compared: {kinds}")
    labels = labels_of(runs)
    looks = looks_of(runs, labels)
    differing = settings_table(runs, labels)
    if runs[0].kind == "federated":
        kind, counted, sent, part, measures = "Federated", "round", "sent, up and down", "a round", FEDERATED
        curves = [draw.curve_of_rounds(run.rounds, look, run.spent) for run, look in zip(runs, looks, strict=True)]
        bars = [draw.round_bar(run.whole.sums) for run in runs]
        of_parts = (
            "Means over all rounds; training and encoding are those of the slowest client. On the right the same "
            "without training."
        )
    else:
        kind, counted, sent, part, measures = "Data-parallel", "epoch", "sent by a rank", "a step", PARALLEL
        curves = [draw.curve_of_epochs(run.epochs, look, run.spent) for run, look in zip(runs, looks, strict=True)]
        bars = [draw.step_bar(run.profiles) for run in runs]
        of_parts = "Means over all steps and ranks. On the right the same without computing."
    places = "; ".join(f"{label} is {run.path}" for run, label in zip(runs, labels, strict=True))
    return Page(
        title=" and ".join(labels) if len(labels) == 2 else ", ".join(labels),
        lead=f"{kind} runs side by side: {places}.",
        notes=[f"{label}: {note}" for run, label in zip(runs, labels, strict=True) for note in run.missing],
        sections=[
            Section(title="In numbers", tables=[measures_table(runs, labels, [*measures, *metric_measures(runs)])]),
            Section(
                title="Learning",
                figures=[
                    PageFigure(
                        "learning",
                        partial(draw.draw_curves, curves, counted=counted, sent=sent),
                        f"{plain_line(draw.shown_quality(curves)) or 'Accuracy'} and loss over {counted}s, bytes "
                        "and time",
                        "Above: on the test set. Below: mean training loss.",
                    )
                ],
            ),
            Section(
                title="Time",
                figures=[
                    PageFigure(
                        "parts",
                        partial(draw.draw_parts, dict(zip(map(style.plain, labels), bars, strict=True))),
                        f"Where the time of {part} goes",
                        of_parts,
                    )
                ],
            ),
            Section(
                title="Settings, versions and machines that differ",
                text="" if differing.rows else "None.",
                tables=[differing] if differing.rows else [],
            ),
        ],
    )


def labels_of(runs: Sequence[RunFiles]) -> list[str]:
    """A label for each: the name of its directory, its end if it is long, and a number where two have the same."""
    names = [run.name if len(run.name) <= MAX_LABEL else f"…{run.name[1 - MAX_LABEL :]}" for run in runs]
    again = [names[:index].count(name) for index, name in enumerate(names)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(names, again, strict=True)]


def looks_of(runs: Sequence[RunFiles], labels: Sequence[str]) -> list[Look]:
    """The look of its codec or algorithm for each run, where these differ; else one look after the other."""
    known = [
        style.look_of(
            str(run.setting("federated", "codec.name", "fp32"))
            if run.kind == "federated"
            else parallel.algorithm_of(run) or "dense"
        )
        for run in runs
    ]
    if len({look.color for look in known}) == len(known):
        return [look._replace(label=style.plain(label)) for look, label in zip(known, labels, strict=True)]
    return [style.nth_look(index, label) for index, label in enumerate(labels)]


# -- in numbers --------------------------------------------------------------------------------------------------------


def _total(key: str) -> Callable[[RunFiles], float | None]:
    return lambda run: run.whole.sums.to_json()[key] if run.rounds else None


def _median(of: Callable[[WholeRun], float]) -> Callable[[RunFiles], float | None]:
    return lambda run: of(run.whole) if run.rounds else None


def _last(key: str) -> Callable[[RunFiles], float | None]:
    return lambda run: getattr(run.epochs[-1], key) if run.epochs else None


def _wall_s(run: RunFiles) -> float | None:
    return run.number("wall_s")


def _not_counted(run: RunFiles) -> float | None:
    return run.whole.faults.dropped.total() if run.rounds else None


_count = "{:,.0f}".format
_loss = partial(number, digits=4)

FEDERATED: Sequence[Measure] = (
    ("rounds", _total("rounds"), _count),
    ("test accuracy", _total("accuracy"), percent),
    ("test loss", _total("eval_loss"), _loss),
    ("best test accuracy", _total("best_accuracy"), percent),
    ("training loss", _total("loss"), _loss),
    ("up", _total("bytes_up"), size),
    ("down", _total("bytes_down"), size),
    ("round, median", _median(lambda whole: whole.median_mean_s), duration),
    ("round without the slowest training, median", _median(lambda whole: whole.median_other_s), duration),
    ("training of the slowest clients, in all", _total("train_s"), duration),
    ("the whole run", _wall_s, duration),
    ("updates and frames not counted", _not_counted, _count),
)
PARALLEL: Sequence[Measure] = (
    ("epochs", lambda run: len(run.epochs) or None, _count),
    ("steps", _last("step"), _count),
    ("test accuracy", _last("accuracy"), percent),
    ("training loss", _last("loss"), _loss),
    ("step, mean of the last epoch", _last("step_s_mean"), duration),
    ("of it waiting", _last("wait_s_mean"), duration),
    ("sent per step by a rank", _last("bytes_out_per_step"), size),
    ("epoch, the last", _last("seconds"), duration),
    ("the whole run", _wall_s, duration),
)


def metric_measures(runs: Sequence[RunFiles]) -> list[Measure]:
    """A row for each metric of the tasks, as of the newest evaluation."""
    newest = [_newest_metrics(run.rounds or run.epochs) for run in runs]
    by_run = {id(run): metrics for run, metrics in zip(runs, newest, strict=True)}
    names = dict.fromkeys(name for metrics in newest for name in metrics)

    def of(name: str) -> Callable[[RunFiles], float | None]:
        return lambda run: by_run[id(run)].get(name)

    return [(plain_line(name), of(name), _loss) for name in names]


def _newest_metrics(reports: Sequence[Evaluated]) -> Mapping[str, float]:
    return next((report.metrics for report in reversed(reports) if report.metrics), {})


def measures_table(runs: Sequence[RunFiles], labels: Sequence[str], measures: Sequence[Measure]) -> PageTable:
    """Rows of measures; of two runs with the second as a multiple of the first."""
    rows = []
    for name, of, shown in measures:
        values = [of(run) for run in runs]
        cells = [DASH if value is None else shown(value) for value in values]
        if len(runs) == 2:
            first, second = values
            cells.append(f"{second / first:.3g}" if first and second is not None else DASH)
        rows.append([name, *cells])
    ratio = [f"{labels[1]} / {labels[0]}"] if len(runs) == 2 else []
    return PageTable(name="measures", head=("", *labels, *ratio), rows=rows, numbers=1)


# -- what differs ------------------------------------------------------------------------------------------------------

_ABSENT = object()


def settings_table(runs: Sequence[RunFiles], labels: Sequence[str]) -> PageTable:
    """The settings, versions and machines that are not the same everywhere, apart from names and places."""
    kept = ("versions", "machine", "platform", "data") if all(run.summary for run in runs) else ()  # known at the end
    of_runs = [
        dict(flat({**run.config, **{key: run.summary[key] for key in kept if key in run.summary}})) for run in runs
    ]
    keys = sorted({key for values in of_runs for key in values} - IGNORED)
    rows = [
        [key, *(text_of(values[key]) if key in values else "not there" for values in of_runs)]
        for key in keys
        if any(values.get(key, _ABSENT) != of_runs[0].get(key, _ABSENT) for values in of_runs)
    ]
    return PageTable(name="settings", head=("setting", *labels), rows=rows)

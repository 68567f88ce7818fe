"""The report on several runs of one kind, side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from gradbus.experiments.report import federated as report_federated
from gradbus.experiments.report import parallel as report_parallel
from gradbus.experiments.report import style
from gradbus.experiments.report.figures import PARTS, Curve, curve_of, draw_curves
from gradbus.experiments.report.figures_parallel import PARTS as STEP_PARTS
from gradbus.experiments.report.figures_parallel import curve_of_epochs
from gradbus.experiments.report.page import DASH, Figure, Page, Section, Table, duration, text_of
from gradbus.experiments.report.style import Look
from gradbus.experiments.report.svg import Picture, new_figure, picture_of
from gradbus.experiments.run.live import number, percent, size
from gradbus.experiments.rundir.directory import totals
from gradbus.experiments.rundir.reading import Run
from gradbus.runtime.errors import ConfigError

IGNORED = {"run_dir", "federated.state_dir", "worker.state_dir", "bus.job", "bus.domain", "rank"}
"""Settings that say where a run was done, not how."""

MAX_LABEL = 24  # letters

Measure = tuple[str, Callable[[Run], float | None], Callable[[float], str]]


def page_of(runs: Sequence[Run]) -> Page:
    """All of them on one page.

    Raises:
        ConfigError: some are federated, some data parallel.
    """
    kinds = {run.kind for run in runs}
    if len(kinds) > 1:
        told = ", ".join(f"{run.path} is {'federated' if run.kind == 'federated' else 'data parallel'}" for run in runs)
        raise ConfigError(f"only runs of one kind can be compared: {told}")
    labels = labels_of(runs)
    looks = looks_of(runs, labels)
    federated = kinds == {"federated"}
    counted, sent = ("round", "sent, up and down") if federated else ("epoch", "sent by a rank")
    parts = draw_parts([*map(_round_parts if federated else _step_parts, runs)], labels, "parts")
    measures = FEDERATED if federated else PARALLEL
    differing = settings_table(runs, labels)
    return Page(
        title=" and ".join(labels) if len(labels) == 2 else ", ".join(labels),
        lead=f"{'Federated' if federated else 'Data-parallel'} runs side by side: "
        + "; ".join(f"{label} is {run.path}" for run, label in zip(runs, labels, strict=True))
        + ".",
        notes=[f"{label}: {note}" for run, label in zip(runs, labels, strict=True) for note in run.missing],
        sections=(
            Section(title="In numbers", tables=[_measures_table(runs, labels, measures)]),
            Section(
                title="Learning",
                figures=[
                    Figure(
                        picture=draw_curves([*map(_curve, runs, looks)], "learning", counted=counted, sent=sent),
                        title=f"Accuracy and loss over {counted}s, bytes and time",
                        caption="Above: accuracy on the test set. Below: mean training loss.",
                    )
                ],
            ),
            Section(
                title="Time",
                figures=[
                    Figure(
                        picture=parts,
                        title=f"Where the time of {'a round' if federated else 'a step'} goes",
                        caption="Means over all rounds; training and encoding are those of the slowest client. On the "
                        "right the same without training." if federated
                        else "Means over all steps and ranks. On the right the same without computing.",
                    )
                ],
            ),
            Section(
                title="Settings, versions and machines that differ",
                text="" if differing.rows else "None.",
                tables=[differing] if differing.rows else [],
            ),
        ),
    )  # fmt: skip


def labels_of(runs: Sequence[Run]) -> list[str]:
    """A name for each: that of its directory, its end if it is long, and a number where two have the same."""
    names = [run.name if len(run.name) <= MAX_LABEL else f"…{run.name[1 - MAX_LABEL :]}" for run in runs]
    again = [names[:index].count(name) for index, name in enumerate(names)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(names, again, strict=True)]


def looks_of(runs: Sequence[Run], labels: Sequence[str]) -> list[Look]:
    """The look of its codec for each run, where these differ; else one look after the other."""
    known = [
        report_federated.codec_look(run, "codec") if run.kind == "federated" else report_parallel.exchange_look(run)
        for run in runs
    ]
    if len({look.color for look in known}) == len(known):
        return [look._replace(label=style.plain(label)) for look, label in zip(known, labels, strict=True)]
    return [style.nth_look(index, label) for index, label in enumerate(labels)]


def _curve(run: Run, look: Look) -> Curve:
    return curve_of(run.rounds, look) if run.kind == "federated" else curve_of_epochs(run.epochs, look)


def draw_parts(parts: Sequence[Sequence[tuple[str, str, float]]], labels: Sequence[str], name: str) -> Picture | None:
    """A bar for each run, part by part; and once more without the first part, which hides the rest."""
    if not any(parts):
        return None
    with style.drawing():
        figure, panels = new_figure(1, 2, height_in=1.5 + 0.4 * len(labels), sharey=True)
        for axes, first in zip(panels, (0, 1), strict=True):
            unit = style.time_unit(max(sum(value for _, _, value in row[first:]) for row in parts))
            for index, row in enumerate(parts):
                left = 0.0
                for _, color, value in row[first:]:
                    axes.barh(index, value / unit.factor, left=left, color=color, height=0.7)
                    left += value / unit.factor
            axes.set_xlabel(f"time / {unit.name}")
            axes.grid(visible=False, axis="y")
        panels[0].set_yticks(range(len(labels)), [style.plain(label) for label in labels])
        panels[0].invert_yaxis()
        style.legend_of_colors(figure, {label: color for row in parts for label, color, _ in row})
        return picture_of(figure, name)


def _round_parts(run: Run) -> list[tuple[str, str, float]]:
    if not run.rounds:
        return []
    return [(label, color, sum(map(of, run.rounds)) / len(run.rounds)) for label, color, of in PARTS]


def _step_parts(run: Run) -> list[tuple[str, str, float]]:
    steps = sum(profile.steps for profile in run.profiles)
    if not steps:
        return []
    sums: Counter[str] = Counter()
    for profile in run.profiles:
        for key, value in profile.mean.items():
            sums[key] += value * profile.steps if math.isfinite(value) else 0.0  # type: ignore[assignment]
    return [(label, color, sums[key] / steps) for key, (label, color) in STEP_PARTS.items()]


def _measures_table(runs: Sequence[Run], labels: Sequence[str], measures: Sequence[Measure]) -> Table:
    """Rows of what was measured; for two runs with the second as a multiple of the first."""
    rows = []
    for name, of, shown in measures:
        values = [of(run) for run in runs]
        cells = [DASH if value is None else shown(value) for value in values]
        if len(runs) == 2:
            first, second = values
            cells.append(f"{second / first:.3g}" if first and second is not None else DASH)
        rows.append([name, *cells])
    ratio = [f"{labels[1]} / {labels[0]}"] if len(runs) == 2 else []
    return Table(name="measures", head=("", *labels, *ratio), rows=rows)


def _of_totals(key: str) -> Callable[[Run], float | None]:
    return lambda run: totals(run.rounds)[key] if run.rounds else None


def _median_round(run: Run) -> float | None:
    return median(report.seconds for report in run.rounds) if run.rounds else None


def _overhead(run: Run) -> float | None:
    return median(r.seconds - r.train_s for r in run.rounds) if run.rounds else None


def _dropped(run: Run) -> float | None:
    return sum(sum(report.dropped.values()) for report in run.rounds) if run.rounds else None


def _last(key: str) -> Callable[[Run], float | None]:
    return lambda run: getattr(run.epochs[-1], key) if run.epochs else None


def _wall(run: Run) -> float | None:
    value = run.summary.get("wall_s")
    return value if isinstance(value, int | float) else None


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _loss(value: float) -> str:
    return number(value, 4)


def _bytes(value: float) -> str:
    return size(round(value))


FEDERATED: Sequence[Measure] = (
    ("rounds", _of_totals("rounds"), _count),
    ("test accuracy", _of_totals("accuracy"), percent),
    ("best test accuracy", _of_totals("best_accuracy"), percent),
    ("training loss", _of_totals("loss"), _loss),
    ("up", _of_totals("bytes_up"), _bytes),
    ("down", _of_totals("bytes_down"), _bytes),
    ("round, median", _median_round, duration),
    ("round without the slowest training, median", _overhead, duration),
    ("training of the slowest clients, in all", _of_totals("train_s"), duration),
    ("the whole run", _wall, duration),
    ("updates and frames not counted", _dropped, _count),
)
PARALLEL: Sequence[Measure] = (
    ("epochs", lambda run: len(run.epochs) or None, _count),
    ("steps", _last("step"), _count),
    ("test accuracy", _last("accuracy"), percent),
    ("training loss", _last("loss"), _loss),
    ("step, mean of the last epoch", _last("step_s_mean"), duration),
    ("of it waiting", _last("wait_s_mean"), duration),
    ("sent per step by a rank", _last("bytes_out_per_step"), _bytes),
    ("epoch, the last", _last("seconds"), duration),
    ("the whole run", _wall, duration),
)


def settings_table(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """What is not the same everywhere, apart from names and places."""
    about = all(run.summary for run in runs)  # one that has not ended does not say with what it was made
    flat = [dict(_flat(run.config)) | (dict(_flat(_about(run))) if about else {}) for run in runs]
    keys = sorted({key for values in flat for key in values} - IGNORED)
    rows = [
        [key, *(text_of(values[key]) if key in values else "not there" for values in flat)]
        for key in keys
        if any(values.get(key, _ABSENT) != flat[0].get(key, _ABSENT) for values in flat)
    ]
    return Table(name="settings", head=("setting", *labels), rows=rows, numbers=None)


_ABSENT = object()


def _about(run: Run) -> dict[str, Any]:
    return {key: run.summary[key] for key in ("versions", "machine", "platform", "data") if key in run.summary}


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value

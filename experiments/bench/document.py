"""Figures as tables: the cells of a row, and the tables in docs/benchmarks.md, made from a file of results alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from gradbus.experiments.bench.growth import Line, lines, text_of
from gradbus.experiments.bench.results import Measurement, PartRun, Results, Summary, summary
from gradbus.runtime.errors import ConfigError

BEGIN = '<!-- Made by: make bench ARGS="--write-docs". What is changed here by hand will be lost. -->'
END = "<!-- The end of what is made. -->"
COLUMNS = ("figure", "median", "quartiles", "ratio", "quartiles", "blocks", "")


def cells(one: Measurement) -> list[str]:
    """A row of COLUMNS."""
    found = [one.name, f"{number(one.summary.median)} {one.unit}".strip(), quartiles(one.summary), "", ""]
    if one.against is not None:
        ratio = summary(one.ratios)
        found[3:] = [f"{number(ratio.median)} x {one.against.name}", quartiles(ratio)]
    return [*found, str(len(one.samples)), one.note]


def number(value: float) -> str:
    """Three digits that count, and no exponent for what people can read without."""
    if value == 0 or not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def quartiles(one: Summary) -> str:
    """The middle half of the samples; nothing where all are equal."""
    return "" if one.low == one.high else f"{number(one.low)} .. {number(one.high)}"


def tables(results: Results, titles: Mapping[str, str]) -> str:
    """A section for each part. ``titles``: by part, in order."""
    made = []
    for name, title in titles.items():
        run = results.run(name)
        if run is not None:
            grown = lines(run)
            made += [f"### {title}", "", *_heading(run), "", *(_growth(grown) if grown else _table(run)), ""]
    return "\n".join(made)


def _heading(run: PartRun) -> Iterator[str]:
    machine, versions = run.machine, run.versions
    yield (
        f"{run.date[:10]}, commit {run.commit or 'unknown'}, {machine['cores']} cores of {machine['cpu']}, load "
        f"{machine['load_1min']} before; Python {versions['python']}, torch {versions['torch']}, "
        f"cyclonedds {versions['cyclonedds']}; {run.configuration.get('effort', 'unknown')} run of {run.seconds:.0f} s."
    )
    if run.fault:
        yield f"It ended early: {run.fault}"


def _growth(grown: list[Line]) -> Iterator[str]:
    places = sorted({at for line in grown for at in line.at})
    yield f"| cost | {' | '.join(f'{at:g}' for at in places)} | exponent | of the last three |"
    yield "|---" * (len(places) + 3) + "|"
    for line in grown:
        costs = dict(zip(line.at, line.costs, strict=True))
        found = [number(costs[at]) if at in costs else "" for at in places]
        yield f"| {line.name}, {line.unit} | {' | '.join(found)} | {text_of(line.whole)} | {text_of(line.end)} |"


def _table(run: PartRun) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)}|"
    yield "|---" * len(COLUMNS) + "|"
    for one in run.figures:
        yield f"| {' | '.join(cells(one))} |"


def rewritten(page: str, results: Results, titles: Mapping[str, str]) -> str:
    """The page with new tables between the marks. Raises ConfigError: it has no marks."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended or BEGIN in rest:
        raise ConfigError(f"the page needs the lines {BEGIN!r} and {END!r}, once and in this order")
    return f"{before}{BEGIN}\n\n{tables(results, titles)}{END}{after}"


def write(page: Path, results: Results, titles: Mapping[str, str]) -> None:
    """Put the tables into the page."""
    page.write_text(rewritten(page.read_text(encoding="utf-8"), results, titles), encoding="utf-8")

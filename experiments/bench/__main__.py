"""The benchmarks as one suite: ``make bench`` or ``python -m gradbus.experiments.bench``.

Real processes over real DDS on the loopback interface. What counts are ratios: each is taken in one run, block by block
in turns, so that a machine that is slow or busy is slow and busy for both sides. Exit code 1: a part failed, or with
--compare a ratio got worse than the stored one by more than the spread of both, and did so again when its part was
measured once more.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gradbus.experiments.bench import document, growth
from gradbus.experiments.bench.compare import Change, compare, known_figures, other_machine, text_of
from gradbus.experiments.bench.results import Effort, PartRun, Results, summary
from gradbus.experiments.bench.suite import ALL, PARTS, SCALE, expected_s, measure
from gradbus.experiments.report import style
from gradbus.runtime.errors import ConfigError

BASELINE = Path(__file__).with_name("baseline.json")
DOCS = Path("docs/benchmarks.md")
DOCS_RESULTS = Path("docs/benchmarks.json")
DOCS_PLOT = Path("docs/images/growth.png")
OUT = Path("runs/bench.json")
_QUIET_LOAD = 0.5


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, compare, write."""
    chosen = _parser().parse_args(arguments)
    try:
        return _run(chosen)
    except ConfigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and blocks: under 3 minutes on 2 cores")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # for tests
    parser.add_argument("--scale", action="store_true", help="cost as work grows, with the exponent and a plot of each")
    parser.add_argument("--part", action="append", choices=list(ALL), help="only this; may be given several times")
    parser.add_argument("--out", type=Path, default=OUT, help="file of results; parts that were not run are kept in it")
    parser.add_argument("--results", type=Path, metavar="FILE", help="take these figures and measure nothing")
    parser.add_argument(
        "--compare", type=Path, nargs="?", const=BASELINE, metavar="FILE",
        help="with a stored baseline, the one that comes with the code by default; runs what the baseline has",
    )  # fmt: skip
    parser.add_argument("--write-docs", action="store_true", help=f"rewrite the tables in {DOCS}, and {DOCS_RESULTS}")
    parser.add_argument("--write-baseline", action="store_true", help="make this the baseline that comes with the code")
    return parser


def _run(chosen: argparse.Namespace) -> int:
    baseline = Results.load(chosen.compare) if chosen.compare else None
    if chosen.results is not None:
        results = measured = Results.load(chosen.results)
        if chosen.part:
            measured = Results(runs=tuple(run for run in results.runs if run.part in chosen.part))
    else:
        results, measured = _measure(chosen, baseline)
    _show(measured)
    if chosen.write_docs:
        known = Results.load(DOCS_RESULTS) if DOCS_RESULTS.exists() else Results()
        for run in measured.runs:
            known = known.with_run(run)
        document.write(DOCS, known)
        known.save(DOCS_RESULTS)
        if style.have_matplotlib():
            growth.draw(DOCS_PLOT, known)
    elif style.have_matplotlib() and growth.draw(plot := chosen.out.with_suffix(".png"), measured):
        print(f"drawn: {plot}", file=sys.stderr)
    if chosen.write_baseline:
        measured.save(BASELINE)
    faults = [f"{run.part} failed: {run.fault}" for run in measured.runs if run.fault]
    for fault in faults:
        print(fault, file=sys.stderr)
    worse = [] if baseline is None else _judge(baseline, measured)
    if worse and baseline is not None and chosen.results is None and not faults:
        worse = _confirm(baseline, measured, worse)
    return 1 if faults or worse else 0


def _confirm(baseline: Results, measured: Results, worse: Sequence[Change]) -> list[Change]:
    """Measure the parts with worse ratios once more: a burst of other work on the machine does not come twice."""
    names = {change.name for change in worse}
    parts = [run.part for run in measured.runs if names & known_figures(baseline.run(run.part), run)]
    print(f"once more, to be sure: {', '.join(parts)}", file=sys.stderr)
    efforts: list[Effort] = [run.configuration["effort"] for run in measured.runs]
    again = Results(runs=tuple(measure(parts, efforts[0])))
    confirmed = [change for change in compare(baseline, again) if change.worse and change.name in names]
    for change in confirmed:
        print(f"WORSE AGAIN  {text_of(change)}")
    print(f"{len(confirmed)} of {len(worse)} ratios are worse in both runs")
    return confirmed


def _measure(chosen: argparse.Namespace, baseline: Results | None) -> tuple[Results, Results]:
    """The file with what is new in it, and what is new alone."""
    effort: Effort = "tiny" if chosen.tiny else "quick" if chosen.quick else "full"
    names = chosen.part or list(SCALE if chosen.scale else PARTS)
    if baseline is not None:
        names = [name for name in names if baseline.run(name) is not None]
        if effort == "full" and {run.configuration.get("effort") for run in baseline.runs} == {"quick"}:
            effort = "quick"
    seconds = expected_s(names, effort)
    took = f"{seconds} s" if seconds < 180 else f"{seconds / 60:.0f} minutes"
    print(f"{effort} run of {', '.join(names)}: about {took} on 2 cores", file=sys.stderr, flush=True)
    load = os.getloadavg()[0]
    if load > _QUIET_LOAD:
        print(f"This machine is busy (load {load:.1f}): expect wide spreads and ratios that mislead.", file=sys.stderr)
    results = Results.load(chosen.out) if chosen.out.exists() else Results()
    measured = Results()
    for run in measure(names, effort):
        measured, results = measured.with_run(run), results.with_run(run)
        results.save(chosen.out)  # after each part: an interrupted run leaves what it has
    return results, measured


def _show(results: Results) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    for run in results.runs:
        console.print(_table(run))
        for line in growth.lines(run):
            whole, end = growth.text_of(line.whole), growth.text_of(line.end)
            console.print(f"  {line.name}: grows with exponent {whole}; of the last three points {end}")


def _table(run: PartRun) -> Table:
    title = f"{ALL[run.part].title}: medians and quartiles" if run.part in ALL else run.part
    table = Table(title=title, title_justify="left", caption=f"{run.seconds:.0f} s, {run.date}, commit {run.commit}")
    for column in ("figure", "median", "quartiles", "ratio", "quartiles", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for one in run.figures:
        ratio = summary(one.ratios) if one.against is not None else None
        table.add_row(
            one.name, f"{document.number(one.summary.median)} {one.unit}", document.quartiles(one.summary),
            f"{document.number(ratio.median)} x {one.against.name}" if ratio and one.against else "",
            document.quartiles(ratio) if ratio else "", one.note,
        )  # fmt: skip
    return table


def _judge(baseline: Results, measured: Results) -> list[Change]:
    changes = compare(baseline, measured)
    differs = other_machine(baseline, measured)
    if differs:
        print(f"The baseline is of another machine or other versions ({'; '.join(differs)}).", file=sys.stderr)
    for change in changes:
        if not change.against:
            print(f"  {text_of(change)} (not judged)")
    for change in changes:
        if change.against and not change.worse:
            print(f"  {text_of(change)}")
    worse = [change for change in changes if change.worse]
    for change in worse:
        print(f"WORSE  {text_of(change)}")
    judged = sum(bool(change.against) for change in changes)
    print(f"{judged} ratios compared, {len(worse)} worse by more than both interquartile ranges")
    return worse


if __name__ == "__main__":
    raise SystemExit(main())

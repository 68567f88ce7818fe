"""What every benchmark has in common: parts, options, measuring one part after the other, tables, limits, comparison.

A benchmark is a few parts, and a part a function that yields measurements: all else is here.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from gradbus.commands.exit_codes import NoData
from gradbus.experiments.bench import document, growth
from gradbus.experiments.bench.checkout import check_out, side_by_side
from gradbus.experiments.bench.compare import Change, compare, other_machine
from gradbus.experiments.bench.results import Measurement, PartRun, Results, fault_of, machine, make_run

BASELINE = Path(__file__).with_name("baseline.json")
_QUIET_LOAD = 0.5

Sides = Callable[[Sequence[str]], tuple[Results, Results]]
"""Measures these parts; the results of before, and those of now."""


class Part(NamedTuple):
    """One part of a benchmark.

    Attributes:
        measure: takes the options of the command line, and gives the figures.
        about: its title. seconds: that it takes on 2 cores with nothing else to do, of a full and of a quick run.
        needs_mnist: whether it needs the data.
    """

    measure: Callable[[argparse.Namespace], Iterable[Measurement]]
    about: str
    seconds: int
    quick_s: int = 0
    needs_mnist: bool = False


class Benchmark(NamedTuple):
    """Parts that one command measures. ``options``: adds those that only this command has. ``default``: parts."""

    about: str
    parts: Mapping[str, Part]
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    default: Sequence[str] = ()

    def measured(self) -> Mapping[str, Part]:
        """The parts that are measured where none is named."""
        return {name: self.parts[name] for name in self.default or self.parts}

    def expected_s(self, names: Iterable[str], effort: str) -> int:
        """Return how long these parts take in all."""
        return sum(part.seconds if effort == "full" else part.quick_s for part in map(self.parts.__getitem__, names))


def add_effort(parser: argparse.ArgumentParser, fewer: str) -> None:
    """Add the options of a benchmark that can be run in less time. ``fewer``: what is less then."""
    parser.add_argument("--quick", dest="effort", action="store_const", const="quick", help=fewer)
    parser.add_argument("--tiny", dest="effort", action="store_const", const="tiny", help=argparse.SUPPRESS)  # tests


def add_training(parser: argparse.ArgumentParser, titles: Iterable[str], only: str) -> None:
    """Add the options of a benchmark that trains for hours. ``titles``: of its rows. ``only``: what of one row alone is
    measured."""
    parser.add_argument("--data-root", type=Path, help="folder that holds MNIST/raw; else $GRADBUS_DATA")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="begin no training after so long: rows then have fewer seeds, and another run trains what is missing",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TITLE",
        choices=list(titles),
        help=f"{only}; may be given several times",
    )
    add_effort(parser, "fewer steps, one seed")


def parse(name: str, benchmark: Benchmark, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of a benchmark, and those words of the command line that say what is measured, but for the parts."""
    common = argparse.ArgumentParser(add_help=False)
    out = "runs/bench.json" if name == "suite" else f"runs/bench-{name}.json"
    common.add_argument(
        "--part", action="append", choices=list(benchmark.parts), help="only this; may be given several times"
    )
    common.add_argument("--out", type=Path, default=Path(out), help="results; parts that were not run are kept in it")
    common.add_argument("--results", type=Path, metavar="FILE", help="take these figures and measure nothing")
    common.add_argument(
        "--compare",
        nargs="?",
        const=str(BASELINE),
        metavar="FILE_OR_COMMIT",
        help="with the stored results in a file, by default those that come with the code; or with an earlier commit, "
        "both measured by turns",
    )
    common.add_argument("--turns", type=int, default=3, help="runs of each version, to compare with a commit")
    common.set_defaults(effort="full")
    about = "\n".join(f"  {it:18} {part.about}: {part.seconds} s" for it, part in benchmark.parts.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m gradbus.experiments.bench{'' if name == 'suite' else f' {name}'}",
        parents=[common],
        description=f"{benchmark.about}\nparts:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.options(parser)
    rest = common.parse_known_args(arguments)[1] if not {"-h", "--help"} & set(arguments) else []
    return parser.parse_args(arguments), rest


def run(benchmark: Benchmark, chosen: argparse.Namespace, words: Sequence[str]) -> tuple[int, Results]:
    """Measure, print, and compare.

    Args:
        words: of the command line, that measure the same in another process.

    Returns:
        The exit code, 1 if a part failed, a figure falls short or a ratio got worse, and what was measured.

    Raises:
        NoData: MNIST is needed and missing.
        ConfigError: a file cannot be used, or there is no such commit.
    """
    names: Sequence[str] = chosen.part or list(benchmark.measured())
    stored = _stored(chosen.compare)
    if stored is not None:
        names = [name for name in names if stored.run(name) is not None]
        if {it.configuration.get("effort") for it in stored.runs} == {"quick"} and chosen.effort == "full":
            chosen.effort = "quick"
    if chosen.effort != "tiny" and any(benchmark.parts[name].needs_mnist for name in names):
        without = " ".join(f"--part {name}" for name, part in benchmark.parts.items() if not part.needs_mnist)
        need_mnist(getattr(chosen, "data_root", None), f"What needs no data: {without or 'nothing here'}")
    by_turns = chosen.compare is not None and stored is None
    if by_turns:
        sides: Sides = partial(side_by_side, check_out(chosen.compare), words, chosen.turns)
    else:
        sides = partial(_here, benchmark, chosen, stored or Results())
    if chosen.results is None:
        _announce(benchmark, names, chosen.effort, 2 * chosen.turns if by_turns else 1)
        before, now = sides(names)
    else:
        runs = Results.load(chosen.results).runs
        before, now = stored or Results(), Results(runs=tuple(it for it in runs if it.part in names))
    for it in now.runs:
        _show(it, f"{it.part}: {benchmark.parts[it.part].about}" if it.part in benchmark.parts else it.part)
    faults = [f"{it.part} failed: {it.fault}" for it in now.runs if it.fault]
    faults += [f"{it.part} failed at {it.commit}: {it.fault}" for it in before.runs if it.fault and by_turns]
    short = [
        f"falls short: {one.name}: asked {one.asked}, got {document.number(one.judged)}"
        for it in now.runs
        for one in it.figures
        if one.falls_short
    ]
    for line in (*faults, *short):
        print(line, file=sys.stderr)
    worse = _judge(before, now, by_turns=by_turns) if chosen.compare else []
    if worse and chosen.results is None and not faults:
        worse = _confirm(worse, now, sides, by_turns=by_turns)
    return (1 if faults or short or worse else 0), now


def _stored(compared: str | None) -> Results | None:
    """The results in the file to compare with; None: there is none to compare with, or it is a commit."""
    if compared is None or not (compared.endswith(".json") or Path(compared).exists()):
        return None
    return Results.load(Path(compared))


def need_mnist(data_root: Path | None, otherwise: str) -> None:
    """Look for MNIST before minutes have gone into other work. Raises NoData, with what to do ``otherwise``."""
    from gradbus import models

    try:
        models.mnist(data_root)
    except models.DataMissing as missing:
        raise NoData(f"{missing}. {otherwise}") from None


def _announce(benchmark: Benchmark, names: Sequence[str], effort: str, times: int) -> None:
    """Print what is going to be measured, and how long that takes."""
    seconds = times * benchmark.expected_s(names, effort)
    took = f"{seconds} s" if seconds < 180 else f"{seconds / 60:.0f} minutes"
    print(f"{effort} run of {', '.join(names)}: about {took} on 2 cores", file=sys.stderr, flush=True)
    load = os.getloadavg()[0]
    if load > _QUIET_LOAD:
        print(f"This machine is busy (load {load:.1f}): expect wide spreads and ratios that mislead.", file=sys.stderr)


def _here(
    benchmark: Benchmark, chosen: argparse.Namespace, stored: Results, names: Sequence[str]
) -> tuple[Results, Results]:
    results, measured = Results.load(chosen.out) if chosen.out.exists() else Results(), Results()
    for it in measure(benchmark, names, chosen):
        measured, results = measured.with_run(it), results.with_run(it)
        results.save(chosen.out)  # after each part: an interrupted run leaves what it has
    return stored, measured


def measure(benchmark: Benchmark, names: Sequence[str], chosen: argparse.Namespace) -> Iterator[PartRun]:
    """Measure the parts in turn. The run of one that fails has the reason, and the others go on."""
    options = {name: str(value) for name, value in vars(chosen).items() if name not in ("out", "results", "compare")}
    for name in names:
        part = benchmark.parts[name]
        print(f"measuring: {name} ({part.about})", file=sys.stderr, flush=True)
        facts, began_s, fault = machine(), time.perf_counter(), ""
        figures: list[Measurement] = []
        try:
            for figure in part.measure(chosen):
                figures.append(figure)  # noqa: PERF402 - what came before a fault stays
        except Exception as error:
            traceback.print_exc()
            fault = fault_of(error)
        seconds = time.perf_counter() - began_s
        yield make_run(name, figures, facts=facts, seconds=seconds, configuration=options, fault=fault)


def _show(run: PartRun, title: str) -> None:
    asks = any(one.asked for one in run.figures)
    caption = f"{run.seconds:.0f} s, {run.date}, commit {run.commit}"
    table = Table(title=title, title_justify="left", caption=caption)
    for column in (*document.COLUMNS[:-1], *(("asked", "") if asks else ()), ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for one in run.figures:
        *found, note = document.cells(one)
        verdict = "[red]short[/]" if one.falls_short else "[green]ok[/]" if one.asked else ""
        table.add_row(*found, *((one.asked, verdict) if asks else ()), note)
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table)
    for line in growth.lines(run):
        whole, end = growth.text_of(line.whole), growth.text_of(line.end)
        console.print(f"  {line.name}: grows with exponent {whole}; of the last three points {end}")


def _judge(before: Results, now: Results, *, by_turns: bool) -> list[Change]:
    """Print what has changed, and return what got worse."""
    changes = compare(before, now, by_turns=by_turns)
    differs = other_machine(before, now)
    if differs:
        print(f"The results compared with are of another machine or version ({'; '.join(differs)}).", file=sys.stderr)
    worse = [change for change in changes if change.worse]
    for change in sorted(changes, key=lambda change: (change.judged, change.worse)):
        print(f"WORSE  {change}" if change.worse else f"  {change}{'' if change.judged else ' (not judged)'}")
    judged = sum(change.judged for change in changes)
    print(f"{judged} ratios compared, {len(worse)} worse by more than both interquartile ranges")
    return worse


def _confirm(worse: Sequence[Change], now: Results, sides: Sides, *, by_turns: bool) -> list[Change]:
    """Measure the parts with worse ratios once more: a burst of other work on the machine does not come twice."""
    names = {change.name for change in worse}
    parts = [run.part for run in now.runs if any(change.part == run.part for change in worse)]
    print(f"once more, to be sure: {', '.join(parts)}", file=sys.stderr)
    confirmed = [it for it in compare(*sides(parts), by_turns=by_turns) if it.worse and it.name in names]
    for change in confirmed:
        print(f"WORSE AGAIN  {change}")
    print(f"{len(confirmed)} of {len(worse)} ratios are worse in both runs")
    return confirmed

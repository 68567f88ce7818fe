"""Run what has not been run, and draw the figures: ``make figures`` or ``python -m gradbus.experiments.figures``.

Finished runs are kept and found again; what was interrupted is done anew. From nothing it takes about half an hour on 2
cores that do nothing else, with --quick less than 5.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from gradbus.commands.exit_codes import exit_code_of
from gradbus.commands.report import style
from gradbus.experiments.bench.command import need_mnist
from gradbus.experiments.figures.index import CATALOGUE, FigureEntry, entries_of, install, write_index
from gradbus.experiments.figures.plan import FULL, QUICK, WITHOUT_DATA, Plan, Scale, make_plan, runs_of
from gradbus.experiments.figures.runs import execute
from gradbus.experiments.figures.store import Store, StoredRun
from gradbus.experiments.figures.tables import TABLES, BadData, TableRow, collect, read_table, write_table
from gradbus.runtime.errors import ConfigError, GradbusError


def do_runs(plan: Plan, store: Store) -> list[tuple[str, StoredRun]]:
    """All runs of the plan; those that are done already are not run again. Raises RunFailed."""
    runs, finished = runs_of(plan), []
    for number, (group, run) in enumerate(runs, start=1):
        done, is_old = store.ensure(run, partial(execute, run))
        how = "done before" if is_old else f"{done.seconds:.0f} s"
        print(f"[{number}/{len(runs)}] {run.label}: {how}", file=sys.stderr, flush=True)
        finished.append((group, done))
    return finished


def draw(
    tables: Mapping[str, list[TableRow]], entries: Mapping[str, FigureEntry], scale: Scale, out: Path
) -> dict[str, str | None]:
    """These figures, PNG and SVG. Returns, by figure, why it could not be drawn; None: it was."""
    failures: dict[str, str | None] = {}
    for name, entry in entries.items():
        failures[name] = None
        files = [out / f"{name}{suffix}" for suffix in (".png", ".svg")]
        try:
            with style.drawing():
                style.save(entry.draw(tables[entry.table], scale), *files)
        except BadData as error:
            failures[name] = str(error)
            for file in files:
                file.unlink(missing_ok=True)  # an old one beside new data would show something else
    return failures


def main(arguments: list[str] | None = None) -> int:
    """The exit code is that of ``gradbus``'s commands; 1 if a figure could not be drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, samples and seeds")
    parser.add_argument("--runs", type=Path, default=Path("runs/figures"), help="folder of the runs")
    parser.add_argument("--out", type=Path, help="folder of the figures [build/figures, with -quick and -glyphs]")
    parser.add_argument("--data", choices=["mnist", "glyphs"], default="mnist", help="glyphs are drawn on the spot")
    parser.add_argument(
        "--draw-only",
        action="store_true",
        help="run nothing: draw from what is done, also by older versions of the code",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="GROUP",
        choices=list(make_plan(FULL)),
        help="runs of these groups alone, and the figures that need no others: %(choices)s",
    )
    parser.add_argument("--install-docs", action="store_true", help="copy the figures of the documents to docs/images")
    chosen = parser.parse_args(arguments)
    try:
        return _make(chosen)
    except GradbusError as error:
        print(f"figures: {error}", file=sys.stderr)
        return int(exit_code_of(error))


def _make(chosen: argparse.Namespace) -> int:
    style.need_matplotlib()
    if chosen.install_docs and (chosen.quick or chosen.data != "mnist"):
        raise ConfigError("--install-docs: not with --quick or --data glyphs, whose figures are for a look only")
    scale = replace(QUICK if chosen.quick else FULL, data=chosen.data)
    kind = "-quick" * chosen.quick + "-glyphs" * (chosen.data == "glyphs")
    out: Path = chosen.out or Path(f"build/figures{kind}")
    plan, store, started_s = make_plan(scale), Store(chosen.runs), time.perf_counter()
    plan = {group: runs for group, runs in plan.items() if chosen.only is None or group in chosen.only}
    if chosen.draw_only:
        found = [(group, store.find_any(run)) for group, run in runs_of(plan)]
        finished = [(group, done) for group, done in found if done is not None]
    else:
        if scale.data == "mnist" and not set(plan) <= WITHOUT_DATA:
            need_mnist(None, "Or see how it works with other data: --data glyphs")  # before the first run fails
        finished = do_runs(plan, store)
    tables: dict[str, list[TableRow]] = {}
    for name, rows in collect(finished).items():
        path = out / "data" / f"{name}.csv"
        write_table(path, TABLES[name], rows)
        tables[name] = list(read_table(path, TABLES[name]))
    entries = entries_of(plan)
    failures = draw(tables, entries, scale, out)
    command = "make figures QUICK=1" if chosen.quick else "make figures"
    arguments = ["--data glyphs"] * (chosen.data == "glyphs")
    arguments += [f"--only {' '.join(chosen.only)}"] if chosen.only else []
    if arguments:
        command += f' ARGS="{" ".join(arguments)}"'
    index = write_index(out, command, finished, failures, code=store.code)
    failed = {name: why for name, why in failures.items() if why is not None}
    for name, why in failed.items():
        print(f"not drawn: {name}: {why}", file=sys.stderr)
    print(f"{len(entries) - len(failed)} figures in {time.perf_counter() - started_s:.0f} s: {index}")
    if chosen.install_docs and not any(CATALOGUE[name].in_docs for name in failed):
        for path in install(out, Path("docs/images"), entries):
            print(f"copied to {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # what was running is done again the next time
        raise SystemExit(main())
    raise SystemExit(130)

"""Benchmarks that compare with limits: rows of what is asked beside what was measured, in parts, as a command."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from gradbus.experiments.bench.results import fault_of, machine
from gradbus.experiments.cli.exit_codes import NoData, exit_code_of


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: what was measured. asked: a text such as "<= 60", empty if there is no limit.
        measured: the figure, a median where there are several. unit: its unit. ok: whether it is as asked.
        note: how it was measured, or the spread.
    """

    name: str
    asked: str
    measured: float
    unit: str
    ok: bool
    note: str = ""


def at_most(name: str, measured: float, limit: float, unit: str, note: str = "") -> Row:
    """A figure that may not be above the limit."""
    return Row(name, f"<= {limit:,g}", measured, unit, measured <= limit, note)


def at_least(name: str, measured: float, limit: float, unit: str, note: str = "") -> Row:
    """A figure that may not be below the limit."""
    return Row(name, f">= {limit:,g}", measured, unit, measured >= limit, note)


def shown(name: str, measured: float, unit: str, note: str = "") -> Row:
    """A figure without a limit."""
    return Row(name, "", measured, unit, True, note)


def failed(name: str, error: Exception) -> Row:
    """A figure that falls short because what measures it failed; the note has the reason."""
    return Row(name, "runs", 0, "", False, fault_of(error))


Taken = tuple[list[Row], dict[str, Any]]
"""Rows, and samples for the file."""


class Part(NamedTuple):
    """One part of a benchmark. ``about``: what it is, and its time on 2 cores. ``needs_mnist``: it needs the data."""

    measure: Callable[[], Taken]
    about: str
    needs_mnist: bool = False


def parser_of(text: str | None, out: str, parts: Mapping[str, Part | str] | None = None) -> argparse.ArgumentParser:
    """The options that all such commands have.

    Args:
        text: the docstring of the module. out: the default of --out. parts: to choose from, or what each of them is.
    """
    lines = [f"  {name:15} {part if isinstance(part, str) else part.about}" for name, part in (parts or {}).items()]
    parser = argparse.ArgumentParser(
        description="\n".join([text or "", *(["parts:"] if lines else []), *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if parts:
        parser.add_argument(
            "--part", action="append", choices=list(parts), help="only this; may be given several times"
        )
    parser.add_argument("--out", type=Path, default=Path(out), help="file of results [%(default)s]")
    return parser


def main(
    title: str, names: Sequence[str] | None, parts: Mapping[str, Part], out: Path, *, data_root: Path | None = None
) -> int:
    """Measure these parts, all by default, print their rows, and write the file.

    Returns:
        The exit code: 1 if a figure falls short or a part fails; that of missing data if MNIST is needed and missing.
    """
    names = list(names or parts)
    try:
        _check_mnist(names, parts, data_root)
    except NoData as missing:
        print(f"bench: {missing}", file=sys.stderr)
        return int(exit_code_of(missing))
    rows, samples = measure(names, parts)
    return finish(title, rows, out, samples)


def _check_mnist(names: Sequence[str], parts: Mapping[str, Part], data_root: Path | None) -> None:
    """Look for MNIST before minutes have gone into other parts. Raises NoData: it is needed and missing."""
    if not any(parts[name].needs_mnist for name in names):
        return
    from gradbus import models

    try:
        models.mnist(data_root)
    except models.DataMissing as missing:
        without = " ".join(f"--part {name}" for name, part in parts.items() if not part.needs_mnist)
        raise NoData(f"{missing}. What needs no data: {without or 'nothing here'}") from None


def measure(names: Sequence[str], parts: Mapping[str, Part]) -> Taken:
    """Rows and samples of these parts. A part that fails becomes a row that falls short, and the others go on."""
    rows: list[Row] = []
    samples: dict[str, Any] = {"seconds": {}}
    for name in names:
        print(f"measuring: {name} ({parts[name].about})", file=sys.stderr, flush=True)
        began_s = time.perf_counter()
        try:
            more, taken = parts[name].measure()
        except Exception as error:
            traceback.print_exc()
            more, taken = [failed(name, error)], {}
        samples["seconds"][name] = round(time.perf_counter() - began_s, 1)
        rows += more
        samples |= taken
    return rows, samples


def finish(title: str, rows: Sequence[Row], out: Path, samples: Mapping[str, Any]) -> int:
    """Print the table, write the file, and give the exit code: 1 if a figure falls short."""
    where = machine()
    console = Console(width=None if sys.stdout.isatty() else 150)
    caption = ", ".join(f"{key} {value}" for key, value in where.items())
    table = Table(title=title, caption=caption, title_justify="left")
    for column in ("figure", "asked", "measured", "", ""):
        table.add_column(column, justify="right" if column in ("asked", "measured") else "left")
    for row in rows:
        verdict = "" if not row.asked else "[green]ok[/]" if row.ok else "[red]short[/]"
        measured = f"{row.measured:,.{'6g' if abs(row.measured) < 1e6 else '0f'}} {row.unit}"  # bytes to the last one
        table.add_row(row.name, row.asked, measured, verdict, row.note)
    console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    body = {"title": title, "machine": where, "rows": [asdict(row) for row in rows], "samples": samples}
    out.write_text(json.dumps(body, indent=1), encoding="utf-8")
    console.print(f"written to {out}")
    return 0 if all(row.ok for row in rows) else 1

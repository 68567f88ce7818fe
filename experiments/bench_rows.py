"""What benchmarks have in common: rows of asked beside measured, the machine they ran on, a file of results."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gradbus.experiments.rundir import versions


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: what was measured. asked: a text such as "<= 60", empty if nothing is asked.
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
    """A figure of which nothing is asked."""
    return Row(name, "", measured, unit, True, note)


def machine() -> dict[str, Any]:
    """Where, when and with what the figures were measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), **versions.machine(),
        "load_1min": round(os.getloadavg()[0], 2), "system": platform.platform(), **versions.versions("uvloop"),
    }  # fmt: skip


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in one thread while the block runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def finish(title: str, rows: Sequence[Row], out: Path | None, samples: dict[str, Any] | None = None) -> int:
    """Print the table, write the file, and give the exit code: 1 if a figure falls short."""
    where = machine()
    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(
        title=title, caption=", ".join(f"{key} {value}" for key, value in where.items()), title_justify="left"
    )
    for column, justify in (("figure", "left"), ("asked", "right"), ("measured", "right"), ("", "left"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        verdict = "" if not row.asked else "[green]ok[/]" if row.ok else "[red]short[/]"
        measured = f"{row.measured:,.{'6g' if abs(row.measured) < 1e6 else '0f'}} {row.unit}"  # bytes to the last one
        table.add_row(row.name, row.asked, measured, verdict, row.note)
    console.print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        body = {"title": title, "machine": where, "rows": [asdict(row) for row in rows], "samples": samples or {}}
        out.write_text(json.dumps(body, indent=1), encoding="utf-8")
        console.print(f"written to {out}")
    return 0 if all(row.ok for row in rows) else 1

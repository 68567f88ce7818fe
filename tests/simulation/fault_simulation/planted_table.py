"""The table of docs/reliability.md that says how soon each planted fault is found. Loads nothing of gradbus."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fault_simulation.mutations import MUTATIONS

PAGE = Path("docs", "reliability.md")
HEADER = ("| planted fault | flavour, or test | seeds | found by |", "|---|---|---|---|")


class Outcome(NamedTuple):
    """What came of one planted fault.

    Attributes:
        runs: the flavour of its seeds, or the test that looks for it. seeds: that were run, the last of which has found
            it if ``is_found``; 0 for a test. invariant: which did not hold there.
    """

    name: str
    runs: str
    seeds: int = 0
    invariant: str = ""
    is_found: bool = False

    def __str__(self) -> str:
        by = f" in {self.seeds} seeds of flavour {self.runs}: {self.invariant}" if self.seeds else f" by {self.runs}"
        return f"{self.name}: {'found' if self.is_found else 'NOT found'}{by.removesuffix(': ')}"

    def row(self) -> str:
        """Return its line of the table."""
        file, _, test = self.runs.partition("::")
        runs = f"[{Path(file).name}](../{file})" if test else f"`{self.runs}`"
        missed = "not found" if self.seeds or test else "not run"
        found_by = (self.invariant or "the test") if self.is_found else missed
        return f"| {self.name} | {runs} | {self.seeds or ''} | {found_by} |"


def write(page: Path, outcomes: Iterable[Outcome]) -> None:
    """Put these outcomes into the table of a page; lines of other faults stay, as long as the fault is there.

    Raises:
        ValueError: the page has no such table.
    """
    before, header, rest = page.read_text(encoding="utf-8").partition("\n".join(HEADER) + "\n")
    if not header:
        raise ValueError(f"{page} has no table that begins with {HEADER[0]!r}: restore these two lines")
    table = list(itertools.takewhile(lambda line: line.startswith("|"), rest.splitlines(keepends=True)))
    rows = {line.split("|")[1].strip(): line for line in table}
    rows |= {outcome.name: outcome.row() + "\n" for outcome in outcomes}
    lines = [rows[mutation.name] for mutation in MUTATIONS if mutation.name in rows]
    page.write_text("".join((before, header, *lines, rest[len("".join(table)) :])), encoding="utf-8")

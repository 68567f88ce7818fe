"""A benchmark in parts: each gives rows, and one that fails takes the figures of no other along."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradbus.experiments.bench_rows import Row, finish
from gradbus.experiments.cli.exit_codes import NoData, exit_code_of

Taken = tuple[list[Row], dict[str, Any]]
"""Rows, and samples for the file."""


class Part(NamedTuple):
    """``about``: what it is, and its time on 2 cores. ``needs_mnist``: it cannot do without."""

    measure: Callable[[], Taken]
    about: str
    needs_mnist: bool = False


def listed(parts: Mapping[str, Part]) -> str:
    """For the help of a command."""
    return "parts:\n" + "\n".join(f"  {name:12} {part.about}" for name, part in parts.items())


def main(
    title: str, names: Sequence[str], parts: Mapping[str, Part], out: Path, *, data_root: Path | None = None
) -> int:
    """Run these parts, print their rows, write the file.

    Returns:
        The exit code: 1 if a figure falls short or a part fails; that of missing data if MNIST is not to be had.
    """
    try:
        check_mnist(names, parts, data_root)
    except NoData as missing:
        print(f"bench: {missing}", file=sys.stderr)
        return int(exit_code_of(missing))
    rows, samples = run(names, parts)
    return finish(title, rows, out, samples)


def check_mnist(names: Sequence[str], parts: Mapping[str, Part], data_root: Path | None = None) -> None:
    """Before minutes have gone into other parts. Raises NoData: one of these parts needs it."""
    if not any(parts[name].needs_mnist for name in names):
        return
    from gradbus import models

    try:
        models.mnist(data_root)
    except models.DataMissing as missing:
        without = " ".join(f"--part {name}" for name, part in parts.items() if not part.needs_mnist)
        raise NoData(f"{missing}. What needs no data: {without or 'nothing here'}") from None


def run(names: Sequence[str], parts: Mapping[str, Part]) -> Taken:
    """Rows and samples of these parts. One that fails becomes a row that falls short, and the others go on."""
    rows: list[Row] = []
    samples: dict[str, Any] = {"seconds": {}}
    for name in names:
        print(f"measuring: {name} ({parts[name].about})", file=sys.stderr, flush=True)
        began_s = time.perf_counter()
        try:
            more, taken = parts[name].measure()
        except Exception as error:
            traceback.print_exc()
            more, taken = [Row(name, "runs", 0, "", False, fault_of(error))], {}
        samples["seconds"][name] = round(time.perf_counter() - began_s, 1)
        rows += more
        samples |= taken
    return rows, samples


def fault_of(error: Exception) -> str:
    """In one line: what the last one of its text says, which in a traceback of a rank is its error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"

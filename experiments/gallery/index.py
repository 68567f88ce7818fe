"""A page of all figures: for each its data, its runs, and the command that makes it anew."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradbus.experiments.gallery.catalogue import CATALOGUE
from gradbus.experiments.gallery.plan import Scale
from gradbus.experiments.gallery.published import source
from gradbus.experiments.gallery.store import Finished

_MACHINE = ("cpu", "cores", "system", "python", "torch", "cyclonedds")


def make_command(scale: Scale) -> str:
    """What makes these figures."""
    return "make figures QUICK=1" if scale.name == "quick" else "make figures"


def write_index(
    out: Path, scale: Scale, finished: Sequence[tuple[str, Finished]], failures: Mapping[str, str], *, code: str
) -> Path:
    """Write ``index.md`` beside the figures.

    Args:
        failures: figures that could not be drawn, and why.
        code: hash of the code that draws; runs may be of another.
    """
    lines = [
        "# Figures", "", *_about(scale, [done for _, done in finished], code), "",
        "Each figure is drawn from one table, a CSV file, which is made of the JSONL files that the runs left. "
        "docs/figures.md tells what the figures show.", "",
    ]  # fmt: skip
    for name, entry in CATALOGUE.items():
        lines += [f"## {entry.title}", ""]
        if name in failures:
            lines += [f"Not drawn: {failures[name]}", ""]
            continue
        runs = Counter(group for group, _ in finished if group in entry.groups)
        used = ", ".join(f"`{group}` ({count})" for group, count in runs.items())
        lines += [
            f"![{entry.title}]({name}.png)", "",
            f"[PNG]({name}.png), [SVG]({name}.svg); data: [{entry.table}.csv](data/{entry.table}.csv), of the runs "
            f"{used} below; command: `{make_command(scale)}`", "",
        ]  # fmt: skip
    lines += ["## Runs", "", "| group | run | seconds | code |", "|---|---|---|---|"]
    for group, done in finished:
        where = Path(os.path.relpath(done.path, out)).as_posix()
        lines.append(f"| {group} | [{done.run.label}]({where}) | {done.seconds:g} | {done.code} |")
    lines += ["", f"Published figures: {source()}", ""]
    path = out / "index.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _about(scale: Scale, finished: Sequence[Finished], code: str) -> list[str]:
    if not finished:
        return ["No run is done yet."]
    dates = sorted(str(done.machine.get("date", "")) for done in finished)
    newest = max(finished, key=lambda done: str(done.machine.get("date", "")))
    where = ", ".join(f"{key} {newest.machine[key]}" for key in _MACHINE if key in newest.machine)
    loads = [float(done.machine.get("load_1min", 0)) for done in finished]
    lines = [
        f"`{make_command(scale)}`: {len(finished)} runs, {sum(done.seconds for done in finished) / 60:.0f} minutes in "
        f"all, from {dates[0]} to {dates[-1]}.",
        f"{where}. Load of the machine at the end of the runs: {min(loads):g} to {max(loads):g}.",
    ]
    others = sorted({done.code for done in finished} - {code})
    if others:
        lines.append(f"Runs by another version of the code than the one here ({code}): {', '.join(others)}.")
    return lines

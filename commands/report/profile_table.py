"""The profiles of all ranks together: a table of where the time of a step goes, and one trace from the traces of all.

    python -m gradbus.commands.report.profile_table FOLDER

The folder is a run directory: ``profile-rank-R.jsonl`` and ``trace-rank-R.json`` of every rank, those of other machines
copied into it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradbus.commands.amounts import size
from gradbus.commands.rundir.traces import files_of_ranks, merge_traces, readable
from gradbus.runtime.profiling.summary import ProfileSummary, read_summary
from gradbus.runtime.profiling.table import PARTS

_BETWEEN_STEPS = {"eval_s": "eval", "checkpoint_s": "checkpoint"}


def summary_table(summaries: Sequence[ProfileSummary], *, max_ranks: int = 8) -> Table:
    """A line for each part of a step, a column for each rank: the mean per step, and behind it the maximum.

    The column ``all`` has the mean over all ranks. Other spans and counters follow the usual ones; lines of evaluation
    and checkpoints are seconds in all. Of more than ``max_ranks`` those are shown that wait least, and so delay others.
    """
    shown = sorted(sorted(summaries, key=_wait)[:max_ranks], key=lambda summary: summary.rank)
    together = _together(summaries)
    columns = [together, *shown] if len(summaries) > 1 else [*shown]

    table = Table(title="Per step: mean (maximum, where it differs)")
    if len(shown) < len(summaries):
        table.caption = f"{len(shown)} of {len(summaries)} ranks, those that wait least: the others wait for them"
    table.add_column("", no_wrap=True)
    for summary in columns:
        heading = "all" if summary is together else f"rank {summary.rank}"
        table.add_column(heading, justify="right", overflow="fold")
    table.add_row("steps", *(_steps(summary) for summary in columns))
    others = sorted(set(together.mean) - {*PARTS, *_BETWEEN_STEPS})
    for name, label in [*PARTS.items(), *((name, name.removesuffix("_s")) for name in others)]:
        if name in together.mean:
            unit = ", ms" if name.endswith("_s") else ""
            table.add_row(escape(label) + unit, *(_cell(summary, name) for summary in columns))
    for name, label in _BETWEEN_STEPS.items():
        if _in_all(together, name):
            table.add_row(f"{label}, s in all", *(f"{_in_all(summary, name):.2f}" for summary in columns))
    return table


def load_summaries(folder: Path) -> list[ProfileSummary]:
    """Return those of all ranks there, by rank. A file that cannot be read is named in the log and left out."""
    found = readable(files_of_ranks(folder, "profile-rank-*.jsonl"), read_summary)
    return sorted((summary for summary in found if summary is not None), key=lambda summary: summary.rank)


def show_profile(folder: Path, console: Console) -> bool:
    """Print the table and where the trace is. False: there is no profile. Raises OSError, as merge_traces."""
    summaries, trace = load_summaries(folder), merge_traces(folder)
    if summaries:
        console.print(summary_table(summaries))
    if trace is not None:
        text = f"trace: {trace}, to be opened in https://ui.perfetto.dev or chrome://tracing"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return bool(summaries) or trace is not None


def _together(summaries: Sequence[ProfileSummary]) -> ProfileSummary:
    """Sums and maxima over all ranks, as if they were one."""
    steps = sum(summary.steps for summary in summaries)
    total = _sums([summary.total for summary in summaries])
    maxima: dict[str, float] = {}
    for summary in summaries:
        for name, amount in summary.max.items():
            maxima[name] = max(amount, maxima.get(name, amount))
    return ProfileSummary(
        rank=-1,
        steps=steps,
        failed_steps=sum(summary.failed_steps for summary in summaries),
        mean={name: amount / steps for name, amount in total.items()} if steps else {},
        max=maxima,
        total=total,
        outside=_sums([summary.outside for summary in summaries]),
    )


def _sums(amounts: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in amounts for name in each)
    return {name: sum(each.get(name, 0.0) for each in amounts) for name in names}


def _wait(summary: ProfileSummary) -> float:
    return summary.mean.get("wait_s", 0.0)


def _steps(summary: ProfileSummary) -> str:
    return f"{summary.steps}, {summary.failed_steps} failed" if summary.failed_steps else str(summary.steps)


def _cell(summary: ProfileSummary, name: str) -> str:
    if name not in summary.mean:
        return "-"
    mean, maximum = _figure(name, summary.mean[name]), _figure(name, summary.max.get(name, 0.0))
    return mean if mean == maximum else f"{mean} ({maximum})"


def _figure(name: str, amount: float) -> str:
    if name.endswith("_s"):
        return f"{amount * 1000:.2f}"
    return size(round(amount)) if name.startswith("bytes") and math.isfinite(amount) else f"{amount:.6g}"


def _in_all(summary: ProfileSummary, name: str) -> float:
    return summary.total.get(name, 0.0) + summary.outside.get(name, 0.0)


def main() -> int:
    """Print the table of a folder, and merge its traces."""
    parser = argparse.ArgumentParser(
        description="Table and trace of a data-parallel run, from the profiles of its ranks."
    )
    parser.add_argument("folder", type=Path, help="with profile-rank-R.jsonl and trace-rank-R.json of every rank")
    folder = parser.parse_args().folder
    if show_profile(folder, Console()):
        return 0
    print(f"{folder}: no profile there (profile-rank-R.jsonl, trace-rank-R.json)", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

"""The command ``gradbus check``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradbus.experiments.run.lifecycle import guard
from gradbus.runtime.plain_text import plain_line

if TYPE_CHECKING:
    from gradbus.experiments.history_check import Finding

_SHOWN = 5  # violations of one invariant


def check(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="What a run has left: runs/JOB-TIME.", show_default=False)
    ],
) -> None:
    """Check what a run has noted against what must be true of every run: nothing lost, nothing counted twice.

    Says what was compared, and ends with exit code 12 where something does not hold. See docs/reliability.md.
    """
    lines: list[str] = []
    well: list[bool] = []

    def action() -> None:
        from gradbus.experiments.history import read_history
        from gradbus.experiments.history_check import check as check_all

        run = read_history(run_dir)
        findings = check_all(run)
        lines.extend(table(findings))
        if run.cut_short:
            lines.append(f"{run.cut_short} lines are left out: cut short where a process was killed, or damaged")
        if run.without_start:
            lines.append(f"{run.without_start} events are left out: no start of their process was noted")
        well.append(not any(finding.violations for finding in findings))

    code = guard("check", action)
    for line in lines:
        print(plain_line(line))
    raise typer.Exit(code or (0 if all(well) else 12))


def table(findings: list[Finding]) -> list[str]:
    """For people: a line for each invariant, and the first of its violations."""
    from gradbus.experiments.history_check import TITLES

    lines = []
    for finding in findings:
        bad = len(finding.violations)
        verdict = f"{bad} VIOLATED" if bad else "holds" if finding.checked else "nothing to check"
        lines.append(f"{finding.name}  {TITLES[finding.name]:<40} {verdict:<18} {finding.checked:>8} compared")
        lines += [f"    {violation}" for violation in finding.violations[:_SHOWN]]
        if bad > _SHOWN:
            lines.append(f"    and {bad - _SHOWN} more")
    return lines


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(check)

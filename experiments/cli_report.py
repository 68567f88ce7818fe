"""The command ``gradbus report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradbus.experiments.run.lifecycle import guard


def report(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR", help="What a run has left: runs/JOB-TIME.", show_default=False)
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A B", help="Two runs of one kind, side by side; with RUN_DIR, three.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to. [default: report.html in the run directory]")
    ] = None,
) -> None:
    """Make one HTML file of a run: curves, where the time went, bytes, faults, settings. It opens from the disk.

    For federated and for data-parallel runs, also for one that goes on or was killed.
    """

    def action() -> None:
        from gradbus.experiments.report.build import make_report

        print(make_report(run_dir, compare or (), out))

    raise typer.Exit(guard("report", action))


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(report)

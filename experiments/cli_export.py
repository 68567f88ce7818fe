"""The command ``gradbus export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradbus.experiments.choices import FileFormat
from gradbus.experiments.lookup import let_current_directory_be_imported
from gradbus.experiments.run.lifecycle import guard


def export(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="What a run has left: runs/JOB-TIME.", show_default=False)
    ],
    to: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to. [default: model.safetensors or model.pt in the run directory]"),
    ] = None,
    form: Annotated[
        FileFormat | None, typer.Option("--format", help="[default: what FILE ends with, else safetensors]")
    ] = None,
    number: Annotated[
        int | None,
        typer.Option("--round", min=0, metavar="N", help="Round, or step of ranks. [default: the newest checkpoint]"),
    ] = None,
) -> None:
    """Write the trained model of a run as named tensors, for model.load_state_dict().

    For federated and for data-parallel runs, also for one that goes on or was killed. The model is the one that
    config.json of the run names: start the command where that can be imported.
    """

    def action() -> None:
        from gradbus.experiments.rundir.export import export as write

        let_current_directory_be_imported()
        print(write(run_dir, to, None if form is None else form.value, number).text)

    raise typer.Exit(guard("export", action))


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(export)

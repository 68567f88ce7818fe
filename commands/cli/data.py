"""The command ``gradbus data inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradbus.commands.cli.options import Config, DataRoot, Overrides, add_current_directory_to_path, command

data = typer.Typer(name="data", help="Look at the data of a federated run.", no_args_is_help=True)


@data.callback()
def _group() -> None:
    """Without it a single command would take the place of the group."""


@data.command()
@command("data")
def inspect(
    config: Config,
    clients: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="[default: as the file says]", show_default=False)
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it there, as PNG or SVG.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    data_root: DataRoot = None,
) -> None:
    """Show which client has what of the training set: samples, labels, and how far they are from those of all.

    CONFIG is that of a controller or of a client.
    """
    from rich.console import Console

    from gradbus.commands.run.data_shares import draw_shares, print_shares, shares_of

    add_current_directory_to_path()
    shares = shares_of(config, overrides or (), data_root, clients)
    print_shares(shares, Console())
    if figure is not None:
        draw_shares(shares, figure)
        print(f"drawn: {figure}")


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.add_typer(data)

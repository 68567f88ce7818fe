"""The commands ``gradbus config reference | schema``."""

from __future__ import annotations

from typing import Annotated

import typer

from gradbus.commands.choices import FileKind
from gradbus.commands.cli.options import command, print_text

config = typer.Typer(
    name="config",
    help="Show all settings of configuration files; docs/settings.md is made by it.",
    no_args_is_help=True,
)


@config.command()
@command("config")
def reference(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/settings.md.")] = False,
) -> None:
    """Print every setting of controller, client and worker: name, default, type, and what it does."""
    from gradbus.commands.settings_reference import as_markdown, as_text

    print_text(as_markdown() if markdown else as_text())


@config.command()
@command("config")
def schema(
    kind: Annotated[FileKind, typer.Argument(help="The command that reads the file.", show_default=False)],
) -> None:
    """Print a JSON schema of a configuration file, with which an editor completes and checks it."""
    from gradbus.commands.settings_reference import json_schema
    from gradbus.runtime.json_text import json_text

    print_text(json_text(json_schema(kind), indent=2) + "\n")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.add_typer(config)

"""The commands ``gradbus flower run | node``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradbus.commands.cli.options import FullTraceback, Insecure, Level, Loop, Overrides, Style, command
from gradbus.commands.lifecycle import run_loop
from gradbus.commands.overrides import settings_of

flower = typer.Typer(
    name="flower",
    help="Run Flower apps over the bus, unchanged; see docs/flower.md.",
    no_args_is_help=True,
)
AppDir = Annotated[
    Path, typer.Argument(metavar="APP_DIR", help="Folder of a Flower app, with pyproject.toml.", show_default=False)
]
File = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings: sections bus and flower.", show_default=False)
]


@flower.command()
@command("flower run")
def run(
    app_dir: AppDir,
    run_config: Annotated[
        list[str] | None,
        typer.Option(metavar="'KEY=VALUE ...'", help="Values in place of the app's config, at all nodes as well."),
    ] = None,
    config: File = None,
    insecure: Insecure = False,
    overrides: Overrides = None,
    log_level: Level = "info",
    log_style: Style = "auto",
    loop: Loop = "uvloop",
    full_traceback: FullTraceback = False,
) -> None:
    """Run the ServerApp of a Flower app, for the nodes of the job."""
    from gradbus.commands.run.console import Screen
    from gradbus.commands.run.flower import configure_flower_logs, open_app, read_flower_file, run_server

    file = read_flower_file(config, settings_of(overrides, insecure=insecure))
    app = open_app(app_dir)
    from gradbus.actors.flower.apps import load_server_app, parse_overrides

    values = parse_overrides(run_config or [])
    app.run_config(values)
    screen = Screen(live=False, level=log_level, style=log_style)
    screen.configure_logs()
    configure_flower_logs(log_style)
    server_app = load_server_app(app)
    screen.say(f"done: {run_loop(lambda: run_server(file, app, server_app, values), loop)}")


@flower.command()
@command("flower node")
def node(
    app_dir: AppDir,
    partition: Annotated[
        int | None,
        typer.Option(min=0, help="Partition of this node, from 0; another one for each.", show_default=False),
    ] = None,
    of: Annotated[
        int | None,
        typer.Option("--of", min=1, metavar="N", help="Number of partitions; the same for all.", show_default=False),
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(metavar="'KEY=VALUE ...'", help="Values for context.node_config, in Flower's syntax."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of this node, which gives it its id. [default: drawn]", show_default=False),
    ] = None,
    config: File = None,
    insecure: Insecure = False,
    overrides: Overrides = None,
    log_level: Level = "info",
    log_style: Style = "auto",
    loop: Loop = "uvloop",
    full_traceback: FullTraceback = False,
) -> None:
    """Answer the messages of a Flower app's ServerApp with its ClientApp."""
    from gradbus.commands.run.console import Screen
    from gradbus.commands.run.flower import configure_flower_logs, open_app, place_of, read_flower_file, run_node

    file = read_flower_file(config, settings_of(overrides, insecure=insecure))
    place_of(partition, of, name, {})  # options that do not fit are refused before Flower is loaded, or missed
    app = open_app(app_dir)
    from gradbus.actors.flower.apps import load_client_app, parse_node_config
    from gradbus.commands.amounts import size

    config_of_node = {**file.flower.node_config, **parse_node_config(node_config or [])}
    place, values = place_of(partition, of, name, config_of_node)
    screen = Screen(live=False, level=log_level, style=log_style)
    screen.configure_logs()
    configure_flower_logs(log_style)
    client_app = load_client_app(app)
    done = run_loop(lambda: run_node(file, app, client_app, place, values), loop)
    screen.say(f"done: {done.answered} messages answered, down {size(done.bytes_down)}, up {size(done.bytes_up)}")


def add_to(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(flower)

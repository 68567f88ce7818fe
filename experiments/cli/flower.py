"""The commands ``gradbus flower run | node``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradbus.experiments.cli.options import FullTraceback, Insecure, Level, Loop, Overrides, Style, command, settings_of
from gradbus.experiments.run.lifecycle import run_loop

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
    from gradbus.experiments.run.console import Screen
    from gradbus.experiments.run.flower import open_app, read_flower_file, run_server

    file = read_flower_file(config, settings_of(overrides, insecure=insecure))
    app = open_app(app_dir)
    from gradbus.actors.flower.apps import load_server_app, parse_overrides

    values = parse_overrides(run_config or [])
    app.run_config(values)
    screen = Screen(live=False, level=log_level, style=log_style)
    screen.configure_logs()
    server_app = load_server_app(app)
    screen.say(f"done: {run_loop(lambda: run_server(file, app, server_app, values), loop)}")


@flower.command()
@command("flower node")
def node(
    app_dir: AppDir,
    partition: Annotated[int, typer.Option(min=0, help="Number of this node, from 0; another one for each.")],
    of: Annotated[int, typer.Option("--of", min=1, metavar="N", help="Number of partitions; the same for all nodes.")],
    config: File = None,
    insecure: Insecure = False,
    overrides: Overrides = None,
    log_level: Level = "info",
    log_style: Style = "auto",
    loop: Loop = "uvloop",
    full_traceback: FullTraceback = False,
) -> None:
    """Answer the messages of a Flower app's ServerApp with its ClientApp, as one of N nodes."""
    from gradbus.experiments.run.console import Screen
    from gradbus.experiments.run.flower import open_app, read_flower_file, run_node
    from gradbus.runtime.errors import ConfigError

    if partition >= of:
        raise ConfigError(f"--partition {partition} --of {of}: partitions count from 0, so give 0 to {of - 1}")
    file = read_flower_file(config, settings_of(overrides, insecure=insecure))
    app = open_app(app_dir)
    from gradbus.actors.flower.apps import load_client_app
    from gradbus.experiments.amounts import size

    screen = Screen(live=False, level=log_level, style=log_style)
    screen.configure_logs()
    client_app = load_client_app(app)
    done = run_loop(lambda: run_node(file, app, client_app, partition, of), loop)
    screen.say(f"done: {done.answered} messages answered, down {size(done.bytes_down)}, up {size(done.bytes_up)}")


def add_to(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(flower)

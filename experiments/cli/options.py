"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from gradbus.experiments.cli.choices import LogLevel, LogStyle, LoopName

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A .json or .toml file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set one key, stronger than the file. May be repeated."),
]
DataRoot = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder that holds MNIST/raw. [default: $GRADBUS_DATA, the cache]")
]
Level = Annotated[LogLevel, typer.Option(help="Least important level that is logged.")]
Style = Annotated[LogStyle, typer.Option(help="auto: readable on a terminal, JSON elsewhere.")]
Loop = Annotated[LoopName, typer.Option(help="Event loop; asyncio where there is no uvloop.")]
RunDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Reports, figures, checkpoints. [default: runs/JOB-TIME]")
]
TensorBoard = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write scalars for TensorBoard there. Needs the package tensorboard"),
]
Resume = Annotated[bool | None, typer.Option("--resume/--no-resume", help="Continue the run in the state directory.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Let data leave this machine without protection: with no key.")
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The key of the job. [default: as the environment says, else the key of this user]",
        show_default=False,
    ),
]
FullTraceback = Annotated[
    bool, typer.Option("--traceback", help="Show every line of a traceback, those of libraries, too.")
]
Live = Annotated[bool, typer.Option("--live/--no-live", help="A table that follows the run, on a terminal.")]


def insecure_setting(insecure: bool) -> list[str]:
    """The override of a setting that the option stands for, if it is given."""
    return ["bus.insecure=true"] if insecure else []


def folder_setting(key: str, folder: Path | None) -> list[str]:
    """An option that names a folder as an override of the setting of that name; a path like ``2024`` stays a text."""
    return [] if folder is None else [f"{key}={json.dumps(os.fspath(folder))}"]


def addresses_of(text: str) -> tuple[str, ...]:
    """The addresses in an option that lists them, separated by commas."""
    return tuple(address.strip() for address in text.split(",") if address.strip())

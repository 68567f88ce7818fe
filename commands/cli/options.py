"""Options and arguments that several commands share, and the decorator of every command."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from gradbus.commands.choices import BindMode, LogLevel, LogStyle, LoopName
from gradbus.commands.lifecycle import guard
from gradbus.runtime.plain_text import plain_text

P = ParamSpec("P")

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
Bind = Annotated[
    BindMode,
    typer.Option(
        help="Cores of its own for each rank of a machine, within a NUMA node: auto, where there are two for each and "
        "nothing else has bound it; cores, or an error; network, cores of the NUMA node of the network card, or an "
        "error; none."
    ),
]
RunDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Reports, figures, checkpoints. [default: runs/JOB-TIME]")
]
TensorBoard = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write scalars for TensorBoard there. Needs the package tensorboard"),
]
Mlflow = Annotated[
    str | None,
    typer.Option(metavar="URI", help="MLflow tracking server that gets the numbers. Needs the package mlflow-skinny"),
]
Wandb = Annotated[
    str | None,
    typer.Option(metavar="PROJECT", help="Project of Weights & Biases that gets the numbers. Needs the package wandb"),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", help="Serve metrics for Prometheus there. Needs the package prometheus-client"),
]
Resume = Annotated[bool | None, typer.Option("--resume/--no-resume", help="Continue the run in the state directory.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Let data leave this machine without protection: with no key.")
]
Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        metavar="ENDPOINTS",
        help="Relays to dial, separated by commas: tls/relay.example.org:443. The bus then uses Zenoh. "
        "[default: bus.connect]",
        show_default=False,
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", metavar="FILE", help="Authority of the relays. [default: bus.tls_ca]", show_default=False),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The key of the job. [default: that of the environment, else the key of this user]",
        show_default=False,
    ),
]
Domain = Annotated[int, typer.Option(min=0, max=232, help="DDS domain.")]
FullTraceback = Annotated[
    bool, typer.Option("--traceback", help="Show every line of a traceback, those of libraries, too.")
]
Live = Annotated[bool, typer.Option("--live/--no-live", help="A table that follows the run, on a terminal.")]


def command(name: str) -> Callable[[Callable[P, int | None]], Callable[P, None]]:
    """Make a command of a function: how it ends becomes an exit code, and an error one line that begins with ``name``.

    The function returns an exit code; None is 0. An option ``full_traceback`` is obeyed.
    """

    def decorate(function: Callable[P, int | None]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            full = bool(kwargs.get("full_traceback"))
            raise typer.Exit(guard(name, lambda: function(*args, **kwargs), full_traceback=full))

        return run

    return decorate


def print_text(text: str) -> None:
    """Print a text, some of whose words may be those of others: a terminal obeys none of them. Its reader, such as
    ``head`` or a pager, may end before its end."""
    try:
        print(plain_text(text), end="", flush=True)
    except BrokenPipeError:  # the interpreter's last flush must not fail as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def addresses_of(text: str) -> tuple[str, ...]:
    """The addresses in an option that lists them, separated by commas."""
    return tuple(address.strip() for address in text.split(",") if address.strip())


def add_current_directory_to_path() -> None:
    """Put the current directory on the import path, for a user's own code, behind everything that is installed.

    Never in front, where ``python -m`` puts it: a folder ``codecs`` or ``models`` in it would hide other modules.
    """
    here = os.getcwd()
    sys.path[:] = [entry for entry in sys.path if entry not in ("", here)] + [here]

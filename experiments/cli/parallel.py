"""The commands of data-parallel training: ``gradbus worker | run``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gradbus.experiments.cli.choices import LogLevel, LogStyle, LoopName
from gradbus.experiments.cli.import_object import add_current_directory_to_path
from gradbus.experiments.cli.options import (
    Config,
    DataRoot,
    FullTraceback,
    Insecure,
    Live,
    Loop,
    Overrides,
    Resume,
    RunDir,
    Style,
    TensorBoard,
    folder_setting,
    insecure_setting,
)
from gradbus.experiments.run.lifecycle import guard


def worker(
    config: Config,
    rank: Annotated[
        int | None, typer.Option(help="Rank of this process, from 0. [default: the file, $GRADBUS_RANK, $RANK]")
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(help="Ranks in all. [default: the file, $GRADBUS_WORLD, $WORLD_SIZE, $WORLD]"),
    ] = None,
    run_dir: RunDir = None,
    tensorboard: TensorBoard = None,
    resume: Resume = None,
    live: Live = True,
    insecure: Insecure = False,
    overrides: Overrides = None,
    data_root: DataRoot = None,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            help="Least important level that is logged. [default: info; warning for rank 0, which reports each epoch]"
        ),
    ] = None,
    log_style: Style = LogStyle.AUTO,
    loop: Loop = LoopName.UVLOOP,
    full_traceback: FullTraceback = False,
) -> None:
    """Train as one rank of a data-parallel job: the same model on every rank, each with its part of the data.

    One process per rank, on one machine or on several. Rank 0 reports the progress.
    """
    hint: list[str] = []

    def action() -> None:
        from gradbus.experiments.run.commands import worker_run

        add_current_directory_to_path()
        extra = [] if resume is None else [f"worker.resume={str(resume).lower()}"]
        extra += [*folder_setting("tensorboard", tensorboard), *insecure_setting(insecure)]
        worker_run(
            config, rank=rank, world=world, run_dir=run_dir, overrides=[*(overrides or ()), *extra],
            data_root=data_root, live=live, level=log_level, style=log_style, loop=loop, hint=hint,
        )  # fmt: skip

    raise typer.Exit(guard("worker", action, when_stopped=lambda: "".join(hint), full_traceback=full_traceback))


def run(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="CONFIG", help="CONFIG and further options, as for gradbus worker.", show_default=False),
    ],
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", metavar="N", help="Ranks. [default: world in CONFIG]")
    ] = None,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0, metavar="SECONDS", help="Between the request to end and the kill.")
    ] = 5.0,
) -> None:
    """Start all ranks of a data-parallel job on this machine, and end them together.

    For example: gradbus run -n 4 -- my.json --set worker.epochs=3

    Each line of a rank comes with [rank R] before it. Ctrl-C is passed on, the second one kills. Where a rank fails,
    the others are ended, and its last lines are shown again.

    A job without a name in CONFIG (bus.job) gets one of its own, so that two launches do not disturb each other. The
    ranks share the cores of the machine, unless task.threads says how many threads each may have.
    """
    worker_command = context.parent.command.get_command(context, "worker")  # type: ignore[union-attr]
    parsed = worker_command.make_context("worker", list(arguments), parent=context.parent)  # complains here, once
    code: list[int] = []

    def action() -> None:
        from gradbus.experiments.launch.command import launch_run

        add_current_directory_to_path()
        code.append(launch_run(arguments, parsed.params, ranks=ranks, grace_s=grace_s))

    failed: Any = guard("run", action)
    raise typer.Exit(failed or code[0])


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(worker)
    # What follows CONFIG is for the ranks, also without "--".
    app.command(context_settings={"allow_interspersed_args": False})(run)

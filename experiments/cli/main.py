"""The command line: ``gradbus demo | controller | client | worker | run | report | export | check | status | keys |
config | doctor``.

What is imported here decides how long ``gradbus --help`` takes; torch and DDS are imported inside the commands.
"""

from __future__ import annotations

from typing import Annotated

import typer

import gradbus
from gradbus.experiments.cli import inspection, keys, parallel, settings
from gradbus.experiments.cli.choices import DATA_HELP, PARTITION_HELP, CodecChoice, LogLevel, LogStyle, LoopName
from gradbus.experiments.cli.import_object import add_current_directory_to_path
from gradbus.experiments.cli.options import (
    Config,
    DataRoot,
    FullTraceback,
    Insecure,
    Level,
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
from gradbus.experiments.run.lifecycle import guard, run_loop

app = typer.Typer(
    name="gradbus",
    help="Train one model across machines over a DDS data bus.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # the default would take [brackets] for markup, and keep the line ends of docstrings
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"gradbus {gradbus.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")] = 5,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client processes.")] = 2,
    samples: Annotated[int, typer.Option(min=0, help="Samples per client and round; 0: all of the client.")] = 2000,
    data: Annotated[str, typer.Option(help=DATA_HELP)] = "auto",
    codec: Annotated[CodecChoice, typer.Option(help="Codec of the clients' updates.")] = CodecChoice.FP32,
    downlink_codec: Annotated[CodecChoice, typer.Option(help="Codec of the global model.")] = CodecChoice.FP32,
    partition: Annotated[str, typer.Option(help=PARTITION_HELP)] = "iid",
    seed: Annotated[int, typer.Option(min=0, max=0x7FFF_FFFF, help="Seed of everything random.")] = 0,
    domain: Annotated[int, typer.Option(min=0, max=232, help="DDS domain.")] = 0,
    run_dir: RunDir = None,
    tensorboard: TensorBoard = None,
    live: Live = True,
    overrides: Overrides = None,
    data_root: DataRoot = None,
    log_level: Level = LogLevel.INFO,
    loop: Loop = LoopName.UVLOOP,
    full_traceback: FullTraceback = False,
) -> None:
    """Train on this machine: a controller and its clients, each a process of its own, over DDS."""
    hint: list[str] = []

    def action() -> None:
        from gradbus.experiments.run.commands import demo_run
        from gradbus.experiments.run.demo import DemoOptions

        add_current_directory_to_path()
        options = DemoOptions(
            rounds=rounds, clients=clients, samples=samples, data=data, data_root=data_root, codec=codec.value,
            downlink_codec=downlink_codec.value, partition=partition, seed=seed, domain=domain, run_dir=run_dir,
            overrides=(*(overrides or ()), *folder_setting("tensorboard", tensorboard)), loop=loop.value,
            level=log_level.value, full_traceback=full_traceback,
        )  # fmt: skip
        demo_run(options, live=live, loop=loop, hint=hint)

    raise typer.Exit(guard("demo", action, when_stopped=lambda: "".join(hint), full_traceback=full_traceback))


@app.command()
def controller(
    config: Config,
    run_dir: RunDir = None,
    tensorboard: TensorBoard = None,
    resume: Resume = None,
    live: Live = True,
    insecure: Insecure = False,
    overrides: Overrides = None,
    data_root: DataRoot = None,
    log_level: Level = LogLevel.INFO,
    log_style: Style = LogStyle.AUTO,
    loop: Loop = LoopName.UVLOOP,
    full_traceback: FullTraceback = False,
) -> None:
    """Run the rounds of a job: wait for its clients, average what they learn, publish the model."""
    hint: list[str] = []

    def action() -> None:
        from gradbus.experiments.run.commands import controller_run

        add_current_directory_to_path()
        extra = [] if resume is None else [f"federated.resume={str(resume).lower()}"]
        extra += [*folder_setting("tensorboard", tensorboard), *insecure_setting(insecure)]
        controller_run(
            config, run_dir=run_dir, overrides=[*(overrides or ()), *extra], data_root=data_root, live=live,
            level=log_level, style=log_style, loop=loop, hint=hint,
        )  # fmt: skip

    raise typer.Exit(guard("controller", action, when_stopped=lambda: "".join(hint), full_traceback=full_traceback))


@app.command()
def client(
    config: Config,
    client_id: Annotated[
        int,
        typer.Option(
            "--id", min=0, help="Id of this client, another one for each client of the job.", show_default=False
        ),
    ],
    insecure: Insecure = False,
    overrides: Overrides = None,
    data_root: DataRoot = None,
    log_level: Level = LogLevel.INFO,
    log_style: Style = LogStyle.AUTO,
    loop: Loop = LoopName.UVLOOP,
    full_traceback: FullTraceback = False,
) -> None:
    """Train on this machine's own data whenever the controller of the job says so."""

    def action() -> None:
        from gradbus.experiments.buses import check
        from gradbus.experiments.files import ClientFile, load
        from gradbus.runtime import logs

        logs.configure(level=log_level.value, style=log_style.value)
        add_current_directory_to_path()
        extra = [*insecure_setting(insecure), *(["client.full_traceback=true"] if full_traceback else [])]
        settings = load(ClientFile, config, overrides=[*(overrides or ()), *extra], data_root=data_root)
        check(settings.bus)
        from gradbus.experiments.run.federated import run_client

        run_loop(lambda: run_client(settings, client_id), loop)

    raise typer.Exit(guard("client", action, full_traceback=full_traceback))


for _commands in (parallel, inspection, settings, keys):
    _commands.add_to(app)


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()

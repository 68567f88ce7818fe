"""The command line: ``gradbus demo | controller | client | worker | run | report | export | check | status | keys |
doctor``.

What is imported here decides how long ``gradbus --help`` takes; torch and DDS are imported inside the commands.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

import gradbus
from gradbus.experiments import cli_check, cli_export, cli_keys, cli_parallel, cli_report, cli_status
from gradbus.experiments.choices import CodecChoice, LogLevel, LogStyle, LoopName, NetworkChoice
from gradbus.experiments.cli_options import (
    Config,
    DataRoot,
    FullTraceback,
    Insecure,
    KeyFile,
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
from gradbus.experiments.lookup import let_current_directory_be_imported
from gradbus.experiments.run.lifecycle import guard, run_loop

app = typer.Typer(
    name="gradbus",
    help="Train one model across machines over a DDS data bus.",
    add_completion=False,
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
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client processes.")] = 2,
    samples: Annotated[int, typer.Option(min=0, help="Per client and round; 0: all that the client has.")] = 2000,
    data: Annotated[str, typer.Option(help="mnist, glyphs, auto, or package.module:attribute.")] = "auto",
    codec: Annotated[CodecChoice, typer.Option(help="Of the clients' updates.")] = CodecChoice.FP32,
    downlink_codec: Annotated[CodecChoice, typer.Option(help="Of the global model.")] = CodecChoice.FP32,
    partition: Annotated[str, typer.Option(help="iid, dirichlet:ALPHA, shards, by_label, or JSON.")] = "iid",
    seed: Annotated[int, typer.Option(min=0, max=0x7FFF_FFFF)] = 0,
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
        from gradbus.experiments.demo import DemoOptions
        from gradbus.experiments.run.commands import demo_run

        let_current_directory_be_imported()
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

        let_current_directory_be_imported()
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
    client_id: Annotated[int, typer.Option("--id", min=0, help="One for each client of the job.", show_default=False)],
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
        let_current_directory_be_imported()
        extra = [*insecure_setting(insecure), *(["client.full_traceback=true"] if full_traceback else [])]
        settings = load(ClientFile, config, overrides=[*(overrides or ()), *extra], data_root=data_root)
        check(settings.bus)
        from gradbus.experiments.run.federated import run_client

        run_loop(lambda: run_client(settings, client_id), loop)

    raise typer.Exit(guard("client", action, full_traceback=full_traceback))


cli_parallel.add_to(app)
cli_report.add_to(app)
cli_export.add_to(app)
cli_check.add_to(app)
cli_keys.add_to(app)
cli_status.add_to(app)


@app.command()
def doctor(
    network: Annotated[NetworkChoice, typer.Option(help="Network profile.")] = NetworkChoice.LOOPBACK,
    interface: Annotated[str, typer.Option(help="Network interface.")] = "lo",
    peers: Annotated[str, typer.Option(help="Addresses of the other machines, separated by commas.")] = "",
    domain: Annotated[int, typer.Option(min=0, max=232, help="DDS domain.")] = 0,
    key_file: KeyFile = None,
    wait_s: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Look for the doctors of other machines for so long. [default: 60 with --peers, else not at all]",
        ),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Meet the other doctors under this name.", show_default=False)] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Everybody on the network is trusted.")] = False,
    loop: Loop = LoopName.UVLOOP,
) -> None:
    """Check this machine, and with --peers the way to others: versions, network, protection, and DDS, measured.

    Start it on two machines within a minute, with the same settings and each other's address in --peers: they find each
    other, measure both ways, and each says what it does not see, and what to check. No answer is a failure.
    """
    well: list[bool] = []

    def action() -> None:
        from gradbus.experiments.doctor import DEFAULT_WAIT_S, examine
        from gradbus.runtime import logs
        from gradbus.runtime.settings import BusSettings

        logs.configure(level="error")
        addresses = tuple(address.strip() for address in peers.split(",") if address.strip())
        settings = BusSettings(
            domain=domain, network=network.value, interface=interface, peers=addresses, insecure=True  # it says nothing
        )  # fmt: skip
        settings = settings if job is None else settings.model_copy(update={"job": job})
        others = any(address not in ("127.0.0.1", "localhost") for address in addresses)
        seconds = wait_s if wait_s is not None else DEFAULT_WAIT_S if others else None
        well.append(examine(settings, loop, key_file, wait_s=seconds, trusted=insecure))

    code: Any = guard("doctor", action)
    raise typer.Exit(code or (0 if all(well) else 8))


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()

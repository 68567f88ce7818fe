"""Commands that look at a run, a job or this machine: ``report``, ``check``, ``status``, ``dashboard`` and others.

None of them takes part in a job. What they need beyond typer is imported when they run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gradbus.commands.choices import FileFormat, Network
from gradbus.commands.cli.options import (
    Connect,
    KeyFile,
    Level,
    Loop,
    TlsCa,
    add_current_directory_to_path,
    addresses_of,
    command,
    print_text,
)
from gradbus.commands.exit_codes import ExitCode
from gradbus.commands.lifecycle import run_loop
from gradbus.runtime.plain_text import plain_line

BusDomain = Annotated[int | None, typer.Option(min=0, max=232, help="DDS domain. [default: bus.domain, else 0]")]
NetworkProfile = Annotated[Network | None, typer.Option(help="Network profile. [default: bus.network, else loopback]")]
Interface = Annotated[str | None, typer.Option(help="Network interface. [default: bus.interface, else lo]")]
Peers = Annotated[str | None, typer.Option(help="Addresses of all machines, separated by commas. [default: bus.peers]")]
_RUN_DIR_HELP = "What a run has left: runs/JOB-TIME."


def report(
    run_dir: Annotated[Path | None, typer.Argument(metavar="RUN_DIR", help=_RUN_DIR_HELP, show_default=False)] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A B", help="Two runs of one kind, side by side; with RUN_DIR, three.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to. [default: report.html in the run directory]")
    ] = None,
) -> None:
    """Make one HTML file of a run: curves, where the time went, bytes, faults, settings. It opens from the disk.

    For federated and for data-parallel runs, also for one that goes on or was killed.
    """
    from gradbus.commands.report.build import make_report

    print_text(f"{make_report(run_dir, compare or (), out)}\n")


def matrix(
    of: Annotated[
        str | None,
        typer.Option(metavar="CHOICE", help="Compare this one with all others, as codec. [default: all with all]"),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="As docs/matrix.md has it.")] = False,
) -> None:
    """Print which choices of a federated run work together, and why others do not: strategy, rule, mode, codec, others.

    Each cell is asked for, as a controller does before it starts; nothing is trained.
    """
    from gradbus.commands.matrix import as_markdown, as_text

    print_text(as_markdown(of) if markdown else as_text(of))


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help=_RUN_DIR_HELP, show_default=False)],
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
    client: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="State of a client, as STATE_DIR/client-3: the model of that client."),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best model of a run with federated.checkpoint.keep_best.")
    ] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Build the model, for tensors that no checkpoint has. This imports and runs the code that config.json "
            "of the run names: use it for runs of your own, and start the command where that code can be imported.",
        ),
    ] = False,
) -> None:
    """Write the trained model of a run as named tensors, for model.load_state_dict().

    For federated and for data-parallel runs, also for one that goes on or was killed. Only the checkpoint is read, and
    nothing that the run directory names is run; what the checkpoint does not have is left out, and named.
    """
    from gradbus.commands.rundir.export import export as write

    if trust:
        add_current_directory_to_path()
    print_text(f"{write(run_dir, to, form, number, client=client, best=best, trust=trust).text}\n")


def check(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help=_RUN_DIR_HELP, show_default=False)],
) -> int:
    """Check the event journals of a run against what must be true of every run: nothing lost, nothing counted twice.

    Prints what was compared, and ends with exit code 12 where something does not hold or cannot be read. See
    docs/reliability.md.
    """
    from gradbus.commands.history.invariants import check as check_all
    from gradbus.commands.history.invariants import table_of
    from gradbus.commands.history.reader import read_history
    from gradbus.commands.history.replay import own_choice

    run = read_history(run_dir)
    results = check_all(run)
    lines = table_of(results)
    if run.cut_short:
        lines.append(f"{run.cut_short} lines are left out: cut short where a process was killed, or damaged")
    if run.without_start:
        lines.append(f"{run.without_start} events are left out: no start of their process was noted")
    lines += run.left_out[:20]
    if run.left_out:
        lines.append("not checked to the end: what is left out may hold events that do not fit the others")
    if name := next(filter(None, (own_choice(start.opening) for start in run.controller)), ""):
        lines.append(f"rounds of the {name[:100]} are not computed again: no code that a run names is run")
    print_text("".join(f"{plain_line(line)}\n" for line in lines))
    does_not_hold = any(result.violations for result in results)
    return ExitCode.HISTORY if does_not_hold or run.left_out else ExitCode.OK


def status(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Its name.", show_default=False)] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Take job and network from a configuration.", show_default=False),
    ] = None,
    domain: BusDomain = None,
    network: NetworkProfile = None,
    interface: Interface = None,
    peers: Peers = None,
    connect: Connect = None,
    tls_ca: TlsCa = None,
    key_file: KeyFile = None,
    timeout: Annotated[float, typer.Option(min=0.5, help="Seconds to wait for a first answer.")] = 5.0,
    seconds: Annotated[float, typer.Option(min=0.5, help="How long to listen from then on.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    loop: Loop = "uvloop",
) -> None:
    """Show what a running job is doing: its members, which of them it waits for and why, rates, drops.

    It only listens, and no process waits for it. For federated and for data-parallel jobs.
    """
    from gradbus.commands.buses import check
    from gradbus.commands.run.status import settings_of
    from gradbus.runtime import logs
    from gradbus.runtime.json_text import json_text

    logs.configure(level="error")
    options: dict[str, Any] = {
        "job": job, "domain": domain, "network": network, "interface": interface,
        "peers": None if peers is None else list(addresses_of(peers)),
        "connect": None if connect is None else list(addresses_of(connect)),
        "tls_ca": None if tls_ca is None else str(tls_ca),
        "key_file": None if key_file is None else str(key_file),
    }  # fmt: skip
    settings = settings_of(config, {key: value for key, value in options.items() if value is not None})
    check(settings)
    from gradbus.commands.run.status import lines_of, observe

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    picture = run_loop(lambda: observe(settings, timeout_s=timeout, listen_s=seconds, tell=tell), loop)
    print(json_text(picture, indent=2) if as_json else "\n".join(lines_of(picture)))


def doctor(
    network: NetworkProfile = None,
    interface: Interface = None,
    peers: Peers = None,
    domain: BusDomain = None,
    connect: Connect = None,
    tls_ca: TlsCa = None,
    key_file: KeyFile = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Examine the bus and the timeouts of this configuration. The other options are stronger.",
            show_default=False,
        ),
    ] = None,
    wait_s: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Look for the doctors of other machines for so long. [default: 60 with peers, else not at all]",
        ),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Meet the other doctors under this name.", show_default=False)] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="All users of the network are trusted.")] = False,
    loop: Loop = "uvloop",
) -> int:
    """Check this machine, and the way to others: versions, network, protection, the bus.

    Start it on two machines within a minute, with the same settings and both addresses in --peers, or with a
    configuration that has bus.peers: they find each other, measure both ways, and each reports what it does not see,
    and what to check. No answer is a failure.

    With --connect, or a configuration that has links, each endpoint is tried, certificates are checked, and the bus is
    measured through the relay.
    """
    from gradbus.commands.doctor.report import DEFAULT_WAIT_S, examine
    from gradbus.commands.doctor.settings import settings_of
    from gradbus.runtime import logs

    logs.configure(level="error")
    options: dict[str, Any] = {
        "job": job, "domain": domain, "network": network, "interface": interface,
        "peers": None if peers is None else list(addresses_of(peers)),
        "connect": None if connect is None else list(addresses_of(connect)),
        "tls_ca": None if tls_ca is None else str(tls_ca),
    }  # fmt: skip
    settings = settings_of(config, {key: value for key, value in options.items() if value is not None}, key_file)
    others = any(address not in ("127.0.0.1", "localhost") for address in settings.peers)
    seconds = wait_s if wait_s is not None else DEFAULT_WAIT_S if others else None
    well = examine(settings, loop, wait_s=seconds, trusted=insecure, config=config)
    return ExitCode.OK if well else ExitCode.BUS


def dashboard(
    runs_dir: Annotated[
        Path, typer.Argument(metavar="RUNS_DIR", help="The folder of the runs, or one run.", show_default=True)
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65_535, help="On 127.0.0.1; 0: any free one.")] = 8765,
    log_level: Level = "warning",
) -> None:
    """Show runs in a browser while they go on: rounds, clients, curves, faults, bytes.

    It reads what the runs write to their directories, and serves it to this machine alone, at an address that it
    prints. For federated and for data-parallel runs. From another machine: ssh -L 8765:127.0.0.1:8765 HOST
    """
    from gradbus.commands.dashboard.server import Dashboard
    from gradbus.runtime import logs

    logs.configure(level=log_level)
    serving = Dashboard(runs_dir, port)
    print_text(f"runs in {plain_line(str(runs_dir))}: {serving.url}\n")
    serving.serve()


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for function in (report, export, check, status, doctor, dashboard, matrix):
        app.command()(command(function.__name__)(function))

"""The command ``gradbus status``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gradbus.experiments.choices import LoopName, NetworkChoice
from gradbus.experiments.cli_options import KeyFile, Loop
from gradbus.experiments.run.lifecycle import guard, run_loop


def status(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Its name.", show_default=False)] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Take job and network from a configuration.", show_default=False),
    ] = None,
    domain: Annotated[int | None, typer.Option(min=0, max=232, help="DDS domain. [default: 0]")] = None,
    network: Annotated[NetworkChoice | None, typer.Option(help="Network profile. [default: loopback]")] = None,
    interface: Annotated[str | None, typer.Option(help="Network interface. [default: lo]")] = None,
    peers: Annotated[str | None, typer.Option(help="Addresses of the other machines, separated by commas.")] = None,
    key_file: KeyFile = None,
    timeout: Annotated[float, typer.Option(min=0.5, help="Seconds to wait for a first word.")] = 5.0,
    seconds: Annotated[float, typer.Option(min=0.5, help="How long to listen from then on.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object.")] = False,
    loop: Loop = LoopName.UVLOOP,
) -> None:
    """Say what a running job is doing: its members, who is waited for and why, rates, drops.

    It only listens, and nobody waits for it. For federated and for data-parallel jobs.
    """

    def action() -> None:
        from gradbus.experiments.buses import check
        from gradbus.experiments.run.status_settings import settings_of
        from gradbus.experiments.rundir.directory import json_text
        from gradbus.runtime import logs

        logs.configure(level="error")
        options: dict[str, Any] = {
            "job": job, "domain": domain, "network": None if network is None else network.value,
            "interface": interface,
            "peers": None if peers is None else [one.strip() for one in peers.split(",") if one.strip()],
            "key_file": None if key_file is None else str(key_file),
        }  # fmt: skip
        settings = settings_of(config, {key: value for key, value in options.items() if value is not None})
        check(settings)
        from gradbus.experiments.run.status import observe
        from gradbus.experiments.run.status_text import lines_of

        picture = run_loop(lambda: observe(settings, timeout_s=timeout, listen_s=seconds), loop)
        print(json_text(picture, indent=2) if as_json else "\n".join(lines_of(picture)))

    raise typer.Exit(guard("status", action))


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(status)

"""The command ``gradbus relay``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from gradbus.commands.cli.options import Level, Overrides, Style, command


def relay(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A .json or .toml file; none is needed.", show_default=False),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENDPOINT",
            show_default=False,
            help="Where to listen: tls/HOST:PORT, or tcp/HOST:PORT. May be repeated. [default: tls/0.0.0.0:443]",
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate", metavar="FILE", help="Certificate of this relay, in PEM.", show_default=False
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="Private key of that certificate.", show_default=False),
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            metavar="FILE",
            help="Authority of the clients' certificates. With it, only clients that have one are let in.",
            show_default=False,
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65_535,
            help="Serve /metrics, /live and /ready there, on 127.0.0.1; 0 picks a free port. [default: no HTTP]",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    log_level: Level = "info",
    log_style: Style = "auto",
) -> int:
    """Forward between controllers, clients and workers that can only dial out, to one port of this machine.

    The relay stores nothing, and cannot read what the members of a job send: they encrypt it with keys that it does not
    have. Members name it in bus.connect, as in bus.connect=["tls/relay.example.org:443"]. Certificates come from
    'gradbus keys tls HOST'. CONFIG may also limit sessions, and say which client may take part in which job; see
    docs/relay.md.

    SIGTERM lets the relay drain: it reports that it is not ready, forwards for relay.drain_s more seconds or until no
    session is left, and ends with exit code 0. A second SIGTERM ends it at once.
    """
    from gradbus.commands.relay.command import run_relay

    files = {"relay.tls_certificate": certificate, "relay.tls_key": key, "relay.tls_ca": authority}
    own = [
        *(overrides or ()),
        *([f"relay.listen={json.dumps(listen)}"] if listen else []),
        *(f"{name}={json.dumps(os.fspath(path))}" for name, path in files.items() if path is not None),
        *(["relay.tls_clients=true"] if authority is not None else []),
        *([] if http_port is None else [f"http.port={http_port}"]),
    ]
    return run_relay(config, own, log_level=log_level, log_style=log_style)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(command("relay")(relay))

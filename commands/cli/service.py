"""The command ``gradbus service install``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from gradbus.commands.cli.options import Config, KeyFile, command, print_text
from gradbus.commands.lifecycle import say
from gradbus.commands.service.roles import Role

service = typer.Typer(
    name="service", help="Run controllers, clients and relays under systemd; see docs/systemd.md.", no_args_is_help=True
)


@service.callback()
def _group() -> None:  # keeps `install` a word of the command line, though there is no other one
    pass


@service.command()
@command("service")
def install(
    config: Config,
    role: Annotated[
        Role | None,
        typer.Option(
            help="What CONFIG is for. [default: by its section federated (controller), client or relay]",
            show_default=False,
        ),
    ] = None,
    client_id: Annotated[int | None, typer.Option("--id", min=0, help="Id of the client.", show_default=False)] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the client.", show_default=False)] = "",
    key_file: KeyFile = None,
    unit: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the unit. [default: gradbus-ROLE]", show_default=False)
    ] = "",
    user: Annotated[bool, typer.Option("--user", help="Write a unit for the systemd of this user.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the unit and write nothing.")] = False,
) -> None:
    """Write a systemd unit that runs CONFIG, and have systemd check it. Nothing is started.

    CONFIG is checked as the run would check it. The unit is printed before it is written to /etc/systemd/system, or
    with --user to ~/.config/systemd/user; a process that is not root, and has no --user, prints it only.
    """
    from gradbus.commands.service.install import folder_of_units, verify, write
    from gradbus.commands.service.roles import Wanted, unit_of

    made = unit_of(
        Wanted(
            config=config,
            role=role,
            unit=unit,
            is_user=user,
            client_id=client_id,
            client_name=name,
            key=key_file,
        )
    )
    folder = folder_of_units(is_user=user)
    print_text(made.text)
    sys.stdout.flush()
    if dry_run:
        return
    if not user and os.geteuid() != 0:
        say(f"gradbus service: nothing is written, as only root may write to {folder}. Run it as root, or with --user")
        return
    verify(made)
    file = write(made, folder)
    systemctl = "systemctl --user" if user else "systemctl"
    say(f"{file} is written. Start it: {systemctl} daemon-reload && {systemctl} enable --now {made.name}")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.add_typer(service)

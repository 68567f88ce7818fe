"""The commands ``gradbus keys new | show | allow | remove | tls``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradbus.commands.choices import ROLE_HELP
from gradbus.commands.cli.options import command, print_text

keys = typer.Typer(
    name="keys",
    help="Make and look at the keys of sealed jobs and of nodes; see docs/security.md.",
    no_args_is_help=True,
)
File = Annotated[Path, typer.Argument(metavar="FILE", help="The key file.", show_default=False)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the node.", show_default=False)]
ListFile = Annotated[Path, typer.Option("--list", metavar="FILE", help="The allow list, bus.allow_file.")]


@keys.command()
@command("keys")
def new(
    file: File,
    identity: Annotated[
        str | None,
        typer.Option("--identity", metavar="NAME", help="Make the key of a node with this name, not that of a job."),
    ] = None,
) -> None:
    """Make a random key in a new file with mode 0600: of a job, or of a node.

    Copy the key of a job to every member, by a safe way. The key of a node stays where it is: only its public half goes
    to the controller. A file that exists is never overwritten. The key itself is not shown.
    """
    from gradbus.runtime.security.identity.key import new_node_key, public_text
    from gradbus.runtime.security.job_key import new_job_key, write_secret_file

    if identity is not None:
        node = new_node_key(identity)
        write_secret_file(file, node.text)
        print(f"{file}: a new key of {node.name}, public key {public_text(node.public)}")
        return
    key = new_job_key()
    write_secret_file(file, key.text)
    print(f"{file}: a new job key, id {key.id.hex()}. Use it with bus.key_file={file}, or GRADBUS_KEY_FILE={file}")


@keys.command()
@command("keys")
def show(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="[default: $GRADBUS_KEY_FILE, $GRADBUS_KEY, the key of this user]"),
    ] = None,
) -> None:
    """Check a key. Of a job's or a user's it shows the id: processes with the same id have the same key. Of a node's,
    its name and public key. None of them is a secret. A user who has no key yet gets one."""
    from gradbus.runtime.security.identity.key import is_identity, load_node_key, public_text
    from gradbus.runtime.security.job_key import key_file, load_job_key, load_user_key, read_secret_file
    from gradbus.runtime.security.settings import names_key

    path = key_file(file)
    if path is not None and is_identity(read_secret_file(path, "key file")):
        node = load_node_key(path)
        print(f"{node.name} {public_text(node.public)}")
    elif not names_key(file):
        key, origin = load_user_key()
        print(f"key of this user, id {key.id.hex()}, in {origin}")
    else:
        print(f"job key, id {load_job_key(file).key.id.hex()}")


@keys.command()
@command("keys")
def allow(
    name: Name,
    public_key: Annotated[
        str, typer.Argument(metavar="PUBLIC_KEY", help="As 'gradbus keys show' prints it there.", show_default=False)
    ],
    role: Annotated[str, typer.Option(help=ROLE_HELP)] = "client",
    ids: Annotated[
        str, typer.Option(metavar="IDS", help="Client ids, or ranks of a worker, that it may use: 0, or 0-3,7.")
    ] = "",
    file: ListFile = Path("allow.list"),
) -> None:
    """Put a node on the allow list. A controller that runs lets it in within a second."""
    from gradbus.runtime.security.identity.allow_list import (
        AllowList,
        Entry,
        changing,
        load_allow_list,
        parse_ids,
        parse_role,
        with_entry,
        write_allow_list,
    )
    from gradbus.runtime.security.identity.key import parse_public

    entry = Entry(
        name,
        parse_role(role, "--role"),
        parse_public(public_key, "PUBLIC_KEY"),
        parse_ids(ids, "--ids") if ids else (),
    )
    with changing(file):
        allowed = with_entry(load_allow_list(file) if file.exists() else AllowList(), entry)
        write_allow_list(file, allowed)
    print(f"{file}: {name} may take part as {role}, {len(allowed.entries)} nodes in all")


@keys.command()
@command("keys")
def remove(name: Name, file: ListFile = Path("allow.list")) -> None:
    """Take a node off the allow list. A controller that runs goes on without it, with new keys, within seconds."""
    from gradbus.runtime.security.identity.allow_list import changing, load_allow_list, without, write_allow_list

    with changing(file):
        allowed = without(load_allow_list(file), name)
        write_allow_list(file, allowed)
    print(f"{file}: {name} may not take part any more, {len(allowed.entries)} nodes are left")


@keys.command()
@command("keys")
def tls(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST]...",
            help="Host names and IP addresses of one machine, as others dial it.",
            show_default=False,
        ),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Make a certificate for one that dials, for a relay with bus.tls_clients. NAME is its common name.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the authority, and of all that it signs.")] = Path(
        "tls"
    ),
) -> None:
    """Make certificates for links over TLS: of a machine that listens (a relay, or a controller), or of a client.

    The first call makes an authority in DIR as well: ca.pem, which everybody gets, and ca.key, which stays there. Later
    calls with the same DIR use it. Keys have mode 0600, and no file is ever overwritten.
    """
    from gradbus.commands.tls_files import make_tls_files

    print_text("".join(f"{line}\n" for line in make_tls_files(hosts or (), client, out)))


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.add_typer(keys)

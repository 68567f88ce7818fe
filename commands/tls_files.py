"""``gradbus keys tls``: the files of an authority, and what to do with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from ipaddress import IPv6Address
from pathlib import Path

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.addresses import ip_address_of
from gradbus.runtime.security.tls_authority import (
    AUTHORITY_CERTIFICATE,
    AUTHORITY_KEY,
    Issued,
    authority_in,
    check_client_name,
    names_of_hosts,
)


def make_tls_files(hosts: Sequence[str], client: str | None, folder: Path) -> Iterator[str]:
    """Make a certificate and its key, and the authority for want of one. Yields lines for the user: what is made, and
    which settings name it.

    Raises:
        ConfigError: neither hosts nor a client are given, or both; a name is none; a file exists or cannot be made.
    """
    if bool(hosts) == (client is not None):
        raise ConfigError(
            "for whom? Give either the names of a machine that listens, as in 'gradbus keys tls relay.example.org', or "
            "--client NAME for one that dials"
        )
    if client is not None:  # all is checked before an authority is made for it
        check_client_name(client)
    elif all(isinstance(ip_address_of(host), IPv6Address) for host in hosts):
        raise ConfigError(
            f"{hosts[0]}: over TLS, Zenoh dials no IPv6 address itself. Give a host name as well, which others dial"
        )
    else:
        names_of_hosts(hosts)
    authority, is_new = authority_in(folder)
    if client is not None:
        issued, stem = authority.client(client), f"client-{client}"
    else:
        issued, stem = authority.server(hosts), _stem(hosts[0])
    certificate, key = folder / f"{stem}.pem", folder / f"{stem}.key"
    issued.write(certificate, key)
    ca = folder / AUTHORITY_CERTIFICATE
    if is_new:
        yield (
            f"{ca}: a new authority, valid until {authority.certificate.not_valid_after_utc:%Y-%m-%d}. Copy it to all. "
            f"{folder / AUTHORITY_KEY} signs certificates: keep it here, and safe"
        )
    yield f"{certificate}, {key}: {_what(issued, client, hosts)}"
    yield from _settings(client, hosts, ca, certificate, key)


def _what(issued: Issued, client: str | None, hosts: Sequence[str]) -> str:
    whose = f"of the client {client}" if client is not None else f"for {', '.join(hosts)}"
    return f"a certificate {whose}, valid until {issued.certificate.not_valid_after_utc:%Y-%m-%d}, and its key"


def _settings(client: str | None, hosts: Sequence[str], ca: Path, certificate: Path, key: Path) -> Iterator[str]:
    files = f'tls_certificate = "{certificate}"\n  tls_key = "{key}"'
    if client is not None:
        yield f'Copy these two and {ca} to that client, and set there, under [bus]:\n  tls_ca = "{ca}"\n  {files}'
        yield "The relay asks for it with tls_clients = true and the same tls_ca"
        return
    host = next(host for host in hosts if ":" not in host)
    yield f'On that machine, under [bus] (or [relay] for gradbus relay):\n  listen = ["tls/0.0.0.0:443"]\n  {files}'
    yield f'Where others dial it, under [bus]:\n  connect = ["tls/{host}:443"]\n  tls_ca = "{ca}"'


def _stem(host: str) -> str:
    """Return the name of files for a host: an IPv6 address has colons, which no file of every system can have."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", host)

"""Certificates and servers for links. All certificates are made by the code of ``gradbus keys tls``."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.security.tls_authority import Authority, Issued, authority_in
from gradbus.runtime.transport.zenoh.session import open_session

HOST = "127.0.0.1"


@dataclass(slots=True)
class TlsFiles:
    """Makes certificates in a folder: ``authority`` signs them, ``stranger`` is another one that nobody knows."""

    folder: Path
    authority: Authority = field(init=False)
    stranger: Authority = field(init=False)

    def __post_init__(self) -> None:
        self.authority, _ = authority_in(self.folder / "ours")
        self.stranger, _ = authority_in(self.folder / "theirs")

    @property
    def ca(self) -> Path:
        """The file of the authority."""
        return self.folder / "ours/ca.pem"

    @property
    def strange_ca(self) -> Path:
        """The file of the other one."""
        return self.folder / "theirs/ca.pem"

    def write(self, issued: Issued, name: str) -> dict[str, Path]:
        """The arguments of a LinkConfig for a certificate, which lies in two files of this name."""
        files = {"certificate": self.folder / f"{name}.pem", "key": self.folder / f"{name}.key"}
        if not files["key"].exists():
            issued.write(files["certificate"], files["key"])
        return files

    def server(self, *hosts: str, days: float = 100) -> dict[str, Path]:
        """Those of a machine, by default this one."""
        named = hosts or (HOST, "localhost")
        return self.write(self.authority.server(named, days=days), f"server-{named[0]}-{days:g}")

    def client(self, name: str = "site-1") -> dict[str, Path]:
        """Those of a client."""
        return self.write(self.authority.client(name), f"client-{name}")


@contextlib.contextmanager
def router(links: LinkConfig) -> Iterator[Any]:
    """A session that listens."""
    session = open_session(links, "router")
    try:
        yield session
    finally:
        session.close()


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], object], files: dict[str, Path] | None = None) -> Iterator[int]:
    """The port of a server that handles each connection on a thread, with TLS if there are files for it."""
    context = None
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files["certificate"], files["key"])
    ended = threading.Event()

    def handle(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.settimeout(10)
            wrapped = connection if context is None else context.wrap_socket(connection, server_side=True)
            with contextlib.closing(wrapped):
                serve(wrapped)

    def accept() -> None:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                threads.append(threading.Thread(target=handle, args=(listening.accept()[0],)))
                threads[-1].start()

    threads: list[threading.Thread] = []
    with socket.create_server((HOST, 0)) as listening:
        listening.settimeout(0.05)
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            ended.set()
            for thread in (accepting, *threads):
                thread.join(20)


def http(connection: socket.socket) -> None:
    """A web server that has not understood."""
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def silent(connection: socket.socket) -> None:
    """What reads and never answers, until the other end has enough of it."""
    while connection.recv(4096):
        pass

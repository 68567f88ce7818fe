"""The HTTP server of a relay: ``/metrics``, ``/live`` and ``/ready``, on threads of its own.

Anybody who reaches the port may ask. What a connection may cost is bounded as in the dashboard: by time and by number.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from gradbus.commands.dashboard.connections import BoundedServer
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.network.addresses import family_of, with_port

_SEND_S = 5.0  # for a peer to take some of an answer
_STOP_S = 5.0
_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"

log = get_logger("relay")


class Answers:
    """Makes the pages. ``is_ready`` and ``metrics`` are called on threads of the server."""

    def __init__(self, is_ready: Callable[[], bool], metrics: Callable[[], str]) -> None:
        self._is_ready = is_ready
        self._metrics = metrics

    def of(self, path: str) -> tuple[HTTPStatus, str, str]:
        """Return status, kind and text of a page."""
        match path.partition("?")[0]:
            case "/live":
                return HTTPStatus.OK, _TEXT, "live\n"
            case "/ready" if self._is_ready():
                return HTTPStatus.OK, _TEXT, "ready\n"
            case "/ready":
                return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, "not ready: the relay starts, or drains\n"
            case "/metrics":
                return HTTPStatus.OK, _METRICS, self._metrics()
        return HTTPStatus.NOT_FOUND, _TEXT, "A relay has /metrics, /live and /ready\n"


@contextlib.contextmanager
def serving(host: str, port: int, answers: Answers) -> Iterator[str]:
    """Serve the pages in a thread, and return their address. ``port``: 0: any free one.

    Raises:
        ConfigError: the port cannot be listened on.
    """
    try:
        server = _Server((host, port), answers)
    except OSError as error:
        raise ConfigError(
            f"http: cannot listen on {with_port(host, port)}: {error.strerror or error}. Set another http.port or "
            f"http.host"
        ) from None
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="gradbus-http", daemon=True
    )
    thread.start()
    try:
        yield f"http://{with_port(host, server.server_port)}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_STOP_S)


class _Server(BoundedServer):
    def __init__(self, address: tuple[str, int], answers: Answers) -> None:
        self.answers = answers
        self.address_family = family_of(address[0])  # http.server takes IPv4 unless another family is set
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "gradbus", ""  # of HTTP/1.0: a connection for each request
    timeout = _SEND_S

    def do_GET(self) -> None:
        """Answer."""
        self.server.connections.answering(self.connection)
        status, kind, text = self.server.answers.of(self.path)
        data = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Supervisors ask every few seconds."""

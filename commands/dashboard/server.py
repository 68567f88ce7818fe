"""The HTTP server of the live pages: on this machine's own address, reading only, for whoever knows its address.

The address holds a random word, new with each start, as run directories are their owner's alone and every user of a
machine can connect to 127.0.0.1. Pages of other sites cannot ask for it: a request must name this machine as its host
(DNS rebinding), no answer may be read across origins, and the pages load nothing from elsewhere.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from gradbus.commands.dashboard import pages
from gradbus.commands.dashboard.connections import BoundedServer, is_own
from gradbus.commands.dashboard.drawings import Drawings
from gradbus.commands.dashboard.runs import Runs
from gradbus.commands.report.page import need_extras, style_sheet
from gradbus.commands.report.style import Theme
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger

HOST = "127.0.0.1"
SEND_S = 15.0  # for a peer to take some of an answer
_BACKLOG = 128  # connections that wait to be accepted: a busy peer must not push others out
_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})  # with any port: that of a tunnel is another one
_THEMES: dict[str, Theme] = {"light": "light", "dark": "dark"}
_HTML, _TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

log = get_logger("dashboard")


class Dashboard:
    """Serves the runs of a folder, from entering to leaving, on threads of its own.

    Attributes:
        url: of the list of runs, with the random word.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Listen. ``port``: 0: any free one.

        Raises:
            ConfigError: there is no such folder, the port is taken, or a package is not installed.
        """
        need_extras()
        site = _Site(Runs(folder))
        try:
            self._server = _Server((HOST, port), site)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {HOST}:{port}: {error.strerror or error}. Name another port (--port), or 0 for any"
            ) from None
        self.url = f"http://{HOST}:{self._server.server_port}/{site.word}/"

    def serve(self) -> None:
        """Serve until :meth:`close` is called by another thread."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Stop serving, and listening."""
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[Dashboard]:
    """A dashboard that serves in a thread. Raises ConfigError, as :class:`Dashboard`."""
    dashboard = Dashboard(folder, port)
    thread = threading.Thread(target=dashboard.serve, name="gradbus-dashboard", daemon=True)
    thread.start()
    try:
        yield dashboard
    finally:
        dashboard.close()
        thread.join(SEND_S)


class _Answer:
    def __init__(
        self, data: str | bytes, kind: str = _TEXT, status: HTTPStatus = HTTPStatus.OK, *, etag: str = ""
    ) -> None:
        self.data = data.encode("utf-8", errors="replace") if isinstance(data, str) else data
        self.kind = kind
        self.status = status
        self.etag = etag


_NOT_FOUND = _Answer("There is nothing here. gradbus dashboard has printed the address.\n", status=HTTPStatus.NOT_FOUND)


class _Site:
    """Answers by path. It is for any number of threads."""

    def __init__(self, runs: Runs) -> None:
        self.word = secrets.token_urlsafe(18)
        self._runs = runs
        self._drawings = Drawings()
        self._start = secrets.token_hex(4)
        self._lock = threading.Lock()  # a run is followed by one thread at a time
        folder = files("gradbus.commands.dashboard") / "templates"
        css, script = ((folder / name).read_text(encoding="utf-8") for name in ("dashboard.css", "dashboard.js"))
        self._files = {
            "dashboard.css": _Answer(style_sheet() + css, "text/css; charset=utf-8"),
            "dashboard.js": _Answer(script, "text/javascript; charset=utf-8"),
        }

    def answer(self, path: str, query: dict[str, list[str]]) -> _Answer:
        """``path``: without the word, and with names still quoted."""
        match path.split("/"):
            case [""]:
                return _Answer(pages.shell("gradbus runs", self._list(), home=""), _HTML)
            case ["body"]:
                body = self._list()
                return _Answer(body, _HTML, etag=f'"{hash(body) & (1 << 64) - 1:x}"')
            case [name] if name in self._files:
                return self._files[name]
            case ["runs", name, ""]:
                found = self._run(unquote(name))
                if found is _NOT_FOUND:
                    return found
                return _Answer(pages.shell(unquote(name), found.data.decode(), home="../../"), _HTML)
            case ["runs", name, "body"]:
                return self._run(unquote(name))
            case ["runs", name, "figures", figure]:
                return self._figure(unquote(name), figure, query)
        return _NOT_FOUND

    def _list(self) -> str:
        with self._lock:
            found = [(name, self._runs.open(name)) for name in self._runs.names()]
            rows = [pages.row_of(name, run) for name, run in found if run is not None]
        return pages.list_body(rows, str(self._runs.folder))

    def _run(self, name: str) -> _Answer:
        with self._lock:
            run = self._runs.open(name)
            if run is None:
                return _NOT_FOUND
            shown = self._drawings.version_to_show(run.files.name, run.version)
            return _Answer(pages.run_body(run, shown), _HTML, etag=f'"{self._start}-{run.version}-{shown}"')

    def _figure(self, name: str, figure: str, query: dict[str, list[str]]) -> _Answer:
        with self._lock:
            run = self._runs.open(name)
            version = 0 if run is None else self._drawings.version_to_show(run.files.name, run.version)
            found = None if run is None else run.files  # it is never changed
        theme = _THEMES.get(query.get("theme", ["light"])[0])
        if found is None or theme is None:
            return _NOT_FOUND
        image = self._drawings.image(found, figure, theme, version)
        return _NOT_FOUND if image is None or not image.data else _Answer(image.data, image.kind)


class _Server(BoundedServer):
    request_queue_size = _BACKLOG

    def __init__(self, address: tuple[str, int], site: _Site) -> None:
        self.site = site
        super().__init__(address, _Handler)

    def is_owner(self, peer_port: int) -> bool:
        return is_own(peer_port, self.server_port)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "gradbus", ""
    timeout = SEND_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.server.connections.answering(self.connection)
        try:
            self._send(self._answer())
        finally:
            self.server.connections.waiting(self.connection)

    def _answer(self) -> _Answer:
        host = self.headers.get("Host", "")
        if host.rpartition(":")[0] not in _HOSTS and host not in _HOSTS:
            return _Answer(
                f"This server answers for {HOST} and localhost only.\n", status=HTTPStatus.MISDIRECTED_REQUEST
            )
        address = urlsplit(self.path)
        word, _, path = address.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(word.encode(), self.server.site.word.encode()):
            return _NOT_FOUND
        try:
            return self.server.site.answer(path, parse_qs(address.query, max_num_fields=8))
        except Exception:  # what a file of a run made of it must not end the page
            log.warning("page not made", path=path[:200], exc_info=True)
            return _Answer("This page cannot be made; the log says why.\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)

    def _send(self, answer: _Answer) -> None:
        is_known = bool(answer.etag) and self.headers.get("If-None-Match") == answer.etag
        data = b"" if is_known else answer.data
        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else answer.status)
        for name, value in {**_HEADERS, "Content-Type": answer.kind, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        if answer.etag:
            self.send_header("ETag", answer.etag)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, socket.timeout):
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """The address, which is logged by default, has the random word."""

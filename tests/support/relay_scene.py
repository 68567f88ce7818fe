"""A relay in a process of its own, and links to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families
from tls_scene import TlsFiles

from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.zenoh.session import open_session

START_S = 30.0  # of an interpreter on a busy machine


class RelayProcess:
    """``gradbus relay`` from its start until it has ended, or is killed at the end of the block."""

    def __init__(
        self,
        *arguments: str,
        listen: str = "",
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """``arguments``: of the command. ``listen``: the endpoint that :func:`linked` dials. ``environment``: variables
        beside those of this process. ``prefix``: a command that starts it elsewhere."""
        self.listen = listen
        self.lines: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-P", "-m", "gradbus", "relay", "--log-style", "json", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(START_S)
        self._reader.join(START_S)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._news:
                try:
                    self.lines.append(json.loads(line))
                except ValueError:
                    self.other.append(line)
                self._news.notify_all()
        with self._news:
            self.other.append("")
            self._news.notify_all()

    def wait_for(self, event: str, count: int = 1, **facts: object) -> dict[str, Any]:
        """Wait for the log line with this event and facts, the ``count``-th one, and return it."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines if {**line, **facts, "event": event} == line]

        with self._news:
            has_come = self._news.wait_for(lambda: len(found()) >= count or self.other[-1:] == [""], START_S)
            lines = found()
            assert len(lines) >= count, f"no {event!r} with {facts}, {has_come=}: {self.lines} {self.other}"
            return lines[count - 1]

    def ready(self) -> Self:
        """Wait until it listens."""
        self.wait_for("relay listens")
        return self

    def get(self, path: str) -> tuple[int, str]:
        """Ask for a page. Returns its status and its text."""
        try:
            with urllib.request.urlopen(self.wait_for("relay listens")["http"] + path, timeout=START_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def counts(self) -> dict[str, float]:
        """Return the metrics, by name without ``gradbus_relay_`` and, behind a blank, the node."""
        families = text_string_to_metric_families(self.get("/metrics")[1])
        samples = [sample for family in families for sample in family.samples]
        return {
            " ".join([sample.name.removeprefix("gradbus_relay_"), *sample.labels.values()]): sample.value
            for sample in samples
        }

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def ended(self) -> int:
        """Wait until it has ended, and until all that it wrote is read. Returns the exit code."""
        code = self._process.wait(START_S)
        self._reader.join(START_S)
        return code

    def status(self, key: str) -> int:
        """Return a number of ``/proc/PID/status``, such as ``VmRSS``, in KiB."""
        found = re.search(rf"^{key}:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1])


@contextlib.contextmanager
def linked(relay: RelayProcess, **settings: Any) -> Iterator[Any]:
    """Open a session of Zenoh to a relay. ``settings``: of :class:`LinkConfig`."""
    relay.ready()
    session = open_session(LinkConfig(connect=(relay.listen,), **settings))
    try:
        yield session
    finally:
        session.close()


def certificate_of(files: TlsFiles, name: str) -> Mapping[str, Path]:
    """Return the settings of a client with a certificate of its own."""
    return {"ca": files.ca, **files.client(name)}


def tls_arguments(files: TlsFiles, *, clients: bool) -> Sequence[str]:
    """Return the options of a relay of this machine. ``clients``: they must show certificates."""
    own = files.server()
    named = ["--tls-certificate", str(own["certificate"]), "--tls-key", str(own["key"])]
    return [*named, "--tls-ca", str(files.ca)] if clients else named

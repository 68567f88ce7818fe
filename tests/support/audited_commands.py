"""Runs commands under an audit hook, and reports what they ran that belongs to no package.

    python -P audited_commands.py < COMMANDS > RESULTS

COMMANDS is a JSON list of argument lists of ``gradbus``; for ``dashboard DIR`` all pages of the runs are fetched.
RESULTS is a list of :class:`Outcome` as JSON. An audit hook cannot be removed: this is a process of its own.
"""

from __future__ import annotations

import contextlib
import http
import http.client
import importlib.metadata
import io
import json
import os
import re
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from urllib.parse import urlsplit

from gradbus.commands.report import page

ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(str(ROOT / name) + os.sep for name in ("actors", "codecs", "commands", "models", "runtime"))
_LIBRARIES = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_KNOWN = set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions()) | {"gradbus"}
_PROGRAMS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn"}


@dataclass
class Outcome:
    """How a command ended, what it printed, and each event that no package accounts for."""

    arguments: list[str]
    code: int = 0
    text: str = ""
    violations: list[str] = field(default_factory=list)


class Audit:
    """Judges audit events by where the code lies that is run, and by where the code lies that runs it."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.on = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        self.on = False  # what is called here has events, too
        try:
            if why := self._judge(event, arguments, sys._getframe(1)):  # noqa: SLF001 - no other way to the caller
                self.found.append(f"{event}: {why}")
        finally:
            self.on = True

    def _judge(self, event: str, arguments: tuple[Any, ...], caller: FrameType | None) -> str:
        if event in _PROGRAMS:
            return repr(arguments)[:200]
        if event == "subprocess.Popen":
            return "" if _is_of_library(_caller_outside_of_stdlib(caller)) else repr(arguments)[:200]
        if event == "pickle.find_class":
            return repr(arguments)[:200]
        if event == "ctypes.dlopen" and isinstance(arguments[0], str) and os.sep in arguments[0]:
            return "" if _is_known_file(arguments[0], caller) else arguments[0]
        if event == "exec" and isinstance(arguments[0], CodeType):
            name = arguments[0].co_filename
            return "" if _is_known_file(name, caller) else name
        if event == "compile":
            name = os.fsdecode(arguments[1]) if isinstance(arguments[1], str | bytes) else ""
            return "" if _is_known_file(name, caller) else name or "a text"
        return ""

    def find_spec(self, name: str, *_: object) -> None:
        """Judge an import, as the first of ``sys.meta_path``: ``importlib.import_module`` has no audit event.

        A library may look for a package that is not installed; nothing else may import what is no package's.
        """
        caller = sys._getframe(1)  # noqa: SLF001 - no other way to the caller
        if self.on and name.partition(".")[0] not in _KNOWN and not _is_of_library(_caller_outside_of_stdlib(caller)):
            self.found.append(f"import: {name}")


def _is_known_file(name: str, caller: FrameType | None) -> bool:
    if name.startswith("<frozen "):
        return True
    if not name or name.startswith("<"):  # made from a text: dataclasses, named tuples, templates
        return caller is not None and _is_of_library(caller.f_code.co_filename)
    return _is_of_library(name) or os.path.realpath(name).startswith(_OURS)


def _is_of_library(name: str) -> bool:
    return name.startswith("<frozen ") or os.path.realpath(name).startswith(_LIBRARIES)


def _caller_outside_of_stdlib(frame: FrameType | None) -> str:
    stdlib = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
    while frame is not None:
        name = frame.f_code.co_filename
        path = os.path.realpath(name)
        if not name.startswith("<frozen ") and (not path.startswith(stdlib) or "site-packages" in path):
            return name
        frame = frame.f_back
    return ""


def run(arguments: list[str], audit: Audit) -> Outcome:
    outcome, printed = Outcome(arguments), io.StringIO()
    audit.found = outcome.violations
    audit.on = True
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if arguments[0] == "dashboard":
                outcome.code = _fetch_all(Path(arguments[1]))
            else:
                outcome.code = _command(arguments)
    finally:
        audit.on = False
    outcome.text = printed.getvalue()
    return outcome


def _command(arguments: list[str]) -> int:
    from gradbus.commands.cli.main import app

    try:
        app(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def _fetch_all(folder: Path) -> int:
    """Fetch the list, the page of each run, and its first figure. Returns 1: one of them cannot be had."""
    from gradbus.commands.dashboard.server import serving

    failed = 0
    with serving(folder) as dashboard:
        address = urlsplit(dashboard.url)
        waiting, seen = [address.path, f"{address.path}body"], set()
        while waiting:
            path = waiting.pop()
            connection = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=60)
            connection.request("GET", path, headers={"Host": f"localhost:{address.port}"})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            connection.close()
            failed |= answer.status != http.HTTPStatus.OK
            seen.add(path)
            links = {f"{address.path}{link}" for link in re.findall(r'(?:href|src)="(runs/[^"]+)"', text)}
            if path.endswith("/") and path != address.path:
                figures = re.findall(r'data-figure="([^"]+)" data-version="([^"]+)"', text)
                links |= {f"{path}figures/{name}?theme=light&version={version}" for name, version in figures[:1]}
            waiting += sorted(links - seen)
    print(f"{len(seen)} pages, {sum('/figures/' in path for path in seen)} figures")
    return failed


def main() -> None:
    page.THEMES = ("light",)  # the other one has other colours alone, and figures take most of the time here
    audit = Audit()
    sys.addaudithook(audit.hook)
    sys.meta_path.insert(0, audit)  # type: ignore[arg-type]
    outcomes = [run(arguments, audit) for arguments in json.load(sys.stdin)]
    json.dump([asdict(one) for one in outcomes], sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # without the teardown of torch


if __name__ == "__main__":
    main()

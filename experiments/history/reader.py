"""Reads the event journals that the processes of a run have left, start by start.

They are written by :mod:`gradbus.runtime.testing.journal`; the invariants that must hold in them are in invariants.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import lines_of, parse_json

Event = dict[str, Any]

_NAME = re.compile(r"(controller|client|rank)(?:-(\d{1,10}))?\.jsonl")
RESOURCES = "resources.jsonl"


@dataclass(slots=True)
class Start:
    """One start of one process: its event ``started``, and those after it up to the next."""

    opening: Event
    events: list[Event] = field(default_factory=list)

    def all(self, name: str) -> Iterator[Event]:
        """Its events of this name."""
        return (event for event in self.events if event["event"] == name)


@dataclass(slots=True)
class RunHistory:
    """The events of all processes of a run, by start; of clients and ranks by number.

    Attributes:
        resources: samples of memory, descriptors and threads, where a soak has taken them.
        cut_short: lines that could not be read: a process was killed while it wrote them.
        without_start: events of processes that have noted no start.
    """

    directory: Path
    controller: list[Start] = field(default_factory=list)
    clients: dict[int, list[Start]] = field(default_factory=dict)
    ranks: dict[int, list[Start]] = field(default_factory=dict)
    resources: list[Event] = field(default_factory=list)
    cut_short: int = 0
    without_start: int = 0


def read_history(path: Path) -> RunHistory:
    """Read the journals in this directory, or in its folder ``history``.

    Raises:
        ConfigError: there are none, or they are of asynchronous rounds.
    """
    directory = path / "history" if (path / "history").is_dir() else path
    run = RunHistory(directory)
    files = sorted(directory.glob("*.jsonl")) if directory.is_dir() else []
    for file in files:
        match = _NAME.fullmatch(file.name)
        if file.name == RESOURCES:
            run.resources += _events(run, file)
        elif match is not None:
            starts = _starts(run, _events(run, file))
            if match[1] == "controller":
                run.controller += starts
            else:
                of = run.clients if match[1] == "client" else run.ranks
                of.setdefault(int(match[2] or 0), []).extend(starts)
    if not any(_NAME.fullmatch(file.name) for file in files):
        raise ConfigError(
            f"{path} holds no history. Runs of `gradbus controller`, `worker` and `demo` keep one in RUN_DIR/history; "
            f"clients in client.history.dir"
        )
    if any(_is_asynchronous(start.opening) for start in run.controller):
        raise ConfigError(
            f"{path} is of a run with federated.mode = asynchronous: what is checked are rounds in which each client "
            f"counts once. Its journals can be read as they are: one JSON object a line"
        )
    return run


def _is_asynchronous(opening: Event) -> bool:
    rules = opening.get("federated")
    return isinstance(rules, dict) and rules.get("mode") == "asynchronous"


def _events(run: RunHistory, file: Path) -> Iterator[Event]:
    for line in lines_of(file):
        try:
            event = parse_json(line)
            hash((event["event"], event.get("pid")))
        except (ValueError, KeyError, TypeError, AttributeError):
            run.cut_short += bool(line.strip())
            continue
        yield event


def _starts(run: RunHistory, events: Iterator[Event]) -> list[Start]:
    starts: list[Start] = []
    newest: dict[object, Start] = {}  # by process: two may use one name at the same time
    for event in events:
        process = event.get("pid")
        if event["event"] == "started":
            newest[process] = Start(event)
            starts.append(newest[process])
        elif process in newest:
            newest[process].events.append(event)
        elif event["event"] != "ended":  # the only event of a controller whose job is in use
            run.without_start += 1
    return starts

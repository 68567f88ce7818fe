"""Reads the event journals that the processes of a run have left, start by start.

They are written by :mod:`gradbus.runtime.testing.journal`; the invariants that must hold in them are in invariants.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from sys import intern
from typing import Any

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.foreign_files import check_not_sparse, is_there, lines_inside, names_inside, open_inside
from gradbus.runtime.json_text import count_values, parse_json

Event = dict[str, Any]

_NAME = re.compile(r"(controller|client|rank)(?:-(\d{1,10}))?\.jsonl")
RESOURCES = "resources.jsonl"
MAX_EVENTS = 2_000_000  # of all processes together: 200,000 rounds of eight clients, in 1 GB
MAX_JOURNAL_BYTES = 16 << 30  # of one process
MAX_CUT_LINES = 100_000  # that are no events: a file with more is no journal
MAX_LINE_VALUES = 1_000_000  # of JSON in an event: ten thousand clients have some ten thousand
MAX_EVENT_VALUES = 32_000_000  # of all events together: 16 for each that there may be
MAX_PAYLOAD_BYTES = 4 << 30  # a model of a billion parameters
_WHOLE = frozenset({"started", "failed", "ended"})
_ASKED_FOR = {
    name: intern(name)
    for name in (
        "event",
        "run",
        "round",
        "client",
        "clients",
        "incarnation",
        "transfer",
        "num_samples",
        "weight",
        "crc32",
        "held_crc32",
        "accepted",
        "step",
        "steps",
        "hash",
        "loss",
        "metrics",
        "at_s",
        "weights",
        "norms",
    )
}
"""Entries of all other events that an invariant looks at, and their time: the rest would take most of the memory."""


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
        directory: of the journals; it is the folder ``below`` of the directory ``root`` that the user has named.
        resources: samples of memory, descriptors and threads, where a soak has taken them.
        cut_short: lines that could not be read: a process was killed while it wrote them.
        without_start: events of processes that have noted no start.
        left_out: sentences on what was not read.
        events: that were read; values: of JSON in them.
    """

    root: Path
    below: str = ""
    controller: list[Start] = field(default_factory=list)
    clients: dict[int, list[Start]] = field(default_factory=dict)
    ranks: dict[int, list[Start]] = field(default_factory=dict)
    resources: list[Event] = field(default_factory=list)
    cut_short: int = 0
    without_start: int = 0
    left_out: list[str] = field(default_factory=list)
    events: int = 0
    values: int = 0

    @property
    def directory(self) -> Path:
        """The folder of the journals."""
        return self.root / self.below

    def open_payload(self, name: str) -> BufferedReader:
        """Open the bytes of an update or a model that a process has kept. Raises OSError: there are none that can be
        read."""
        place = Path(self.below, "payloads", name)
        file = open_inside(self.root, place, max_bytes=MAX_PAYLOAD_BYTES)
        try:
            check_not_sparse(file, place)
        except OSError:
            file.close()
            raise
        return file

    def has_payload(self, name: str) -> bool:
        """Whether there is anything of this name."""
        return is_there(self.root, Path(self.below, "payloads", name))


def read_history(path: Path) -> RunHistory:
    """Read the journals in this directory, or in its folder ``history``.

    Raises:
        ConfigError: there are none, they cannot be read, or they are of asynchronous rounds.
    """
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise ConfigError(f"run directory {path} {what}. Name one that a run has left, as in runs/<job>-<time>")
    run = RunHistory(path, "history" if is_there(path, "history") else "")
    try:
        names = names_inside(path, "*.jsonl", below=run.below)
        for name in names:
            _read_journal(run, name)
    except OSError as error:
        raise ConfigError(f"the history of {path} cannot be read: {error}") from None
    if not any(_NAME.fullmatch(name) for name in names):
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


def _read_journal(run: RunHistory, name: str) -> None:
    match = _NAME.fullmatch(name)
    if name == RESOURCES:
        run.resources += _events(run, name)
    elif match is not None:
        starts = _starts(run, _events(run, name))
        if match[1] == "controller":
            run.controller += starts
        else:
            of = run.clients if match[1] == "client" else run.ranks
            of.setdefault(int(match[2] or 0), []).extend(starts)


def _is_asynchronous(opening: Event) -> bool:
    rules = opening.get("federated")
    return isinstance(rules, dict) and rules.get("mode") == "asynchronous"


def _events(run: RunHistory, name: str) -> Iterator[Event]:
    """Yield the events of a journal."""
    cut = run.cut_short
    for line in lines_inside(run.root, Path(run.below, name), run.left_out.append, max_bytes=MAX_JOURNAL_BYTES):
        if line.isspace():
            continue
        try:
            event = parse_json(line, max_values=MAX_LINE_VALUES)
            hash((event["event"], event.get("pid")))
        except (ValueError, KeyError, TypeError, AttributeError):
            run.cut_short += 1
            if run.cut_short - cut >= MAX_CUT_LINES:
                run.left_out.append(f"{name}: {MAX_CUT_LINES:,} lines are no events, and nothing behind them is read.")
                return
            continue
        run.events += 1
        run.values += count_values(line)
        if run.events > MAX_EVENTS or run.values > MAX_EVENT_VALUES:
            raise ConfigError(
                f"{run.directory} has more than {MAX_EVENTS:,} events, or {MAX_EVENT_VALUES:,} values in them, which "
                f"are compared in memory. Check the "
                f"journals of fewer clients at a time: copy them and controller.jsonl to a directory of their own"
            )
        yield event


def _compact(event: Event) -> Event:
    """The event without what nothing asks for, and with names that all events share."""
    if event["event"] in _WHOLE:
        return event
    kept = {_ASKED_FOR[name]: value for name, value in event.items() if name in _ASKED_FOR}
    if isinstance(kept["event"], str):
        kept["event"] = intern(kept["event"])
    return kept


def _starts(run: RunHistory, events: Iterator[Event]) -> list[Start]:
    starts: list[Start] = []
    newest: dict[object, Start] = {}  # by process: two may use one name at the same time
    for event in events:
        process = event.get("pid")
        if event["event"] == "started":
            newest[process] = Start(event)
            starts.append(newest[process])
        elif process in newest:
            newest[process].events.append(_compact(event))
        elif event["event"] != "ended":  # the only event of a controller whose job is in use
            run.without_start += 1
    return starts

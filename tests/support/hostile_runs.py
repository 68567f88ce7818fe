"""Run directories as an attacker might send them: each is a sound run in which one thing was changed."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradbus.actors import EpochReport, RoundReport
from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.json_text import json_text
from gradbus.runtime.testing.journal import weights_name

SPARSE_BYTES = 40 << 30
LINE_BYTES = 200 << 20
MODULE = "sent_along"  # a module in the directory that leaves a file when it is imported
RUN = "00000000000000aa"
ANSI = "\x1b[2J\x1b]0;owned\x07\n<script>alert(1)</script>"
SAVED = {
    "run_id": RUN, "incarnation": 1, "layout": 0, "tensors": [["w", "float32", [10]]], "downlink_codec": "fp32",
    "downlink": "full", "history": [],
}  # fmt: skip
"""The metadata of a checkpoint of a federated run."""


@dataclass(frozen=True)
class Hostile:
    """How a sound run is changed, and what commands must say of it.

    Attributes:
        change: changes the directory; the second argument is a folder outside of it, with a file ``secret``.
        says: words, by command; commands that do not look at what was changed are not named.
        kind: of the run. draws: whether the figures of its report matter.
    """

    change: Callable[[Path, Path], object]
    says: dict[str, str] = field(default_factory=dict)
    kind: str = "federated"
    draws: bool = False


def make(path: Path, kind: str) -> None:
    """A sound run of two rounds, or of two epochs of one rank."""
    (path / "history").mkdir(parents=True)
    config: dict[str, Any] = {"bus": {"job": "sent"}, "task": {}, kind: {}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "summary.json").write_text('{"outcome": "done", "job": "sent"}')
    started = {"event": "started", "pid": 1, "at_s": 0.0, "run": RUN, "round": 0, "crc32": 1, "held_crc32": 1}
    if kind == "federated":
        reports = [RoundReport(round_id=n, clients=(0,), expected=1, outcome="all", loss=1 / n) for n in (1, 2)]
        (path / "rounds.jsonl").write_text("".join(json_text(report.to_json()) + "\n" for report in reports))
        rules = {"federated": FederatedConfig().model_dump(mode="json"), "incarnation": 1}
        (path / "history" / "controller.jsonl").write_text(json.dumps({**started, **rules}) + "\n")
    else:
        epochs = [EpochReport(epoch=n, step=5 * n + 5, loss=1.0) for n in (0, 1)]
        (path / "epochs.jsonl").write_text("".join(json_text(report.to_json()) + "\n" for report in epochs))
        (path / "profile-rank-0.jsonl").write_text('{"kind": "start", "rank": 0}\n')
        (path / "trace-rank-0.json").write_text('{"traceEvents": [], "otherData": {"origin_unix_ns": 0}}')
        (path / "history" / "rank-0.jsonl").write_text(json.dumps(started) + "\n")
    with CheckpointStore(path / "state" if kind == "federated" else path / "state" / "rank-0") as store:
        store.save(Checkpoint(2, {"weights": torch.zeros(10)}, SAVED))


# -- changes -----------------------------------------------------------------------------------------------------------


def _removed(path: Path) -> Path:
    if path.is_dir():
        path.rename(path.with_name(f"{path.name}-before"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return path


def pipe(name: str) -> Callable[[Path, Path], object]:
    return lambda run, outside: os.mkfifo(_removed(run / name))


def link(name: str, to: str) -> Callable[[Path, Path], object]:
    """``to``: relative to the folder outside."""
    return lambda run, outside: _removed(run / name).symlink_to(outside / to)


def device(name: str) -> Callable[[Path, Path], object]:
    """A device that never ends; only root may make one, and others get a socket."""

    def change(run: Path, outside: Path) -> None:
        path = _removed(run / name)
        if os.geteuid() == 0:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        else:
            bind(path)

    return change


def bind(path: Path) -> None:
    """Leave a socket there. Its name may be longer than an address of one."""
    here = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def sparse(name: str, beginning: bytes = b"") -> Callable[[Path, Path], object]:
    def change(run: Path, outside: Path) -> None:
        with _removed(run / name).open("wb") as file:
            file.write(beginning)
            file.truncate(SPARSE_BYTES)

    return change


def text(name: str, content: str, *, times: int = 1) -> Callable[[Path, Path], object]:
    def change(run: Path, outside: Path) -> None:
        with _removed(run / name).open("w") as file:
            for _ in range(times):
                file.write(content)

    return change


def more(name: str, content: str) -> Callable[[Path, Path], object]:
    """Append to a file."""

    def change(run: Path, outside: Path) -> None:
        with (run / name).open("a") as file:
            file.write(content)

    return change


def setting(*paths: str) -> Callable[[Path, Path], object]:
    """Name an object of a module in each of these keys of config.json, and in the summary."""

    def change(run: Path, outside: Path) -> None:
        (run / f"{MODULE}.py").write_text(f"open({str(outside / 'has-run')!r}, 'w').close()\nClass = run = print\n")
        config = json.loads((run / "config.json").read_text())
        for path in paths:
            *sections, key = path.split(".")
            group = config
            for section in sections:
                group = group.setdefault(section, {})
            group[key] = [f"{MODULE}:run"] if key == "callbacks" else f"{MODULE}:run"
        (run / "config.json").write_text(json.dumps(config))
        (run / "summary.json").write_text(json.dumps({"outcome": "done", "job": "sent", "algorithm": f"{MODULE}:run"}))

    return change


def code_in_journal(key: str, run: Path, outside: Path) -> None:
    """The rules of the run name a class, and weights are there to compute its rounds again with."""
    setting()(run, outside)
    journal = run / "history" / "controller.jsonl"
    opening = json.loads(journal.read_text())
    opening["federated"][key] = {"name": f"{MODULE}:Class"}
    counted = {
        "event": "counted",
        "round": 1,
        "client": 0,
        "incarnation": 5,
        "transfer": 1,
        "num_samples": 1,
        "crc32": 1,
        "pid": 1,
    }
    committed = {
        "event": "committed",
        "round": 1,
        "clients": [0],
        "num_samples": 1,
        "crc32": 2,
        "held_crc32": 2,
        "pid": 1,
    }
    journal.write_text("".join(json.dumps(event) + "\n" for event in (opening, counted, committed)))
    (run / "history" / "payloads").mkdir()
    (run / "history" / "payloads" / weights_name(int(RUN, 16), 0)).write_bytes(bytes(40))


def payload(change_of: Callable[[str], Callable[[Path, Path], object]]) -> Callable[[Path, Path], object]:
    """Change the weights from which rounds are computed again."""

    def change(run: Path, outside: Path) -> None:
        journal = run / "history" / "controller.jsonl"
        committed = {
            "event": "committed",
            "round": 1,
            "clients": [],
            "num_samples": 0,
            "crc32": 2,
            "held_crc32": 2,
            "pid": 1,
        }
        with journal.open("a") as file:
            file.write(json.dumps(committed) + "\n")
        change_of(f"history/payloads/{weights_name(int(RUN, 16), 0)}")(run, outside)

    return change


def odd_names(run: Path, outside: Path) -> None:
    for name in (f"profile-rank-{ANSI.replace('/', '')}.jsonl", "trace-rank-\x1b[31m.json", "\u202eprofile"):
        (run / name).write_text("x")


def odd_texts(run: Path, outside: Path) -> None:
    (run / "summary.json").write_text(json.dumps({"outcome": ANSI, "job": ANSI, "data": ANSI, "platform": ANSI}))
    (run / "config.json").write_text(json.dumps({"federated": {"strategy": {"name": ANSI}}, ANSI: {ANSI: ANSI}}))
    report = RoundReport(round_id=3, clients=(0,), outcome=ANSI, loss=1.0, dropped={ANSI: 1}, metrics={ANSI: 1.0})
    more("rounds.jsonl", json_text(report.to_json()) + "\n")(run, outside)
    more("history/controller.jsonl", json.dumps({"event": ANSI, "pid": ANSI, "round": ANSI}) + "\n")(run, outside)


def very_many_files(run: Path, outside: Path) -> None:
    for number in range(100_050):
        path, first = run / f"{number}", run / f"{number - number % 50_000}"
        if path == first:
            path.touch()
        else:
            os.link(first, path)  # it costs less than a file, which may have some 65,000


def odd_numbers(run: Path, outside: Path) -> None:
    infinite = '{"round_id": 3, "loss": 1e400, "seconds": 1e400, "bytes_up": 1, "metrics": {"f1": -1e400}}\n'
    long = '{"round_id": ' + "9" * 5000 + ', "loss": 1.0}\n{"round_id": 4, "loss": 0.5, "bytes_up": ' + "9" * 39 + "}\n"
    more("rounds.jsonl", infinite + long)(run, outside)
    (run / "summary.json").write_text('{"outcome": "done", "wall_s": 1e400, "never_counted": [1e400]}')
    (run / "config.json").write_text('{"federated": {"rounds": 1e400, "privacy": {"epsilon": -1e400}}}')
    more("history/controller.jsonl", '{"event": "committed", "pid": 1, "round": 1e400, "clients": 1e400}\n')(
        run, outside
    )


def mistyped(run: Path, outside: Path) -> None:
    """JSON of any type where another is expected."""
    (run / "summary.json").write_text('{"outcome": [], "job": {}, "versions": 1, "machine": "x", "wall_s": "1"}')
    (run / "config.json").write_text('{"federated": {"rounds": "x", "codec": 7, "privacy": []}, "task": 1, "bus": []}')
    more("history/controller.jsonl", '{"event": [], "pid": {}}\n{"event": "committed", "pid": 1}\n')(run, outside)


DEEP = "[" * 1_000_000
MANY_METRICS = json.dumps({"round_id": 3, "metrics": {f"m{number}": 0.5 for number in range(200_000)}}) + "\n"
LONG_NAME = json.dumps({"round_id": 3, "metrics": {"m" * 100_000: 0.5}}) + "\n"
REFUSED = "is a pipe, expected a regular file"
DEVICE = "is a (device|socket), expected a regular file"
SPARSE = "42,949,672,960 bytes, at most"
REPORTS = ("report", "compare")
PAGES = (*REPORTS, "dashboard")
LINK = "is a link, and links in a run directory are not followed"
_ALL_KEYS = [
    *(f"task.{key}" for key in ("model", "data", "task", "train_fn", "evaluate_fn")),
    *(f"federated.{key}" for key in ("strategy", "training.rule", "training.schedule", "selection", "callbacks")),
    *(f"federated.{key}" for key in ("codec", "section_codec", "downlink_codec")),
]
_PARALLEL_KEYS = [
    *(f"task.{key}" for key in ("model", "data", "task")),
    *(f"parallel.{key}" for key in ("algorithm", "optimizer", "schedule", "callbacks")),
]


def _says(words: str, *commands: str) -> dict[str, str]:
    return dict.fromkeys(commands, words)


HOSTILE: dict[str, Hostile] = {
    "pipe for the settings": Hostile(pipe("config.json"), _says(REFUSED, *PAGES, "export")),
    "pipe for the rounds": Hostile(pipe("rounds.jsonl"), _says(REFUSED, *PAGES)),
    "pipe for the epochs": Hostile(pipe("epochs.jsonl"), _says(REFUSED, *PAGES), kind="parallel"),
    "pipe for the summary": Hostile(pipe("summary.json"), _says(REFUSED, *PAGES)),
    "pipe for the cross-site table": Hostile(pipe("cross_site.json"), _says(REFUSED, *PAGES)),
    "pipe for a journal": Hostile(pipe("history/controller.jsonl"), _says(REFUSED, "check", "dashboard")),
    "pipe for a journal of a client": Hostile(pipe("history/client-7.jsonl"), _says(REFUSED, "check")),
    "pipe for the history": Hostile(pipe("history"), _says("is a pipe, expected a folder", "check", "dashboard")),
    "pipe for a payload": Hostile(payload(pipe), _says(REFUSED, "check")),
    "pipe for a profile": Hostile(pipe("profile-rank-0.jsonl"), _says(REFUSED, *REPORTS, "profile"), kind="parallel"),
    "pipe for a trace": Hostile(pipe("trace-rank-0.json"), _says(REFUSED, *REPORTS, "profile"), kind="parallel"),
    "pipe for the state": Hostile(pipe("state"), _says("no checkpoint in|is a pipe", "export")),
    "pipe for a checkpoint": Hostile(pipe("state/round-000002.json"), _says(REFUSED, "export")),
    "pipe for weights": Hostile(pipe("state/round-000002.safetensors"), _says(REFUSED, "export")),
    "pipe where the report is written": Hostile(pipe("report.html.tmp")),
    "link to the settings of others": Hostile(link("config.json", "secret"), _says(LINK, *PAGES, "export")),
    "link to a device": Hostile(link("rounds.jsonl", "/dev/zero"), _says(LINK, *PAGES)),
    "link that leads to itself": Hostile(
        lambda run, outside: _removed(run / "summary.json").symlink_to("summary.json"),
        _says(LINK, *PAGES),
    ),
    "link that stays inside": Hostile(
        lambda run, outside: _removed(run / "cross_site.json").symlink_to("summary.json"),
        _says(LINK, *PAGES),
    ),
    "link to the history of others": Hostile(link("history", "history"), _says(LINK, "check", "dashboard")),
    "link to a journal of others": Hostile(
        link("history/controller.jsonl", "secret"), _says(LINK, "check", "dashboard")
    ),
    "link to a payload of others": Hostile(payload(lambda name: link(name, "secret")), _says(LINK, "check")),
    "link to the state of others": Hostile(link("state", "state"), _says(f"{LINK}|no checkpoint in", "export")),
    "link to weights of others": Hostile(link("state/round-000002.safetensors", "secret"), _says(LINK, "export")),
    "link where the report is written": Hostile(link("report.html.tmp", "secret")),
    "pipe where the model is written": Hostile(pipe("model.safetensors.tmp")),
    "link where the model is written": Hostile(link("model.safetensors.tmp", "secret")),
    "link for the report": Hostile(link("report.html", "secret")),
    "device for the rounds": Hostile(device("rounds.jsonl"), _says(DEVICE, *PAGES)),
    "device for a profile": Hostile(
        device("profile-rank-0.jsonl"),
        _says(DEVICE, *REPORTS, "profile"),
        kind="parallel",
    ),
    "socket for a journal": Hostile(
        lambda run, outside: bind(_removed(run / "history" / "controller.jsonl")),
        _says("is a socket", "check", "dashboard"),
    ),
    "sparse settings": Hostile(sparse("config.json", b"{}"), _says(SPARSE, *PAGES, "export")),
    "sparse rounds": Hostile(sparse("rounds.jsonl"), _says("a hole from byte", *REPORTS)),
    "sparse rounds behind a line": Hostile(
        sparse("rounds.jsonl", b'{"round_id": 1, "loss": 1.0}\n'), _says("a hole from byte", *REPORTS)
    ),
    "sparse journal": Hostile(
        sparse("history/controller.jsonl", b'{"event": "started"}\n'), _says("a hole from byte", "check")
    ),
    "sparse payload": Hostile(payload(sparse), _says("42,949,672,960 bytes", "check")),
    "sparse profile": Hostile(
        sparse("profile-rank-0.jsonl"), _says("nothing that can be read", *REPORTS), kind="parallel"
    ),
    "sparse trace": Hostile(sparse("trace-rank-0.json"), _says(SPARSE, *REPORTS), kind="parallel"),
    "sparse weights": Hostile(sparse("state/round-000002.safetensors"), _says("is sparse", "export")),
    "header of 2^60 bytes": Hostile(
        lambda run, outside: (run / "state" / "round-000002.safetensors").write_bytes(
            (1 << 60).to_bytes(8, "little") * 9
        ),
        _says("begin with a header of|checksum", "export"),
    ),
    "settings nested a million times": Hostile(
        text("config.json", DEEP), _says("nested too deeply|has 1,000,000 values", *PAGES)
    ),
    "a round with very many metrics": Hostile(
        more("rounds.jsonl", MANY_METRICS), _says("line 3 is left out: it has 200,000 names of metrics", *REPORTS)
    ),
    "a round with a very long name": Hostile(
        more("rounds.jsonl", LONG_NAME), _says("line 3 is left out: it has a text of 100,000 characters", *REPORTS)
    ),
    "a round of very many values": Hostile(
        more("rounds.jsonl", f'{{"round_id": 3, "clients": [{"{}," * 3_000_000}]}}\n'),
        _says(r"line 3 is left out: it has 6,000,00\d values", *REPORTS),
    ),
    "an event of very many values": Hostile(
        more("history/controller.jsonl", f'{{"event": "committed", "clients": [{"{}," * 3_000_000}1]}}\n'),
        _says("lines are left out: cut short", "check"),
    ),
    "rounds nested a million times": Hostile(more("rounds.jsonl", DEEP), _says("line 3 is left out", *REPORTS)),
    "journal nested a million times": Hostile(
        more("history/controller.jsonl", DEEP), _says("1 lines are left out", "check")
    ),
    "very long line": Hostile(
        text("rounds.jsonl", "[" * (1 << 20), times=LINE_BYTES >> 20), _says("more than 16 MiB", *REPORTS)
    ),
    "very many lines": Hostile(
        text("rounds.jsonl", "{}\n" * 1000, times=500), _says("1,000 lines are no reports", *REPORTS)
    ),
    "very many empty lines": Hostile(
        text("rounds.jsonl", "\n" * (1 << 20), times=8), _says("more than 1,000 empty lines", *REPORTS)
    ),
    "very many empty lines of a journal": Hostile(
        text("history/controller.jsonl", "\n" * (1 << 20), times=8), _says("more than 1,000 empty lines", "check")
    ),
    "very many lines of a profile": Hostile(text("profile-rank-0.jsonl", "{}\n" * 1000, times=2000), kind="parallel"),
    "very many files": Hostile(
        very_many_files, _says("has more than 100,000 entries", *PAGES, "profile"), kind="parallel"
    ),
    "very large numbers": Hostile(odd_numbers, _says("line 4 is left out", *REPORTS), draws=True),
    "values of other types": Hostile(mistyped, {}, draws=True),
    "names that drive a terminal": Hostile(odd_names, {}, kind="parallel"),
    "texts that drive a terminal or a page": Hostile(odd_texts, {}, draws=True),
    "code in every key": Hostile(setting(*_ALL_KEYS)),
    "code in every key of ranks": Hostile(setting(*_PARALLEL_KEYS), kind="parallel"),
    **{
        f"{key} in a journal": Hostile(
            partial(code_in_journal, key), _says(f"rounds of the {what} {MODULE}:Class are not", "check")
        )
        for key, what in (("strategy", "strategy"), ("codec", "codec"), ("downlink_codec", "codec"))
    },
}

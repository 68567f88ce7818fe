"""A run whose clients have names, as real processes of the commands: the seven places in which the names show."""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from forked_commands import Commands
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry
from rich.console import Console
from structlog.testing import capture_logs

from gradbus.commands.dashboard.following import Following
from gradbus.commands.dashboard.pages import now_of, run_body
from gradbus.commands.files import ControllerFile, load
from gradbus.commands.report.federated import page_of
from gradbus.commands.report.followed import FollowedJob
from gradbus.commands.report.metrics import JobCollector
from gradbus.commands.run.console import LogFile
from gradbus.commands.run.federated import run_controller
from gradbus.commands.run.live import Display, RoundTable
from gradbus.commands.run.status import Observer, lines_of
from gradbus.commands.rundir.directory import ControllerDirectory
from gradbus.commands.rundir.reading import read_run
from gradbus.runtime.wire.control import PROTOCOL, Hello, Status
from gradbus.runtime.wire.frames import CONTROLLER, UNASSIGNED
from gradbus.runtime.wire.messages import Control

NAMES = ["site-1", "site-2", "site-3"]
TASK = {"data": "glyphs", "data_options": {"train": 300, "test": 100}}


class Shown(Display[Any]):
    """What the terminal and a scrape show when a round is done."""

    def __init__(self, progress: Any, followed: FollowedJob) -> None:
        self.progress = progress
        self.registry = CollectorRegistry()
        self.registry.register(JobCollector({"named": followed}))
        self.terminal, self.scrape = "", ""

    def done(self, report: Any) -> None:
        console = Console(file=io.StringIO(), width=160)
        console.print(RoundTable(console, LogFile(io.StringIO()), "named", self.progress, 3).render())
        self.terminal = console.file.getvalue()  # type: ignore[attr-defined]
        self.scrape = generate_latest(self.registry).decode()


@pytest.mark.slow
@pytest.mark.parametrize("host", [False, True], ids=["clients", "host"])
def test_names_show_in_all_seven_places(tmp_path: Path, host: bool) -> None:
    domain = new_domain()
    bus = {"job": "named", "domain": domain}
    (tmp_path / "client.json").write_text(json.dumps({"task": TASK, "bus": bus}))
    rules = {"rounds": 2, "clients": {"num": 3, "min": 3, "dead_after_s": 60.0}, "history": {"payloads": False}}
    (tmp_path / "controller.json").write_text(json.dumps({"task": TASK, "bus": bus, "federated": rules}))
    shown: list[Shown] = []
    followed = FollowedJob()

    def display(controller: Any) -> Shown:
        shown.append(Shown(controller.progress, followed))
        return shown[0]

    with Commands(tmp_path, domain) as commands, ControllerDirectory(tmp_path / "run") as run, capture_logs() as log:
        if host:
            commands.start(["host", "client.json", "--ids", "0-2", "--name", "lab", "--processes", "1"])
        else:
            for name in NAMES:
                commands.start(["client", "client.json", "--name", name])
        file = load(ControllerFile, tmp_path / "controller.json")
        reports = asyncio.run(run_controller(file, run, display, followed=followed))
        commands.outputs()
    assert [report.clients for report in reports] == [(0, 1, 2)] * 2

    rows = json.loads((tmp_path / "run" / "clients.json").read_text())["names"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["client_names"] == rows
    if host:
        assert rows == [{"clients": "0-2", "name": "lab"}]
        names = {number: f"lab.{number}" for number in range(3)}
        series = {("0-2", "lab")}
        assert [line["name"] for line in log if line["event"] == "clients joined"] == ["lab"]
    else:
        names = {int(row["clients"]): row["name"] for row in rows}
        series = {(str(number), name) for number, name in names.items()}
        assert (sorted(names), sorted(names.values())) == ([0, 1, 2], NAMES)
        joined = [(line["client"], line["name"]) for line in log if line["event"] == "client joined"]
        assert sorted(joined) == sorted(names.items())
    labels = [f"{number} ({name})" for number, name in sorted(names.items())]

    assert f"clients here: {', '.join(labels)}" in shown[0].terminal
    found = re.findall(r'gradbus_client_info\{client="([^"]*)",job="named",name="([^"]*)"\} 1', shown[0].scrape)
    assert set(found) == series
    events = [json.loads(line) for line in (tmp_path / "run" / "history" / "controller.jsonl").read_text().splitlines()]
    assert {(e["client"], e["name"]) for e in events if e["event"] == "counted"} == set(names.items())
    commanded = [event["names"] for event in events if event["event"] == "commanded"]
    assert commanded == [{str(number): name for number, name in names.items()}] * 2
    page = page_of(read_run(tmp_path / "run"))
    tables = {table.name: table for section in page.sections for table in section.tables}
    assert [row[0] for row in tables["clients"].rows] == labels
    following = Following(tmp_path / "run", "federated")
    following.refresh()
    body = run_body(following, 1)
    assert all(label in body for label in labels)


def test_the_open_round_of_the_dashboard_shows_names_of_its_journal_that_are_names(tmp_path: Path) -> None:
    (tmp_path / "history").mkdir()
    event = {
        "event": "commanded",
        "time": time.time(),
        "round": 1,
        "expected": [0, 1, 2],
        "names": {"0": "site-1", "1": "<b>", "x": "site-3"},
    }
    (tmp_path / "history" / "controller.jsonl").write_text(json.dumps(event) + "\n")
    (tmp_path / "clients.json").write_text(json.dumps({"names": [{"clients": "2", "name": "site-2"}, {"name": 7}, 8]}))
    following = Following(tmp_path, "federated")
    following.refresh()
    assert [chip.client for chip in now_of(following).chips] == ["0 (site-1)", "1", "2 (site-2)"]


def test_the_status_of_a_job_shows_names_and_leaves_out_who_has_no_id_yet() -> None:
    observer = Observer()
    status = Status(1, 1, "training", 0, 2, awaited=[0, 7], silent_s=[0.0, 0.0])
    observer.take(Control(CONTROLLER, 1, status), 0.0)
    for sender, said in (
        (0, {"name": "site-1"}),
        (3, {"name": "site-2"}),
        (UNASSIGNED, {"name": "new"}),
        (1 << 31 | 7, {"name": "lab", "ids": "7-9"}),
    ):
        observer.take(Control(sender, 5, Hello(PROTOCOL, 1, 1, True, 1, "training", 1, 0, "host", 1, **said)), 0.0)
    lines = lines_of(observer.picture("job", 0.0))
    assert [line.split(":")[0] for line in lines if "waiting for" in line] == [
        "  waiting for client 0 (site-1)",
        "  waiting for client 7 (lab.7)",
    ]
    assert "  clients that are not waited for: 3 (site-2)" in lines

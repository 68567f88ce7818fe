"""A run whose clients have names, as real processes of the commands: the seven places in which the names show."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import Commands
from dds_domains import new_domain
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry
from rich.console import Console
from structlog.testing import capture_logs

from gradbus.experiments.dashboard.following import Following
from gradbus.experiments.dashboard.pages import run_body
from gradbus.experiments.files import ControllerFile, load
from gradbus.experiments.report.federated import page_of
from gradbus.experiments.report.followed import FollowedJob
from gradbus.experiments.report.metrics import JobCollector
from gradbus.experiments.run.console import LogFile
from gradbus.experiments.run.federated import run_controller
from gradbus.experiments.run.live import Display, RoundTable
from gradbus.experiments.rundir.directory import ControllerDirectory
from gradbus.experiments.rundir.reading import read_run

pytestmark = pytest.mark.slow

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

"""The live pages of runs, without a browser: what is read as it grows, what is served, and to whom."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gradbus.actors import EpochReport, RoundReport
from gradbus.commands.dashboard import following
from gradbus.commands.dashboard.drawings import Drawings
from gradbus.commands.dashboard.growing_file import GrowingFile
from gradbus.commands.dashboard.runs import Runs
from gradbus.commands.dashboard.server import Dashboard, serving
from gradbus.commands.files import ControllerFile, WorkerFile
from gradbus.commands.rundir.directory import ControllerDirectory, WorkerDirectory
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.testing.journal import History

RULES = {"rounds": 5, "clients": {"min": 2}}


def begin(path: Path, job: str = "cells") -> ControllerDirectory:
    """A federated run of which two rounds are done."""
    run = ControllerDirectory(path)
    run.write_config(ControllerFile.model_validate({"bus": {"job": job}, "federated": RULES}).model_dump(mode="json"))
    run.add([RoundReport(round_id=n, clients=(0, 1), expected=2, loss=1 / n, accuracy=n / 10) for n in (1, 2)])
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    begin(folder / "first").log.close()
    return folder


@pytest.fixture
def dashboard(runs: Path) -> Iterator[Dashboard]:
    with serving(runs) as found:
        yield found


def get(
    dashboard: Dashboard, path: str, *, method: str = "GET", host: str = "", whole: bool = False, **headers: str
) -> tuple[int, str]:
    """Status and text. ``path``: behind the random word, or with ``whole`` all of it."""
    address = urlsplit(dashboard.url)
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=10)
    asked = path if whole else address.path + path
    connection.request(method, asked, headers={"Host": host or f"localhost:{address.port}", **headers})
    answer = connection.getresponse()
    text = answer.read().decode("utf-8", errors="replace")
    connection.close()
    return answer.status, text


def test_a_line_counts_once_it_is_whole_and_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = GrowingFile(path.parent, path.name, max_bytes=1000)
    assert tail.new_lines() == (False, [])
    path.write_text("one\ntw")
    assert tail.new_lines() == (True, ["one"])
    with path.open("a") as file:
        file.write("o\n")
    assert tail.new_lines() == (False, ["two"])
    (tmp_path / "new").write_text("other\n")
    os.replace(tmp_path / "new", path)
    assert tail.new_lines() == (True, ["other"])


def test_of_a_large_file_the_last_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"line {n:03d}\n" for n in range(100)))
    assert GrowingFile(path.parent, path.name, max_bytes=22).new_lines() == (True, ["line 098", "line 099"])


def test_links_and_pipes_in_a_run_directory_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("text\n")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        assert GrowingFile(tmp_path, name, max_bytes=100).new_lines() == (False, [])


def test_a_round_is_shown_from_its_command_to_its_model(runs: Path, dashboard: Dashboard) -> None:
    journal = History(runs / "first" / "history", "controller")
    journal.note("commanded", round=3, expected=[0, 1, 2], counted=[])
    journal.note("counted", round=3, client=2)
    text = get(dashboard, "runs/first/body")[1]
    assert "round 3: training, 1 of 3 updates" in text
    assert '<li class="in">client 2 ✓</li>' in text
    assert '<li class="expected">client 0</li>' in text
    journal.note("refused", round=3, client=0, reason="non-finite")
    journal.note("committed", round=3, clients=[2])
    assert "round 3: evaluation of its model, 1 of 3 updates, 1 refused" in get(dashboard, "runs/first/body")[1]
    journal.note("ended", phase="stopped")
    text = get(dashboard, "runs/first/body")[1]
    assert "stopped, after round 2" in text
    assert '<table id="rounds"' in text
    journal.close()


def test_a_page_is_sent_again_only_when_something_has_changed(runs: Path, dashboard: Dashboard) -> None:
    address = urlsplit(dashboard.url)
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=10)
    connection.request("GET", f"{address.path}runs/first/body")
    answer = connection.getresponse()
    answer.read()
    tag = str(answer.headers["ETag"])
    connection.close()
    ask = {"If-None-Match": tag}
    assert get(dashboard, "runs/first/body", **ask) == (304, "")
    with (runs / "first" / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(RoundReport(round_id=3, loss=0.25).to_json()) + "\n")
    status, text = get(dashboard, "runs/first/body", **ask)
    assert (status, "0.2500" in text) == (200, True)


def test_epochs_and_ranks_of_a_data_parallel_run_are_shown(runs: Path, dashboard: Dashboard) -> None:
    run = WorkerDirectory(runs / "second", 0)
    run.write_config(WorkerFile.model_validate({"world": 2, "parallel": {"epochs": 4}}))
    run.add(EpochReport(epoch=0, step=50, loss=0.5, accuracy=0.9, bytes_out_per_step=1000.0))
    text = get(dashboard, "runs/second/body")[1]
    assert "epoch 2: training, step 50 or later" in text
    assert '<table id="epochs"' in text
    assert "data parallel" in get(dashboard, "body")[1]


def test_figures_are_drawn_in_both_themes_and_others_are_not_there(dashboard: Dashboard) -> None:
    for theme in ("light", "dark"):
        status, text = get(dashboard, f"runs/first/figures/learning?theme={theme}")
        assert (status, text[:5]) == (200, "<?xml")
    for path in ("runs/first/figures/learning?theme=x", "runs/first/figures/none", "runs/other/figures/learning"):
        assert get(dashboard, path)[0] == 404


def test_drawing_rests_many_times_as_long_as_it_took(runs: Path) -> None:
    now_s = [0.0]
    drawings = Drawings(lambda: now_s[0])
    assert drawings.version_to_show("first", 1) == 1
    assert drawings.version_to_show("first", 2) == 1
    now_s[0] = 1.0
    assert drawings.version_to_show("first", 2) == 2


def test_whoever_does_not_know_the_address_gets_nothing(dashboard: Dashboard) -> None:
    for path in ("/", "/body", "/x/", "/dashboard.js", "/%C3%A9/"):
        assert get(dashboard, path, whole=True)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1:8765"])
def test_a_request_that_names_another_host_is_refused(dashboard: Dashboard, host: str) -> None:
    assert get(dashboard, "", host=host)[0] == 421


def test_a_tunnel_may_have_another_port_and_writing_is_not_served(dashboard: Dashboard) -> None:
    assert get(dashboard, "", host="localhost:9000")[0] == 200
    assert get(dashboard, "", method="POST")[0] == 501


@pytest.mark.parametrize(
    "name", ["..", "../outside", "..%2Foutside", "%2e%2e", "outside", "link", "first/../../outside"]
)
def test_what_lies_outside_of_the_folder_is_not_served(runs: Path, dashboard: Dashboard, name: str) -> None:
    begin(runs.parent / "outside").log.close()
    (runs / "link").symlink_to(runs.parent / "outside")
    for path in (f"runs/{name}/", f"runs/{name}/body", f"runs/{name}/figures/learning"):
        assert get(dashboard, path)[0] == 404


def test_markup_in_the_files_of_a_run_is_text_on_the_page(runs: Path, dashboard: Dashboard) -> None:
    path = runs / "<b>bold&"
    begin(path).log.close()
    config = json.loads((path / "config.json").read_text())
    config["bus"]["job"] = "<script>alert(1)</script>"
    config["federated"]["strategy"]["name"] = "<img src=x onerror=alert(1)>"
    (path / "config.json").write_text(json.dumps(config))
    with (path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(RoundReport(round_id=3, dropped={"<i>why": 1}).to_json()) + "\n")
    for page in ("", "runs/%3Cb%3Ebold%26/"):
        status, text = get(dashboard, page)
        assert status == 200
        assert "&lt;script&gt;alert(1)" in text
        assert not [mark for mark in ("<script>", "<img src=x", "<i>", "<b>bold") if mark in text]


def test_files_that_hold_nonsense_leave_the_page_as_it_was(runs: Path, dashboard: Dashboard) -> None:
    path = runs / "first"
    (path / "history").mkdir(exist_ok=True)
    (path / "history" / "controller.jsonl").write_text(
        '{"event": "commanded", "time": 1e400, "round": 1e400}\n[1]\nx\n'
        '{"event": "counted", "time": 1, "round": null}\n'
    )
    (path / "summary.json").write_text("[" * 10_000)
    with (path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round_id": "x"}\n\xff\xfe\n' + b"[" * 100_000 + b"\n{}\n")
    status, text = get(dashboard, "runs/first/body")
    assert (status, "2 of 5" in text) == (200, True)


def test_of_very_many_runs_the_newest_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbus.commands.dashboard.runs.MAX_RUNS", 2)
    for number in range(4):
        path = tmp_path / f"run-{number}"
        path.mkdir()
        (path / "rounds.jsonl").write_text("")
        for file in (path / "rounds.jsonl", path):
            os.utime(file, (1000 + number, 1000 + number))
    assert Runs(tmp_path).names() == ["run-3", "run-2"]


def test_a_run_directory_by_itself_is_a_list_of_one(runs: Path) -> None:
    assert Runs(runs / "first").names() == ["first"]


def test_a_run_whose_files_do_not_change_is_silent(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Runs(runs).open("first")
    assert run is not None
    assert run.state == "running"
    monkeypatch.setattr(following, "SILENT_S", -1.0)
    assert run.state == "silent"


def test_a_folder_that_is_not_there_and_a_port_that_is_taken_are_named(runs: Path, dashboard: Dashboard) -> None:
    with pytest.raises(ConfigError, match="none does not exist"):
        Dashboard(runs / "none")
    port = urlsplit(dashboard.url).port
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
        Dashboard(runs, port or 0)

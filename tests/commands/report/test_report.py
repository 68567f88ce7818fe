"""``gradbus report``: from the files of real runs, whole ones and broken ones, to one HTML file."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.federated.controller.report import ClientTimeline, RoundReport
from gradbus.actors.federated.controller.update_admission import Quarantine
from gradbus.commands.amounts import duration
from gradbus.commands.report.build import page_of
from gradbus.commands.report.page import byte_column, render, row_table, time_column
from gradbus.commands.rundir.directory import ControllerDirectory
from gradbus.commands.rundir.reading import RunFiles, read_run
from gradbus.runtime.json_text import json_text

FEDERATED_FIGURES = ["learning", "client-training", "round-times", "timeline-1", "timeline-2", "bytes", "norms"]
PARALLEL_FIGURES = ["learning", "step-parts", "windows", "step-spans", "bytes"]


@pytest.fixture
def broken(federated: Path, tmp_path: Path) -> Path:
    """A copy to be broken."""
    return Path(shutil.copytree(federated, tmp_path / "broken"))


def figures_of(html: str) -> list[str]:
    return re.findall(r'<figure id="([^"]+)"', html)


def drawing_of(html: str, name: str, theme: str) -> str:
    """The SVG of a figure."""
    part = html[html.index(f'<figure id="{name}"') :]
    found = re.search(rf'{"srcset" if theme == "dark" else "src"}="data:image/svg\+xml;base64,([^"]*)"', part)
    assert found is not None, name
    return base64.b64decode(found[1]).decode()


def rows_of(html: str, table: str) -> list[list[str]]:
    body = re.search(rf'<table id="{table}".*?<tbody>(.*?)</tbody>', html, re.DOTALL)
    assert body is not None, table
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", body[1])]


def notes_of(html: str) -> str:
    found = re.search(r'id="missing".*?</section>', html, re.DOTALL)
    return "" if found is None else found[0]


def without_figures(run: RunFiles) -> str:
    """Drawing takes most of the time of a report."""
    page = page_of([run])
    return render(replace(page, sections=[replace(section, figures=()) for section in page.sections]))


def check_it_needs_nothing_but_itself(html: str) -> None:
    assert "<script" not in html
    assert not re.search(r"https?://(?!www\.w3\.org/)", html)
    assert set(re.findall(r'(?:src|srcset|href)="([^";,]*)', html)) <= {"data:", "data:image/svg+xml", "data:image/png"}
    assert "default-src 'none'" in html
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(ids) == len(set(ids))


@pytest.mark.usefixtures("in_one_theme")  # the next test draws both
def test_a_federated_run_becomes_one_file_with_its_figures_and_every_round(invoke, federated: Path) -> None:
    ended = invoke("report", federated)
    assert ended.code == 0, ended.err
    out = federated / "report.html"
    assert str(out) in ended.out
    html = out.read_text(encoding="utf-8")
    assert out.stat().st_size < 1_500_000
    assert figures_of(html) == FEDERATED_FIGURES
    reports = [json.loads(line) for line in (federated / "rounds.jsonl").read_text().splitlines()]
    rows = rows_of(html, "rounds")
    assert [row[0] for row in rows] == [str(report["round_id"]) for report in reports]
    assert [row[3] for row in rows] == [f"{100 * report['accuracy']:.2f}" for report in reports]
    assert [row[0] for row in rows_of(html, "clients")] == ["0", "1", "2"]
    assert ["codec.name", "sq8"] in rows_of(html, "settings-federated")
    facts = dict(rows_of(html, "versions"))
    assert {"python", "torch", "cyclonedds", "processor", "cores", "memory", "system"} <= facts.keys()
    assert notes_of(html) == ""
    check_it_needs_nothing_but_itself(html)


def test_a_data_parallel_run_becomes_one_file_with_its_figures_every_epoch_and_rank(invoke, parallel: Path) -> None:
    ended = invoke("report", parallel, "--out", "mine.html")
    assert ended.code == 0, ended.err
    html = Path("mine.html").read_text(encoding="utf-8")
    assert figures_of(html) == PARALLEL_FIGURES
    assert [row[0] for row in rows_of(html, "epochs")] == ["1", "2", "3"]
    assert [row[:2] for row in rows_of(html, "ranks")] == [["0", "15"], ["1", "15"]]
    assert ["algorithm.name", "dgc"] in rows_of(html, "settings-parallel")
    for theme in ("light", "dark"):
        assert ">exchange<" in drawing_of(html, "step-spans", theme)
    assert notes_of(html) == ""
    check_it_needs_nothing_but_itself(html)


@pytest.mark.usefixtures("in_one_theme")
def test_two_runs_are_shown_side_by_side_with_what_differs(invoke, federated: Path, broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    config["federated"]["codec"] = {"name": "s4"}
    (broken / "config.json").write_text(json.dumps(config))
    ended = invoke("report", "--compare", federated, broken, "--out", "both.html")
    assert ended.code == 0, ended.err
    html = Path("both.html").read_text(encoding="utf-8")
    assert figures_of(html) == ["learning", "parts"]
    assert rows_of(html, "settings") == [["federated.codec.name", "sq8", "s4"]]
    rounds = rows_of(html, "measures")[0]
    assert rounds == ["rounds", "10", "10", "1"]


@pytest.mark.usefixtures("in_one_theme")
def test_data_parallel_runs_are_compared_as_well(invoke, parallel: Path, tmp_path: Path) -> None:
    other = shutil.copytree(parallel, tmp_path / "other")
    ended = invoke("report", parallel, "--compare", other, parallel, "--out", "three.html")
    assert ended.code == 0, ended.err
    html = Path("three.html").read_text(encoding="utf-8")
    assert figures_of(html) == ["learning", "parts"]
    assert len(rows_of(html, "measures")[0]) == 4
    assert "<h1>parallel, other, parallel (2)</h1>" in html


def test_what_is_no_run_is_an_error_that_says_what_one_is(invoke, federated: Path, parallel: Path) -> None:
    Path("empty").mkdir()
    Path("file").write_text("")
    Path("young").mkdir()  # nothing of it is to be drawn
    Path("young", "config.json").write_text('{"federated": {"rounds": 3}, "bus": {"job": "young"}}')
    for arguments, said in (
        (("gone",), "run directory gone does not exist"),
        (("file",), "run directory file is a file, not a directory"),
        (("empty",), "empty is no run directory: it has neither rounds.jsonl (federated) nor epochs.jsonl"),
        ((), "which run? Name its directory"),
        (("--compare", str(federated), str(parallel)), "only runs of one kind can be compared"),
        (("young", "--out", "file/x.html"), "cannot be written"),
    ):
        ended = invoke("report", *arguments)
        assert ended.code == 2, arguments
        assert said in ended.err
        assert ended.err.count("\n") == 1


@pytest.mark.usefixtures("in_one_theme")
def test_a_run_that_was_killed_is_shown_as_far_as_it_went(broken: Path) -> None:
    (broken / "summary.json").unlink()
    (broken / "config.json").write_text('{"federated": {"rou')
    lines = (broken / "rounds.jsonl").read_text().splitlines()
    del lines[4]
    lines[2] = '{"round_id": 3, "accuracy": "high"}'
    (broken / "rounds.jsonl").write_text("\n".join(lines)[:-200])
    html = render(page_of([read_run(broken)]))
    assert [row[0] for row in rows_of(html, "rounds")] == ["1", "2", "4", "6", "7", "8", "9"]
    assert figures_of(html) == FEDERATED_FIGURES
    notes = notes_of(html)
    for said in (
        "summary.json is not there: the run has not come to its end",
        "config.json cannot be read, it is no JSON",
        "rounds.jsonl, line 3 is left out: accuracy: Input should be a valid number",
        "rounds.jsonl, line 9 is left out: no JSON; it was cut off",
        "Of round 3, 5 there is no report",
    ):
        assert said in notes
    assert "not finished" in html


def test_a_run_that_ended_early_says_why_and_what_it_has_spent(broken: Path) -> None:
    lines = [json.loads(line) for line in (broken / "rounds.jsonl").read_text().splitlines()][:2]
    (broken / "rounds.jsonl").write_text("".join(json.dumps(line | {"epsilon": 3.189}) + "\n" for line in lines))
    summary = json.loads((broken / "summary.json").read_text()) | {"outcome": "done", "rounds": 2}
    (broken / "summary.json").write_text(json.dumps(summary | {"ended_early": "the privacy budget is spent"}))
    html = without_figures(read_run(broken))
    assert re.search(r"The run ended after round 2 of \d+: the privacy budget is spent\.", notes_of(html))
    assert "3.19" in html
    (broken / "summary.json").write_text(json.dumps(summary))
    assert "its last report is of round 2 of" in notes_of(without_figures(read_run(broken)))


def test_a_run_that_has_just_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"federated": {"rounds": 3}, "bus": {"job": "young"}}')
    html = render(page_of([read_run(tmp_path)]))
    assert figures_of(html) == []
    assert "rounds.jsonl is not there: nothing was finished" in notes_of(html)
    (tmp_path / "config.json").write_text('{"parallel": {"epochs": 3}}')
    (tmp_path / "profile-rank-0.jsonl").write_text('{"kind": "start", "rank": 0}\n{"kind": "win')
    (tmp_path / "trace-rank-0.json").write_text("{")
    notes = notes_of(without_figures(read_run(tmp_path)))
    assert "epochs.jsonl is not there: nothing was finished" in notes
    assert "trace-rank-0.json cannot be read" in notes


@pytest.mark.usefixtures("in_one_theme")
def test_reports_of_an_older_program_make_a_report_without_timelines(broken: Path) -> None:
    entries = [json.loads(line) for line in (broken / "rounds.jsonl").read_text().splitlines()]
    for entry in entries:
        for key in ("timeline", "step_s", "command_s", "downlink_residual_norm"):
            del entry[key]
    (broken / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    html = render(page_of([read_run(broken)]))
    assert figures_of(html) == ["learning", "round-times", "bytes"]
    assert "There are no timelines of clients" in notes_of(html)


@pytest.mark.usefixtures("in_one_theme")
def test_whatever_the_files_say_stays_text(broken: Path) -> None:
    name = '<script>alert("1")</script> $\\frac{1}$ & _x'
    summary = json.loads((broken / "summary.json").read_text())
    (broken / "summary.json").write_text(json.dumps(summary | {"job": name, "outcome": name}))
    lines = (broken / "rounds.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"dropped": {name: 3}, "loss": 1e300}
    (broken / "rounds.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]))
    config = json.loads((broken / "config.json").read_text())
    config["federated"]["codec"] = {"name": name}
    (broken / "config.json").write_text(json.dumps(config))
    html = render(page_of([read_run(broken)]))
    assert "<script" not in html
    assert "<script" not in drawing_of(html, "bytes", "light")
    assert "&lt;script&gt;alert" in html
    assert figures_of(html) == FEDERATED_FIGURES


def test_drops_and_faults_are_shown_by_reason_with_their_meaning(tmp_path: Path) -> None:
    reports = [
        RoundReport(round_id=1, clients=(0,), expected=2, attempt=2, outcome="deadline",
                    dropped={"client lost": 1, "stale": 2}),
        RoundReport(round_id=2, clients=(0, 1), expected=2, outcome="all live clients answered", dropped={"stale": 1}),
    ]  # fmt: skip
    with ControllerDirectory(tmp_path) as run:
        run.add(reports)
        run.finish(reports, outcome="failed", seconds=3.0)
    html = without_figures(read_run(tmp_path))
    assert rows_of(html, "dropped") == [
        ["stale", "3", "1, 2", "offered for a round that was not open any more"],
        ["client lost", "1", "1", "died, or left, while its update was expected"],
    ]
    assert rows_of(html, "uneven") == [["1", "1 of 2", "2", "deadline"]]


def test_bad_updates_are_told_by_client_with_what_followed(tmp_path: Path) -> None:
    conduct, reports = Quarantine(2, 3), []
    for round_id, client_id, reason in ((1, 7, "malformed"), (2, 7, "non-finite"), (3, 1, "samples")):
        conduct.strike(client_id, round_id, reason, f"<b>{reason}</b> of {client_id}")
        reports.append(
            RoundReport(
                round_id=round_id,
                clients=(0, 2),
                expected=3,
                strikes=conduct.take_new(),
                marks={"clipped": (2,), "samples capped": (0, 2)} if round_id > 1 else {},
            )
        )
    with ControllerDirectory(tmp_path) as run:
        run.add(reports)
        run.finish(reports, outcome="done", seconds=3.0)
    found = read_run(tmp_path)
    assert [r.strikes for r in found.rounds] == [r.strikes for r in reports]
    assert [r.marks for r in found.rounds] == [r.marks for r in reports]
    html = without_figures(found)
    assert rows_of(html, "strikes") == [
        ["1", "1", "3", "samples", "&lt;b&gt;samples&lt;/b&gt; of 1", "no"],
        ["7", "2", "1, 2", "non-finite", "&lt;b&gt;non-finite&lt;/b&gt; of 7", "3 to 5"],
    ]
    assert rows_of(html, "marks") == [["0", "0", "2"], ["2", "2", "2"]]


@pytest.mark.usefixtures("in_one_theme")
def test_a_long_run_with_many_clients_stays_small_and_says_what_is_left_out(tmp_path: Path) -> None:
    def timeline(client_id: int) -> ClientTimeline:
        return ClientTimeline(
            client_id=client_id,
            offered_s=1.0,
            granted_s=1.1,
            received_s=1.2,
            adding_s=1.3,
            counted_s=1.4,
            train_s=0.8,
            update_norm=1.0 + client_id,
            residual_norm=0.5,
        )

    few = tuple(timeline(client_id) for client_id in range(64))
    with (tmp_path / "rounds.jsonl").open("w") as file:
        for round_id in range(1, 501):
            report = RoundReport(
                round_id=round_id,
                clients=tuple(range(200)),
                expected=200,
                accuracy=0.5,
                loss=1.0,
                seconds=1.5,
                bytes_up=10**6,
                timeline=few if round_id % 50 == 0 else (),
            )
            file.write(json_text(report.to_json()) + "\n")
    html = render(page_of([read_run(tmp_path)]))
    assert len(html) < 1_500_000
    assert "100 rounds are left out; rounds.jsonl has all of them" in html
    assert "Of 200 clients the 24 that counted last" in html
    assert figures_of(html) == [name for name in FEDERATED_FIGURES if name != "client-training"]


@pytest.mark.parametrize("package", ["jinja2", "matplotlib.figure"])
def test_without_the_extra_it_is_said_what_to_install(
    invoke, federated: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    ended = invoke("report", federated)
    assert ended.code == 2
    assert "-m pip install '" in ended.err
    assert "'jinja2>=3.1'" in ended.err


def test_a_file_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    (tmp_path / "rounds.jsonl").write_text("")
    assert "config.json cannot be read, it is a folder, expected a regular file" in read_run(tmp_path).missing[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (2e-6, "2 µs"),
        (0.0123, "12.3 ms"),
        (3.0, "3.00 s"),
        (600, "10.0 min"),
        (7200, "2.0 h"),
        (math.nan, "–"),
        (None, "–"),
    ],
)
def test_times_are_said_in_a_unit_that_fits(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_columns_have_one_unit_and_gaps_where_nothing_is_known() -> None:
    assert time_column("train", [0.5, 12.25, None, math.nan]) == ("train\ns", ["0.5", "12.2", "–", "–"])
    assert byte_column("up", [1_500_000, 10]).cells == ["1.50", "0.00"]


def test_of_a_long_table_the_first_and_the_last_rows_are_shown() -> None:
    table = row_table("rounds", ("round", ""), [[str(i), "x"] for i in range(10)], "rounds", most=4, file="all.jsonl")
    assert [row[0] for row in table.rows] == ["0", "1", "…", "8", "9"]
    assert table.caption == "6 rounds are left out; all.jsonl has all of them."


def test_metrics_of_a_task_without_an_accuracy_are_in_the_page_beside_the_losses(tmp_path: Path) -> None:
    rounds, epochs, metrics = tmp_path / "rounds", tmp_path / "epochs", {"rmse": 0.125, "worst": math.nan}
    for folder, name, report in (
        (rounds, "rounds", RoundReport(round_id=1, loss=0.5, eval_loss=0.4, metrics=metrics)),
        (
            epochs,
            "epochs",
            EpochReport(
                epoch=0,
                step=3,
                loss=0.5,
                eval_loss=0.4,
                metrics=metrics,
                train_metrics={"mae": 0.75},
            ),
        ),
    ):
        folder.mkdir()
        (folder / f"{name}.jsonl").write_text(json_text(report.to_json()) + "\n")
        run = read_run(folder)
        assert not any("left out" in line for line in run.missing)
        html = without_figures(run)
        (row,) = rows_of(html, name)
        assert "0.1250" in row
        assert "test accuracy" not in html
        assert re.search(r"rmse", html)
    assert "0.7500" in row
    assert "mae (training)" in html

"""A run whose clients evaluate, from its configuration to its report: real processes, one of which is killed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from forked_commands import Forked
from safetensors.torch import load_file

from gradbus.actors.federated.client.local_evaluation import NOT_SHARED
from gradbus.actors.federated.controller.evaluation import LOST
from gradbus.commands.amounts import number
from gradbus.commands.dashboard.drawings import figures_of
from gradbus.commands.dashboard.following import Following
from gradbus.commands.dashboard.pages import row_of, run_body
from gradbus.commands.report.followed import Totals
from gradbus.commands.report.scalars import round_values
from gradbus.commands.run.live import cross_site_table, round_line, rounds_table
from gradbus.commands.rundir.reading import read_run
from gradbus.experiments.examples.tabular_regression import HousePrices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

TASK = '''
import os, signal
from gradbus.experiments.examples.tabular_regression import HousePrices

class Mortal(HousePrices):
    """The process of client 2 is killed when it evaluates what it has trained, not the initial model."""
    has_trained = False
    def train(self, model, **given):
        self.has_trained = True
        return super().train(model, **given)
    def evaluate_local(self, model, *, client_id):
        if client_id == 2 and self.has_trained:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate_local(model, client_id=client_id)
'''
CLIENTS = 3


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """The directory of such a run, and what its controller has printed."""
    from dds_domains import new_domain

    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "mortal.py").write_text(TASK, encoding="utf-8")
    task = {"task": "mortal:Mortal", "task_options": {"samples": 60}}
    bus = {"job": "evaluated", "domain": new_domain()}
    federated: dict[str, Any] = {
        "rounds": 2, "clients": {"num": CLIENTS}, "evaluation": {"every": 1, "cross_site": True},
        "checkpoint": {"keep_best": "client.rmse"},
    }  # fmt: skip
    (folder / "controller.json").write_text(json.dumps({"bus": bus, "task": task, "federated": federated}))
    for client_id in range(CLIENTS):
        client = {"bus": bus, "task": task, "client": {"share_model": client_id == 0}}
        (folder / f"client-{client_id}.json").write_text(json.dumps(client))
    commands = [["controller", "controller.json", "--run-dir", "run", "--no-live"]]
    commands += [["client", f"client-{number}.json", "--id", str(number)] for number in range(CLIENTS)]
    running = [Forked(words, folder, {}) for words in commands]
    try:
        told = [process.communicate(timeout=100.0) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0, 0, -9], told
    return folder / "run", told[0][0]


def test_a_client_that_is_killed_is_not_waited_for_and_the_report_says_so(run_dir: tuple[Path, str]) -> None:
    first, second = read_run(run_dir[0]).rounds
    assert (first.by_clients.asked, first.by_clients.answered, dict(first.by_clients.missing)) == (3, 2, {LOST: 1})
    assert first.by_clients.seconds < 20.0, "not the deadline"
    assert (second.by_clients.asked, second.by_clients.answered) == (2, 2)
    assert set(second.by_clients.metrics) == {"loss", "rmse", "r2"}
    assert second.by_clients.metrics["r2"].worst[0][1] == second.by_clients.metrics["r2"].min
    assert second.accuracy is None
    assert set(second.metrics) == {"rmse", "r2"}


def test_the_report_says_whom_the_run_trusts(run_dir: tuple[Path, str], invoke: Any) -> None:
    assert invoke("report", run_dir[0]).code == 0
    assert "<dt>trust</dt><dd>cooperative" in "".join((run_dir[0] / "report.html").read_text().split("\n"))


def test_the_table_of_local_models_is_printed_and_kept_for_programs_and_spreadsheets(
    run_dir: tuple[Path, str],
) -> None:
    path, told = run_dir
    found = read_run(path).cross_site
    assert found is not None
    assert found.round_id == 2
    assert [(row.model, row.failure) for row in found.rows] == [(None, ""), (0, ""), (1, NOT_SHARED)]
    assert "rmse of each model (rows) on the data of each client" in told
    with (path / "cross_site.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["client"]) for row in rows] == [
        ("global", "0"),
        ("global", "1"),
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    assert float(rows[3]["rmse"]) == found.rows[1].results[1]["rmse"]
    assert {row["missing"] for row in rows[4:]} == {NOT_SHARED}
    assert {row["samples"] for row in rows[:4]} == {"12"}


@pytest.mark.usefixtures("in_one_theme")
def test_the_run_is_judged_by_its_metrics_everywhere(run_dir: tuple[Path, str], invoke: Any, tmp_path: Path) -> None:
    path, told = run_dir
    files = read_run(path)
    last = files.rounds[-1]
    assert (path / "metric.png").stat().st_size > 1000
    assert not (path / "accuracy.png").exists()
    summary = json.loads((path / "summary.json").read_text())
    assert summary["metrics"] == last.metrics
    assert summary["by_clients"]["rmse"] == last.by_clients.metrics["rmse"].mean
    assert "rmse" in told.splitlines()[-1]
    line = round_line(last, 2)
    assert "accuracy" not in line
    assert "on data of 2/2 clients: loss" in line
    heads = [str(column.header) for column in rounds_table(files.rounds).columns]
    assert "accuracy" not in heads
    assert {"rmse", "r2", "clients' loss", "clients' rmse", "clients' r2"} <= set(heads)
    assert len(cross_site_table(files.cross_site, "rmse").rows) == 3  # type: ignore[arg-type]
    values = round_values(last)
    found = last.by_clients.metrics["rmse"]
    assert [values[f"by_clients/rmse/{of}"] for of in ("max", "median")] == [found.max, found.median]
    assert f"median {number(found.median, 4)}, {number(found.min, 4)} to" in line
    assert Totals().follow(files.rounds).by_clients == last.by_clients
    shown = invoke("report", path, "--out", tmp_path / "report.html")
    assert shown.code == 0, shown.err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for text in ("rmse and loss over rounds", "What clients find", "of each model on the data of each", NOT_SHARED):
        assert text in page
    assert '<th scope="col" class="number">accuracy<' not in page
    followed = Following(path, "federated")
    followed.refresh()
    assert "rmse" in row_of("run", followed).cells[4]
    assert "worst clients" in run_body(followed, 1)
    drawn = {figure.name for figure in figures_of(followed.files)}
    assert drawn >= {"learning", "clients-metrics", "cross-site-0", "cross-site-1", "cross-site-2"}


def test_the_best_model_of_the_run_is_exported(
    run_dir: tuple[Path, str], invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = run_dir
    means = [report.by_clients.metrics["rmse"].mean for report in read_run(path).rounds]
    best = 1 + means.index(min(means))
    monkeypatch.chdir(path.parent)  # where the class of the task is
    shown = invoke("export", path, "--best", "--to", tmp_path / "best.safetensors")
    assert shown.code == 0, shown.err
    assert f"after round {best}, the minimum of client.rmse: {min(means):.6g}" in shown.out
    task = HousePrices(samples=60)
    model = task.build_model()
    model.load_state_dict(load_file(tmp_path / "best.safetensors"))
    found = [task.evaluate_local(model, client_id=number).metrics["rmse"] for number in range(CLIENTS - (best > 1))]
    assert min(found) <= min(means) <= max(found)

"""Metrics of a process over HTTP, as Prometheus reads them."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from forked_commands import Forked
from patience import until
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families

from gradbus.actors import EpochReport, RoundReport
from gradbus.actors.federated.controller.evaluation import ClientEvaluation, ClientMetric
from gradbus.commands.files import MetricsSettings
from gradbus.commands.report.followed import FollowedJob, FollowedRank
from gradbus.commands.report.metrics import JobCollector
from gradbus.commands.report.metrics_server import client_metrics, controller_metrics, rank_metrics
from gradbus.commands.report.process_metrics import RankCollector
from gradbus.runtime.errors import ConfigError


def scrape(port: int) -> dict[str, float]:
    """All samples, by name and labels other than those of the process."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return samples(text_string_to_metric_families(text))


def samples(families: Any) -> dict[str, float]:
    found = {}
    for family in families:
        for sample in family.samples:
            own: Mapping[str, str] = {
                key: value for key, value in sample.labels.items() if key not in ("job", "client", "rank")
            }
            found[sample.name + "".join(f" {value}" for value in own.values())] = sample.value
    return found


def test_a_controller_that_has_not_started_is_up_and_one_that_failed_says_so() -> None:
    port = free_port()
    with controller_metrics(MetricsSettings(port=port), "metrics") as followed:
        assert scrape(port)["gradbus_controller_up"] == 1
        followed.end(failed=True)
        found = scrape(port)
        assert (found["gradbus_controller_up"], found["gradbus_controller_failed"]) == (0, 1)
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_metrics_of_a_round_that_is_evaluated_are_there_by_name_and_reports_count_once() -> None:
    followed = FollowedJob()
    found_by_clients = {"mse": ClientMetric(mean=3.0, median=2.0, std=0.5, min=1.0, max=4.0, clients=3)}
    followed.progress.reports.append(
        RoundReport(
            round_id=1,
            loss=2.0,
            eval_loss=1.5,
            metrics={"mse": 0.25},
            by_clients=ClientEvaluation(asked=3, answered=3, metrics=found_by_clients),
        )
    )
    collector = JobCollector({"metrics": followed})
    for _ in range(2):
        found = samples(collector.collect())
        assert found["gradbus_rounds_total"] == 1
    assert (found["gradbus_metric mse"], found["gradbus_eval_loss"]) == (0.25, 1.5)
    assert "gradbus_accuracy" not in found
    spread = [found[f"gradbus_client_metric mse {of}"] for of in ("mean", "median", "std", "min", "max")]
    assert spread == [3.0, 2.0, 0.5, 1.0, 4.0]


def test_rounds_of_another_run_that_a_site_begins_are_counted_from_the_first() -> None:
    followed = FollowedJob()
    collector = JobCollector({"metrics": followed})
    followed.progress.reports.extend(RoundReport(round_id=number, bytes_up=10) for number in (1, 2))
    assert samples(collector.collect())["gradbus_rounds_total"] == 2
    followed.progress.reports = [RoundReport(round_id=1, loss=0.5, bytes_up=3)]
    assert samples(collector.collect())["gradbus_rounds_total"] == 1
    assert (followed.totals.sums["bytes_up"], followed.totals.loss) == (3, 0.5)


def test_epsilon_is_that_of_the_newest_round_and_there_only_with_privacy() -> None:
    followed = FollowedJob()
    collector = JobCollector({"metrics": followed})
    assert not {"gradbus_epsilon", "gradbus_epsilon_budget"} & samples(collector.collect()).keys()
    followed.progress.epsilon_budget = 8.0
    for round_id, epsilon in (1, 1.25), (2, 1.75):
        followed.progress.add(RoundReport(round_id=round_id, epsilon=epsilon))
    found = samples(collector.collect())
    assert (found["gradbus_epsilon"], found["gradbus_epsilon_budget"]) == (1.75, 8.0)


def test_the_newest_report_of_a_rank_is_served_and_epochs_and_skipped_steps_are_added_up() -> None:
    followed = FollowedRank()
    collector = RankCollector("metrics", 1, followed)
    assert "gradbus_rank_train_loss" not in samples(collector.collect())
    followed.epoch(EpochReport(epoch=0, step=5, loss=2.0, skipped_steps=2))
    followed.epoch(EpochReport(epoch=1, step=7, loss=1.0, metrics={"top5": 0.9}, skipped_steps=1, finished=False))
    found = samples(collector.collect())
    assert (found["gradbus_rank_epochs_total"], found["gradbus_rank_steps_skipped_total"]) == (1, 3)
    assert (found["gradbus_rank_train_loss"], found["gradbus_rank_metric top5"]) == (1.0, 0.9)


def test_a_port_that_is_taken_and_one_that_is_too_high_are_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*metrics.port"),
            client_metrics(MetricsSettings(port=port), "metrics", 3),
        ):
            pass
    with (
        pytest.raises(ConfigError, match="would have port 65536"),
        rank_metrics(MetricsSettings(port=65_535), "metrics", 1),
    ):
        pass


@pytest.mark.slow
def test_a_controller_a_client_a_host_and_a_rank_serve_what_they_do(
    fork: Callable[..., Forked], domain: int, tmp_path: Path
) -> None:
    """One process each; the ports are read while they run."""
    ports = {name: free_port() for name in ("controller", "client", "host", "worker")}
    files = {name: tmp_path / f"{name}.json" for name in ports}
    bus = {"job": "metrics", "domain": domain}
    few = {"train": 400, "test": 40}
    task = {"model": "gradbus.models:mnist_mlp", "data": "glyphs", "data_options": few, "threads": 1}
    rules = {"rounds": 100_000, "clients": {"num": 3, "min": 1}, "training": {"subset_size": 64}}
    files["controller"].write_text(json.dumps({"bus": bus, "task": task, "federated": rules}))
    for name in ("client", "host"):
        files[name].write_text(json.dumps({"bus": bus, "task": task}))
    parallel = {"epochs": 100_000}
    files["worker"].write_text(
        json.dumps({"bus": {**bus, "job": "metrics-ranks"}, "task": task, "parallel": parallel, "world": 1, "rank": 0})
    )
    folder = ("--run-dir", tmp_path / "run")
    own = {
        "client": ("--id", 0),
        "host": ("--ids", "1-2"),
        "worker": folder,
        "controller": ("--run-dir", tmp_path / "rounds"),
    }
    running: dict[str, Forked] = {
        name: fork(name, files[name], "--metrics-port", ports[name], *own[name]) for name in ports
    }
    wanted = {
        "controller": "gradbus_rounds_total",
        "client": "gradbus_client_rounds_total",
        "host": "gradbus_host_rounds_total",
        "worker": "gradbus_rank_epochs_total",
    }
    for name, metric in wanted.items():
        _until_above_zero(running[name], ports[name], metric)


def _until_above_zero(process: Forked, port: int, metric: str) -> None:
    def above_zero() -> bool:
        assert process.poll() is None, process.communicate()
        try:
            return scrape(port).get(metric, 0) > 0
        except OSError:  # it does not listen yet
            return False

    until(above_zero, timeout_s=60.0)


def test_the_time_of_the_newest_commit_clients_in_quarantine_and_the_disk_are_there_to_alert_on(tmp_path: Path) -> None:
    followed = FollowedJob()
    collector = JobCollector({"metrics": followed}, {"metrics": tmp_path / "not" / "there" / "yet"})
    before = samples(collector.collect())
    followed.progress.add(RoundReport(round_id=1))
    followed.progress.out = {3: 7}
    after = samples(collector.collect())
    assert before["gradbus_last_commit_timestamp_seconds"] < after["gradbus_last_commit_timestamp_seconds"]
    assert (before["gradbus_clients_quarantined"], after["gradbus_clients_quarantined"]) == (0, 1)
    assert 0 < after["gradbus_disk_free_bytes"] <= after["gradbus_disk_size_bytes"]
    assert "gradbus_disk_free_bytes" not in samples(JobCollector({"metrics": followed}).collect())

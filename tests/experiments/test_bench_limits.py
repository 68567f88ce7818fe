"""Benchmarks in parts: one that fails leaves the others their figures, and missing data is reported before any runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradbus import models
from gradbus.experiments.bench import attacks, data_parallel, federated, limits
from gradbus.experiments.bench.limits import Part, Taken, at_most
from gradbus.experiments.cli.exit_codes import ExitCode


def good() -> Taken:
    return [at_most("wait", 1.0, 2.0, "ms")], {"wait_s": [0.001]}


def fails() -> Taken:
    raise ValueError("rank 1 failed: Traceback\nOSError: why")


def no_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    def mnist(data_root: Path | None, **_: object) -> models.DataSplit:
        raise models.DataMissing("no MNIST here", Path())

    monkeypatch.setattr(models, "mnist", mnist)


def test_a_part_that_fails_falls_short_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    rows, samples = limits.measure(["bad", "good"], {"bad": Part(fails, ""), "good": Part(good, "")})
    assert [(row.ok, row.note) for row in rows] == [(False, "ValueError: OSError: why"), (True, "")]
    assert samples["wait_s"] == [0.001]
    error = capsys.readouterr().err
    assert "measuring: good" in error
    assert "Traceback" in error


def test_a_part_that_fails_in_a_command_leaves_a_file_with_the_figures_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(federated, "PARTS", {"bad": Part(fails, ""), "good": Part(good, "")})
    assert federated.main(["--out", str(tmp_path / "out.json")]) == 1
    saved = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in saved["rows"]] == ["bad", "wait"]


@pytest.mark.parametrize("command", [attacks, data_parallel, federated], ids=lambda it: it.__name__)
def test_without_mnist_nothing_is_measured_and_one_line_says_what_goes_without(
    command: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_mnist(monkeypatch)
    assert command.main(["--out", str(tmp_path / "out.json")]) == ExitCode.NO_DATA  # type: ignore[attr-defined]
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no MNIST here. What needs no data: " in error
    assert not (tmp_path / "out.json").exists()


def test_a_part_that_needs_no_data_runs_without_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_mnist(monkeypatch)
    parts = {"needs": Part(fails, "", needs_mnist=True), "free": Part(good, "")}
    assert limits.main("title", ["free"], parts, tmp_path / "out.json") == 0


def test_over_dds_the_same_parts_are_measured_and_named_alike() -> None:
    here, over_dds = federated.parts(shared_memory=True), federated.parts(shared_memory=False)
    assert here == federated.PARTS
    assert [part.about for part in over_dds.values()] == [part.about for part in here.values()]
    assert [name for name in here if over_dds[name] != here[name]] == ["overhead", "durable", "memory"]

"""Benchmarks in parts: one that fails leaves the others their figures, and missing data is told of before any runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradbus import models
from gradbus.experiments import bench_attacks, bench_ddp, bench_federated, bench_parts
from gradbus.experiments.bench_parts import Part, Taken
from gradbus.experiments.bench_rows import at_most
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
    rows, samples = bench_parts.run(["bad", "good"], {"bad": Part(fails, ""), "good": Part(good, "")})
    assert [(row.ok, row.note) for row in rows] == [(False, "ValueError: OSError: why"), (True, "")]
    assert samples["wait_s"] == [0.001]
    error = capsys.readouterr().err
    assert "measuring: good" in error
    assert "Traceback" in error


def test_a_part_that_fails_in_a_command_leaves_a_file_with_the_figures_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_federated, "PARTS", {"bad": Part(fails, ""), "good": Part(good, "")})
    assert bench_federated.main(["--out", str(tmp_path / "out.json")]) == 1
    saved = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in saved["rows"]] == ["bad", "wait"]


@pytest.mark.parametrize("command", [bench_attacks, bench_ddp, bench_federated], ids=lambda it: it.__name__)
def test_without_mnist_nothing_is_measured_and_one_line_says_what_goes_without(
    command: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_mnist(monkeypatch)
    assert command.main(["--out", str(tmp_path / "out.json")]) == ExitCode.NO_DATA  # type: ignore[attr-defined]
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no MNIST here. What needs no data: --part " in error
    assert not (tmp_path / "out.json").exists()


def test_a_part_that_needs_no_data_runs_without_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_mnist(monkeypatch)
    parts = {"needs": Part(fails, "", needs_mnist=True), "free": Part(good, "")}
    assert bench_parts.main("title", ["free"], parts, tmp_path / "out.json") == 0


def test_over_dds_the_same_parts_are_measured_and_named_alike() -> None:
    assert bench_federated.OVER_DDS.keys() <= bench_federated.PARTS.keys()
    for name, part in bench_federated.OVER_DDS.items():
        assert part.about == bench_federated.PARTS[name].about

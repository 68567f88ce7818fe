"""What all benchmarks have in common: limits, parts that fail, missing data, comparison with another commit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradbus import models
from gradbus.commands.exit_codes import ExitCode
from gradbus.experiments.bench import __main__ as bench
from gradbus.experiments.bench import checkout, sealing
from gradbus.experiments.bench.__main__ import BENCHMARKS
from gradbus.experiments.bench.command import Part
from gradbus.experiments.bench.results import Measurement, Results, measurement

NAMES = [name for name in BENCHMARKS if name != "suite"]


def good(chosen: object) -> Iterator[Measurement]:
    yield measurement("wait", "ms", [1.0, 2.0], at_most=2.0)


def fails(chosen: object) -> Iterator[Measurement]:
    yield measurement("before", "ms", [1.0])
    raise ValueError("rank 1 failed: Traceback\nOSError: why")


def no_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    def mnist(data_root: Path | None, **_: object) -> models.DataSplit:
        raise models.DataMissing("no MNIST here", Path())

    monkeypatch.setattr(models, "mnist", mnist)


def with_parts(monkeypatch: pytest.MonkeyPatch, name: str, **parts: Part) -> None:
    monkeypatch.setitem(BENCHMARKS, name, BENCHMARKS[name]._replace(parts=parts, default=()))


@pytest.mark.parametrize(
    ("limits", "short", "asked"),
    [
        ({}, False, ""),
        ({"at_most": 1.5}, False, "<= 1.5"),
        ({"at_most": 1.4}, True, "<= 1.4"),
        ({"at_least": 1.5}, False, ">= 1.5"),
        ({"at_least": 1600}, True, ">= 1,600"),
    ],
)
def test_a_limit_holds_for_the_median_of_the_samples_or_of_the_ratios(
    limits: dict[str, float], short: bool, asked: str
) -> None:
    for figure in (
        measurement("wait", "ms", [1.0, 1.5, 9.0], **limits),
        measurement("wait", "ms", [30.0, 1.5, 1.0], against=("gloo", [10.0, 1.0, 1.0]), **limits),
    ):
        assert (figure.falls_short, figure.asked) == (short, asked)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("limit", "code"), [(2.0, 0), (0.5, 1)])
def test_the_exit_code_tells_of_a_figure_that_falls_short(
    name: str, limit: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_parts(monkeypatch, name, one=Part(lambda chosen: [measurement("x", "ms", [1.0], at_most=limit)], "one", 1))
    assert bench.main([name, "--part", "one", "--out", "bench.json"]) == code
    saved = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert saved["runs"][0]["figures"] == [
        {"name": "x", "unit": "ms", "samples": [1.0], "note": "", "series": "", "at_most": limit}
    ]


@pytest.mark.parametrize("name", NAMES)
def test_help_names_every_part(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {part} " in text for part in BENCHMARKS[name].parts)


def test_a_part_that_fails_is_named_keeps_its_figures_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_parts(monkeypatch, "federated", bad=Part(fails, "", 1), good=Part(good, "", 1))
    assert bench.main(["federated", "--out", "out.json"]) == 1
    results = Results.load(tmp_path / "out.json")
    assert [(run.part, [one.name for one in run.figures]) for run in results.runs] == [
        ("bad", ["before"]),
        ("good", ["wait"]),
    ]
    error = capsys.readouterr().err
    assert "bad failed: ValueError: OSError: why" in error
    assert "Traceback" in error


@pytest.mark.parametrize("name", ["attacks", "ddp", "federated"])
def test_without_mnist_nothing_is_measured_and_one_line_says_what_goes_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_mnist(monkeypatch)
    assert bench.main([name, "--out", str(tmp_path / "out.json")]) == ExitCode.NO_DATA
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no MNIST here. What needs no data: " in error
    assert not (tmp_path / "out.json").exists()


def test_a_part_that_needs_no_data_runs_without_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    no_mnist(monkeypatch)
    with_parts(monkeypatch, "ddp", needs=Part(fails, "", 1, needs_mnist=True), free=Part(good, "", 1))
    assert bench.main(["ddp", "--part", "free"]) == 0


@pytest.mark.parametrize(("psk", "code"), [(1.04, 0), (1.2, 1)])
def test_encryption_that_takes_too_long_falls_short(
    psk: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocks = [
        sealing.TimedBlock(level, {"none": 1.0, "psk": psk, "identity": 3.0}[level], 1.0)
        for level in sealing.LEVELS * 4
    ]
    monkeypatch.setattr(sealing, "measured_blocks", lambda case, folder: blocks)
    assert bench.main(["sealing", "--part", "round", "--part", "alone", "--repeats", "2", "--out", "out.json"]) == code
    _, alone = sorted(Results.load(tmp_path / "out.json").runs, key=lambda run: len(run.figures))
    assert {one.unit for one in alone.figures} == {"us"}


# Another commit


@pytest.fixture
def earlier(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The code that is here, as a commit of a repository of its own, from which it is run."""
    copy = tmp_path / "repository"
    for words in (
        ["clone", "--quiet", "--shared", str(root), str(copy)],
        ["-C", str(copy), "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *words], check=True)
    monkeypatch.setattr(checkout, "ROOT", copy)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=copy, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_what_is_neither_a_file_nor_a_commit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--compare", "no-such-thing"]) == 2
    assert "neither a file of results nor a commit" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)  # four processes that load torch, one after the other
def test_another_commit_is_measured_by_turns_with_the_code_here(
    earlier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = bench.main(["--tiny", "--part", "codecs", "--turns", "2", "--compare", earlier])
    output = capsys.readouterr()
    turns = [line for line in output.err.splitlines() if line.startswith("codecs, ")]
    sides = ("before: run 1", "now: run 1", "now: run 2", "before: run 2")
    assert turns[:4] == [f"codecs, {side} of 2" for side in sides]
    assert "ratios compared" in output.out
    (line,) = [line for line in output.out.splitlines() if line.startswith("  bytes fp32, 10,000 elements: ")]
    assert "1 x fp32 (1 .. 1) then, 1 x fp32 (1 .. 1) now" in line
    assert line.endswith("now / then 1 (1 .. 1)")
    assert code in (0, 1)  # of two so short runs on a busy machine one may be slower, twice

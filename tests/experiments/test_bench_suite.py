"""The suite of benchmarks: its file of results, the comparison with a baseline, the tables in the documentation."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from pydantic import ValidationError

from gradbus.experiments.bench import __main__ as bench
from gradbus.experiments.bench import command, data_parallel, document, federated, scale
from gradbus.experiments.bench.__main__ import BENCHMARKS, DOCUMENTED, PARTS, SCALE, TITLES
from gradbus.experiments.bench.command import BASELINE, Part
from gradbus.experiments.bench.compare import compare, other_machine
from gradbus.experiments.bench.gloo_training import GlooRun, train_on_gloo
from gradbus.experiments.bench.results import Measurement, PartRun, Results, machine, make_run, measurement, summary
from gradbus.experiments.bench.rounds import WAYS
from gradbus.runtime import fast_paths
from gradbus.runtime.errors import ConfigError

SUITE: dict[str, Part] = BENCHMARKS["suite"].parts  # type: ignore[assignment]


def run_of(*figures: Measurement, part: str = "bus") -> PartRun:
    return make_run(part, figures, facts=machine(), seconds=1.0, configuration={"effort": "tiny"})


def results_of(*figures: Measurement, part: str = "bus") -> Results:
    return Results(runs=(run_of(*figures, part=part),))


def ratio(*ratios: float, name: str = "round trip") -> Measurement:
    """A figure with these ratios, while the machine gets slower and slower."""
    pace = [10.0 * 1.1**number for number in range(len(ratios))]
    return measurement(name, "ms", [r * p for r, p in zip(ratios, pace, strict=True)], against=("TCP", pace))


# The file


def test_a_file_of_results_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = results_of(ratio(1.0, 2.0, 3.0), measurement("late", "ms", [0.123456789, 7], note="p99"))
    written.save(tmp_path / "new" / "bench.json")
    assert Results.load(tmp_path / "new" / "bench.json") == written
    assert written.runs[0].versions.keys() >= {"python", "torch", "cyclonedds"}
    assert written.runs[0].machine.keys() >= {"cpu", "cores", "system"}
    assert written.runs[0].figures[1].samples == (0.12346, 7)


def test_a_later_run_of_a_part_takes_the_place_of_the_older_one() -> None:
    both = results_of(ratio(1.0)).with_run(run_of(ratio(5.0), part="codecs")).with_run(run_of(ratio(2.0)))
    assert {run.part: run.figures[0].ratios for run in both.runs} == {"bus": (2.0,), "codecs": (5.0,)}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"colour": 1}, "colour"),
        ({"samples": []}, "samples"),
        ({"samples": [1.0, float("inf")]}, "samples"),
        ({"against": {"name": "TCP", "samples": [1.0]}}, "1 samples|2 samples"),
        ({"against": {"name": "TCP", "samples": [1.0, 0.0]}}, "not above 0"),
    ],
)
def test_a_figure_that_makes_no_sense_is_refused(change: dict[str, Any], complaint: str) -> None:
    good = {"name": "x", "unit": "ms", "samples": [1.0, 2.0]}
    assert Measurement.model_validate(good).ratios == ()
    with pytest.raises(ValidationError, match=complaint):
        Measurement.model_validate(good | change)


def test_two_figures_of_one_name_or_two_runs_of_a_part_are_refused() -> None:
    with pytest.raises(ValidationError, match="same name"):
        run_of(ratio(1.0), ratio(2.0))
    with pytest.raises(ValidationError, match="more than one run"):
        Results(runs=(run_of(ratio(1.0)), run_of(ratio(1.0))))


@pytest.mark.parametrize("text", ["", "[]", '{"format": "gradbus-bench-0", "runs": []}', '{"runs": [{}]}'])
def test_a_file_that_holds_no_results_is_told_of_with_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bench\.json cannot be used"):
        Results.load(path)
    with pytest.raises(ConfigError, match=r"missing\.json: No such file"):
        Results.load(tmp_path / "missing.json")


def test_quartiles_lie_between_the_samples_and_one_sample_has_no_spread() -> None:
    assert summary([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert summary([5.0]).spread == 0


# The comparison


def test_only_a_ratio_that_is_worse_by_more_than_both_spreads_counts() -> None:
    before = results_of(ratio(1.0, 1.1, 1.2, 1.3, 1.4))  # median 1.2, quartiles 1.1 .. 1.3
    for shift, worse in ((0.0, False), (-0.5, False), (0.39, False), (0.41, True)):
        now = results_of(ratio(*(one + shift for one in (1.0, 1.1, 1.2, 1.3, 1.4))))
        (change,) = compare(before, now)
        assert change.worse is worse, shift
        assert change.allowed == pytest.approx(0.4, abs=1e-3)


def test_a_wide_spread_now_allows_more_just_as_one_of_the_baseline_does() -> None:
    narrow, wide = (1.0, 1.0, 1.0), (1.0, 1.5, 2.0)
    assert compare(results_of(ratio(*narrow)), results_of(ratio(1.4, 1.5, 1.6)))[0].worse
    assert not compare(results_of(ratio(*narrow)), results_of(ratio(*wide)))[0].worse
    assert not compare(results_of(ratio(*wide)), results_of(ratio(1.9, 1.9, 1.9)))[0].worse


def test_a_slow_machine_is_no_worse_ratio_and_a_time_is_never_judged() -> None:
    fast = measurement("step", "ms", [1.0, 1.0], against=("gloo", [2.0, 2.0])), measurement("late", "ms", [1.0])
    slow = measurement("step", "ms", [9.0, 9.0], against=("gloo", [18.0, 18.0])), measurement("late", "ms", [100.0])
    assert [change.worse for change in compare(results_of(*fast), results_of(*slow))] == [False, False]


def test_a_message_that_grew_by_a_thousandth_is_worse() -> None:
    sizes = [measurement("bytes q8", "B", [size], against=("fp32", [4_000_000])) for size in (1_000_000, 1_001_000)]
    assert compare(results_of(sizes[0]), results_of(sizes[1]))[0].worse


def test_a_ratio_that_is_no_longer_measured_is_worse_unless_its_part_was_not_asked_for() -> None:
    before = results_of(ratio(1.0), ratio(2.0, name="stream"))
    gone = [change for change in compare(before, results_of(ratio(1.0))) if change.worse]
    assert [str(change) for change in gone] == ["stream: was 2 x TCP (2 .. 2), and was not measured now"]
    assert compare(before, results_of(ratio(9.0), part="codecs")) == []
    unpaired = results_of(measurement("round trip", "ms", [1.0]), ratio(2.0, name="stream"))
    assert [change.worse for change in compare(before, unpaired)] == [True, False]


def test_by_turns_the_samples_are_compared_as_well_and_a_figure_of_one_side_is_not_judged() -> None:
    before = results_of(ratio(1.0, 2.0), ratio(1.0, name="gone"), ratio(1.0, name="round"))
    now = results_of(ratio(2.0, 3.0), ratio(1.0, name="new"), ratio(1.0, name="round, one host"))
    changes = {change.name: change for change in compare(before, now, by_turns=True)}
    assert changes.keys() == {"round trip", "gone", "new", "round, one host"}
    assert changes["round trip"].pace == summary([2.0, 1.5])
    assert not any(changes[name].worse for name in ("gone", "new", "round, one host"))
    assert changes["round, one host"].before is not None


def test_noise_around_the_same_ratio_seldom_counts() -> None:
    numbers, false_alarms = random.Random(0), 0
    for _ in range(300):
        before, now = ([numbers.gauss(1.0, 0.1) for _ in range(7)] for _ in range(2))
        false_alarms += compare(results_of_cheap(before), results_of_cheap(now))[0].worse
    assert false_alarms <= 9  # 3 %, and each would have to come twice


RUN = run_of(ratio(1.0))


def results_of_cheap(ratios: list[float]) -> Results:
    return Results(runs=(RUN.model_copy(update={"figures": (ratio(*ratios),)}),))


def test_what_differs_between_machines_is_named() -> None:
    before, now = results_of(ratio(1.0)), results_of(ratio(1.0))
    assert other_machine(before, now) == []
    elsewhere = before.runs[0].model_copy(update={"machine": before.runs[0].machine | {"cores": 999}})
    (text,) = other_machine(Results(runs=(elsewhere,)), now)
    assert text.startswith("cores: 999 then, ")


# The tables


def test_the_tables_in_the_documentation_come_from_the_file_beside_it(root: Path) -> None:
    page = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    results = Results.load(root / "docs" / "benchmarks.json")
    assert document.rewritten(page, results, TITLES) == page, (
        'make bench ARGS="--results docs/benchmarks.json --write-docs"'
    )
    stored = {run.part for run in results.runs}
    assert DOCUMENTED["suite"].keys() | DOCUMENTED["compression"].keys() | DOCUMENTED["privacy"].keys() <= stored
    assert stored <= TITLES.keys()
    assert {run.fault for run in results.runs} == {""}


def test_no_two_tables_in_the_documentation_are_of_parts_with_one_name() -> None:
    assert len(TITLES) == sum(map(len, DOCUMENTED.values()))
    for name, titles in DOCUMENTED.items():
        assert titles.keys() <= BENCHMARKS[name].parts.keys()


def test_a_part_that_has_no_table_does_not_replace_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both the benchmarks of compression and of federated training have a part ``accuracy``; the first has a table."""
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("docs/benchmarks.md").write_text(f"{document.BEGIN}{document.END}", encoding="utf-8")
    Results(runs=tuple(run_of(ratio(1.0), part=part) for part in ("accuracy", "secure"))).save(Path("here.json"))
    words = ["--results", "here.json", "--write-docs", "--part", "accuracy", "--part", "secure"]
    monkeypatch.setattr(command, "need_mnist", lambda *_: None)
    assert bench.main(["federated", *words]) == 0
    assert [it.part for it in Results.load(Path("docs/benchmarks.json")).runs] == ["secure"]
    assert "### Federated: with secure aggregation and without" in Path("docs/benchmarks.md").read_text("utf-8")
    assert "no table of it: accuracy" in capsys.readouterr().err


def test_a_page_without_marks_is_refused_and_all_outside_of_them_is_kept() -> None:
    for page in ("", document.BEGIN, document.END + document.BEGIN, (document.BEGIN + document.END) * 2):
        with pytest.raises(ConfigError, match="needs the lines"):
            document.rewritten(page, Results(), TITLES)
    page = document.rewritten(
        f"before {document.BEGIN}old{document.END} after", results_of(ratio(0.5, 1.0, 1.5)), TITLES
    )
    assert page.startswith(f"before {document.BEGIN}\n\n### Bus\n")
    assert page.endswith(f"\n{document.END} after")
    assert "| 1.00 x TCP | 0.750 .. 1.25 | 3 |" in page
    assert "old" not in page


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.012345, "0.0123"), (1.0, "1.00"), (45.67, "45.7"), (4_799_528, "4,799,528"), (1e-5, "1e-05")],
)
def test_numbers_are_written_with_three_digits_that_count(value: float, text: str) -> None:
    assert document.number(value) == text


# The command


def test_the_stored_baseline_is_a_quick_run_of_all_parts_with_ratios() -> None:
    baseline = Results.load(BASELINE)
    assert {run.part for run in baseline.runs} == set(PARTS)
    for run in baseline.runs:
        assert (run.configuration["effort"], run.fault) == ("quick", "")
        assert any(one.against for one in run.figures), run.part


def test_a_quick_run_is_meant_to_take_less_than_three_minutes() -> None:
    for parts in (PARTS, SCALE):
        assert BENCHMARKS["suite"].expected_s(parts, "quick") < 180


@pytest.mark.slow
def test_a_tiny_run_of_bus_and_codecs_goes_into_a_file_and_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "benchmarks.md").write_text(f"{document.BEGIN}{document.END}", encoding="utf-8")
    assert bench.main(["--tiny", "--part", "bus", "--part", "codecs", "--write-docs"]) == 0
    output = capsys.readouterr()
    assert "tiny run of bus, codecs: about 25 s" in output.err
    results = Results.load(tmp_path / "runs" / "bench.json")
    bus, of_codecs = (results.run(part) for part in ("bus", "codecs"))
    assert bus is not None
    assert of_codecs is not None
    assert {one.name for one in bus.figures} >= {"round trip, 64 B", "round trip, 64 KiB", "stream of 1 MiB messages"}
    assert all(min(one.samples) > 0 for one in bus.figures if "late" not in one.name)  # which a loop need not be
    exact = next(one for one in of_codecs.figures if one.name == "bytes fp32, 10,000 elements")
    assert exact.samples == (40_016,)
    assert document.tables(results, TITLES) in (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert bench.main(["--results", "runs/bench.json", "--compare", "runs/bench.json"]) == 0


@pytest.mark.slow
def test_rounds_are_measured_on_one_host_and_over_dds_alone_and_their_names_say_which(tmp_path: Path) -> None:
    assert bench.main(["--tiny", "--part", "federated", "--part", "payload", "--out", "rounds.json"]) == 0
    results = Results.load(tmp_path / "rounds.json")
    for part, first in (("federated", "round overhead, 0.004 MB, 2 clients"), ("payload", "time of a round")):
        run = results.run(part)
        assert run is not None
        names = {one.name if part == "federated" else one.series for one in run.figures}
        assert {f"{first}, one host", f"{first}, DDS only"} <= names
        ways = [name.rpartition(", ")[2] for name in names]
        assert ways.count("one host") == ways.count("DDS only") == len(names) / 2


def test_of_two_ways_one_shares_memory_and_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def run_rounds(*_: Any, shared_memory: bool, **__: Any) -> None:
        asked.append(shared_memory)
        raise RuntimeError("nothing more is looked at")

    monkeypatch.setattr(federated, "run_rounds", run_rounds)
    monkeypatch.setattr(scale, "run_rounds", run_rounds)
    (case,), echo = federated.PLANS["tiny"][1], SimpleNamespace(round_trip_s=lambda size: 0.001)
    for way in WAYS:
        with pytest.raises(RuntimeError, match="nothing more"):
            federated.launch(case, way, cast("Any", echo))
        with pytest.raises(RuntimeError, match="nothing more"):
            list(scale.payload_figures(1, 5, way))
    assert asked == [True, True, False, False]


def test_ranks_of_gloo_have_malloc_set_as_those_with_a_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Stopped(Exception):
        pass

    class NoPlace:
        spec: ClassVar = GlooRun(training=data_parallel.PLANS["tiny"].training(), steps=1)

        def start(self, backend: str) -> None:
            calls.append(backend)
            raise Stopped

    monkeypatch.setattr(fast_paths, "keep_memory", lambda: calls.append("memory"))
    with pytest.raises(Stopped):
        train_on_gloo(cast("Any", NoPlace()))
    assert calls == ["memory", "gloo"]


def test_a_worse_ratio_ends_the_comparison_with_1_and_is_named_with_both_values_and_the_spread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results_of(ratio(1.0, 1.1, 1.2), ratio(1.0, name="stream")).save(tmp_path / "old.json")
    results_of(ratio(2.0, 2.1, 2.2), ratio(1.0, name="stream")).save(tmp_path / "new.json")
    assert bench.main(["--results", "new.json", "--compare", "old.json"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WORSE")]
    assert lines == ["WORSE  round trip: 1.1 x TCP (1.05 .. 1.15) then, 2.1 x TCP (2.05 .. 2.15) now; may be 0.2 more"]
    assert bench.main(["--results", "old.json", "--compare", "new.json"]) == 0


@pytest.mark.parametrize(("measured", "code"), [((9.0, 1.0), 0), ((9.0, 9.0), 1), ((1.0, 9.0), 0)])
def test_a_ratio_counts_as_worse_only_if_it_is_so_again(
    measured: tuple[float, float], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = itertools.chain(measured)
    monkeypatch.setitem(SUITE, "bus", Part(lambda chosen: [ratio(next(values))], "Bus", 1))
    results_of(ratio(1.0)).save(tmp_path / "old.json")
    assert bench.main(["--tiny", "--compare", "old.json"]) == code
    assert len(list(values)) == (1 if measured[0] == 1.0 else 0)


def test_a_benchmark_that_does_not_exist_lists_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["federatd", "--quick"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bench: there is no benchmark 'federatd'. The benchmarks: aggregation, attacks, ")
    assert all(name in said for name in BENCHMARKS)


def test_a_wrong_file_is_an_error_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--compare", "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err

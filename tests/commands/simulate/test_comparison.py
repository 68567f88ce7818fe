"""Ways to sum gradients compared by the command: against their closed forms, with a trace, and what it refuses."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradbus.commands.cli.main import app
from gradbus.commands.simulate.command import work_of
from gradbus.commands.simulate.comparison import ComparisonRow, compare, conditions
from gradbus.commands.simulate.network import NetworkModel
from gradbus.commands.simulate.settings import SimulationSettings
from gradbus.commands.simulate.steps import StepWork, overlapped_s, ready_buckets, simulate_steps
from gradbus.commands.simulate.topology import LinkSpec, cluster
from gradbus.runtime.choices import Choice

WIRE = {"rate_mbit_s": 10_000, "latency_us": 5}


def settings_of(**more: Any) -> SimulationSettings:
    compared = {"blocks": 64, **more.pop("compare", {})}
    given = {
        "gradient_bytes": 1 << 20, "forward_s": 1e-3, "backward_s": 2e-3, "overlap": False, "steps": 1, "worlds": [8],
        "topology": {"network": WIRE, "hosts_per_rack": 4}, **more,
    }  # fmt: skip
    return SimulationSettings.model_validate({**given, "compare": compared})


def rows_of(**more: Any) -> list[ComparisonRow]:
    settings = settings_of(**more)
    return list(compare(settings, work_of(settings)))


WAYS = ["ring", "star", "halving-doubling", "hierarchical", "ps-1", "ps-n", "ina", "hina", "mtina", "cina"]


def test_without_loss_every_way_takes_the_time_of_its_closed_form() -> None:
    rows = rows_of(worlds=[8, 32], compare={"ways": WAYS})
    assert Counter((row.way, row.world) for row in rows) == Counter((way, n) for way in WAYS for n in (8, 32))
    for row in rows:
        assert row.exchange_s == pytest.approx(row.formula_s, rel=0.01), (row.way, row.world)
        assert row.step_s == pytest.approx(3e-3 + row.exchange_s)
        assert row.efficiency == pytest.approx(3e-3 / row.step_s)
        assert row.speed_up == pytest.approx(row.world * row.efficiency)


def test_no_way_is_faster_than_its_bytes_allow() -> None:
    without_latency = {"network": {"rate_mbit_s": 10_000, "latency_us": 0}}
    by_way = {row.way: row for row in rows_of(topology=without_latency, compare={"ways": WAYS})}
    ratio = by_way["ring"].exchange_s / by_way["ina"].exchange_s  # type: ignore[operator]
    assert 1 < ratio <= 2 * 7 / 8
    for row in by_way.values():
        assert row.exchange_s >= 8e-10 * (1 << 20)  # type: ignore[operator]


def test_buckets_go_while_the_backward_pass_goes_on() -> None:
    """One after the other, as a trace has them: close to the simulation of all programs and all buckets at once."""
    settings = settings_of(
        trace="resnet50", compute_scale=0.01, overlap=True, forward_s=None, backward_s=None, compare={"ways": ["ring"]}
    )
    work = work_of(settings)
    (row,) = compare(settings, work)
    assert row.compute_s == pytest.approx(work.compute_s)
    assert work.gradient_bytes == 102_228_128
    assert row.exchange_s == pytest.approx(row.formula_s, rel=0.01)
    assert work.compute_s < row.step_s < work.compute_s + row.exchange_s
    network = NetworkModel(cluster(8, network=LinkSpec(rate_bytes_s=1.25e9, latency_s=5e-6)))
    whole = simulate_steps(network, Choice.model_validate({"name": "dense", "route": "ring"}), work, 1)
    assert row.step_s == pytest.approx(whole.step_s, rel=0.02)
    without = rows_of(
        trace="resnet50", compute_scale=0.01, forward_s=None, backward_s=None, compare={"ways": ["ring"]}
    )[0]
    assert without.step_s > row.step_s


def test_a_step_ends_with_its_last_bucket_or_its_backward_pass() -> None:
    work = StepWork(
        shapes={"one": (250_000,), "two": (500_000,)},
        forward_s=1.0,
        backward_s=[2.0, 3.0],
        update_s=0.5,  # type: ignore[dict-item]
        bucket_bytes=1,
        first_bucket_bytes=1,
    )
    assert [(one.size_bytes, one.ready_s) for one in ready_buckets(work)] == [(2_000_000, 3.0), (1_000_000, 5.0)]
    assert overlapped_s(work, lambda _: 0.0) == 6.5
    assert overlapped_s(work, lambda size: size / 1e6) == 1.0 + 5.0 + 1.0 + 0.5  # the first is hidden
    assert overlapped_s(work, lambda size: 2 * size / 1e6) == 1.0 + 3.0 + 4.0 + 2.0 + 0.5


def test_little_memory_and_loss_cost_time_and_change_no_sum() -> None:
    """The simulation checks each sum by itself."""
    rows = rows_of(
        steps=2,
        gradient_bytes=1 << 22,
        forward_s=0.0,
        backward_s=0.0,
        compare={"ways": ["ring", "ina", "ra-ina"], "memory": [None, 0.5], "losses": [0.0, 0.01], "blocks": 128},
    )
    found = {(row.way, row.memory, row.loss): row for row in rows}
    assert len(found) == 2 + 4 + 4  # rank programs have no memory
    for way in ("ina", "ra-ina"):
        for memory in (None, 0.5):
            assert found[way, memory, 0.01].exchange_s > found[way, memory, 0.0].exchange_s  # type: ignore[operator]
            assert found[way, memory, 0.01].retransmissions > 0  # type: ignore[operator]
    assert found["ina", 0.5, 0.0].exchange_s > 1.5 * found["ina", None, 0.0].exchange_s  # type: ignore[operator]
    assert found["ina", 0.5, 0.0].slots > 0  # type: ignore[operator]


def test_conditions_that_change_nothing_are_simulated_once() -> None:
    settings = settings_of(
        compare={"ways": ["ring", "ps-1", "hina"], "memory": [None, 1], "jobs": [1, 2], "seeds": [3, 4]}
    )
    assert Counter(way for way, *_ in conditions(settings)) == {"ring": 1, "ps-1": 3, "hina": 6}


def test_what_would_take_too_many_messages_has_its_closed_form_alone() -> None:
    small, large = rows_of(worlds=[8, 64], compare={"ways": ["ring"], "most_messages": 1000})
    assert small.exchange_s == pytest.approx(small.formula_s)
    assert large.exchange_s is None
    assert large.speed_up == pytest.approx(64 * 3e-3 / large.formula_step_s)  # type: ignore[operator]


def write(path: Path, **compare: Any) -> Path:
    given = settings_of(compare=compare).model_dump(mode="json", exclude_unset=True)
    path.write_text(json.dumps({"simulate": given}), encoding="utf-8")
    return path


def test_the_command_prints_a_table_and_writes_every_row(tmp_path: Path) -> None:
    out = tmp_path / "ways.csv"
    config = write(tmp_path / "simulate.json", ways=["ring", "cina"])
    result = CliRunner().invoke(app, ["simulate", str(config), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "+0.00%" in result.output
    with out.open(encoding="utf-8", newline="") as file:
        ring, cina = csv.DictReader(file)
    assert (ring["way"], cina["way"], cina["memory"]) == ("ring", "cina", "")
    assert float(ring["exchange_s"]) == pytest.approx(14 * ((1 << 20) / 8 / 1.25e9 + 1e-5))
    assert float(cina["bytes_out"]) == pytest.approx(1 << 20, rel=0.01)


@pytest.mark.parametrize(
    ("compare", "said"),
    [
        ({"ways": ["rin"]}, "simulate.compare.ways.0"),
        ({"way": ["ring"]}, "did you mean 'ways'"),
        ({"losses": [0.9]}, "simulate.compare.losses.0"),
        ({"ways": ["ina"], "memory": [0.01]}, "simulate.compare.memory: ina, 8 ranks, 1 jobs: slots"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_key(tmp_path: Path, compare: dict[str, Any], said: str) -> None:
    path = tmp_path / "simulate.json"
    given = {"gradient_bytes": 1 << 20, "forward_s": 0, "backward_s": 0, "worlds": [8], "compare": compare}
    path.write_text(json.dumps({"simulate": given}), encoding="utf-8")
    result = CliRunner().invoke(app, ["simulate", str(path)])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_file_that_cannot_be_written_is_named_before_anything_is_simulated(tmp_path: Path) -> None:
    config = write(tmp_path / "simulate.json", ways=["ring"])
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["simulate", str(config), "--out", str(tmp_path / "file" / "ways.csv")])
    assert result.exit_code == 2
    assert "ways.csv cannot be written" in " ".join(result.output.split())

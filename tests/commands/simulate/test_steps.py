"""Steps of training on the model of a network, and the command that simulates them."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gradbus.commands.cli.main import app
from gradbus.commands.simulate.network import NetworkModel
from gradbus.commands.simulate.settings import read_simulation
from gradbus.commands.simulate.steps import SimulatedSteps, StepWork, Stragglers, simulate_steps
from gradbus.commands.simulate.topology import LinkSpec, cluster
from gradbus.runtime.choices import ALGORITHMS, Choice
from gradbus.runtime.errors import ConfigError

RATE = 25e6
WIRE = LinkSpec(rate_bytes_s=RATE)
SHAPES = {"conv": torch.Size([1000]), "matrix": torch.Size([1000, 1000]), "last": torch.Size([10, 1000])}
WORK = StepWork(shapes=SHAPES, forward_s=0.1, backward_s=[0.2, 0.05, 0.01], update_s=0.02, batch_size=8)
SIZE = 4 * 1_011_000


def simulate(name: str, *, world: int = 4, work: StepWork = WORK, **options: Any) -> SimulatedSteps:
    more = {key: options.pop(key) for key in ("stragglers", "values", "seed") if key in options}
    choice = Choice.model_validate({"name": name, **options})
    return simulate_steps(NetworkModel(cluster(world, network=WIRE)), choice, work, 3, **more)


def test_without_overlap_a_step_is_its_computing_and_the_exchange_of_all_bytes() -> None:
    work = StepWork(shapes=SHAPES, forward_s=0.1, backward_s=[0.2, 0.05, 0.01], update_s=0.02, overlap=False)
    for route, factor in (("star", 2 * 3), ("ring", 2 * 3 / 4), ("shards", 2 * 3 / 4)):
        found = simulate("dense", work=work, route=route)
        assert found.step_s == pytest.approx(0.38 + factor * SIZE / RATE, rel=0.01), route
    assert found.bytes_out == pytest.approx(2 * 3 / 4 * SIZE, rel=1e-3)
    assert found.utilisation == pytest.approx(0.38 / found.step_s)
    assert found.exchange_share == pytest.approx(1 - found.utilisation)


def test_with_overlap_the_exchange_of_what_is_there_is_hidden_behind_the_rest_of_the_backward_pass() -> None:
    """The bucket of the last two parameters leaves 0.2 s before the end of the backward pass."""
    hidden = simulate("dense", route="ring")
    matrix_s = 2 * 3 / 4 * 4 * 1_010_000 / RATE
    assert hidden.step_s == pytest.approx(0.1 + 0.06 + matrix_s + 0.02, rel=0.02)
    assert hidden.samples_s == pytest.approx(4 * 8 / hidden.step_s)


def test_a_straggler_holds_all_up_and_jitter_depends_on_the_seed() -> None:
    slow = simulate("dense", stragglers=Stragglers(ranks=(2,), factor=3.0))
    assert slow.step_s > 3 * WORK.compute_s > 2 * simulate("dense").step_s
    one, other, again = (simulate("dense", stragglers=Stragglers(jitter=0.5), seed=seed).times_s for seed in (1, 2, 1))
    assert one == again != other


@pytest.mark.parametrize("name", ["bytegrad", "powersgd", "topk", "decentralized", "dense"])
def test_algorithms_that_look_at_values_get_random_ones(name: str) -> None:
    found = simulate(name, values=True)
    assert found.step_s >= WORK.compute_s
    assert 0 < found.bytes_out < 1.6 * SIZE


def write(path: Path, **settings: Any) -> Path:
    given = {
        "worlds": [2, 8], "model": "gradbus.models:mnist_mlp", "forward_s": 0.01, "backward_s": 0.02, "steps": 2,
        "topology": {"network": {"rate_mbit_s": 200, "latency_us": 0}}, **settings,
    }  # fmt: skip
    path.write_text(json.dumps({"simulate": given}), encoding="utf-8")
    return path


def test_the_command_prints_a_table_and_writes_it(tmp_path: Path) -> None:
    out = tmp_path / "steps.csv"
    config = write(tmp_path / "simulate.json", algorithm={"name": "dense", "route": "ring"}, overlap=False)
    result = CliRunner().invoke(app, ["simulate", str(config), "--set", "simulate.worlds=[2,64]", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "busiest link" in result.output
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["world"] for row in rows] == ["2", "64"]
    size = 4 * 407_050  # 784-512-10
    for row, world in zip(rows, (2, 64), strict=True):
        expected_s = 0.03 + 2 * (world - 1) / world * size / 25e6
        assert float(row["step_s"]) == pytest.approx(expected_s, rel=0.01)
        assert math.isclose(float(row["compute_s"]), 0.03)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "topk"}, "set simulate.values=true"),
        ({"algorithm": "densse"}, "did you mean 'dense'"),
        ({"topology": {"ranks_per_host": 3}}, "2 ranks do not fill hosts of 3"),
        ({"model": "gradbus.models:nothing"}, "simulate.model"),
        ({"stepps": 1}, "did you mean 'steps'"),
        ({"trace": "resnet5"}, "did you mean 'resnet50'"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_what_to_change(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    result = CliRunner().invoke(app, ["simulate", str(write(tmp_path / "simulate.json", **settings))])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_the_configuration_that_comes_with_the_code_is_read(root: Path) -> None:
    settings = read_simulation(root / "experiments/configs/simulate.conf.json")
    assert settings.algorithm.name in ALGORITHMS.table
    with pytest.raises(ConfigError, match="cannot be read"):
        read_simulation(root / "none.json")

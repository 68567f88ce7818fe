"""``gradbus flower run`` and ``gradbus flower node``: Flower apps as they are, in the environment that has Flower."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gradbus.experiments.cli.main import app as command_line

pytestmark = pytest.mark.slow

ENDS_S = 100.0
APPS = Path(__file__).parents[2] / "flower_apps"


@pytest.fixture
def flower(root: Path) -> Path:
    """The folder of programs of the environment with Flower."""
    folder = root / ".venv-flower"
    if not list(folder.glob(".set-up-*")):
        pytest.skip("Flower is not set up: make setup-flower")
    return folder / "bin"


def run_app(flower: Path, app: Path, domain: int, *options: str) -> str:
    """Run an app with two nodes. What its ServerApp printed."""
    environment = {**os.environ, "GRADBUS_BUS__DOMAIN": str(domain), "OMP_NUM_THREADS": "1"}
    gradbus = str(flower / "gradbus")
    commands = [
        [gradbus, "flower", "run", str(app), *options],
        *([gradbus, "flower", "node", str(app), "--partition", str(one), "--of", "2"] for one in range(2)),
    ]
    running = [
        subprocess.Popen(one, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for one in commands
    ]
    try:
        ended = [process.communicate(timeout=ENDS_S) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0, 0], ended
    return ended[0][0]


def accuracies(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"^accuracy ([\d.]+)$", output, re.MULTILINE)]


def test_an_app_of_client_fn_and_numpy_computes_what_federated_averaging_is(
    flower: Path, domain: int, tmp_path: Path
) -> None:
    app = shutil.copytree(APPS / "numpy-app", tmp_path / "numpy-app")
    spec = importlib.util.spec_from_file_location("numpyapp_task", app / "numpyapp" / "task.py")
    assert spec is not None
    assert spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    data = [task.load_data(partition, 2) for partition in range(2)]
    weights, expected = np.zeros(task.DIM + 1), []
    for _ in range(2):
        weights = np.mean([task.train(weights, *one, 0.25) for one in data], axis=0)
        expected.append(np.mean([task.test(weights, *one)[1] for one in data]))
    before = {path: path.read_bytes() for path in app.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    printed = run_app(flower, app, domain, "--run-config", "num-server-rounds=2 learning-rate=0.25")
    assert accuracies(printed) == pytest.approx(expected, abs=1e-6)
    assert "done: messages down" in printed
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", ["sklearn-app", "torch-app"])
def test_an_app_of_messages_trains(flower: Path, name: str, domain: int) -> None:
    found = accuracies(run_app(flower, APPS / name, domain, "--run-config", "num-server-rounds=2"))
    assert len(found) == 2
    assert min(found) > 0.8


def test_payloads_grid_and_refusals_with_flower(flower: Path, root: Path, domain: int) -> None:
    script = root / "tests" / "support" / "flower_checks.py"
    command = [str(flower / "python"), str(script), str(domain)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_S, check=False)
    assert ended.stdout.strip().endswith("ok"), ended.stderr[-4000:]


@pytest.mark.skipif(importlib.util.find_spec("flwr") is not None, reason="flwr is installed here")
def test_without_flower_the_error_names_the_extra() -> None:
    ended = CliRunner().invoke(command_line, ["flower", "run", str(APPS / "numpy-app")])
    assert ended.exit_code == 2
    assert "with the extra gradbus[flower]: in a checkout, make setup-flower" in " ".join(ended.output.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["node", "--partition", "2", "--of", "2"], "partitions count from 0, so give 0 to 1"),
        (["run", "--set", "flower.max_byte=5"], "max_bytes"),
    ],
)
def test_wrong_options_are_refused_at_the_start(arguments: list[str], said: str) -> None:
    ended = CliRunner().invoke(command_line, ["flower", arguments[0], str(APPS / "numpy-app"), *arguments[1:]])
    assert ended.exit_code == 2
    assert said in ended.output

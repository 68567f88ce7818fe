"""MLflow and Weights & Biases: what a run tells them, read back from what they keep on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradbus.actors import RoundReport
from gradbus.commands.files import ControllerFile, WorkerFile
from gradbus.commands.report.scalars import Scalars, open_scalars
from gradbus.commands.report.trackers import TrackedRun, WeightsAndBiases
from gradbus.runtime.config.settings import flat
from gradbus.runtime.errors import ConfigError


class Listed:
    """A tracker that keeps what it is told; ``fails``: with the first number."""

    name, where = "listed", "memory"

    def __init__(self, *, fails: bool = False, waits: threading.Event | None = None) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self._fails, self._waits = fails, waits

    def open(self, first: int | None) -> None:
        if self._waits is not None:
            self._waits.wait(30)

    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        if self._fails:
            raise ConnectionError("the server is gone")
        self.told.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


@pytest.mark.slow
def test_a_run_is_told_to_mlflow_and_to_weights_and_biases(root: Path, domain: int, tmp_path: Path) -> None:
    python = root / ".venv-integrations" / "bin" / "python"
    if not (python.parents[1] / ".set-up").exists():
        pytest.skip("MLflow and Weights & Biases are not set up: make setup-integrations")
    task = {"model": "gradbus.models:mnist_mlp", "data": "glyphs", "batch_size": 64}
    file = tmp_path / "worker.conf.json"
    file.write_text(
        json.dumps(
            {
                "bus": {"domain": domain},
                "parallel": {"epochs": 2},
                "task": {**task, "data_options": {"train": 160, "test": 40}},
            }
        )
    )
    # MLflow's folders are asked for by a variable, as it advises a database: which needs all of MLflow, not its client.
    environment = {**os.environ, "WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true", "OMP_NUM_THREADS": "1"}
    run_dir, store = tmp_path / "run", tmp_path / "mlruns"
    options = ["--run-dir", run_dir, "--mlflow", store.as_uri(), "--wandb", "digits"]
    subprocess.run(
        [python, "-m", "gradbus", "worker", file, "--rank", "0", "--world", "1", *options],
        env=environment,
        cwd=tmp_path,
        check=True,
        timeout=110,
        stdout=subprocess.DEVNULL,
    )
    epochs = [json.loads(line) for line in (run_dir / "epochs.jsonl").read_text().splitlines()]
    tracked = json.loads((run_dir / "tracked-by-mlflow.json").read_text())
    (kept,) = store.glob(f"*/{tracked['run_id']}")
    lines = [line.split() for line in (kept / "metrics" / "accuracy").read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in lines] == [(it["step"], it["accuracy"]) for it in epochs]
    assert (kept / "params" / "task.batch_size").read_text() == "64"
    assert tracked["last_step"] == epochs[-1]["step"]
    run_id = json.loads((run_dir / "tracked-by-wandb.json").read_text())["run_id"]
    (offline,) = (run_dir / "wandb").glob(f"offline-run-*/run-{run_id}.wandb")
    assert offline.read_bytes().count(b"loss/train") >= len(epochs)


def test_what_an_earlier_start_has_told_is_not_told_again(tmp_path: Path) -> None:
    first = TrackedRun(tmp_path, "mlflow")
    assert first.run_id is None
    for step in (3, 6, 5):  # a window may come after an epoch that ended later
        assert first.is_new(step)
        first.keep("abc", step)
    again = TrackedRun(tmp_path, "mlflow")
    assert again.run_id == "abc"
    assert [step for step in range(3, 9) if again.is_new(step)] == [7, 8]
    assert TrackedRun(tmp_path, "wandb").run_id is None


@pytest.mark.parametrize("text", ["", "[]", '{"run_id": 7}', "{"])
def test_a_damaged_note_of_a_tracked_run_begins_a_new_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "tracked-by-mlflow.json").write_text(text)
    found = TrackedRun(tmp_path, "mlflow")
    assert found.run_id is None
    assert found.is_new(1)


def test_a_tracker_that_fails_or_hangs_takes_nothing_from_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    goes_on = threading.Event()
    good, bad, slow = Listed(), Listed(fails=True), Listed(waits=goes_on)
    with Scalars(good, bad, slow) as scalars:
        history: list[RoundReport] = []
        for number in (1, 2):
            history.append(RoundReport(round_id=number, loss=float("nan")))
            scalars.rounds(history)
        goes_on.set()
    assert [step for step, _ in good.told] == [step for step, _ in slow.told] == [1, 2]
    assert "loss/train" not in good.told[0][1]  # NaN
    assert good.closed
    assert slow.closed
    assert "".join(capsys.readouterr()).count("the server is gone") == 1


@pytest.mark.parametrize(("option", "package"), [("mlflow", "mlflow-skinny>=3.1"), ("wandb", "wandb>=0.21")])
def test_a_tracker_that_is_not_installed_is_named_with_how_to_install_it(
    option: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, option, None)
    for file in (ControllerFile, WorkerFile):
        with pytest.raises(ConfigError, match=rf"--{option} needs .*-m pip install '{package}'"):
            open_scalars(file.model_validate({option: "somewhere"}), tmp_path)


def test_without_a_key_of_weights_and_biases_nothing_is_asked_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package: Any = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        WeightsAndBiases("digits", "job", tmp_path, {})
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert WeightsAndBiases("digits", "job", tmp_path, {}).where == "digits"


def test_settings_become_parameters_by_names_with_dots() -> None:
    assert dict(flat({"federated": {"rounds": 5, "share": {}}, "task": {"data": {"name": "x"}}})) == {
        "federated.rounds": 5,
        "federated.share": {},
        "task.data.name": "x",
    }

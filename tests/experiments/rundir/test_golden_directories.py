"""Directories that earlier versions have left: the code of today resumes, reports, checks and exports them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_runs
import pytest
import torch
from golden_task import GoldenModel
from safetensors.torch import load_file

from gradbus.experiments.rundir.export import export
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.security.identity.allow_list import load_allow_list
from gradbus.runtime.security.identity.key import load_node_key
from gradbus.runtime.security.job_key import load_job_key

ROOT = Path(__file__).resolve().parents[2] / "golden" / "directories"
VERSIONS = sorted(path.name for path in ROOT.iterdir() if path.is_dir())
RUNS = [*golden_runs.FEDERATED, *golden_runs.PARALLEL]

pytestmark = pytest.mark.usefixtures("one_thread")
Copied = Callable[[str], Path]


@pytest.fixture(params=VERSIONS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the directories of one version, in the current directory, whose files are their owner's alone."""
    shutil.copytree(ROOT / request.param, tmp_path, dirs_exist_ok=True)
    for path in [*tmp_path.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return tmp_path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", golden_runs.FEDERATED)
def test_a_federated_run_of_an_earlier_version_goes_on(stored: Path, name: str, domain: int) -> None:
    before, summary = lines(stored / name / "rounds.jsonl"), json.loads((stored / name / "summary.json").read_text())
    run_id = CheckpointStore.to_read(stored / name / "state").load(3).meta["run_id"]
    golden_runs.federated(name, domain, rounds=5, **golden_runs.FEDERATED[name])
    after = lines(stored / name / "rounds.jsonl")
    assert [report["round_id"] for report in after] == [1, 2, 3, 4, 5]
    assert [report["weights_crc32"] for report in after[:3]] == [report["weights_crc32"] for report in before]
    assert after[4]["loss"] < summary["loss"], "it goes on with the model that it had"
    newest = CheckpointStore.to_read(stored / name / "state").load_newest()
    assert newest is not None
    assert (newest.round_id, newest.meta["run_id"]) == (5, run_id)
    for client in range(golden_runs.CLIENTS):
        assert CheckpointStore.to_read(stored / f"{name}-clients" / f"client-{client}").rounds() == [3, 4, 5]


@pytest.mark.parametrize("name", golden_runs.PARALLEL)
def test_ranks_of_an_earlier_version_go_on(stored: Path, name: str, domain: int) -> None:
    before = lines(stored / name / "epochs.jsonl")
    golden_runs.parallel(name, domain, servers=golden_runs.PARALLEL[name], epochs=3)
    after = lines(stored / name / "epochs.jsonl")
    assert [report["epoch"] for report in after] == [0, 1, 2]
    assert [report["params_hash"] for report in after[:2]] == [report["params_hash"] for report in before]
    assert after[2]["loss"] < before[1]["loss"], "it goes on with the model that it had"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_earlier_version_is_reported(stored: Path, name: str, invoke: Any) -> None:
    done = invoke("report", stored / name)
    assert done.code == 0, done.err
    page = (stored / name / "report.html").read_text()
    assert f"golden-{name}" in page
    assert "cannot be read" not in page
    assert "left out" not in page


@pytest.mark.parametrize("name", [*golden_runs.FEDERATED, "ranks"])  # servers keep no journal
def test_the_journals_of_an_earlier_version_are_checked(stored: Path, name: str, invoke: Any) -> None:
    done = invoke("check", stored / name)
    assert done.code == 0, done.out + done.err
    assert "left out" not in done.out


@pytest.mark.parametrize("name", RUNS)
def test_the_model_of_an_earlier_version_is_exported(stored: Path, name: str) -> None:
    loaded = load_file(export(stored / name).path)
    like = GoldenModel().state_dict()
    assert loaded.keys() == like.keys()
    assert all(loaded[key].dtype == like[key].dtype for key in like)
    assert not torch.equal(loaded["first.weight"], like["first.weight"])
    assert torch.equal(loaded["first.weight"], loaded["last.weight"])


def test_keys_and_lists_of_an_earlier_version_are_read(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = stored / "keys"
    monkeypatch.setenv("GRADBUS_KEY_FILE", str(keys / "for-tests-only-job.key"))
    assert len(load_job_key(None).key.secret) == 32
    allowed = load_allow_list(keys / "allow.list")
    for name, role, ids in (("server", "controller", ()), ("robot-7", "client", ((7, 7),)), ("eye", "observer", ())):
        key = load_node_key(keys / f"for-tests-only-{name}.key")
        assert (key.name, key.public, role, ids) in [
            (one.name, one.public, one.role, one.ids) for one in allowed.entries
        ]

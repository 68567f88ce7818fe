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

from gradbus.commands.files import ControllerFile
from gradbus.commands.rundir.export import export
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
    done = export(stored / name)
    assert not done.unknown, "the checkpoints of today name everything"
    assert int(load_file(done.path)["norm.num_batches_tracked"]) == 2, (
        "its checkpoints had no counts: as built, then two"
    )
    for client in range(golden_runs.CLIENTS):
        assert CheckpointStore.to_read(stored / f"{name}-clients" / f"client-{client}").rounds() == [3, 4, 5]


@pytest.mark.parametrize("name", golden_runs.FEDERATED)
def test_the_settings_that_an_earlier_version_has_written_down_are_read(stored: Path, name: str) -> None:
    file = ControllerFile.model_validate_json((stored / name / "config.json").read_text())
    assert (file.federated.limits.trust, file.federated.limits.cap_samples) == ("cooperative", None)


@pytest.mark.parametrize("name", golden_runs.PARALLEL)
def test_ranks_of_an_earlier_version_go_on(stored: Path, name: str, domain: int) -> None:
    before = lines(stored / name / "epochs.jsonl")
    golden_runs.parallel(name, domain, servers=golden_runs.PARALLEL[name], epochs=3)
    after = lines(stored / name / "epochs.jsonl")
    assert [report["epoch"] for report in after] == [0, 1, 2]
    assert [report["params_hash"] for report in after[:2]] == [report["params_hash"] for report in before]
    assert after[2]["loss"] < before[1]["loss"], "it goes on with the model that it had"
    assert export(stored / name).is_whole


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


def is_one_of_the_run(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether the tensors are those of a trained model in their dtypes."""
    like = GoldenModel().state_dict()
    return all(tensors[name].dtype == like[name].dtype for name in tensors) and not torch.equal(
        tensors["first.weight"], like["first.weight"]
    )


@pytest.mark.parametrize("name", RUNS)
def test_the_model_of_an_earlier_version_is_built_and_exported(stored: Path, name: str) -> None:
    done = export(stored / name, trust=True)
    loaded = load_file(done.path)
    assert loaded.keys() == GoldenModel().state_dict().keys()
    assert is_one_of_the_run(loaded)
    assert torch.equal(loaded["first.weight"], loaded["last.weight"])
    GoldenModel().load_state_dict(loaded)
    assert "strict" not in done.text


@pytest.mark.parametrize("name", RUNS)
def test_what_a_checkpoint_of_an_earlier_version_has_is_exported_without_the_model(stored: Path, name: str) -> None:
    whole = load_file(export(stored / name, stored / "whole.safetensors", trust=True).path)
    done = export(stored / name)
    loaded = load_file(done.path)
    assert is_one_of_the_run({key: tensor for key, tensor in loaded.items() if key != "scratch"})
    assert all(torch.equal(whole[key], tensor) for key, tensor in loaded.items() if key != "scratch")
    of_federated = {"frozen.weight", "frozen.bias", "norm.num_batches_tracked", "last.weight"}
    not_there = {"federated": of_federated, "personal": of_federated | {"head.weight", "head.bias"}}
    assert whole.keys() - loaded.keys() == not_there.get(name, {"last.weight"})
    assert "second names of tied weights" in done.text
    assert "\nsaved by an earlier version, whose checkpoints lack the " in done.text
    assert ("the names of frozen parameters (their 20 values are left out); " in done.text) == (name in not_there)
    assert ("the tensors that federated.share leaves at the clients (left out)" in done.text) == (name == "personal")
    assert "--trust would build the model for the rest, which runs the code that config.json names\n" in done.text
    assert done.text.endswith(", strict=False)")


def test_the_model_of_a_client_of_an_earlier_version_is_exported(stored: Path) -> None:
    client = stored / "personal-clients" / "client-1"
    whole = load_file(export(stored / "personal", stored / "whole.safetensors", client=client, trust=True).path)
    done = export(stored / "personal", client=client)
    loaded = load_file(done.path)
    assert torch.equal(loaded["head.weight"], whole["head.weight"])
    assert loaded["head.weight"].dtype == torch.bfloat16
    assert ", 3 of them of client-1\n" in done.text, "the counter of batch norm is one of them"
    assert "federated.share" not in done.text


def test_the_best_model_of_an_earlier_version_is_exported(stored: Path) -> None:
    done = export(stored / "federated", best=True)
    whole = load_file(export(stored / "federated", stored / "whole.safetensors", best=True, trust=True).path)
    assert all(torch.equal(whole[key], tensor) for key, tensor in load_file(done.path).items())
    assert f"after round {done.number}, the minimum of eval_loss" in done.text


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

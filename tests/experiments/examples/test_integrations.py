"""Accelerate, Lightning and DeepSpeed over the bus, on two ranks of torchrun's launcher; adapters of peft."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from dds_domains import new_domain

pytestmark = pytest.mark.slow

BACKENDS = ("dds", "gloo")
EXAMPLES = ("accelerate", "lightning", "deepspeed")
SCRIPT = "tests/support/example_on_backends.py"
ENDS_S = 110.0  # on a busy machine


def python_of(root: Path) -> str:
    """The interpreter with the libraries. Skips the test where they are not set up."""
    python = root / ".venv-integrations" / "bin" / "python"
    if not (python.parents[1] / ".set-up").exists():
        pytest.skip("Accelerate, Lightning, DeepSpeed and peft are not set up: make setup-integrations")
    return str(python)


@pytest.fixture(scope="module")
def trained(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of what all examples reported, and what they wrote to stderr: one program, as it loads torch."""
    folder = tmp_path_factory.mktemp("trained")
    command = [python_of(root), SCRIPT, str(folder), ",".join(EXAMPLES), ",".join(BACKENDS)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **offline, "GRADBUS_BUS__DOMAIN": str(new_domain()), "GLOO_SOCKET_IFNAME": "lo"}
    # With DeepSpeed the interpreter was once aborted as it ended ("terminate called without an active exception"). It
    # ends after gloo's turn: where all reports are there, what is tested of "dds" has ended well.
    ended = subprocess.run(
        command, cwd=root, env=environment, timeout=ENDS_S, capture_output=True, text=True, check=False
    )
    return folder, ended.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_to_the_same_bits_as_on_gloo(trained: tuple[Path, str], name: str) -> None:
    folder, errors = trained
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"{name}-*.json")]
    found = {(report.pop("backend"), report.pop("rank")): report for report in reports}
    assert sorted(found) == [(backend, rank) for backend in BACKENDS for rank in range(2)], errors
    for rank in range(2):
        assert found["dds", rank] == found["gloo", rank]
    assert found["dds", 0]["weights"] == found["dds", 1]["weights"]
    if name == "deepspeed":  # what is spread over the ranks changes neither data nor order of the sums
        assert sorted(found["dds", 0]["weights"]) == ["1", "2", "3"]
        assert found["dds", 0]["weights"]["1"] == found["dds", 0]["weights"]["2"]


def test_adapters_of_peft_are_all_that_travels_and_they_learn(trained: tuple[Path, str]) -> None:
    folder, errors = trained
    report = folder / "peft.json"
    assert report.exists(), errors
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["shared_values"] == 4 * 2 * 2 * (128 + 128)
    assert found["share"] < 0.02
    assert found["bytes_up_of_an_update"] < 4 * found["shared_values"] + 200
    assert found["losses"][-1] < found["losses"][0]
    assert found["merged_differs_by"] < 1e-3

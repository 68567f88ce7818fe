"""Accelerate, Lightning and DeepSpeed over the bus, with two ranks that torchrun starts; adapters of peft."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BACKENDS = ("dds", "gloo")
SCRIPT = "tests/support/example_on_backends.py"
ENDS_S = 110.0


def python_of(root: Path) -> str:
    """The interpreter with the libraries. Skips the test where they are not set up."""
    python = root / ".venv-integrations" / "bin" / "python"
    if not (python.parents[1] / ".set-up").exists():
        pytest.skip("Accelerate, Lightning, DeepSpeed and peft are not set up: make setup-integrations")
    return str(python)


def reports(root: Path, name: str, domain: int) -> dict[tuple[str, int], dict[str, Any]]:
    """What the ranks of an example printed, by backend and rank. Skips the test where the library is not set up."""
    command = [python_of(root), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT, name]
    environment = {**os.environ, "GRADBUS_BUS__DOMAIN": str(domain), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(
        [*command, *BACKENDS], cwd=root, env=environment, timeout=ENDS_S, capture_output=True, text=True, check=False
    )
    # Both ranks write to one pipe, and the ends of their lines may come after what the other one writes.
    printed = [json.loads(text) for text in re.findall(r"\{\"rank\".*?\}(?=\s|\{\"rank\"|$)", ended.stdout)]
    # With DeepSpeed the interpreter was once aborted as it ended ("terminate called without an active exception"). It
    # ends after gloo's turn: where all reports are there, what is tested of "dds" has ended well.
    assert ended.returncode == 0 or len(printed) == 2 * len(BACKENDS), ended.stderr
    return {(report.pop("backend"), report.pop("rank")): report for report in printed}


@pytest.mark.parametrize("name", ["accelerate", "lightning", "deepspeed"])
def test_an_example_trains_to_the_same_bits_as_on_gloo(root: Path, name: str, domain: int) -> None:
    found = reports(root, name, domain)
    assert sorted(found) == [(backend, rank) for backend in BACKENDS for rank in range(2)]
    for rank in range(2):
        assert found["dds", rank] == found["gloo", rank]
    assert found["dds", 0]["weights"] == found["dds", 1]["weights"]
    if name == "deepspeed":  # what is spread over the ranks changes neither data nor order of the sums
        assert sorted(found["dds", 0]["weights"]) == ["1", "2", "3"]
        assert found["dds", 0]["weights"]["1"] == found["dds", 0]["weights"]["2"]


def test_adapters_of_peft_are_all_that_travels_and_they_learn(root: Path, domain: int) -> None:
    command = [python_of(root), "-m", "gradbus.experiments.examples.peft_lora", "--rounds", "3"]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **offline, "GRADBUS_BUS__DOMAIN": str(domain)}
    ended = subprocess.run(
        command, cwd=root, env=environment, timeout=ENDS_S, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["shared_values"] == 4 * 2 * 2 * (128 + 128)
    assert found["share"] < 0.02
    assert found["bytes_up_of_an_update"] < 4 * found["shared_values"] + 200
    assert found["losses"][-1] < found["losses"][0]
    assert found["merged_differs_by"] < 1e-3

"""Robots at two sites: the example as it is run, with DDS inside the sites and one TLS port outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dds_domains import new_domain
from ports import free_port

ROUNDS = 3

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("over_relay", [False, True])
def test_robots_on_dds_at_two_sites_learn_one_model_through_one_tls_port(over_relay: bool, tmp_path: Path) -> None:
    folder, domains = tmp_path / "fleet", [str(new_domain()) for _ in range(2)]
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "gradbus.experiments.examples.robot_fleet", "--folder", str(folder)),
            *("--robots", "1", "--rounds", str(ROUNDS), "--port", str(free_port()), "--domains", *domains),
            *(["--relay"] if over_relay else []),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    logs = {file.name: file.read_text() for file in folder.glob("*.log")}
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    rounds = {
        level: [json.loads(line) for line in (folder / level / "rounds.jsonl").read_text().splitlines()]
        for level in ("centre", "site-0", "site-1")
    }
    assert [report["clients"] for report in rounds["centre"]] == [[0, 1]] * ROUNDS
    assert [report["num_samples"] for report in rounds["centre"]] == [512] * ROUNDS
    assert [report["clients"] for report in rounds["site-1"]] == [[1]] * ROUNDS
    weights = [[report["weights_crc32"] for report in reports] for reports in rounds.values()]
    assert weights[0] == weights[1] == weights[2]
    rmse = [report["metrics"]["rmse"] for report in rounds["centre"]]
    assert rmse[-1] < rmse[0] < 0.3  # a model that has learned nothing is off by 0.5
    assert ("relay.log" in logs) == over_relay


def test_a_folder_that_is_there_already_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "fleet").mkdir()
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-P",
                "-m",
                "gradbus.experiments.examples.robot_fleet",
                "--folder",
                str(tmp_path / "fleet"),
            )
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "is there already: name another with --folder, or remove it" in done.stderr
    assert list((tmp_path / "fleet").iterdir()) == []

"""Robots at two sites: the example as it is run, with DDS inside the sites and one TLS port outside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from ports import free_port

from gradbus.commands.lab.namespaces import NoNamespaces, two_hosts

ROUNDS = 3
PROGRAM = (sys.executable, "-P", "-m", "gradbus.experiments.examples.robot_fleet")
FIRST_HOST = "10.231.77.1"  # of a laboratory

pytestmark = pytest.mark.slow


def reports_of(folder: Path, level: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / level / "rounds.jsonl").read_text().splitlines()]


def run(*command: str, cwd: Path) -> str:
    """Run a program of this example. Return what it has printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd)
    logs = {file.name: file.read_text() for file in cwd.glob("fleet/*.log")}
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    return done.stderr


@pytest.mark.nightly  # eight processes that load torch
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


@pytest.mark.netns
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_each_site_of_robots_on_a_host_of_its_own_dials_out_to_one_port_and_needs_no_other(tmp_path: Path) -> None:
    """The command of docs/trees.md. The sites reach no other port, and nothing reaches them."""
    try:
        with two_hosts():
            pass
    except NoNamespaces as error:
        pytest.skip(str(error))

    def at(place: str) -> Sequence[str]:
        return (*PROGRAM, "--place", place, "--robots", "1")

    run(*PROGRAM, "--prepare", "--host", FIRST_HOST, "--robots", "1", "--rounds", str(ROUNDS), cwd=tmp_path)
    lab = (sys.executable, "-P", "-m", "gradbus", "lab", "--nat", "8443", "--rate", "100mbit", "--")
    printed = run(*lab, *at("centre"), "+", *at("site-0"), "+", *at("site-1"), cwd=tmp_path)
    assert "3 hosts, 100 Mbit/s" in printed
    centre, first, second = (reports_of(tmp_path / "fleet", level) for level in ("centre", "site-0", "site-1"))
    assert [report["clients"] for report in centre] == [[0, 1]] * ROUNDS
    assert [report["clients"] for report in second] == [[1]] * ROUNDS
    weights = [[report["weights_crc32"] for report in reports] for reports in (centre, first, second)]
    assert weights[0] == weights[1] == weights[2]

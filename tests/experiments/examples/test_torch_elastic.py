"""The ways in which scripts of torch.distributed go on when a rank has died: their examples, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked_commands import torchrun
from torch_node import SceneRanks

pytestmark = [pytest.mark.slow, pytest.mark.faults]

ENDS_S = 100.0


def printed(text: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"\{\"(?:rank|replica)\".*?\}", text)]


@pytest.mark.parametrize("way", ["reconfigure", "init"])
def test_two_ranks_go_on_with_the_same_weights_when_the_third_is_killed(way: str) -> None:
    with SceneRanks("reconfigure_scenes", "example", world=3, dying=[2], way=way) as ranks:
        reports = [json.loads(ranks.value(node.wait_for("done"))) for node in ranks.nodes[:2]]
        assert [node.wait() for node in ranks.nodes[:2]] == [0, 0]
    assert [(report["rank"], report["world"], report["steps"]) for report in reports] == [(0, 2, 8), (1, 2, 8)]
    assert reports[0]["weights"] == reports[1]["weights"]


def test_a_replica_group_of_torchft_is_killed_and_comes_back(root: Path, domain: int) -> None:
    python = root / ".venv-integrations" / "bin" / "python"
    if not (python.parents[1] / ".set-up").exists():
        pytest.skip("torchft is not set up: make setup-integrations")
    command = [str(python), "-m", "gradbus.experiments.examples.torchft_training"]
    environment = {**os.environ, "GRADBUS_BUS__DOMAIN": str(domain), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, timeout=ENDS_S, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = printed(ended.stdout)
    participants = [line["participants"] for line in lines if line["replica"] == "replica_0" and "step" in line]
    steps = [line["step"] for line in lines if line["replica"] == "replica_0" and "step" in line]
    together = [number for number, count in enumerate(participants) if count == 2]
    alone = [number for number, count in enumerate(participants) if count == 1 and number > together[0]]
    assert len(alone) >= 5, participants
    assert together[-1] > alone[-1], participants
    # It has committed each step once, whoever was there, from the one on with which it came: the other may be first.
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    final = {line["replica"]: line["weights"] for line in lines if "weights" in line}
    assert final["replica_0"] == final["replica_1"]


def test_the_script_of_local_updates_runs_as_its_page_says(root: Path, domain: int) -> None:
    page = (root / "docs" / "local-updates.md").read_text("utf-8")
    found = re.search(
        r"`torchrun (--standalone --nproc-per-node 2 -m\s+gradbus\.experiments\.examples\.local_updates)`", page
    )
    assert found
    environment = {**os.environ, "GRADBUS_BUS__DOMAIN": str(domain), "OMP_NUM_THREADS": "1"}
    agent = torchrun(found[1].split(), root, environment)
    out, err = agent.communicate(ENDS_S)
    assert agent.returncode == 0, err
    of_rank = {line["rank"]: line for line in printed(out)}
    assert of_rank.keys() == {0, 1}
    assert {line["backend"] for line in of_rank.values()} == {"dds"}
    assert of_rank[0]["weights"] == of_rank[1]["weights"]

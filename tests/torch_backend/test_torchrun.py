"""torchrun: agents of two machines start the ranks, and start them again when one has died."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from forked_commands import Forked, torchrun
from patience import until
from ports import kept_ports
from torch_node import DYING_LEASE_S

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("torchrun_script.py")
ENDS_S = 90.0


def start_agent(node: int, port: int, domain: int, folder: Path) -> Forked:
    """The agent of one machine of two, with one rank."""
    arguments = [
        "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}",
        "--max-restarts=1", "--monitor-interval=0.2", "--rdzv-conf=timeout=60", str(SCRIPT), str(folder),
    ]  # fmt: skip
    environment = {
        **os.environ, "GRADBUS_BUS__DOMAIN": str(domain), "GRADBUS_BUS__LEASE_S": str(DYING_LEASE_S),
        "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": "",
    }  # fmt: skip
    return torchrun(arguments, folder, environment)


def told(folder: Path) -> dict[str, Any]:
    """What the ranks said, by attempt and rank."""
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("attempt*.json")}


def runs(pid: int) -> bool:
    """Whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


def test_two_agents_start_all_ranks_again_when_one_is_killed_and_then_end_well(tmp_path: Path) -> None:
    domain = new_domain()
    with kept_ports(1) as (port,):
        agents = [start_agent(node, port, domain, tmp_path) for node in range(2)]
        try:
            logs = "\n".join("".join(agent.communicate(ENDS_S)) for agent in agents)
        finally:
            for agent in agents:
                agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], logs
    results = told(tmp_path)
    assert sorted(results) == [f"attempt {attempt} rank {rank}" for attempt in range(2) for rank in range(2)], logs
    # The one that was killed says nothing; the other one is told why it cannot go on, and leaves with that error.
    assert set(results["attempt 0 rank 1"]) == {"pid"}
    assert "rank 1" in results["attempt 0 rank 0"]["error"]
    assert "weights" not in results["attempt 0 rank 0"]
    assert results["attempt 1 rank 0"]["weights"] == results["attempt 1 rank 1"]["weights"]
    until(lambda: not [facts["pid"] for facts in results.values() if runs(facts["pid"])])

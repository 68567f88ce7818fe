"""Workers as processes of their own, one of which is killed."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ddp_node import ddp_ranks
from federation import NOBODY_DIES_S

pytestmark = [pytest.mark.slow, pytest.mark.faults]

STEADY: dict[str, Any] = {"lease_s": NOBODY_DIES_S}
LONG: dict[str, Any] = {"epochs": 10_000, "eval_every_epochs": 0, "timeouts__collective_s": 30.0}
MORTAL = {"lease_s": 3.0}
# After the lease; the rest is for a machine that stands still. Nothing else would end their wait before 30 s.
TOLD_WITHIN_S = 3.0 + 10.0


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "dense"},
        {"algorithm": "dgc"},
        {"algorithm": "powersgd", "delay_steps": 1},  # several phases, in the background
        {"algorithm": "decentralized", "algorithm__peers": "choco"},
    ],
    ids=str,
)
def test_when_a_rank_is_killed_the_others_are_told_at_once_and_end(settings: dict[str, Any]) -> None:
    with ddp_ranks(3, **settings, **LONG, **STEADY) as ranks:
        nodes = ranks.start_all(rank_1=MORTAL)
        for node in nodes:
            node.wait_for("batch", number=20)
        killed_s = time.monotonic()  # the clock of all processes of a machine
        nodes[1].signal(signal.SIGKILL)
        for rank in (0, 2):
            failed = nodes[rank].wait_for("failed", timeout_s=20.0)
            assert failed["kind"] == "PeerLost"
            assert "rank 1" in failed["text"]
            assert failed["at_s"] - killed_s < TOLD_WITHIN_S
            assert nodes[rank].wait(10.0) == 3
        assert nodes[1].wait() == -signal.SIGKILL


def test_after_a_kill_all_ranks_go_on_from_the_last_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm": "dgc", "epochs": 2, "checkpoint__every_steps": 3, **STEADY}
    with ddp_ranks(2, **settings) as ranks:
        whole = [node.wait_for("done") for node in ranks.start_all()]
    with ddp_ranks(2, **settings, checkpoint__dir=str(tmp_path)) as ranks:
        first, second = ranks.start_all(rank_1={"die_at": 10, **MORTAL})
        assert first.wait_for("failed")["kind"] == "PeerLost"
        assert second.wait() == -signal.SIGKILL
        assert first.wait() == 3
        again = ranks.start_all()
        results = [node.wait_for("done") for node in again]
        assert again[0].all("batch")[0]["epoch"] == 1
    for result in (*results, *whole):
        assert (result["params_hash"], result["loss"]) == (whole[0]["params_hash"], whole[0]["loss"])
        assert result["steps"] == 16

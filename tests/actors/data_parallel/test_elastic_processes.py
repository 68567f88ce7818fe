"""Elastic workers as processes of their own, which are killed, stopped and asked to leave."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from ddp_node import ddp_ranks
from federation import NOBODY_DIES_S

pytestmark = [pytest.mark.slow, pytest.mark.faults]

ELASTIC: dict[str, Any] = {
    "elastic__min_world": 1, "elastic__max_world": 4, "elastic__wait_s": 60.0, "epochs": 10_000, "eval_every_epochs": 0,
    "hash_every": 10, "lease_s": NOBODY_DIES_S,
}  # fmt: skip
GOES_ON_S = 2.0  # for the survivors' next step after a kill; the rest is for a machine that stands still
STANDS_STILL_S = 8.0


@pytest.mark.parametrize(
    "settings",
    [{}, {"algorithm__name": "diloco", "algorithm__steps": 4, "algorithm__delay": 3, "algorithm__fragments": 2}],
    ids=["dense", "diloco with a delay"],
)
def test_survivors_of_a_kill_go_on_one_joins_and_one_leaves_and_all_have_equal_weights(
    settings: dict[str, Any],
) -> None:
    with ddp_ranks(3, **ELASTIC, **settings) as ranks:
        nodes = ranks.start_all(rank_0={"ends_with": [3, 2, 3, 2]})
        nodes[2].wait_for("step", world=3)
        nodes[0].wait_for("step", world=3)
        killed_s = time.monotonic()  # the clock of all processes of a machine
        nodes[2].signal(signal.SIGKILL)
        for survivor in nodes[:2]:
            first = survivor.wait_for("step", world=2, timeout_s=20.0)
            assert first["at_s"] - killed_s < GOES_ON_S + STANDS_STILL_S
        joiner = ranks.start(2, founders=0)
        joiner.wait_for("step", world=3, timeout_s=20.0)
        nodes[1].signal(signal.SIGTERM)
        left = nodes[1].wait_for("done", timeout_s=20.0)
        assert left["left"]
        results = [node.wait_for("done", timeout_s=20.0) for node in (nodes[0], joiner)]
        assert results[0]["params_hash"] == results[1]["params_hash"]
        assert results[0]["steps"] == results[1]["steps"]
        steps = [event["step"] for event in joiner.all("step")]
        assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_a_minority_makes_no_step_and_goes_on_when_the_others_do() -> None:
    with ddp_ranks(3, **ELASTIC, timeouts__collective_s=2.0, max_steps=250, accumulation_steps=1) as ranks:
        nodes = ranks.start_all()
        nodes[0].wait_for("step", step=20)
        for node in nodes[1:]:
            node.signal(signal.SIGSTOP)
        time.sleep(4.0)  # collectives have timed out, and nobody else answers
        before = len(nodes[0].all("step"))
        assert before < 250  # they were stopped in the midst of it
        time.sleep(1.0)
        assert len(nodes[0].all("step")) == before
        for node in nodes[1:]:
            node.signal(signal.SIGCONT)
        results = [node.wait_for("done", timeout_s=40.0) for node in nodes]
        assert {(result["params_hash"], result["steps"]) for result in results} == {(results[0]["params_hash"], 250)}

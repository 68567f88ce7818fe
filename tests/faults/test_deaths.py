"""Processes that die or stand still in the midst of something: who waits for them, for how long, and what is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ddp_node import ddp_ranks
from dds_domains import new_domain
from federation import Federation
from patience import PATIENT_S, until

from gradbus.commands.history.invariants import check
from gradbus.commands.history.reader import Event, read_history
from gradbus.runtime.testing.failpoints import fail_at

pytestmark = [pytest.mark.slow, pytest.mark.faults]

CALM: dict[str, Any] = {"lease_s": PATIENT_S}  # of those that do not die, on a machine that stands still now and then
DYING: dict[str, Any] = {"lease_s": 4.0}  # of those that do: a lease runs from when they were heard of last
# A lease, a second, and a busy machine; docs/reliability.md has what an idle one needs. Nothing else would end the
# wait before PATIENT_S.
GAP_S = 4.0 + 1.0 + 4.0
BACK_S = 5.0


@pytest.fixture
def federation() -> Iterator[Federation]:
    with Federation(domain=new_domain(), network=CALM) as federation:
        yield federation


def when(federation: Federation, who: str, name: str, **match: Any) -> list[float]:
    """Times of an event, of the controller or a client, over all its starts."""
    run = read_history(federation.history)
    starts = run.controller if who == "controller" else run.clients[int(who)]
    events: list[Event] = [event for start in starts for event in (start.opening, *start.events)]
    return [
        event["at_s"]
        for event in events
        if event["event"] == name and all(event.get(key) == value for key, value in match.items())
    ]


def test_a_client_that_dies_in_a_round_is_back_in_training_soon_and_the_others_hardly_wait(
    federation: Federation, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    state = {"state_dir": str(tmp_path / "state")}
    controller = federation.controller(
        rounds=5, clients__num=3, codec="sq8", history__payloads=True, clients__dead_after_s=PATIENT_S
    )
    clients = [federation.client(0), federation.client(1, hold={"4": str(gate)})]
    victim = federation.client(2, fail_at="after_receipt_before_residual:2", client=state, network=DYING)
    assert victim.wait() == -signal.SIGKILL
    died_s = time.monotonic()
    committed = controller.wait_for("round", round_id=2)
    assert time.monotonic() - died_s < GAP_S
    assert committed["clients"] == [0, 1, 2]
    back_s = time.monotonic()
    again = federation.client(2, client=state)
    controller.wait_for("takes part", client=2)
    gate.touch()
    again.wait_for("training")
    assert time.monotonic() - back_s < BACK_S + 3.0  # of these, what a process takes to start
    done = controller.wait_for("done")
    assert [client.wait() for client in (*clients, again)] == [0, 0, 0]
    # In the last one at the latest. It may work for the fourth in vain: that had begun when it was ready.
    assert done["reports"][4]["clients"] == [0, 1, 2]
    assert federation.findings()["I3"].checked == 5


def test_a_client_that_dies_with_half_its_update_sent_leaves_nothing_behind(tmp_path: Path) -> None:
    network = {**CALM, "shared_memory": False}
    with Federation(domain=new_domain(), dim=1_500_000, network=network) as federation:  # 6 frames
        controller = federation.controller(rounds=3, clients__num=3, clients__dead_after_s=PATIENT_S)
        clients = [federation.client(0), federation.client(1)]
        victim = federation.client(2, faults="crash update round=2 nth=4", network={**network, **DYING})
        assert victim.wait() == -signal.SIGKILL
        died_s = time.monotonic()
        controller.wait_for("round", round_id=2, clients=[0, 1])
        assert time.monotonic() - died_s < GAP_S
        done = controller.wait_for("done")
        assert [client.wait() for client in clients] == [0, 0]
    assert sum(report["dropped"].get("cut short", 0) for report in done["reports"]) == 1


def test_a_client_that_stood_still_brings_a_late_update_which_is_refused_and_goes_on(
    federation: Federation, tmp_path: Path
) -> None:
    gate, late = tmp_path / "gate", tmp_path / "late"
    controller = federation.controller(rounds=4, clients__num=2, clients__dead_after_s=DYING["lease_s"])
    client = federation.client(0, hold={"3": str(gate)})
    faults = "delay upload_request round=2 seconds=6"  # more than this machine may need to stop it
    sleeper = federation.client(1, hold={"2": str(late)}, faults=faults, network=DYING)
    sleeper.wait_for("training", round=2)
    late.touch()
    until(lambda: when(federation, "1", "offered", round=2))
    sleeper.wait_for("phase", phase="offering", round=2)
    controller.wait_for("takes part", client=1)
    sleeper.signal(signal.SIGSTOP)  # what it has to say of round 2 is still in this process
    controller.wait_for("round", round_id=2, clients=[0])
    sleeper.signal(signal.SIGCONT)
    until(lambda: when(federation, "1", "receipt", round=2, accepted=False))
    controller.wait_for("takes part", client=1)
    gate.touch()
    done = controller.wait_for("done")
    assert [client.wait(), sleeper.wait()] == [0, 0]
    assert done["reports"][3]["clients"] == [0, 1]
    assert sum(report["dropped"].get("stale", 0) for report in done["reports"]) >= 1


@pytest.mark.parametrize("place", ["after_send", "after_step"])
def test_when_a_rank_dies_in_a_step_the_others_know_at_once_and_their_parameters_are_equal(
    place: str, tmp_path: Path
) -> None:
    history = tmp_path / "history"
    settings: dict[str, Any] = {
        "epochs": 2, "eval_every_epochs": 0, "hash_every": 1, "history__dir": str(history),
        "checkpoint__dir": str(tmp_path / "state"), "checkpoint__every_steps": 2,
    }  # fmt: skip
    with ddp_ranks(3, **settings) as ranks:
        dies = {"fail_at": fail_at(1, 5, place), **DYING}
        nodes = ranks.start_all(rank_0=CALM, rank_1=dies, rank_2=CALM)
        assert nodes[1].wait(40.0) == -signal.SIGKILL
        died_s = time.monotonic()
        for rank in (0, 2):
            failed = nodes[rank].wait_for("failed", timeout_s=30.0)
            assert "rank 1" in failed["text"]
            assert failed["at_s"] - died_s < GAP_S
            assert nodes[rank].wait(10.0) == 3
        again = ranks.start_all(rank_0=CALM, rank_1=CALM, rank_2=CALM)
        assert len({node.wait_for("done")["params_hash"] for node in again}) == 1
        assert [node.wait() for node in again] == [0, 0, 0]
    findings = {finding.name: finding for finding in check(read_history(history))}
    assert findings["I5"].violations == []  # over both starts: the steps that were done again as well
    assert findings["I5"].checked > 5

"""Another user of the machine, without any setting on the side of those who are attacked: nothing he does succeeds."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import other_user
import pytest
from dds_domains import new_domain
from federation import DIM, NOBODY_DIES_S, Federation
from torch_node import SceneRanks

pytestmark = [pytest.mark.faults, pytest.mark.slow]

QUIET, ATTACKED = 15, 40  # rounds
TRAIN_S = 0.03


@pytest.fixture
def his_home() -> Any:
    with other_user.home_of_another_user() as home:
        yield home


def attacked_run(security: dict[str, Any], home: str, **attack: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """A run of two clients, in the last rounds of which he attacks. Returns what the controller and he found."""
    domain, gate, over = new_domain(), Path(home, "gate"), Path(home, "over")
    with Federation(domain=domain, silence_s=NOBODY_DIES_S, security=security) as federation:
        controller = federation.controller(rounds=QUIET + ATTACKED, clients__num=2)
        hold = {str(QUIET + 1): str(gate)}
        clients = [federation.client(number, hold=hold, train_s=TRAIN_S) for number in range(2)]
        for client in clients:
            client.wait_for("training", round=QUIET + 1)
        place = {"job": federation.job, "domain": domain, "dim": DIM, "until": str(over)}
        he = other_user.start("federated", home, **place, **attack)
        try:
            he.wait_for("attacking")
            gate.touch()
            done = controller.wait_for("done", timeout_s=60.0)
            over.touch()
            return done, he.wait_for("done")["found"]
        finally:
            he.end()


def test_he_cannot_read_join_poison_or_end_a_run_and_its_rounds_keep_their_pace(his_home: str) -> None:
    done, found = attacked_run({}, his_home, client_ids=(7, 0), lies=True)
    assert found == {}
    reports = done["reports"]
    assert [report["clients"] for report in reports] == [[0, 1]] * (QUIET + ATTACKED)
    assert {reason for report in reports for reason in report["dropped"]} <= {"other key", "not sealed"}
    assert done["rejected"]["other key"] > 0  # what he said did come
    assert done["rejected"]["not sealed"] > 0
    silent_for_s = statistics.median(report["seconds"] for report in reports[1:QUIET])
    attacked_s = statistics.median(report["seconds"] for report in reports[QUIET + 1 :])
    assert attacked_s < 2 * silent_for_s


def test_without_protection_he_can(his_home: str) -> None:
    """Else the test above would show nothing."""
    _, found = attacked_run({"level": "none"}, his_home, client_ids=(7,), lies=False)
    assert found["rounds trained"] > 0
    assert found["TrainCmd read"] > 0


@pytest.mark.parametrize("protected", [True, False], ids=["by-default", "none"])
def test_he_takes_no_rank_of_a_store_and_runs_no_code_by_objects_of_torch(
    his_home: str, tmp_path: Path, protected: bool
) -> None:
    url = f"dds://{new_domain()}/objects-{tmp_path.name}"
    gate, over, bomb = (Path(his_home, name) for name in ("gate", "over", "bomb"))
    environments = {rank: {} if protected else {"GRADBUS_BUS__SECURITY": "none"} for rank in (0, 1)}
    with SceneRanks(
        "rendezvous_scenes", "exchange_objects", url=url, gate=str(gate), environments=environments
    ) as ranks:
        attack = {"url": url, "bomb": str(bomb), "until": str(over), "timeout_s": 2.0 if protected else 20.0}
        his = [
            other_user.start("ranks", his_home, **attack, level=level)
            for level in (other_user.WAYS if protected else ("none",))
        ]
        try:
            if not protected:
                his[0].wait_for("has a rank")
                ranks.nodes[0].wait_for("failed")
                assert bomb.exists()
                return
            for he, why in zip(
                his, ("has another job key", "encrypts what it sends, and this one does not"), strict=True
            ):
                assert why in he.wait_for("refused")["text"]
            gate.touch()
            assert ranks.results() == [list(range(20))] * 2
            over.touch()
            for he in his:
                assert he.wait_for("done")["tries"] > 0
                assert not he.all("has a rank")
            assert not bomb.exists()
        finally:
            for he in his:
                he.end()

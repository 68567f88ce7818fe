"""Clients and controllers that are killed between two packets of an update, over the real bus."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from federation import NOBODY_DIES_S, Federation
from patience import PATIENT_S

pytestmark = [pytest.mark.slow, pytest.mark.faults]

ROUNDS = 8
RULES: dict[str, Any] = {
    "rounds": ROUNDS, "clients__num": 2, "clients__min": 2, "clients__dead_after_s": PATIENT_S,
    "history__payloads": True,
}  # fmt: skip
CALM: dict[str, Any] = {"lease_s": PATIENT_S}
MORTAL: dict[str, Any] = {"lease_s": 1.0}
PACKETS = 4


@pytest.fixture(scope="module")
def unbroken() -> list[int]:
    """The weights after each round of a run in which nobody dies."""
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S, dim=20_000) as federation:
        controller = federation.controller(**RULES)
        clients = [federation.client(client_id, packets=PACKETS) for client_id in (0, 1)]
        reports = controller.wait_for("done", timeout_s=60.0)["reports"]
        assert [client.wait() for client in clients] == [0, 0]
    assert [report["clients"] for report in reports] == [[0, 1]] * ROUNDS
    return [report["weights_crc32"] for report in reports]


def test_whoever_is_killed_between_two_packets_each_update_counts_once_and_in_full(
    unbroken: list[int], tmp_path: Path
) -> None:
    chance = random.Random(0)  # with other seeds, and many more of them, the simulation kills them
    with Federation(domain=new_domain(), dim=20_000, network=CALM) as federation:
        kept = {"state_dir": str(tmp_path / "clients")}
        rules = {**RULES, "checkpoint__dir": str(tmp_path / "controller")}
        stays = federation.client(0, packets=PACKETS, client=kept)
        # The client first, and then the controller, each in a round of its own and after a packet of its own.
        places = ["between_packets", "after_offer", "after_grant_before_upload", "after_training_before_offer"]
        chance.shuffle(places)
        client_rounds = sorted(chance.sample(range(2, 5), 2))
        controller = federation.controller(
            **rules, network=MORTAL, faults=f"crash receipt round=5 nth={chance.randint(1, 2 * PACKETS - 1)}"
        )
        for round_id, place in zip(client_rounds, places, strict=False):
            victim = federation.client(1, packets=PACKETS, client=kept, network=MORTAL, fail_at=f"{place}:{round_id}")
            assert victim.wait(60.0) == -signal.SIGKILL
        last = federation.client(1, packets=PACKETS, client=kept)
        assert controller.wait(60.0) == -signal.SIGKILL
        nth = chance.randint(1, 2 * PACKETS - 1)
        controller = federation.controller(**rules, network=MORTAL, faults=f"crash receipt round=7 nth={nth}")
        assert controller.wait(60.0) == -signal.SIGKILL
        done = federation.controller(**rules).wait_for("done", timeout_s=60.0)
        assert [client.wait() for client in (stays, last)] == [0, 0]
        assert [report["weights_crc32"] for report in done["reports"]] == unbroken
        assert [report["clients"] for report in done["reports"]] == [[0, 1]] * ROUNDS
        findings = federation.findings()
        assert findings["I3"].checked >= ROUNDS  # every round was computed again, from the payloads that counted

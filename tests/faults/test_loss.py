"""What the network loses, delays, doubles and damages costs time, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from dds_domains import new_domain
from federation import Federation
from patience import soonest

pytestmark = [pytest.mark.slow, pytest.mark.faults]

DIM = 20_000  # two datagrams
ROUNDS = 20
_RULES: dict[str, Any] = {"rounds": ROUNDS, "clients__num": 4, "codec": "sq8", "downlink_codec": "s4"}
ALL_ANSWERED = [([0, 1, 2, 3], "all live clients answered")] * ROUNDS


def rounds(*, loss_per_mille: int = 0, faults: str = "", **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the controller, and each client, say at the end of a run in which everything goes over DDS."""
    # With a lease of 1 s, the bad luck that nothing at all comes through for so long would be a death now and then.
    network = {"lease_s": 10.0, "shared_memory": False, "loss_per_mille": loss_per_mille}
    rules = {
        **_RULES,
        "clients__heartbeat_s": 0.3,
        "clients__dead_after_s": 10.0,
        "clients__start_grace_s": 30.0,
        **more,
    }
    with Federation(domain=new_domain(), dim=DIM, network=network) as federation:
        controller = federation.controller(**rules, faults=faults, network=network)
        clients = [federation.client(i, faults=f"{faults}; seed={i}" if faults else "") for i in range(4)]
        done = controller.wait_for("done", timeout_s=100.0)
        told = [client.wait_for("done", timeout_s=20.0) for client in clients]
        findings = federation.findings()
        assert all(findings[name].checked for name in ("I1", "I2", "I7"))
    return done, told  # the federation has found nothing lost, counted twice or changed on its way


@pytest.fixture(scope="module")
def clean() -> dict[str, Any]:
    done = rounds()[0]
    assert course(done) == ALL_ANSWERED
    return done


@pytest.mark.parametrize(("loss_per_mille", "factor", "count"), [(10, 5, ROUNDS), (100, 15, 10), (300, 80, 5)])
@pytest.mark.timeout(320)
def test_lost_packets_cost_time_and_nothing_else(
    loss_per_mille: int, factor: float, count: int, clean: dict[str, Any]
) -> None:
    def needed_s() -> float:
        done, _ = rounds(loss_per_mille=loss_per_mille, rounds=count)
        assert course(done) == ALL_ANSWERED[:count]
        assert crcs(done) == crcs(clean)[:count]
        return seconds(done, count)

    limit_s = factor * seconds(clean, count) + 2.0
    assert soonest(needed_s, limit_s) < limit_s


def test_late_doubled_overtaken_lost_and_damaged_messages_change_no_bit(clean: dict[str, Any]) -> None:
    faults = (
        "drop p=0.03; duplicate p=0.05; corrupt p=0.03; reorder p=0.1 seconds=0.05; delay update p=0.2 seconds=0.06;"
        "delay model p=0.2 seconds=0.05; delay upload_request p=0.2 seconds=0.06"
    )
    done, told = rounds(faults=faults, rounds=6)
    fired = [done["fired"], *(one["fired"] for one in told)]
    total = {
        action: sum(counts.get(f"{action} any", 0) for counts in fired) for action in ("drop", "duplicate", "corrupt")
    }
    assert all(total.values()), total
    assert done["rejected"]  # damaged frames were noticed as such
    assert course(done) == ALL_ANSWERED[:6], [report["dropped"] for report in done["reports"]]
    assert crcs(done) == crcs(clean)[:6]
    assert [report["attempt"] for report in done["reports"]] == [1] * 6  # no lost message costs the deadline of a round


def course(done: dict[str, Any]) -> list[tuple[list[int], str]]:
    """Whose updates counted in each round, and why it was over: weights differ as soon as these do."""
    return [(report["clients"], report["outcome"]) for report in done["reports"]]


def crcs(done: dict[str, Any]) -> list[int]:
    return [report["weights_crc32"] for report in done["reports"]]


def seconds(done: dict[str, Any], count: int) -> float:
    return sum(report["seconds"] for report in done["reports"][1:count])  # the first one waits for discovery

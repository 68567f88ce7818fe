"""Links that are cut and mended, long or bad: between network namespaces, with datagrams of 1,500 bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from federation import Federation

from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import Host, Network, NoNamespaces, hosts_on_a_switch, set_link

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.faults]


def network(here: Host, other: Host, **more: Any) -> dict[str, Any]:
    return {
        "profile": "network",
        "interface": here.interface,
        "peers": [here.address, other.address],
        "lease_s": 1.0,
        "shared_memory": False,
        **more,
    }


@pytest.mark.parametrize(
    ("lease_s", "cut_s"), [(10.0, 1.2), (4.0, 6.5)], ids=["shorter than the lease", "longer than the lease"]
)
def test_a_round_does_without_who_is_cut_off_and_has_it_back_soon_after(
    lease_s: float, cut_s: float, hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    left, right = hosts
    here, there = network(left, right, lease_s=lease_s), network(right, left, lease_s=lease_s)
    gate = tmp_path / "gate"
    with Federation(domain=7) as federation:
        controller = federation.controller(
            rounds=4,
            clients__num=4,
            round__quorum=0.75,
            round__grace_s=0.5,
            codec="sq8",
            clients__dead_after_s=lease_s,
            prefix=left.prefix,
            network=here,
        )
        near = [federation.client(i, prefix=left.prefix, network=here, hold={"3": str(gate)}) for i in range(3)]
        far = federation.client(3, prefix=right.prefix, network=there, hold={"2": "/nonexistent/gate"})
        far.wait_for("training", round=2, timeout_s=60.0)
        set_link(right, up=False)
        cut_at_s = time.monotonic()
        assert controller.wait_for("round", round_id=2)["clients"] == [0, 1, 2]
        assert time.monotonic() - cut_at_s < 0.5 + 5.0  # the grace, not the longer lease or the deadline
        time.sleep(max(0.0, cut_s - (time.monotonic() - cut_at_s)))  # this is the fault, not a wait for something
        set_link(right, up=True)
        mended_at_s = time.monotonic()
        if cut_s < lease_s:
            far.wait_for("training", round=3)  # it was never gone
        else:
            controller.wait_for("takes part", client=3, from_round=4)
        assert time.monotonic() - mended_at_s < 8.0
        gate.touch()
        reports = controller.wait_for("done", timeout_s=60.0)["reports"]
        assert reports[3]["clients"] == [0, 1, 2, 3]
        assert [node.wait() for node in (*near, far)] == [0] * 4


def test_a_network_that_loses_one_packet_in_a_hundred_loses_nothing_else(hosts: tuple[Host, Host]) -> None:
    left, right = hosts
    lossy = {"loss_per_mille": 10, "lease_s": 20.0}
    with Federation(domain=7, dim=1_199_882) as federation:
        controller = federation.controller(
            rounds=4,
            clients__num=1,
            clients__dead_after_s=20.0,
            prefix=left.prefix,
            network=network(left, right, **lossy),
        )
        client = federation.client(0, prefix=right.prefix, network=network(right, left, **lossy))
        done = controller.wait_for("done", timeout_s=100.0)
        assert client.wait() == 0
    reports = done["reports"]
    assert [report["clients"] for report in reports] == [[0]] * 4
    rates = [(report["bytes_up"] + report["bytes_down"]) / report["seconds"] for report in reports[1:]]
    assert statistics.median(rates) > 5e6, rates  # bytes a second; a busy machine makes single rounds slower


@pytest.fixture
def far_hosts() -> Iterator[Network]:
    try:
        with hosts_on_a_switch(
            2, LinkConditions(delay_s=0.05, jitter_s=0.01, loss=0.01, duplicate=0.01), "switch"
        ) as network:
            yield network
    except NoNamespaces as error:
        pytest.skip(str(error))


def test_over_a_link_that_is_slow_and_loses_doubles_and_reorders_packets_each_update_counts_once(
    far_hosts: Network,
) -> None:
    left, right = far_hosts.hosts
    assert far_hosts.switch is not None
    here, there = network(left, right, lease_s=20.0), network(right, left, lease_s=20.0)
    with Federation(domain=7, dim=100_000) as federation:
        controller = federation.controller(
            rounds=4,
            clients__num=4,
            codec="sq8",
            downlink_codec="s4",
            clients__dead_after_s=20.0,
            clients__start_grace_s=30.0,
            history__payloads=True,
            prefix=left.prefix,
            network=here,
        )
        clients = [federation.client(i, prefix=right.prefix, network=there) for i in range(4)]
        reports = controller.wait_for("done", timeout_s=100.0)["reports"]
        assert [node.wait() for node in clients] == [0] * 4
        assert federation.findings()["I3"].checked == 4
    assert [report["clients"] for report in reports] == [[0, 1, 2, 3]] * 4
    counts = far_hosts.switch.counts
    assert all(counts[what] for what in ("lost", "doubled", "overtaken")), counts

"""The same runs between two hosts made of network namespaces: veth, MTU 1500, profile ``network``."""

from __future__ import annotations

from typing import Any

import pytest
from federation import NOBODY_DIES_S, Federation

from gradbus.commands.lab.namespaces import Host, set_link

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.faults]


def network(here: Host, other: Host) -> dict[str, Any]:
    return {
        "profile": "network",
        "interface": here.interface,
        "peers": [here.address, other.address],
        "shared_memory": False,  # the two are one machine, as far as memory is concerned
    }


def test_a_run_between_two_hosts_gives_the_weights_of_a_run_on_one(hosts: tuple[Host, Host]) -> None:
    left, right = hosts
    rules = {"rounds": 3, "clients__num": 2, "codec": "sq8"}
    with Federation(domain=7, dim=1_199_882, silence_s=NOBODY_DIES_S) as federation:
        controller = federation.controller(**rules, prefix=left.prefix, network=network(left, right))
        clients = [
            federation.client(0, prefix=left.prefix, network=network(left, right)),
            federation.client(1, prefix=right.prefix, network=network(right, left)),
        ]
        across = controller.wait_for("done", timeout_s=60.0)["reports"]
        assert [client.wait() for client in clients] == [0, 0]
    with Federation(domain=7, dim=1_199_882, silence_s=NOBODY_DIES_S) as federation:
        controller = federation.controller(**rules)
        clients = [federation.client(0), federation.client(1)]
        alone = controller.wait_for("done", timeout_s=60.0)["reports"]
        assert [client.wait() for client in clients] == [0, 0]
    assert [report["clients"] for report in across] == [[0, 1]] * 3
    assert [report["weights_crc32"] for report in across] == [report["weights_crc32"] for report in alone]


def test_a_client_behind_a_cut_link_is_left_out_and_is_back_after_the_link_is_mended(
    hosts: tuple[Host, Host], tmp_path: Any
) -> None:
    left, right = hosts
    gates = {str(round_id): str(tmp_path / str(round_id)) for round_id in (2, 3)}
    with Federation(domain=7, silence_s=3.0) as federation:
        controller = federation.controller(rounds=4, clients__num=2, prefix=left.prefix, network=network(left, right))
        near = federation.client(0, prefix=left.prefix, network=network(left, right), hold=gates)
        far = federation.client(1, prefix=right.prefix, network=network(right, left), hold={"2": "/nonexistent/gate"})
        far.wait_for("training", round=2, timeout_s=60.0)
        set_link(right, up=False)
        (tmp_path / "2").touch()
        assert controller.wait_for("round", round_id=2)["clients"] == [0]
        set_link(right, up=True)
        controller.wait_for("takes part", client=1, from_round=4)
        (tmp_path / "3").touch()
        reports = controller.wait_for("done", timeout_s=60.0)["reports"]
        assert reports[3]["clients"] == [0, 1]
        assert [near.wait(), far.wait()] == [0, 0]

"""Trees of real processes over real DDS: a site that is killed, and one whose link to the centre is cut."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from federation import NOBODY_DIES_S, Federation, Node

from gradbus.commands.lab.namespaces import Host, set_link

pytestmark = [pytest.mark.slow, pytest.mark.faults]

QUIET: dict[str, Any] = {"client": {"history": {"dir": None}}}  # the journals of a directory are those of one level


def site(federation: Federation, number: int, path: Path, clients: int = 1, **more: Any) -> Node:
    upstream = {"site": number, "job": federation.job, "alone": False, **more.pop("upstream", {})}
    return federation.controller(
        **{
            "job": f"{federation.job}-{number}",
            "upstream": upstream,
            "clients__num": clients,
            "clients__min": clients,
            "history__dir": None,
            "checkpoint__dir": str(path / f"site-{number}"),
            "round__timeout_s": 20.0,
            **more,
        }
    )


@functools.lru_cache
def flat_weights(clients: int, rounds: int) -> list[int]:
    with Federation(domain=new_domain(), silence_s=NOBODY_DIES_S) as federation:
        controller = federation.controller(rounds=rounds, clients__num=clients, clients__min=clients)
        nodes = [federation.client(client_id) for client_id in range(clients)]
        reports = controller.wait_for("done", timeout_s=60.0)["reports"]
        assert [node.wait() for node in nodes] == [0] * clients
    return [report["weights_crc32"] for report in reports]


def test_a_site_that_is_killed_and_started_again_changes_no_bit(tmp_path: Path) -> None:
    with Federation(domain=new_domain()) as federation:
        above = {"clients__kind": "sites", "clients__num": 2, "clients__min": 2}
        centre = federation.controller(rounds=3, **above)
        doomed = site(federation, 0, tmp_path, clients=2, fail_at="mid_collect:2")
        site(federation, 1, tmp_path)
        clients = [federation.client(number, job=f"{federation.job}-{number // 2}", **QUIET) for number in range(3)]
        assert doomed.wait(60.0) == -9
        again = site(federation, 0, tmp_path, clients=2)
        reports = centre.wait_for("done", timeout_s=60.0)["reports"]
        assert [node.wait(60.0) for node in (again, *clients)] == [0] * 4
    assert [report["clients"] for report in reports] == [[0, 1]] * 3
    assert [report["weights_crc32"] for report in reports] == flat_weights(3, 3)


@pytest.mark.netns
def test_a_site_behind_a_cut_link_goes_on_alone_and_rejoins_when_it_is_mended(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    left, right = hosts

    def network(here: Host, other: Host) -> dict[str, Any]:
        peers = [here.address, other.address]
        return {"profile": "network", "interface": here.interface, "peers": peers, "shared_memory": False}

    domain = new_domain()
    with Federation(domain=domain, silence_s=3.0) as federation:
        own = new_domain()  # a process has one network for each DDS domain
        centre = federation.controller(
            rounds=3, clients__kind="sites", clients__num=1, prefix=left.prefix, network=network(left, right)
        )
        upstream = {"alone": True, "alone_after_s": 2.0, "network": {**network(right, left), "lease_s": 3.0}}
        far = site(federation, 0, tmp_path, prefix=right.prefix, domain=own, upstream={**upstream, "domain": domain})
        gate = tmp_path / "gate"
        client = federation.client(
            0, job=f"{federation.job}-0", domain=own, prefix=right.prefix, hold={"2": str(gate)}, **QUIET
        )
        client.wait_for("training", round=2, timeout_s=60.0)
        set_link(right, up=False)
        gate.touch()
        far.wait_for("attempt", round=2, number=2, timeout_s=60.0)  # its run alone: one round of it is whole
        set_link(right, up=True)
        reports = centre.wait_for("done", timeout_s=60.0)["reports"]
        assert [node.wait(60.0) for node in (far, client)] == [0, 0]
    assert [report["weights_crc32"] for report in reports] == flat_weights(1, 3)
    kept = sorted(file.name for file in (tmp_path / "site-0" / "alone-after-000001").glob("round-*.json"))
    assert kept, "no round alone is kept"  # how many there are by then, and which are the newest, is the machine's

"""Machines that start before their name service does: the run begins when the names resolve.

Two hosts made of network namespaces, each with its own ``/etc/hosts``, which begins without the names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import late_member
import pytest
import warm
from federation import NOBODY_DIES_S, Federation, Node
from host_files import add_ipv6_addresses, add_names, name_service
from patience import PATIENT_S

from gradbus.commands.lab.namespaces import Host
from gradbus.runtime.transport.dds.network import discovery_ports

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(180)]
NAMES = ("robot-a", "robot-b")
START_S = 60.0  # of a process beside others


@pytest.fixture
def nameless(hosts: tuple[Host, Host]) -> Iterator[tuple[Host, Host]]:
    """Two hosts that know each other by address alone, as yet."""
    with name_service(hosts):
        yield hosts


def resolve(hosts: tuple[Host, Host], *at: Host) -> None:
    for host in at:
        add_names(host, dict(zip(NAMES, (one.address for one in hosts), strict=True)))


class Pair:
    """A process on each host: the ranks of a group, or two that meet on the bus."""

    def __init__(self, hosts: tuple[Host, Host], *networks: dict[str, Any], domain: int, is_group: bool) -> None:
        common = {"domain": domain, "wait_s": START_S, "is_group": is_group}
        self.ranks = [
            self._start(host, {"rank": rank, "network": network, **common})
            for rank, (host, network) in enumerate(zip(hosts, networks, strict=True))
        ]

    @staticmethod
    def _start(host: Host, spec: dict[str, Any]) -> Node:
        spec |= {"host": host.name, "network": {**spec["network"], "interface": host.interface}}
        process, _, events = warm.fork_that_tells(late_member.run, spec)
        return Node(process, events)

    def __enter__(self) -> list[Node]:
        return self.ranks

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.end()


def test_a_name_that_resolves_after_ten_seconds_joins_the_run_and_is_named_until_then(
    nameless: tuple[Host, Host], domain: int
) -> None:
    """Neither knows the other, nor itself: both start, and wait."""
    both = ({"peers": NAMES}, {"peers": NAMES})
    with Pair(nameless, *both, domain=domain, is_group=True) as ranks:
        for rank in ranks:
            warned = rank.wait_for("peer not resolved", START_S, peer="robot-b")
            assert warned["effect"] == "starts without it, and looks again"
            waiting = rank.wait_for("still waiting", START_S)
            assert waiting["waited_s"] >= 10
            assert "No address yet for robot-a (" in waiting["hint"]
            assert "robot-b (" in waiting["hint"]
            assert waiting["hint"].startswith("Start it, with the same")
            assert waiting["hint"].endswith(": check DNS or /etc/hosts here, or give IP addresses")
        resolve(nameless, *nameless)
        for rank in ranks:
            assert rank.wait_for("done", PATIENT_S)["gathered"] == ["rank 0", "rank 1"]
            assert rank.wait(PATIENT_S) == 0
        # The first to find the other one is enough; it had its name before.
        found = [event for rank in ranks for event in rank.all("peer resolved")]
        assert {event["peer"]: event["addresses"] for event in found}.items() <= {
            name: [host.address] for name, host in zip(NAMES, nameless, strict=True)
        }.items()
        assert found


@pytest.mark.parametrize(("port", "multicast"), [("", False), (":{}", False), ("", True)])
def test_a_late_peer_that_does_not_name_this_machine_is_met_all_the_same(
    nameless: tuple[Host, Host], domain: int, port: str, multicast: bool
) -> None:
    """The second one knows its own address alone, and no multicast: it answers whoever announces himself."""
    peer = f"robot-b{port.format(discovery_ports(domain)[0])}"
    networks = {"peers": [peer], "multicast": multicast}, {"peers": [nameless[1].address]}
    with Pair(nameless, *networks, domain=domain, is_group=False) as ranks:
        for rank in ranks:
            rank.wait_for("open", START_S)
        resolve(nameless, nameless[0])
        ranks[0].wait_for("peer resolved", PATIENT_S, peer="robot-b")
        for rank in ranks:
            rank.wait_for("done", PATIENT_S)


def test_late_names_are_met_over_ipv6_where_the_peers_say_so(nameless: tuple[Host, Host], domain: int) -> None:
    here, there = add_ipv6_addresses(nameless)
    with Pair(nameless, {"peers": [here, "robot-b"]}, {"peers": [there]}, domain=domain, is_group=False) as ranks:
        for rank in ranks:
            rank.wait_for("open", START_S)
        add_names(nameless[0], {"robot-b": nameless[1].address})  # IPv4: of no use here
        add_names(nameless[0], {"robot-b": there})
        assert ranks[0].wait_for("peer resolved", PATIENT_S)["addresses"] == [there]
        for rank in ranks:
            rank.wait_for("done", PATIENT_S)


def test_a_federated_run_begins_when_the_name_of_the_other_machine_resolves(nameless: tuple[Host, Host]) -> None:
    networks = [
        {"profile": "network", "interface": host.interface, "peers": list(NAMES), "shared_memory": False}
        for host in nameless
    ]
    here, there = (host.prefix for host in nameless)
    with Federation(domain=7, silence_s=NOBODY_DIES_S) as federation:
        controller = federation.controller(rounds=2, prefix=here, network=networks[0])
        client = federation.client(0, prefix=there, network=networks[1])
        for node in (controller, client):
            node.wait_for("started", START_S)
        resolve(nameless, *nameless)
        reports = controller.wait_for("done", timeout_s=PATIENT_S)["reports"]
        assert [report["clients"] for report in reports] == [[0]] * 2
        assert client.wait() == 0

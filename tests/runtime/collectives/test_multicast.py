"""Groups on a network with multicast: what goes to all ranks leaves once, and nothing else changes."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from group_node import all_done, group_ranks
from group_scripts import every_collective, steps_until_the_end, traffic_of_collectives

from gradbus.commands.lab.namespaces import Host

pytestmark = pytest.mark.slow

MULTICAST = {"multicast": True, "lease_s": 20.0}
PAYLOAD_BYTES = 128 << 10  # so few that no receive buffer overflows, and nothing is sent again
LOST_S = 10.0  # of the 20 s of a lease: the kernel tells of it, and a busy machine gives turns late


@pytest.mark.parametrize("shared", [False, True])
def test_every_collective_is_right_with_multicast(shared: bool) -> None:
    network = MULTICAST | {"shared_memory": shared}
    with group_ranks(every_collective, 4, numels=[5, 100_000], network=network) as ranks:
        assert all(done["dropped"] == {} for done in all_done(ranks))


def test_every_collective_is_right_where_each_rank_misses_other_packets_of_a_multicast() -> None:
    network = MULTICAST | {"shared_memory": False, "loss_per_mille": 100}
    with group_ranks(every_collective, 3, numels=[1, 100_000], network=network, limits={"timeout_s": 60.0}) as ranks:
        all_done(ranks)


@pytest.mark.parametrize("algorithm", ["direct", "shards"])
def test_a_rank_killed_while_it_multicasts_a_large_vector_is_named_in_time(algorithm: str) -> None:
    dies = {"die_in_step": 2, "die_after_bytes": 2 << 20}
    network = MULTICAST | {"shared_memory": False}
    with group_ranks(steps_until_the_end, 4, network=network, numel=2 << 20, algorithm=algorithm) as ranks:
        nodes = ranks.start_all(rank_1=dies)
        killed_s = nodes[1].wait_for("dies")["at_s"]
        for node in (nodes[0], nodes[2], nodes[3]):
            end = node.wait_for("ended")
            assert (end["kind"], end["ranks"]) == ("PeerLost", [1])
            assert end["at_s"] - killed_s < LOST_S
            assert node.wait() == 0
        assert nodes[1].wait() == -signal.SIGKILL


# Networks of their own, in which nobody else sends


def traffic(
    hosts: tuple[Host, Host],
    places: list[int],
    interfaces: list[str],
    *,
    size_bytes: int = PAYLOAD_BYTES,
    **network: Any,
) -> tuple[dict[str, float], int]:
    """What leaves by the interface of rank 0 in each collective, in payloads, and the bytes that leave by other ones.

    Args:
        places: which of the hosts each rank is on. interfaces: of the hosts, which their ranks use.
    """
    network = {"lease_s": 20.0, "shared_memory": False, **network}
    with group_ranks(traffic_of_collectives, len(places), size_bytes=size_bytes) as ranks:
        for rank, place in enumerate(places):
            ranks.start(
                rank,
                namespace=hosts[place].name,
                interface=interfaces[place],
                network=network | {"interface": interfaces[place]},
            )
        nodes = ranks.nodes
        assert [node.wait(60.0) for node in nodes] == [0] * len(places)
        (sent,) = nodes[0].all("sent")
        return {name: size / size_bytes for name, size in sent["by_collective"].items()}, sent["elsewhere"]


@pytest.mark.netns
@pytest.mark.parametrize("multicast", [True, False])
def test_on_one_host_a_payload_for_all_leaves_once_with_multicast(hosts: tuple[Host, Host], multicast: bool) -> None:
    sent, elsewhere = traffic(hosts, [0, 0, 0, 0], ["lo", "lo"], multicast=multicast)
    assert sent == {
        "broadcast": pytest.approx(1 if multicast else 3, rel=0.2),
        "scatter": pytest.approx(3, rel=0.2),  # to each its own
    }
    assert elsewhere < PAYLOAD_BYTES / 20  # the kernel itself talks there


@pytest.mark.netns
def test_between_hosts_ranks_find_each_other_by_multicast_and_a_payload_crosses_the_wire_once(
    hosts: tuple[Host, Host],
) -> None:
    """No address of the other host is given."""
    interfaces = [host.interface for host in hosts]
    sent, _ = traffic(hosts, [0, 1, 1, 1], interfaces, profile="network", multicast=True)
    assert sent == {"broadcast": pytest.approx(1, rel=0.2), "scatter": pytest.approx(3, rel=0.2)}


@pytest.mark.netns
def test_between_hosts_a_fragment_and_the_news_of_it_share_a_packet(hosts: tuple[Host, Host]) -> None:
    """News of a fragment in a packet of its own is as many packets again."""
    interfaces, peers = [host.interface for host in hosts], tuple(host.address for host in hosts)
    sent, _ = traffic(hosts, [0, 1], interfaces, size_bytes=1 << 20, profile="network", peers=peers)
    assert sent["scatter"] < 1.12  # a packet has 84 bytes of headers to 1,316 of payload, and 42 of Ethernet and UDP

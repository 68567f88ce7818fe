"""What members of a group send while they have nothing to say, between hosts without multicast; and how soon one who
comes late, when nobody searches any more, has found them."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator

import gradbus
from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import Host, Network, enter_host, hosts_on_a_switch, traffic
from gradbus.experiments.bench.processes import DOMAIN, Processes
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.runtime.collectives import join_group
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security import Security
from gradbus.runtime.transport.dds import network as dds_network
from gradbus.runtime.transport.dds.participant import Participant

_WORLDS = (2, 4)
_SETTLE_S = 15.0
_SEARCH_S = 30.0  # not ten minutes: what is sent afterwards does not depend on it
_FOUND_S = 30.0
_POLL_S = 0.005


def _network(hosts: tuple[Host, ...], rank: int) -> NetworkConfig:
    peers = tuple(host.address for host in hosts)
    return NetworkConfig(profile="network", interface=hosts[rank].interface, peers=peers)


async def _idle(hosts: tuple[Host, ...], rank: int, world: int, until_s: float) -> None:
    """The work of a member: it joins, and then does nothing until this time of ``time.monotonic``."""
    enter_host(hosts[rank])
    dds_network.SEARCH_S = _SEARCH_S
    network, security = _network(hosts, rank), Security(insecure=True)
    async with (
        gradbus.connect(f"idle-{world}", domain=DOMAIN, network=network, security=security) as bus,
        join_group(bus, rank=rank, world=world),
    ):
        await asyncio.sleep(until_s - time.monotonic())


def _late(hosts: tuple[Host, ...], others: int) -> float:
    """The work of one who comes late, on the last host. Returns seconds until it knows all others."""
    enter_host(hosts[-1])
    began_s = time.monotonic()
    made = Participant(domain_id=DOMAIN, partition="late", network=_network(hosts, len(hosts) - 1))
    try:
        while len(made.claims()) < others + 1:  # its own one, too
            if time.monotonic() > began_s + _FOUND_S:
                raise TimeoutError(f"knows {len(made.claims())} of {others + 1} after {_FOUND_S:g} s")
            made.look_around()
            time.sleep(_POLL_S)
        return time.monotonic() - began_s
    finally:
        made.close()


def measure_idle(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Bytes a second of a member for each peer, with Ethernet headers; the two groups are idle at the same time."""
    measured_s = chosen.idle_s
    begun_s = time.monotonic()
    until_s = begun_s + _SETTLE_S + _SEARCH_S + measured_s + _FOUND_S
    links = LinkConditions(rate_bit_s=1e9)
    with hosts_on_a_switch(_WORLDS[0] + 1, links) as two, hosts_on_a_switch(_WORLDS[1] + 1, links) as four:
        networks = dict(zip(_WORLDS, (two, four), strict=True))
        with Processes() as processes:
            for world, network in networks.items():
                for rank in range(world):
                    processes.start(f"member {rank} of {world}", _idle, network.hosts, rank, world, until_s)
            searching = _rates(networks, begun_s + _SETTLE_S, _SETTLE_S)
            idle = _rates(networks, begun_s + _SETTLE_S + _SEARCH_S, measured_s)
            with Processes() as newcomers:
                for world, network in networks.items():
                    newcomers.start(f"late of {world}", _late, network.hosts, world)
                found_s = newcomers.results(_FOUND_S + _SETTLE_S)
            processes.results(until_s - time.monotonic() + _SETTLE_S)
    for world, seconds in zip(_WORLDS, found_s, strict=True):
        note = f"while it searches {max(searching[world]) / 1e3:,.0f} kB/s"
        yield measurement(
            f"an idle member of {world} sends, for each peer",
            "kB/s",
            [one / 1e3 for one in idle[world]],
            at_most=1.0,
            note=note,
        )
        yield measurement(f"one who comes late has found {world} members", "s", [seconds], at_most=5.0)


def _rates(networks: dict[int, Network], from_s: float, for_s: float) -> dict[int, list[float]]:
    """Bytes a second of each member and peer, in the time after that moment."""
    time.sleep(max(0.0, from_s - time.monotonic()))

    def counted() -> dict[int, list[int]]:
        return {world: [traffic(host).sent_bytes for host in it.hosts[:world]] for world, it in networks.items()}

    first = counted()
    time.sleep(for_s)
    last = counted()
    return {
        world: [(after - before) / for_s / world for before, after in zip(first[world], last[world], strict=True)]
        for world in networks
    }

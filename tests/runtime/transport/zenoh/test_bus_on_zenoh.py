"""A bus over Zenoh, and its groups, go on when the relay is killed and comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest
import torch
from bus_helpers import CHIEF, CLIENT, MIB, UPDATE, Run, payload_from, reads
from tcp_proxy import TcpProxy
from zenoh_node import Relay, transport_at

from gradbus.runtime.bus.bus import Bus, connect, connect_over
from gradbus.runtime.collectives import join_group
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport import peer_processes
from gradbus.runtime.transport.channels import ToController
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.messages import ClientUpdate, Control, PeerGone, TrainCmd

PATIENCE_S = 60.0

pytestmark = pytest.mark.slow


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


def test_messages_and_a_large_update_arrive_although_the_relay_is_killed(run: Run, relay: Relay) -> None:
    async def main() -> None:
        at = partial(transport_at, relay.port)
        async with asyncio.timeout(PATIENCE_S), connect_over(at, "job") as one, connect_over(at, "job") as other:
            inbox, updates = other.subscribe(TrainCmd, ToController), other.subscribe(ClientUpdate)
            for kind in (TrainCmd, ToController, ClientUpdate):
                await reads(one, kind)
            command = TrainCmd(3, 600, 2, 0.05, 11)
            await one.publish(CHIEF, command)
            assert await inbox.get() == command
            payload = random.Random(1).randbytes(40 * MIB)
            sending = asyncio.create_task(one.send_update(UPDATE, 600, payload))
            receiving = asyncio.create_task(payload_from(updates, UPDATE, len(payload)))
            await asyncio.to_thread(relay.kill)
            await asyncio.to_thread(relay.start)
            assert await receiving == payload
            assert await sending == len(payload)
            assert await one.drain(ClientUpdate, PATIENCE_S)
            await one.publish(CLIENT, Leave("done"))
            assert await inbox.get() == Control(CLIENT.sender, CLIENT.incarnation, Leave("done"))
            assert not other.rejected

    run(main)


def test_a_peer_that_closes_its_bus_is_gone(run: Run, relay: Relay) -> None:
    async def main() -> None:
        at = partial(transport_at, relay.port)
        async with asyncio.timeout(PATIENCE_S), connect_over(at, "job") as bus:
            inbox = bus.subscribe(ToController)
            async with connect_over(at, "job") as other:
                await reads(other, ToController)
                await other.publish(CLIENT, Leave("done"))
                assert isinstance(await inbox.get(), Control)
            gone = await inbox.get()
            assert isinstance(gone, PeerGone)
            assert (gone.sender, gone.incarnation, gone.certain) == (CLIENT.sender, CLIENT.incarnation, True)

    run(main)


def on_link(port: int, lease_s: float) -> AbstractAsyncContextManager[Bus]:
    """A bus as settings open it."""
    links = LinkConfig(connect=(f"tcp/127.0.0.1:{port}",), lease_s=lease_s)
    return connect("job", network=NetworkConfig(links=links), security="none")


def test_a_member_whose_link_broke_at_its_end_only_is_not_lost_where_the_others_have_a_longer_lease(
    run: Run, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dials again at once, and the relay refuses it until its own lease is over."""
    monkeypatch.setattr(peer_processes, "own_claim", lambda: "")  # as a process of another machine
    own_lease_s, their_lease_s = 2.0, 30.0

    async def main() -> None:
        with TcpProxy(relay.port) as way:
            near, far = on_link(relay.port, their_lease_s), on_link(way.port, own_lease_s)
            async with asyncio.timeout(PATIENCE_S), near as bus, far as other:
                inbox = bus.subscribe(ToController)
                await reads(other, ToController)
                await other.publish(CLIENT, Leave("0"))
                assert await inbox.get() == Control(CLIENT.sender, CLIENT.incarnation, Leave("0"))
                began_s = asyncio.get_running_loop().time()
                way.forget_links()
                await other.publish(CLIENT, Leave("1"))
                assert await inbox.get() == Control(CLIENT.sender, CLIENT.incarnation, Leave("1"))
                assert asyncio.get_running_loop().time() - began_s > own_lease_s / 2

    run(main)


def test_ranks_add_up_their_tensors_although_the_relay_is_killed(run: Run, relay: Relay) -> None:
    rounds = 20

    async def rank(number: int, world: int) -> list[float]:
        async with (
            connect_over(partial(transport_at, relay.port), "job") as bus,
            join_group(bus, rank=number, world=world, timeout_s=PATIENCE_S) as group,
        ):
            sums = set()
            for turn in range(rounds):
                if number == 0 and turn == rounds // 2:
                    await asyncio.to_thread(relay.kill)
                    await asyncio.to_thread(relay.start)
                found = await group.all_reduce("sum", torch.full((70_000,), float(number + 1)))
                sums |= set(found.tolist())
            await group.barrier()
            return sorted(sums)

    async def main() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            assert await asyncio.gather(*(rank(number, 3) for number in range(3))) == [[6.0]] * 3

    run(main)

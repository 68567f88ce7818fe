"""A bus runs on the network in memory as it does on DDS: with its own threads, in real time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from bus_helpers import CHIEF, CLIENT, MIB, UPDATE, Run, payload_from, reads

from gradbus.runtime.bus.bus import connect_over
from gradbus.runtime.collectives import join_group
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.transport.channels import ToController
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import MemoryNode
from gradbus.runtime.transport.memory.transport import MemoryTransport
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.messages import ClientUpdate, Control, PeerGone, TrainCmd

PATIENCE_S = 60.0


@pytest.fixture
def network() -> Iterator[MemoryNetwork]:
    made = MemoryNetwork(seed=3)
    made.loss, made.resend_s, made.jitter_s = 0.2, 0.005, 0.002
    yield made
    made.close()


def at(network: MemoryNetwork, machine: int) -> partial[MemoryTransport]:
    return partial(MemoryTransport, network, MemoryNode(f"node-{machine}", machine))


def test_messages_and_large_payloads_arrive_over_a_lossy_network(run: Run, network: MemoryNetwork) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            connect_over(at(network, 0), "job") as one,
            connect_over(at(network, 1), "job") as other,
        ):
            inbox, updates = other.subscribe(TrainCmd, ToController), other.subscribe(ClientUpdate)
            for kind in (TrainCmd, ToController, ClientUpdate):
                await reads(one, kind)
            command = TrainCmd(3, 600, 2, 0.05, 11)
            await one.publish(CHIEF, command)
            assert await inbox.get() == command
            await one.publish(CLIENT, Leave("done"))
            assert await inbox.get() == Control(CLIENT.sender, CLIENT.incarnation, Leave("done"))
            payload = random.Random(1).randbytes(40 * MIB)  # more frames than its reader holds
            sending = asyncio.create_task(one.send_update(UPDATE, 600, payload))
            assert await payload_from(updates, UPDATE, len(payload)) == payload
            assert await sending == len(payload)
            assert await one.drain(ClientUpdate, PATIENCE_S)
            assert not other.rejected

    run(main)


def test_a_peer_that_closes_its_bus_is_gone(run: Run, network: MemoryNetwork) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), connect_over(at(network, 0), "job") as bus:
            inbox = bus.subscribe(ToController)
            async with connect_over(at(network, 1), "job") as other:
                await reads(other, ToController)
                await other.publish(CLIENT, Leave("done"))
                assert isinstance(await inbox.get(), Control)
            gone = await inbox.get()
            assert isinstance(gone, PeerGone)
            assert (gone.sender, gone.incarnation, gone.certain) == (CLIENT.sender, CLIENT.incarnation, True)

    run(main)


def test_ranks_add_up_their_tensors(run: Run, network: MemoryNetwork) -> None:
    async def rank(number: int, world: int) -> list[float]:
        async with (
            connect_over(at(network, number), "job") as bus,
            join_group(bus, rank=number, world=world, timeout_s=PATIENCE_S) as group,
        ):
            found = await group.all_reduce("sum", torch.full((70_000,), float(number + 1)))
            await group.barrier()
            return sorted(set(found.tolist()))

    async def main() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            assert await asyncio.gather(*(rank(number, 3) for number in range(3))) == [[6.0]] * 3

    run(main)


def test_a_job_has_a_name_as_on_dds(run: Run, network: MemoryNetwork) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="job name"):
            async with connect_over(at(network, 0), "a*"):
                pass

    run(main)

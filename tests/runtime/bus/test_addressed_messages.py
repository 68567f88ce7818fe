"""A control message reaches the process that it is for, once, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
from bus_helpers import CHIEF, CLIENT, Run, reads

import gradbus
from gradbus.runtime.bus.bus import Bus, connect_over
from gradbus.runtime.transport.channels import Inbox, ToClients, ToController
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import MemoryNode
from gradbus.runtime.transport.memory.transport import MemoryTransport
from gradbus.runtime.wire.control import Grant, Leave, Status
from gradbus.runtime.wire.messages import Control, PeerGone

PATIENCE_S = 60.0
CUT_S = 1.0  # longer than the lease
OTHER = 1 << 61  # incarnation of another client
STATUS = Status(5, 0, "waiting", 0, 3)
Opens = Callable[[], AbstractAsyncContextManager[Bus]]


def grant(incarnation: int, transfer: int = 1) -> Grant:
    return Grant(7, incarnation, 1, transfer)


@pytest.fixture(params=["dds", "memory"])
def opens(request: pytest.FixtureRequest, place: dict[str, Any]) -> Any:
    """Opens a bus of the job, over each transport."""
    if request.param == "dds":
        yield partial(gradbus.connect, **place)
        return
    network, machines = MemoryNetwork(seed=5), iter(range(16))
    yield lambda: connect_over(
        partial(MemoryTransport, network, MemoryNode(f"node-{(machine := next(machines))}", machine)), "job"
    )
    network.close()


def test_a_client_does_not_receive_what_is_for_another_one(run: Run, opens: Opens) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), opens() as server, opens() as one, opens() as other:
            inboxes = [
                bus.subscribe(ToClients, Inbox(incarnation))
                for bus, incarnation in ((one, CLIENT.incarnation), (other, OTHER))
            ]
            await reads(server, ToClients, 2)
            for transfer in range(3):
                await server.publish(CHIEF, grant(CLIENT.incarnation, transfer))
            assert [(await inboxes[0].get()).body.transfer for _ in range(3)] == [0, 1, 2]  # type: ignore[union-attr]
            await server.publish(CHIEF, grant(OTHER))
            assert await inboxes[1].get() == Control(CHIEF.sender, CHIEF.incarnation, grant(OTHER))
            await server.publish(CHIEF, STATUS)
            assert [(await inbox.get()).body for inbox in inboxes] == [STATUS, STATUS]  # type: ignore[union-attr]
            assert sum(other.received_control.values()) == 2
            assert not other.rejected

    run(main)


def test_a_client_does_not_receive_what_another_one_sends(run: Run, opens: Opens) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), opens() as server, opens() as one, opens() as other:
            desk, ears = server.subscribe(ToController), other.subscribe(ToClients, Inbox(OTHER))
            await reads(one, ToController)
            await reads(server, ToClients)
            await one.publish(CLIENT, Leave("done"))
            assert await desk.get() == Control(CLIENT.sender, CLIENT.incarnation, Leave("done"))
            await server.publish(CHIEF, STATUS)
            assert (await ears.get()).body == STATUS  # type: ignore[union-attr]
            assert sum(other.received_control.values()) == 1

    run(main)


def test_what_is_addressed_before_the_two_have_matched_arrives(run: Run, opens: Opens) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), opens() as server, opens() as client:
            for transfer in range(20):
                await server.publish(CHIEF, grant(CLIENT.incarnation, transfer))
            inbox = client.subscribe(Inbox(CLIENT.incarnation))
            found = [(await inbox.get()).body.transfer for _ in range(16)]  # type: ignore[union-attr]
            assert found == list(range(4, 20))  # the newest ones

    run(main)


def test_no_outlet_is_left_for_a_client_that_has_left(run: Run, opens: Opens) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), opens() as server, opens() as client:
            kind = Inbox(CLIENT.incarnation)
            inbox = client.subscribe(kind)
            await server.publish(CHIEF, grant(CLIENT.incarnation))
            await inbox.get()
            assert server.open_inboxes == 1
            server.close_inbox(CLIENT.incarnation)
            assert server.open_inboxes == 0
            await client.matched(lambda: client.matched_writers(kind) == 0, timeout_s=PATIENCE_S)
            await server.publish(CHIEF, grant(CLIENT.incarnation, 2))  # it has come back
            assert (await inbox.get()).body == grant(CLIENT.incarnation, 2)  # type: ignore[union-attr]

    run(main)


def test_a_controller_that_closes_an_inbox_is_still_there_and_its_end_is_reported_once(run: Run, opens: Opens) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), opens() as client:
            inbox = client.subscribe(ToClients, Inbox(CLIENT.incarnation))
            async with opens() as server:
                await reads(server, ToClients)
                await server.publish(CHIEF, STATUS)
                await inbox.get()
                for transfer in range(3):  # more than to all
                    await server.publish(CHIEF, grant(CLIENT.incarnation, transfer))
                    await inbox.get()
                server.close_inbox(CLIENT.incarnation)
                await client.matched(
                    lambda: client.matched_writers(Inbox(CLIENT.incarnation)) == 0, timeout_s=PATIENCE_S
                )
                await server.publish(CHIEF, STATUS)
                assert (await inbox.get()).body == STATUS  # type: ignore[union-attr]
            gone = await inbox.get()
            assert isinstance(gone, PeerGone)
            assert gone.certain
            async with opens() as server:
                await reads(server, ToClients)
                await server.publish(CHIEF, STATUS)
                assert isinstance(await inbox.get(), Control)  # not a second report of the end

    run(main)


def test_what_comes_again_after_a_lost_match_is_received_once(run: Run) -> None:
    network = MemoryNetwork(seed=5)
    network.lease_s = CUT_S / 4
    nodes = [MemoryNode(f"node-{machine}", machine) for machine in range(2)]

    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            connect_over(partial(MemoryTransport, network, nodes[0]), "job") as server,
            connect_over(partial(MemoryTransport, network, nodes[1]), "job") as client,
        ):
            kind = Inbox(CLIENT.incarnation)
            inbox = client.subscribe(kind)
            for transfer in range(3):
                await server.publish(CHIEF, grant(CLIENT.incarnation, transfer))
                await inbox.get()
            network.cut(0, 1, CUT_S)
            await client.matched(lambda: client.matched_writers(kind) == 0, timeout_s=PATIENCE_S)
            await server.publish(CHIEF, grant(CLIENT.incarnation, 3))
            while not isinstance(message := await inbox.get(), Control):
                pass  # the server was out of reach
            assert message.body == grant(CLIENT.incarnation, 3)
            assert client.rejected["repeated"] == 3

    try:
        run(main)
    finally:
        network.close()

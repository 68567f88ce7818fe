"""A control message reaches the process that it is for, once, and no other."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
from bus_helpers import CHIEF, CLIENT, Run, bound_inboxes, inboxes_in_transport, reads
from patience import eventually
from structlog.testing import capture_logs

import gradbus
from gradbus.runtime.bus.bus import Bus, connect_over
from gradbus.runtime.transport.channels import Inbox, ToClients, ToController, channel_of
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import MemoryNode
from gradbus.runtime.transport.memory.transport import MemoryTransport
from gradbus.runtime.wire.control import Grant, Leave, Status
from gradbus.runtime.wire.messages import Control, PeerGone

PATIENCE_S = 60.0
CUT_S = 1.0  # longer than the lease
MOST = 3  # inboxes of a bus whose bound is tested
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


async def served(server: Bus, clients: Bus, incarnation: int, transfer: int = 1) -> None:
    """A client comes, receives what is addressed to it, and goes on or is killed: nothing reports its end."""
    with clients.subscribe(Inbox(incarnation)) as inbox:
        await server.publish(CHIEF, grant(incarnation, transfer))
        while (await inbox.get()).body != grant(incarnation, transfer):  # type: ignore[union-attr]
            pass  # what the inbox retains comes first


def test_of_more_inboxes_than_there_may_be_the_least_recently_addressed_ones_are_closed(run: Run, opens: Opens) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), opens() as server, opens() as clients:
            bound_inboxes(server, MOST)
            everyone = range(1, 2 * MOST + 1)
            inboxes = {one: clients.subscribe(Inbox(one)) for one in everyone}

            async def address(incarnation: int, transfer: int) -> None:
                await server.publish(CHIEF, grant(incarnation, transfer))
                assert (await inboxes[incarnation].get()).body == grant(incarnation, transfer)  # type: ignore[union-attr]
                assert server.open_inboxes <= MOST

            async def served_now(*incarnations: int) -> None:
                """These have an outlet that matches, and the others lose theirs."""
                expected = {one: int(one in incarnations) for one in everyone}
                await clients.matched(
                    lambda: expected == {one: clients.matched_writers(Inbox(one)) for one in everyone},
                    timeout_s=PATIENCE_S,
                )
                names = {channel_of(Inbox(one)).name for one in incarnations}
                await eventually(lambda: inboxes_in_transport(server) == names)  # readers know it a little earlier

            def warnings(logs: list[Any]) -> list[Any]:
                return [line for line in logs if line["event"] == "more processes than inboxes"]

            with capture_logs() as logs:
                for one in everyone[:MOST]:
                    await address(one, 1)
                assert warnings(logs) == []
                await address(1, 2)  # used again: 2 is the oldest now
                await address(MOST + 1, 1)
                await served_now(1, *everyone[2 : MOST + 1])
                for one in everyone[MOST + 1 :]:
                    await address(one, 1)
                await served_now(*everyone[MOST:])
                await address(2, 2)  # opened again: nothing that it received before comes twice
                await served_now(2, *everyone[MOST + 1 :])
            assert [line["most"] for line in warnings(logs)] == [MOST]

    run(main)


def test_clients_that_come_and_go_leave_no_channel_behind(run: Run, opens: Opens) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), opens() as server, opens() as clients:
            bound_inboxes(server, MOST)
            for incarnation in range(1, 5 * MOST):
                await served(server, clients, incarnation)
                assert server.open_inboxes <= MOST
            await eventually(lambda: len(inboxes_in_transport(server)) == MOST)
            assert server.received_control == clients.received_control == {}
            # Bytes are counted, but not by inbox.
            assert len(server.sent_bytes) <= 1

    run(main)


def test_clients_that_come_and_go_leave_nothing_in_memory(run: Run) -> None:
    network, nodes = MemoryNetwork(seed=5), [MemoryNode(f"node-{machine}", machine) for machine in range(2)]

    def live() -> Counter[str]:
        """What there is of the runtime now, by class. An inbox that were not forgotten would leave some of it."""
        gc.collect()
        kinds = (type(one) for one in gc.get_objects())
        return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("gradbus.runtime."))

    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            connect_over(partial(MemoryTransport, network, nodes[0]), "job") as server,
            connect_over(partial(MemoryTransport, network, nodes[1]), "job") as clients,
        ):
            bound_inboxes(server, MOST)

            async def lap(first: int) -> None:
                for incarnation in range(first, first + 3 * MOST):
                    await served(server, clients, incarnation)

            def is_quiet() -> bool:
                """Return whether nothing is on its way: what is keeps inboxes that are closed for up to 0.3 s."""
                return not (network.pairs or network.schedule._calls)  # type: ignore[attr-defined]  # noqa: SLF001 - no event tells

            await lap(1)
            await eventually(is_quiet)
            held = live()
            assert held["MemoryOutlet"] >= MOST
            await lap(1000)
            await eventually(is_quiet)
            await eventually(lambda: not live() - held)

    try:
        run(main)
    finally:
        network.close()


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

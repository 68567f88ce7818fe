"""The inboxes that a controller writes: one for each process of clients that takes part, and none for others."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

import pytest
from dds_domains import new_domain
from patience import PATIENT_S, eventually

import gradbus
from gradbus.models import NoopTask
from gradbus.runtime.transport.channels import ToClients, ToController
from gradbus.runtime.wire.control import PROTOCOL, Hello, Refused
from gradbus.runtime.wire.messages import Control, Identity

DIM, FLOOD = 100, 50
_jobs = itertools.count()


@pytest.fixture
def place() -> dict[str, Any]:
    return {"job": f"inboxes-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}


def test_a_flood_of_hellos_that_are_refused_opens_no_inbox(place: dict[str, Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENT_S), gradbus.connect(**place) as bus, gradbus.connect(**place) as other:
            config = gradbus.FederatedConfig(rounds=1, clients={"num": 1, "start_timeout_s": PATIENT_S})
            running = asyncio.create_task(gradbus.Controller(bus, NoopTask(DIM), config).run())
            hello = Hello(PROTOCOL, DIM + 1, 1, True, 0, "idle", -1, -1, "flood:1", -1)
            refused: set[int] = set()
            with other.subscribe(ToClients) as inbox:
                other.open_writer(ToController)
                await other.matched(
                    lambda: other.matched_readers(ToController) > 0 < other.matched_writers(ToClients),
                    timeout_s=PATIENT_S,
                )
                while len(refused) < FLOOD:
                    for number in range(FLOOD):
                        await other.publish(Identity(number, 1000 + number), hello)
                    while len(inbox):
                        message = await inbox.get()
                        if isinstance(message, Control) and isinstance(message.body, Refused):
                            refused.add(message.body.incarnation)
                    await asyncio.sleep(0.01)
            assert bus.open_inboxes == 0
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(main())


def test_a_controller_writes_an_inbox_for_each_client_until_it_has_left(place: dict[str, Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENT_S), gradbus.connect(**place) as bus, asyncio.TaskGroup() as group:
            config = gradbus.FederatedConfig(rounds=3, clients={"num": 3})
            controller = gradbus.Controller(bus, NoopTask(DIM), config)

            async def client(client_id: int) -> None:
                async with gradbus.connect(**place) as own:
                    await gradbus.Client(own, NoopTask(DIM), client_id=client_id).run()

            for client_id in range(3):
                group.create_task(client(client_id))
            opened = [bus.open_inboxes async for _ in controller.rounds()]
            assert opened == [3, 3, 3]
            await eventually(lambda: bus.open_inboxes == 0)

    asyncio.run(main())

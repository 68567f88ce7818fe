"""The end of a run may overtake the receipt of the last update: there is no order between channels."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

import gradbus
from gradbus.actors.federated.client.client import ClientSummary
from gradbus.models import NoopTask
from gradbus.runtime.bus.bus import connect_over
from gradbus.runtime.transport.memory.network import MemoryNetwork
from gradbus.runtime.transport.memory.pairs import MemoryNode
from gradbus.runtime.transport.memory.transport import MemoryTransport

PATIENT_S = 60.0


@pytest.mark.parametrize("seed", range(8))
def test_a_client_knows_of_each_update_that_counts_though_the_end_of_the_run_overtakes_its_receipt(seed: int) -> None:
    network = MemoryNetwork(seed=seed)
    network.base_s, network.jitter_s = 0.001, 0.03

    async def main() -> tuple[list[gradbus.RoundReport], list[ClientSummary]]:
        async with asyncio.timeout(PATIENT_S), connect_over(at(0), "job") as bus, asyncio.TaskGroup() as group:
            clients = [group.create_task(client(number)) for number in range(2)]
            config = gradbus.FederatedConfig(rounds=2, clients={"num": 2})
            reports = await gradbus.Controller(bus, NoopTask(100), config).run()
        return reports, [one.result() for one in clients]

    def at(machine: int) -> partial[MemoryTransport]:
        return partial(MemoryTransport, network, MemoryNode(f"node-{machine}", machine))

    async def client(client_id: int) -> ClientSummary:
        async with connect_over(at(client_id + 1), "job") as bus:
            return await gradbus.Client(bus, NoopTask(100), client_id=client_id).run()

    try:
        reports, summaries = asyncio.run(main())
    finally:
        network.close()
    counted = [sum(client_id in report.clients for report in reports) for client_id in range(2)]
    assert [summary.rounds for summary in summaries] == counted

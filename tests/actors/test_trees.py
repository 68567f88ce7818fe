"""Trees of Controllers over real DDS: bits of a flat run, one payload for each site, and sites that come and go."""

from __future__ import annotations

import asyncio

import pytest
from trees import DIM, UnequalTask, rules, site_of, tree

import gradbus
from gradbus.models import NoopTask


async def flat_run(clients: int, **more: object) -> list[gradbus.RoundReport]:
    """The same clients with one Controller."""
    async with tree() as here, asyncio.TaskGroup() as group:
        bus = await here.bus("flat")
        theirs = await here.bus("flat")
        for client_id in range(clients):
            group.create_task(gradbus.Client(theirs, UnequalTask(), client_id=client_id).run())
        return await gradbus.Controller(bus, NoopTask(DIM), rules(clients, rounds=3, **more)).run()


async def tree_run(shape: list[list[int]], **more: object) -> tuple[list[gradbus.RoundReport], int]:
    """Regions, each with sites of so many clients. Returns the reports of the centre, and its bytes in."""
    async with tree() as here, asyncio.TaskGroup() as group:
        centre, above, number = await here.bus("centre"), await here.bus("centre"), 0
        for region, sites in enumerate(shape):
            regional, below = await here.bus(f"region-{region}"), await here.bus(f"region-{region}")
            group.create_task(site_of(above, regional, region, rules(len(sites), sites=True)).run())
            for site, clients in enumerate(sites):
                local, theirs = await here.bus(f"site-{region}-{site}"), await here.bus(f"site-{region}-{site}")
                group.create_task(site_of(below, local, site, rules(clients)).run())
                for client_id in range(number, number + clients):
                    group.create_task(gradbus.Client(theirs, UnequalTask(), client_id=client_id).run())
                number += clients
        controller = gradbus.Controller(centre, NoopTask(DIM), rules(len(shape), sites=True, rounds=3, **more))
        return await controller.run(), number


@pytest.mark.parametrize(
    ("codec", "strategy"), [("fp32", "fedavg"), ("sq8", "fedadam")], ids=["fp32-fedavg", "sq8-fedadam"]
)
def test_a_tree_of_two_regions_with_two_sites_each_has_the_bits_of_a_flat_run(codec: str, strategy: str) -> None:
    flat = asyncio.run(flat_run(8, codec=codec, downlink_codec=codec, strategy=strategy))
    found, clients = asyncio.run(
        tree_run([[2, 2], [1, 3]], codec=codec, downlink_codec=codec, strategy=strategy)
    )  # fmt: skip
    assert clients == 8
    for above, below in zip(found, flat, strict=True):
        assert above.weights_crc32 == below.weights_crc32
        assert (above.num_samples, above.loss) == (below.num_samples, below.loss)
        assert above.clients == (0, 1)
        assert above.bytes_up <= 2 * 8 * DIM < 8 * 4 * DIM  # two sums, whatever the number of clients
    assert len({report.weights_crc32 for report in found}) == 3

"""The command ``aggregator``: serves the jobs of its configuration until their workers have left."""

from __future__ import annotations

import asyncio

from gradbus.actors.in_network.aggregator import AggregatorActor, AggregatorConfig
from gradbus.experiments.buses import open_bus
from gradbus.experiments.files import AggregatorFile


async def run_aggregator(file: AggregatorFile) -> None:
    """Serve all jobs at once. Raises as :func:`open_bus` and :meth:`AggregatorActor.serve`."""
    settings = file.aggregator
    actor = AggregatorActor(
        AggregatorConfig(
            slots=settings.slots,
            block_elems=settings.block_elems,
            allocation=settings.allocation,
            max_jobs=max(1, len(settings.jobs)),
            max_groups_per_job=settings.max_groups_per_job,
            retransmit_s=settings.retransmit_s,
        )
    )

    async def serve(job: str, world: int) -> None:
        # It is the rank after the workers'.
        async with open_bus(file.bus.model_copy(update={"job": job}), rank=world) as bus:
            await actor.serve(bus, world, timeout_s=settings.join_s)

    async with asyncio.TaskGroup() as group:
        for job, world in (settings.jobs or {file.bus.job: settings.world}).items():
            group.create_task(serve(job, world))

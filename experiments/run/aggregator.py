"""The command ``aggregator``: serves the jobs of its configuration."""

from __future__ import annotations

import asyncio

from gradbus.actors.in_network.aggregator import AggregatorActor, AggregatorConfig
from gradbus.experiments.buses import open_bus
from gradbus.experiments.files import AggregatorFile
from gradbus.runtime.errors import BarrierTimeout, CollectiveError
from gradbus.runtime.logs import get_logger

log = get_logger("aggregator")


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
            lease_s=settings.lease_s,
            report_s=settings.report_s,
        )
    )

    async def serve(job: str, world: int) -> None:
        """Until it is stopped, or once. An error of one job is not the others'."""
        own = file.bus.model_copy(update={"job": job})
        while True:
            try:
                async with open_bus(
                    own, rank=world + settings.node
                ) as bus:  # aggregators are the ranks after the workers
                    await actor.serve(
                        bus, world, node=settings.node, nodes=settings.nodes, timeout_s=settings.join_s,
                        is_idle=settings.keep_serving,
                    )  # fmt: skip
            except (BarrierTimeout, CollectiveError) as error:
                if not settings.keep_serving:
                    raise
                log.warning("job failed", job=job, reason=str(error), effect="its workers are waited for again")
            if not settings.keep_serving:
                return

    jobs = settings.jobs or {file.bus.job: settings.world}
    ends = await asyncio.gather(*(serve(job, world) for job, world in jobs.items()), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end

"""The command ``aggregator``: serves the jobs of its configuration."""

from __future__ import annotations

import asyncio

from gradbus.actors.in_network.aggregator import AggregatorActor, AggregatorConfig
from gradbus.commands.buses import open_bus
from gradbus.commands.files import AggregatorFile
from gradbus.runtime.errors import BarrierTimeout, CollectiveError, ConfigError
from gradbus.runtime.logs import get_logger

PAUSE_S = 2.0  # after a job that failed: members that were refused may be seen for a moment longer

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

    jobs = settings.jobs or {file.bus.job: settings.world}

    async def serve_and_log(job: str, world: int) -> None:
        """Serve one job. Its error does not end the other jobs, which may go on for long, so it is logged at once."""
        try:
            await _serve(file, actor, job, world)
        except Exception as error:
            if len(jobs) > 1:
                log.error("job is served no more", job=job, reason=str(error), exc_info=error)
            raise

    ends = await asyncio.gather(*(serve_and_log(job, world) for job, world in jobs.items()), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end


async def _serve(file: AggregatorFile, actor: AggregatorActor, job: str, world: int) -> None:
    """Serve a job until it is stopped, or once."""
    settings = file.aggregator
    own = file.bus.model_copy(update={"job": job})
    while True:
        failed: Exception | None = None
        try:
            async with open_bus(own, rank=world + settings.node) as bus:  # aggregators are the ranks after the workers
                try:
                    await actor.serve(
                        bus,
                        world,
                        node=settings.node,
                        nodes=settings.nodes,
                        timeout_s=settings.join_s,
                        is_idle=settings.keep_serving,
                    )
                except ConfigError as error:  # workers that do not fit; those of the next start may
                    failed = error
        except (BarrierTimeout, CollectiveError) as error:
            failed = error
        if not settings.keep_serving:
            if failed is not None:
                raise failed
            return
        if failed is not None:
            log.warning("job failed", job=job, reason=str(failed), effect="its workers are waited for again")
            await asyncio.sleep(PAUSE_S)

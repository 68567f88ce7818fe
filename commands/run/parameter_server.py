"""A parameter server, from a configuration file to the end; and the group that workers and servers form."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from gradbus.actors.parameter_server.agreement import NETWORK
from gradbus.actors.parameter_server.server import ParameterServer, ServerSummary
from gradbus.commands.buses import open_bus, place_of
from gradbus.commands.configured_task import ConfiguredShardTask
from gradbus.commands.files import WorkerFile
from gradbus.commands.rundir.directory import WorkerDirectory
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.collectives import Group, join_group
from gradbus.runtime.errors import BarrierTimeout
from gradbus.runtime.logs import get_logger

PLACE = "run/place"  # worker 0 tells the servers which directory it is, and whether anything is left to do

_START = (
    "A server is started with gradbus parameter-server CONFIG --index I, with the configuration of the workers; "
    "gradbus run starts all of them on one machine"
)

log = get_logger("cli")


@contextlib.asynccontextmanager
async def join_network(bus: Bus, file: WorkerFile, rank: int, workers: int) -> AsyncIterator[Group]:
    """The group of all workers and servers. ``rank``: of a server, the number of workers more than its index.

    Raises:
        BarrierTimeout: some are missing; the text says how servers are started. And as :func:`gradbus.join_group`.
    """
    timeouts, world = file.parallel.timeouts, workers + file.parameter_server.servers
    group = join_group(
        bus,
        rank=rank,
        world=world,
        name=NETWORK,
        timeout_s=timeouts.join_s,
        collective_timeout_s=timeouts.collective_s,
        stall_warning_s=0.0,
        describe_missing=lambda missing: (
            [_name(one, workers) for one in missing],
            _START if missing and min(missing) >= workers else "",
        ),
    )
    async with contextlib.AsyncExitStack() as stack:
        try:
            network = await stack.enter_async_context(group)
        except BarrierTimeout as error:
            missing = [_name(one, workers) for one in error.missing]
            raise BarrierTimeout(
                f"workers and parameter servers{': no ' if missing else ''}{', '.join(missing)}",
                missing=error.missing,
                ready=error.ready,
                needed=error.needed,
                timeout_s=timeouts.join_s,
                misconfiguration=bus.misconfiguration,
                hint=_START,
            ) from None
        yield network


def _name(rank: int, workers: int) -> str:
    return f"worker {rank}" if rank < workers else f"parameter server {rank - workers}"


async def run_server(
    file: WorkerFile, index: int, workers: int, say: Callable[[str], None] = lambda text: None
) -> ServerSummary | None:
    """Serve until the workers have come to the end. None: all of the run was done already.

    Raises:
        As :func:`gradbus.join_group` and :meth:`ParameterServer.run`.
    """
    rank, servers = workers + index, file.parameter_server.servers
    task = ConfiguredShardTask(file.task.model_copy(update={"device": "cpu"}))
    async with open_bus(file.bus, rank=rank) as bus:
        say(
            f"parameter server {index} of {servers}, waiting for {workers} workers: job {file.bus.job}, "
            f"{place_of(file.bus)}"
        )
        async with join_network(bus, file, rank, workers) as network:
            place = await network.broadcast_object(PLACE, root=0)
            if place["is_finished"]:
                return None
            directory = WorkerDirectory.meet(place["directory"], file.run_dir, rank)
            config = file.parallel
            if config.checkpoint.dir is None:
                config = config.replaced("checkpoint.dir", directory.state)
            server = ParameterServer(network, task, config, file.parameter_server)
            return await server.run()

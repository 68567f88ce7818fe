"""``gradbus virtual`` and ``gradbus host``: many clients of a federated run in a few processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gradbus.actors.federated.chosen_codecs import names_in
from gradbus.actors.federated.client.run_terms import Allowed
from gradbus.actors.federated.controller.combinations import CheckedChoices
from gradbus.actors.virtual.client_trainer import PoolSettings
from gradbus.actors.virtual.host import ClientHost
from gradbus.actors.virtual.pool import TrainingPool
from gradbus.actors.virtual.simulation import CLIENTS_PREFIX, SimulationOptions, check_first_round, choices_of
from gradbus.commands.buses import open_bus
from gradbus.commands.configured_task import ConfiguredTask
from gradbus.commands.files import ClientFile, ControllerFile
from gradbus.commands.report.followed import FollowedHost
from gradbus.commands.report.metrics_server import host_metrics
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.names import check_name
from gradbus.runtime.private_folder import scratch_folder
from gradbus.runtime.transport.access_policy import NO_HOST
from gradbus.runtime.wire.id_ranges import parse_ids

log = get_logger("cli")


def pool_options(processes: int, ray: str | None, gpus: float) -> SimulationOptions:
    """Return where clients train. ``ray``: an address, or None: processes of this machine. Raises ConfigError."""
    if ray is None:
        if gpus:
            raise ConfigError("--gpus is of a Ray cluster: say which with --ray")
        return SimulationOptions(processes=processes)
    return SimulationOptions(processes=processes, pool="ray", ray_address=ray, gpus=gpus)


@dataclass(frozen=True, slots=True)
class VirtualClients:
    """The options of ``gradbus virtual``. ``fraction``: share of them in each round; None: as the file says.
    ``pool``: where they train. ``full_traceback``: of an error in training, log the lines of libraries, too."""

    clients: int
    fraction: float | None
    pool: SimulationOptions
    full_traceback: bool = False

    def settle(self, file: ControllerFile) -> CheckedChoices:
        """Settle the rules of the run with these clients. Raises ConfigError: they cannot take part in such a run."""
        if file.upstream.site is not None:
            raise ConfigError("upstream.site: a site passes no names of participants on, which virtual clients need")
        if file.bus.listen:
            raise ConfigError(
                f"bus.listen: virtual clients have a bus of their own in this process, which cannot listen on "
                f"{file.bus.listen[0]} as well. Start a relay ('gradbus relay'), and set bus.connect instead"
            )
        return choices_of(file.federated, self.clients, self.fraction)

    def open_pool(self, file: ControllerFile, choices: CheckedChoices, state_dir: Path) -> Hosted:
        """Open the pool that trains them: before there are DDS, threads, open ports or a loop in this process."""
        task = ConfiguredTask(file.task)
        check_first_round(choices, task)
        bus = file.bus.model_copy(update={"faults": ""})
        own = tuple(sorted({name for name in names_in(choices.config) if ":" in name}))  # it names them for both sides
        client = ClientConfig(state_dir=state_dir, full_traceback=self.full_traceback, codecs=own)
        return Hosted.start(bus, task, range(self.clients), client, state_dir, self.pool)


@dataclass(frozen=True, slots=True)
class Hosted:
    """Clients that this process is about to speak for. A context manager, at whose end the pool is closed: not where
    a loop runs."""

    bus: BusSettings
    task: ConfiguredTask
    ids: Iterable[int]
    client: ClientConfig
    state_dir: Path
    pool: TrainingPool[Any]
    name: str = ""

    @classmethod
    def start(
        cls,
        bus: BusSettings,
        task: ConfiguredTask,
        ids: Iterable[int],
        client: ClientConfig,
        state_dir: Path,
        options: SimulationOptions,
        name: str = "",
    ) -> Hosted:
        """Open the pool that trains them. Raises ConfigError: a bus with this security has no place for them."""
        if bus.security == "identity":
            raise ConfigError(NO_HOST)
        settings = PoolSettings(
            state_dir=state_dir,
            allowed=Allowed(client.rule, client.codecs),
            full_traceback=client.full_traceback,
            shared_memory=bus.shared_memory,
        )
        return cls(bus, task, ids, client, state_dir, options.open_pool(task, settings), name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run(self.pool.close())

    async def run(self, followed: FollowedHost | None = None) -> None:
        """Take part until all rounds are done. ``followed``: gets the host that runs, for its metrics."""
        async with open_bus(self.bus) as bus:
            host = ClientHost(
                bus,
                self.task,
                ids=self.ids,
                pool=self.pool,
                state_dir=self.state_dir,
                config=self.client,
                name=self.name,
            )
            if followed is not None:
                followed.host, followed.pool = host, self.pool
            summary = await host.run()
        log.info(
            "clients done",
            updates=summary.rounds,
            refused=summary.refused,
            bytes_up=summary.bytes_up,
            train_s=round(summary.train_s, 3),
            processes=self.pool.size,
            replaced=self.pool.replaced,
        )


def host_run(
    file: ClientFile,
    ids: str,
    options: SimulationOptions,
    run: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
    *,
    name: str = "",
) -> None:
    """``gradbus host``. ``run``: runs a loop to its end. ``name``: of its clients."""
    if name:
        check_name(name)
    try:
        ranges: Sequence[range] = parse_ids(ids)
    except ValueError as error:
        raise ConfigError(f"--ids: {error}") from None
    if not ranges:
        raise ConfigError("--ids: expected ids of clients, as in 0-999 or 0,3-7,12")
    with contextlib.ExitStack() as stack:
        state_dir = file.client.state_dir
        if state_dir is None:
            state_dir = stack.enter_context(scratch_folder(CLIENTS_PREFIX))
        every = [client_id for each in ranges for client_id in each]
        starting = Hosted.start(file.bus, ConfiguredTask(file.task), every, file.client, state_dir, options, name)
        hosted = stack.enter_context(starting)
        followed = stack.enter_context(host_metrics(file.metrics, file.bus.job))
        run(lambda: hosted.run(followed))

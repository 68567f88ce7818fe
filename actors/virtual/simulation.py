"""``gradbus.simulate``: a federated run with all its clients on this machine, in one call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import nn

from gradbus.actors.federated.client.run_terms import Allowed
from gradbus.actors.federated.controller.combinations import CheckedChoices, check_combination, make_strategy
from gradbus.actors.federated.controller.controller import Controller
from gradbus.actors.federated.controller.progress_line import ProgressLine
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.virtual.client_trainer import PoolSettings
from gradbus.actors.virtual.host import ClientHost, check_room
from gradbus.actors.virtual.pool import MAX_PROCESSES, TrainingPool
from gradbus.runtime.built_model import build_model
from gradbus.runtime.bus.bus import connect
from gradbus.runtime.config.federated import ClientConfig, FederatedConfig
from gradbus.runtime.cores import usable_cores
from gradbus.runtime.errors import ConfigError, GradbusError, RunAborted
from gradbus.runtime.loop_thread import LoopThread
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.private_folder import scratch_folder

T = TypeVar("T")

MAX_CLIENTS = 65_536
CLIENTS_PREFIX = "gradbus-clients-"  # of temporary folders with what clients keep
HOST_END_S = 30.0  # from the end of the run to that of its host


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SimulationResult:
    """Holds what a simulation has come to.

    Attributes:
        rounds: the reports of all rounds; see :class:`RoundReport`.
        model: with the weights after the last round.
        clients: how many there were. processes: how many have trained them.
        seconds: of the rounds, without the start. replaced: training processes that have died.
    """

    rounds: Sequence[RoundReport]
    model: nn.Module
    clients: int
    processes: int
    seconds: float
    replaced: int = 0

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the newest round that was evaluated, by name: accuracy, eval_loss, the task's own, and
        those that clients have found, such as ``client.loss``."""
        return next((named for report in reversed(self.rounds) if (named := report.named())), {})

    @property
    def trained(self) -> int:
        """Updates that counted, in all rounds."""
        return sum(report.updates for report in self.rounds)

    @property
    def clients_per_s(self) -> float:
        """Updates that counted for each second of the rounds."""
        return self.trained / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        shown = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        return (
            f"<{len(self.rounds)} rounds of {self.clients:,} clients, {self.trained:,} trainings in "
            f"{self.seconds:.1f} s by {self.processes} processes{shown}>"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Tells how a simulation runs, beside the rules of its rounds.

    Attributes:
        processes: that train; 0: one for each core that this process may use, or that the Ray cluster has.
        threads: of torch, in each of them.
        pool: where they run: ``processes`` of this machine, or as actors of a cluster of ``ray``.
        ray_address: of the cluster, as ``ray.init`` has it; ``local``: one that is started here for this run; empty:
            that of the variable RAY_ADDRESS, else local.
        gpus: of Ray's, that each training process has for itself; less than 1: a share of one.
        state_dir: where clients keep their state from round to round; None: in a folder that goes with the run.
        domain: DDS domain. network: how its two buses are connected; by default over ``lo``.
        client: settings of the clients.
        progress: show one line, in a terminal or a notebook, that follows the rounds; else nothing is shown.
    """

    processes: int = 0
    threads: int = 1
    pool: Literal["processes", "ray"] = "processes"
    ray_address: str = ""
    gpus: float = 0.0
    state_dir: Path | None = None
    domain: int = 0
    network: NetworkConfig | None = None
    client: ClientConfig = field(default_factory=ClientConfig)
    progress: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.processes <= MAX_PROCESSES or not 1 <= self.threads <= 1024:
            raise ConfigError(
                f"expected processes within 0 .. {MAX_PROCESSES} and threads within 1 .. 1024, got {self.processes} "
                f"and {self.threads}"
            )
        if self.pool not in ("processes", "ray"):
            raise ConfigError(f"pool: expected processes or ray, got {self.pool!r}")
        if self.pool != "ray" and (self.ray_address or self.gpus):
            raise ConfigError("ray_address and gpus are of a Ray cluster, and pool=processes has none: set pool=ray")
        if not 0 <= self.gpus <= 64:
            raise ConfigError(f"gpus: expected 0 .. 64, got {self.gpus}")

    def open_pool(self, task: FederatedTask, settings: PoolSettings) -> TrainingPool[Any]:
        """The pool that trains: before this process has DDS, and while few threads run in it.

        Raises:
            ConfigError: this system, or the cluster, cannot run it.
        """
        if self.pool == "ray":
            from gradbus.actors.virtual.ray_pool import RayPool

            return RayPool(task, settings, size=self.processes, address=self.ray_address, gpus=self.gpus)
        from gradbus.actors.virtual.local_pool import LocalPool

        return LocalPool(task, settings, size=self.processes or usable_cores())


def choices_of(config: FederatedConfig, clients: int, fraction: float | None) -> CheckedChoices:
    """Settle the settings of a run with so many clients, of which a fraction takes part in each round, and check them.

    Raises:
        ConfigError: virtual clients cannot take part in such a run; or a number is out of range.
    """
    if not 1 <= clients <= MAX_CLIENTS:
        raise ConfigError(f"clients: expected 1 .. {MAX_CLIENTS:,}, got {clients}")
    if config.mode != "synchronous":
        raise ConfigError(
            "federated.mode=asynchronous: each client takes the newest model by itself, which virtual clients do not. "
            "Use mode=synchronous, or processes of their own for the clients (gradbus client)"
        )
    if config.clients.kind != "clients":
        raise ConfigError("federated.clients.kind=sites: virtual clients are clients, and belong to one controller")
    if config.evaluation.cross_site:
        raise ConfigError(
            "federated.evaluation.cross_site: virtual clients keep no model from round to round. Leave it out, or use "
            "processes of their own for the clients (gradbus client)"
        )
    if config.secure_aggregation.enabled:
        raise ConfigError(
            "federated.secure_aggregation: one process speaks for all virtual clients, and knows their updates. Use "
            "processes of their own for the clients (gradbus client)"
        )
    changed = config.model_dump(exclude_unset=True)
    changed["clients"] = {**changed.get("clients", {}), "num": clients}
    if fraction is not None:
        if not 0 < fraction <= 1:
            raise ConfigError(f"fraction: expected a share of the clients, more than 0 and at most 1, got {fraction}")
        others = {key: value for key, value in config.selection.options.items() if key not in ("count", "fraction")}
        changed["selection"] = {"name": config.selection.name, **others, "fraction": fraction}
    return check_combination(FederatedConfig(**changed))


def check_first_round(choices: CheckedChoices, task: FederatedTask) -> None:
    """Raises ConfigError: the updates of a round, which wait until all are announced, have no room."""
    config = choices.config
    dim = FlatModel(build_model(task), Sharing.of(config)).dim
    bounds = make_strategy(config, dim).bounds
    if bounds is not None and not bounds.is_settled:
        asked = choices.selector.wanted(config.clients.num or 0, config.clients.min)
        check_room(asked, int(choices.codecs.longest.max_bytes(dim)))


def simulate(
    task: FederatedTask,
    clients: int,
    *,
    fraction: float | None = None,
    config: FederatedConfig | None = None,
    options: SimulationOptions | None = None,
    callbacks: Sequence[Any] = (),
    on_report: Callable[[RoundReport], object] = lambda _: None,
) -> SimulationResult:
    """Train with many clients on this machine: the Controller, the messages and the bits of a run whose clients are
    processes of their own, with a few processes that train them in turn.

    It blocks until the run has ended, and may be called from a notebook, too, or wherever an event loop runs.

    Args:
        task: model, data and training, as those of any client have it. It is not copied: what it has loaded is shared
            with the processes that train.
        clients: how many, with ids from 0.
        fraction: share of them that takes part in a round, at random; None: as ``config.selection`` says, by default
            all.
        config: rules of the run.
        options: processes, directories, network.
        callbacks: of the Controller.
        on_report: called with each report as its round is done, on another thread.

    Raises:
        ConfigError: a setting is wrong. TrainingFailed: too many trainings have raised. And what else ends a
            Controller.
    """
    options = options or SimulationOptions()
    choices = choices_of(config or FederatedConfig(), clients, fraction)
    check_first_round(choices, task)
    line = ProgressLine(choices.config.rounds) if options.progress else None
    run = _Simulation(task, clients, choices, options, [*callbacks, *([line] if line else [])], on_report)
    with contextlib.closing(line) if line else contextlib.nullcontext(), _state_dir(options.state_dir) as state_dir:
        pool = options.open_pool(
            task,
            PoolSettings(
                state_dir=state_dir,
                allowed=Allowed(options.client.rule, options.client.codecs),
                threads=options.threads,
                full_traceback=options.client.full_traceback,
                shared_memory=options.network is None or options.network.shared_memory,
            ),
        )
        thread = LoopThread(run.main(pool, state_dir), "gradbus-simulate")
        thread.start()
        return thread.result()


@contextlib.contextmanager
def _state_dir(chosen: Path | None) -> Iterator[Path]:
    if chosen is not None:
        yield chosen
        return
    with scratch_folder(CLIENTS_PREFIX) as made:
        yield made


@dataclass(frozen=True, slots=True)
class _Simulation:
    """One run."""

    task: FederatedTask
    clients: int
    choices: CheckedChoices
    options: SimulationOptions
    callbacks: Sequence[Any]
    on_report: Callable[[RoundReport], object]

    async def main(self, pool: TrainingPool[Any], state_dir: Path) -> SimulationResult:
        """The whole run; the pool is closed then."""
        job = f"simulate-{os.getpid()}-{secrets.token_hex(4)}"
        network = self.options.network or NetworkConfig()
        try:
            async with (
                connect(job, domain=self.options.domain, network=network) as bus,
                connect(job, domain=self.options.domain, network=network) as other,
            ):
                controller = Controller(bus, self.task, self.choices, callbacks=self.callbacks)
                host = ClientHost(
                    other,
                    self.task,
                    ids=range(self.clients),
                    pool=pool,
                    state_dir=state_dir,
                    config=self.options.client,
                )
                return await self._run(controller, host, pool)
        finally:
            await pool.close()

    async def _run(self, controller: Controller, host: ClientHost, pool: TrainingPool[Any]) -> SimulationResult:
        began_s = ended_s = 0.0

        async def serve() -> None:
            nonlocal began_s, ended_s
            async for report in controller.rounds():
                began_s = began_s or time.monotonic() - report.seconds
                self.on_report(report)
            ended_s = time.monotonic()

        await run_beside(serve(), host.run())
        model = build_model(self.task)
        model.load_state_dict(await controller.state_dict())
        return SimulationResult(
            rounds=tuple(controller.progress.reports),
            model=model,
            clients=self.clients,
            processes=pool.size,
            seconds=ended_s - began_s if began_s else 0.0,
            replaced=pool.replaced,
        )


async def run_beside(controller: Coroutine[Any, Any, T], host: Coroutine[Any, Any, object]) -> T:
    """Run a controller and the host of its clients in one process until both have ended; what the controller returns.

    Raises:
        GradbusError: the host has ended, and the controller has not. And what either of them raises.
    """
    serving, hosting = asyncio.create_task(controller, name="controller"), asyncio.create_task(host, name="host")
    try:
        await asyncio.wait({serving, hosting}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            if not isinstance(hosting.exception(), RunAborted):  # else the controller is about to end with the cause
                hosting.result()
            await asyncio.wait({serving}, timeout=HOST_END_S)
        if not serving.done():
            raise GradbusError("the clients have ended, and the controller has not")
        result = serving.result()
        await asyncio.wait({hosting}, timeout=HOST_END_S)
        if hosting.done():
            hosting.result()
        return result
    finally:
        for task in (serving, hosting):
            task.cancel()
        await asyncio.wait({serving, hosting})
        for task in (serving, hosting):
            if not task.cancelled():
                task.exception()  # raised above, where it is the reason

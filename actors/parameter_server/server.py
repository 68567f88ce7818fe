"""A parameter server: holds a part of the weights, and changes it by the gradients that workers push.

    async with gradbus.join_group(bus, rank=workers + index, world=workers + servers, name=NETWORK) as network:
        await ParameterServer(network, task, config, settings).run()

Here all meet and agree on where the run begins; the work is that of a :class:`~.service.Service`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.replicas import describe_layout
from gradbus.actors.data_parallel.task import DataParallelTask
from gradbus.actors.parameter_server.agreement import Agreement, Introduction, Roles, agree, find_version
from gradbus.actors.parameter_server.assignment import assign
from gradbus.actors.parameter_server.clocks import Clocks
from gradbus.actors.parameter_server.service import ServedRun, Service
from gradbus.actors.parameter_server.shard import Shard, check_config
from gradbus.actors.parameter_server.state import FROZEN, SavedServer, ServerState, own_tensors
from gradbus.runtime.built_model import build_model
from gradbus.runtime.checkpoint import Checkpoint
from gradbus.runtime.collectives import Group, check_group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings
from gradbus.runtime.errors import PeerLost
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import check_instance, check_task
from gradbus.runtime.saved_state import StateNames

log = get_logger("parameter-server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSummary:
    """A run as one server saw it.

    Attributes:
        steps: of the slowest worker that was left. updates: of the weights. refused: gradients that were not finite.
        lost: workers that were dropped. staleness_mean, staleness_max: of the gradients that were applied, in updates.
        held_bytes: of the weights. bytes_in, bytes_out: payload of all messages to and from it. Of earlier starts of
            the run what they had counted at the checkpoint that this one went on from: a server has no profile.
    """

    server: int
    servers: int
    workers: int
    steps: int
    updates: int
    refused: int
    lost: tuple[int, ...]
    staleness_mean: float
    staleness_max: int
    held_bytes: int
    bytes_in: int
    bytes_out: int


class ParameterServer:
    """One server of a run. It runs once; make another one to run again."""

    def __init__(
        self,
        network: Group,
        task: DataParallelTask,
        config: DataParallelConfig,
        settings: ParameterServerSettings,
        *,
        on_open: Callable[[], object] = lambda: None,
    ) -> None:
        """A server that has not started.

        Args:
            network: of all workers and servers.
            task: for the model, and for the optimizer if it makes one. No data are loaded.
            config, settings: the rules, equal on all workers and servers.
            on_open: called once all fit together and the weights are there.

        Raises:
            ConfigError: an argument is another kind of thing, or this server has left the group.
        """
        call, advice = "ParameterServer(network, task, config, settings)", "Keep the order of the arguments"
        check_group(call, "network", network)
        check_instance(call, "config", config, DataParallelConfig, advice)
        check_instance(call, "settings", settings, ParameterServerSettings, advice)
        check_task(call, task, ("build_model",), "gradbus.actors.DataParallelTask")
        self._network = network
        self._task = task
        self._config = config
        self._settings = settings
        self._on_open = on_open
        self._roles = roles = Roles.of(network, settings)
        self._index = network.rank - roles.workers
        self._compute = ComputeThread(f"server-{self._index}")
        self._state: ServerState | None = None
        self._service: Service | None = None

    @property
    def summary(self) -> ServerSummary:
        """Return what was done so far. Raises RuntimeError: nothing was, as :meth:`run` has not met the others yet."""
        if (service := self._service) is None:
            raise RuntimeError("this server serves nobody yet: it does when run() has met the workers")
        clocks, (bytes_in, bytes_out) = service.clocks, service.exchanged
        counts = clocks.staleness_counts
        return ServerSummary(
            server=self._index,
            servers=self._roles.servers,
            workers=self._roles.workers,
            steps=clocks.slowest,
            updates=clocks.updates,
            refused=clocks.refused,
            lost=tuple(service.lost),
            staleness_mean=counts.total() and sum(k * n for k, n in counts.items()) / counts.total(),
            staleness_max=max(counts, default=0),
            held_bytes=service.shard.nbytes,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
        )

    async def run(self) -> ServerSummary:
        """Serve until all workers have come to the end.

        Raises:
            ConfigError: settings or models differ, or do not fit.
            CheckpointError: a checkpoint cannot be written, or does not fit.
            PeerLost: a server is lost, or so many workers that the run cannot go on.
            CollectiveTimeout: a worker is silent, and the run cannot go on without it.
            CollectiveError: a worker sends what no worker sends.
            TrainingDiverged: the weights have NaN or infinity.
        """
        try:
            self._service = service = await self._meet()
            self._on_open()
            log.info(
                "serving",
                server=self._index,
                servers=self._roles.servers,
                workers=self._roles.workers,
                mode=self._settings.mode,
                step=service.kept.step,
                tensors=len(service.shard.pieces),
                bytes=service.shard.nbytes,
            )
            await service.serve()
            return self.summary
        except PeerLost as error:
            raise self._roles.named(self._network.name, error) from None
        finally:
            self._compute.close()
            if self._state is not None:
                self._state.close()

    # The start

    async def _meet(self) -> Service:
        """Agree with all workers and servers. Returns what serves from where the run stands."""
        config, settings, roles, compute = self._config, self._settings, self._roles, self._compute
        shard, layout, names = await compute.run(self._build)
        if config.checkpoint.dir is not None:
            self._state = await compute.run(ServerState, config, settings, self._index, roles, layout, names)
        state = self._state
        hello = Introduction(
            optimizer=type(shard.optimizer.optimizer).__name__,
            layout=layout,
            steps=[] if state is None else state.steps(),
            has_completed=state is not None and state.has_completed,
        )
        agreement = await agree(self._network, roles, hello, config, settings)
        await compute.run(shard.optimizer.start_schedule, _steps(agreement, config))
        loaded: list[tuple[Checkpoint, SavedServer]] = []  # the one that was loaded last

        async def load(step: int) -> Mapping[str, Any]:
            assert state is not None
            checkpoint, saved = await compute.run(state.load, step)
            await compute.run(shard.restore, checkpoint)
            loaded[:] = [(checkpoint, saved)]
            return {"run_id": saved.run_id}

        step = await find_version(self._network, agreement, config, load)
        if state is not None:
            await compute.run(state.delete_later, -1 if step is None else step)
        if step is None:
            clocks, kept = self._clocks(), ServedRun(agreement.run_id, state)
        else:
            clocks, kept = self._resumed(*loaded[0])
        return Service(self._network, roles, config, compute, shard, clocks, kept)

    def _build(self) -> tuple[Shard, list[str], Mapping[str, Any]]:
        """Make the model and keep the part of this server. Returns that, the layout, and the names in the model's
        state."""
        check_config(self._config)
        model = build_model(self._task)
        layout, names = describe_layout(model), StateNames.of_model(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
        pieces = assign(trained, self._roles.servers, self._settings.cut_bytes)[self._index]
        return Shard(self._config, self._task, model, pieces), layout, names

    def _clocks(self, *counts: Any) -> Clocks:
        """``counts``: those of :class:`.clocks.Clocks`, from the start on."""
        workers, settings = self._roles.workers, self._settings
        staleness = settings.staleness if settings.mode == "asynchronous" else None
        return Clocks(workers, staleness, settings.workers_needed(workers), *counts)

    def _resumed(self, checkpoint: Checkpoint, saved: SavedServer) -> tuple[Clocks, ServedRun]:
        counts = Counter({int(staleness): number for staleness, number in saved.staleness.items()})
        kept = ServedRun(
            int(saved.run_id, 16),
            self._state,
            checkpoint.round_id,
            own={int(rank): (meta, own_tensors(checkpoint, int(rank))) for rank, meta in saved.own.items()},
            frozen={name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(FROZEN)},
            bytes_in=saved.bytes_in,
            bytes_out=saved.bytes_out,
        )
        return self._clocks(checkpoint.round_id, saved.updates, saved.refused, counts), kept


def _steps(agreement: Agreement, config: DataParallelConfig) -> int:
    """Steps of the run, as long as epochs are as long as the first one."""
    first = EpochPlan.of(agreement.batches, config.accumulation_steps).steps * config.epochs
    return min(first, config.max_steps or first)

"""Parameter servers and their workers, and who starts them again.

Each process is started again when it has ended with the loss of another one, as the operator of such a run does with
the same command. Where a server fails after others have come to the end, all are started once more.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from fault_simulation.faults import OF_NETWORK
from fault_simulation.findings import HEALTHY, SAME_MODEL
from fault_simulation.flavours import FLAVOURS
from fault_simulation.kernel import VirtualProcess, now_s
from fault_simulation.memory import connected
from fault_simulation.tasks import DIM, STEPS_IN_EPOCH, GradientTask
from fault_simulation.world import COMPUTE_S, World
from gradbus.actors.parameter_server.agreement import NETWORK
from gradbus.actors.parameter_server.server import ParameterServer
from gradbus.actors.parameter_server.worker import ParameterServerWorker
from gradbus.runtime.collectives import join_group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings
from gradbus.runtime.errors import (
    BarrierTimeout,
    CollectiveError,
    CollectiveTimeout,
    PeerLost,
    WriteTimeout,
)

SERVERS = 2
JOIN_S, COLLECTIVE_S, CHECKPOINT_S = 20.0, 6.0, 6.0
AGAIN_S = (0.2, 3.0)  # from the end of a process until it is started again
LR, MOMENTUM = 0.1, 0.9
CUT_BYTES = 128  # so that each server has several parts of the model
LOST = (PeerLost, CollectiveTimeout, BarrierTimeout, WriteTimeout)
DROPPED = ("has dropped this worker", "worker 0 was lost, whose weights a new run begins with")


def is_loss(error: Exception) -> bool:
    """Return whether an actor ends with this error by design, after the loss of another one or its own absence."""
    is_dropped = isinstance(error, CollectiveError) and any(words in str(error) for words in DROPPED)
    return is_dropped or isinstance(error, LOST)


class ServersWorld(World):
    """A run of some workers and two servers.

    Attributes:
        models: parameters of each worker at its end, by role. server_failed_s: when each server has failed last.
    """

    round_limit_s = 130.0

    def __init__(self, *args: Any, **given: Any) -> None:
        self.models: dict[str, torch.Tensor] = {}
        self.server_failed_s: dict[str, float] = {}  # when it did last
        super().__init__(*args, **given)

    def _draw_roles(self, clients: int) -> list[str]:
        servers = [f"server-{number}" for number in range(SERVERS)]
        return [*servers, *(f"worker-{number}" for number in range(clients))]

    @property
    def workers(self) -> int:
        """Return their number."""
        return len(self.roles) - SERVERS

    @property
    def pulls(self) -> bool:
        """Return whether gradients depend on the weights, see :class:`.GradientTask`: where the run without faults says
        what they must be."""
        return FLAVOURS[self.flavour].is_fixed

    @property
    def staleness(self) -> int:
        """Return how many steps a worker may be ahead of the slowest one when it pushes."""
        return int(FLAVOURS[self.flavour].settings.get("staleness", 0))

    @property
    def is_over(self) -> bool:
        """Return whether all servers have come to the end of the run."""
        return all(
            role in self.ended and not isinstance(self.ended[role].result, Exception) for role in self.roles[:SERVERS]
        )

    def compute_cost_s(self, function: Callable[..., Any]) -> float:
        names = [getattr(cell.cell_contents, "__name__", "") for cell in getattr(function, "__closure__", None) or ()]
        mean_s = self.circumstances.train_s if "_compute_gradients" in names else COMPUTE_S
        return min(self.rng.expovariate(1.0) * mean_s, COLLECTIVE_S / 3)  # no worker is too slow

    # What is reported to it

    def on_decision(self, process: VirtualProcess, name: str, facts: dict[str, Any]) -> None:
        """Take a decision. A worker that takes part as it should is not dropped because it seems to be silent.

        It may be where another server has failed meanwhile, or was paused for as long as requests may take. The worker
        waits for that one until it is known to be lost, which may be later; and then all begin again, this server, too.
        """
        super().on_decision(process, name, facts)
        if name == "drop" and facts["why"] == "CollectiveTimeout":
            worker = f"worker-{facts['worker']}"
            if any(failed_s > process.started_s for failed_s in self.server_failed_s.values()):
                return
            if any(
                one.action == "pause" and one.role in self.roles[:SERVERS] and one.seconds >= COLLECTIVE_S
                for one in self.happened
            ):
                return
            own = [fault for fault in self.happened if fault.role in (worker, process.role) or fault.other == worker]
            if not own and not any(fault.action in OF_NETWORK for fault in self.happened):
                self.finding(HEALTHY, f"{process.name} drops {worker}, to which nothing has happened")

    # Who starts them again

    def _kill(self, process: VirtualProcess, again_s: float) -> None:
        super()._kill(process, again_s)
        self._begin_anew(process.role)

    def _again_after_s(self, process: VirtualProcess, error: Exception) -> float | None:
        if not is_loss(error) or (self.is_over and process.role not in self.roles[:SERVERS]):
            return None
        self.trace.add(f"{process.name} has failed: {type(error).__name__}: {str(error)[:200]}")
        self._begin_anew(process.role)
        return self.rng.uniform(*AGAIN_S)

    def _begin_anew(self, failed: str) -> None:
        """A process has failed: if it is a server, those that have come to the end have to begin with it again."""
        if failed in self.roles[:SERVERS]:
            self.server_failed_s[failed] = now_s()
            for role in [one for one in self.ended if one != failed]:
                del self.ended[role]
                self.network.at(self.rng.uniform(*AGAIN_S), self.start, role)

    # Actors

    async def _act(self, process: VirtualProcess) -> object:
        rank, workers = int(process.role.partition("-")[2]), self.workers
        is_server = process.role in self.roles[:SERVERS]
        chosen = FLAVOURS[self.flavour].settings
        settings = ParameterServerSettings(servers=SERVERS, cut_bytes=CUT_BYTES, **chosen)
        every = 2 if chosen["mode"] == "synchronous" else 0  # all meet there, and none is ahead
        config = DataParallelConfig.model_validate(
            {
                "epochs": -(-self.rounds // STEPS_IN_EPOCH),
                "max_steps": self.rounds,
                "eval_every_epochs": 0,
                "optimizer": {"name": "sgd", "lr": LR, "momentum": MOMENTUM},
                "checkpoint": {
                    "dir": self.disk.folder_of(process.role),
                    "every_steps": every,
                    "keep": 1,
                    "timeout_s": CHECKPOINT_S,
                },
                "timeouts": {"join_s": JOIN_S, "collective_s": COLLECTIVE_S},
            }
        )
        task = GradientTask(DIM, pulls=self.pulls)
        limits: dict[str, Any] = {"timeout_s": JOIN_S, "collective_timeout_s": COLLECTIVE_S}
        place: dict[str, Any] = {
            "rank": workers + rank if is_server else rank,
            "world": workers + SERVERS,
            "name": NETWORK,
        }
        async with connected(process) as bus:
            if is_server:
                async with join_group(bus, **place, **limits) as network:
                    return await ParameterServer(network, task, config, settings).run()
            async with (
                join_group(bus, rank=rank, world=workers, **limits) as group,
                join_group(bus, **place, **limits) as network,
            ):
                worker = ParameterServerWorker(group, network, task, config, settings)
                async for report in worker.epochs():
                    self.trace.add(f"{process.name} reports epoch {report.epoch}, step {report.step}")
                self.models[process.role] = task.parameters(worker.model)
                return worker.summary

    # What must hold

    def _judge(self) -> None:
        from fault_simulation import servers_oracles  # which reads worlds

        servers_oracles.judge(self)

    def fixed_crc32(self) -> int | None:
        models = [self.models[role] for role in self.roles[SERVERS:] if role in self.models]
        if any(not torch.equal(model, models[0]) for model in models):
            self.finding(SAME_MODEL, "the workers have ended with different models")
        return zlib.crc32(models[0].numpy().tobytes()) if models else None

"""What servers and workers tell each other before anything is trained: whether they fit together, and from which
version they go on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradbus.actors.data_parallel.replicas import check_equal, check_equal_layouts
from gradbus.actors.data_parallel.state import CheckpointMismatch, newest_common
from gradbus.actors.parameter_server.messages import PROTOCOL
from gradbus.runtime.collectives import Group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings
from gradbus.runtime.config.timeouts import log_timeouts, parallel_timeouts
from gradbus.runtime.errors import CheckpointError, ConfigError, PeerLost
from gradbus.runtime.logs import get_logger

log = get_logger("parameter-server")

NETWORK = "parameter_server"  # the group: workers are ranks 0 .. N - 1, servers N .. N + S - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """Holds what a process tells the others.

    Attributes:
        protocol: version of the messages. optimizer: the class of its optimizer.
        layout: of its model, see ``describe_layout``.
        batches: of a worker in the first epoch. callbacks: whether it has some.
        run_id: of a new run, if this is rank 0. steps: of which a server has checkpoints. has_completed: it knows of a
            checkpoint that all servers had.
    """

    optimizer: str
    layout: Sequence[str]
    batches: int = 0
    callbacks: bool = False
    run_id: int = 0
    steps: Sequence[int] = ()
    has_completed: bool = False
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Roles:
    """Tells who is who in the group."""

    workers: int
    servers: int

    @classmethod
    def of(cls, network: Group, settings: ParameterServerSettings) -> Roles:
        """Raises ConfigError: the group has no room for enough workers beside the servers, or there is no server."""
        workers = network.world - settings.servers
        if settings.servers < 1 or workers < 1:
            raise ConfigError(
                f"a group of {network.world} with parameter_server.servers={settings.servers}: expected at least one "
                f"worker and one server"
            )
        if settings.min_workers > workers:
            raise ConfigError(
                f"parameter_server.min_workers is {settings.min_workers}, but there are {workers} workers"
            )
        return cls(workers, settings.servers)

    def name(self, rank: int) -> str:
        """The role of a rank, for people."""
        return f"worker {rank}" if rank < self.workers else f"server {rank - self.workers}"

    def named(self, group: str, error: PeerLost) -> PeerLost:
        """Return the same error, with the role of each rank that is lost."""
        return PeerLost(group, {rank: f"{self.name(rank)}: {why}" for rank, why in error.reasons.items()})


@dataclass(frozen=True, slots=True)
class Agreement:
    """Holds what all have agreed on.

    Attributes:
        batches: of each worker in the first epoch. votes: some worker has callbacks. steps: of which each server has
            checkpoints.
    """

    run_id: int
    batches: tuple[int, ...]
    votes: bool
    steps: list[list[int]] = field(default_factory=list)
    has_completed: bool = False


async def agree(
    network: Group, roles: Roles, hello: Introduction, config: DataParallelConfig, settings: ParameterServerSettings
) -> Agreement:
    """Compare all that must be equal.

    Raises:
        ConfigError: it is not; the text names the ranks, what they have, and what the others have.
    """
    log_timeouts(log, parallel_timeouts(config, lease_s=network.bus.remote_lease_s))
    shared = {
        "version of the protocol": hello.protocol, "number of workers": roles.workers,
        **{f"parameter_server.{key}": value for key, value in settings.model_dump(mode="json").items()},
        **config.shared({"name": config.algorithm.name}), "class of the optimizer": hello.optimizer,
    }  # fmt: skip
    values = {
        "settings": shared, "layout": list(hello.layout), "batches": hello.batches, "callbacks": hello.callbacks,
        "run_id": hello.run_id, "steps": list(hello.steps), "has_completed": hello.has_completed,
    }  # fmt: skip
    hellos = await network.all_gather_object("parameter_server/hello", values, timeout_s=config.timeouts.join_s)
    check_equal(f"settings of workers (ranks 0 .. {roles.workers - 1}) and servers", [h["settings"] for h in hellos])
    check_equal_layouts([hello["layout"] for hello in hellos])
    workers, servers = hellos[: roles.workers], hellos[roles.workers :]
    return Agreement(
        int(hellos[0]["run_id"]),
        tuple(int(hello["batches"]) for hello in workers),
        any(hello["callbacks"] for hello in workers),
        [list(hello["steps"]) for hello in servers],
        any(hello["has_completed"] for hello in servers),
    )


async def find_version(
    network: Group,
    agreement: Agreement,
    config: DataParallelConfig,
    load: Callable[[int], Awaitable[Mapping[str, Any]]] | None = None,
) -> int | None:
    """The newest version that all servers have, whole and of one run; None: there is none, the run begins.

    Args:
        load: of a server: reads its part of a version and returns what must be equal on all of them.

    Raises:
        CheckpointError: there are some, but none that all can go on from.
    """
    if any(agreement.steps) and not all(agreement.steps) and not agreement.has_completed:
        log.warning("starting afresh: the first checkpoint was never complete", steps=agreement.steps)
        return None
    faults: list[str] = []
    timeout_s = max(config.timeouts.join_s, config.checkpoint.timeout_s)  # servers read theirs meanwhile
    for step in newest_common(agreement.steps):
        facts: Mapping[str, Any] | None = None
        fault, fits = "", True
        if load is not None:
            try:
                facts = await load(step)
            except CheckpointError as error:
                fault, fits = str(error), not isinstance(error, CheckpointMismatch)
        found = await network.all_gather_object(
            "parameter_server/version", [facts, fault, fits], round_id=step, timeout_s=timeout_s
        )
        first = network.world - len(agreement.steps)
        here = [f"server {rank - first}: {why}" for rank, (_, why, _) in enumerate(found) if why]
        if not all(fits for _, _, fits in found):
            raise CheckpointMismatch("; ".join(here))
        if not here:
            check_equal(f"checkpoints of step {step}", [facts for facts, _, _ in found if facts is not None])
            if faults:
                log.warning("using an older checkpoint", step=step, damaged=faults)
            return step
        faults += here
    if faults:
        raise CheckpointError(
            f"all checkpoints are damaged on some server ({'; '.join(faults)}). Restore them from a backup, or move "
            f"the state directories away to start afresh"
        )
    return None

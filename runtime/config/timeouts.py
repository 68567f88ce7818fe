"""The timeouts of a job, and the order that they need: the one place that knows all of them.

Each notices what the next one, which is longer, only ends. Where two are the other way round, a job ends or goes on for
the wrong reason: a collective that gives up before the lease has told who is dead, for one, blames whom it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.federated import FederatedConfig

ELASTIC_LEASE_S = 4.0
"""The lease of ranks that may come and go on a network. Until it ends, the others stand still; and one that is taken
for dead is back a second later, where it would end a run of a fixed world. So a dead machine is known within 5 s."""


@dataclass(frozen=True, slots=True)
class NamedTimeout:
    """One of them. ``key``: its setting."""

    name: str
    key: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class _Rule:
    shorter: str
    longer: str
    reason: str


_RULES = (
    _Rule("heartbeat", "lease", "a process between two heartbeats would count as dead"),
    _Rule("lease", "join", "a process that is started again would give up before its former start counts as dead"),
    _Rule("lease", "collective", "a collective would give up before it is known which process is dead"),
    _Rule("lease", "round", "a round would end before it is known that a client is dead"),
    _Rule("collective", "commit", "a rank would give up a checkpoint that the others still prepare"),
    _Rule("collective", "wait", "a process would give up before the members have noticed that one of them is lost"),
)


def parallel_timeouts(config: DataParallelConfig, *, lease_s: float | None) -> list[NamedTimeout]:
    """Those of data-parallel training, shortest first by their meaning.

    Args:
        lease_s: of processes on other machines; None: there are none, and the kernel tells who is dead.
    """
    found = [
        NamedTimeout("join", "parallel.timeouts.join_s", config.timeouts.join_s),
        NamedTimeout("collective", "parallel.timeouts.collective_s", config.timeouts.collective_s),
        NamedTimeout("commit", "parallel.checkpoint.timeout_s", config.checkpoint.timeout_s),
    ]
    if config.elastic.is_on:
        found.append(NamedTimeout("wait", "parallel.elastic.wait_s", config.elastic.wait_s))
    return [*_lease(lease_s), *found]


def federated_timeouts(config: FederatedConfig, *, lease_s: float | None) -> list[NamedTimeout]:
    """Those of federated training; ``lease_s`` as for :func:`parallel_timeouts`."""
    return [
        NamedTimeout("heartbeat", "federated.clients.heartbeat_s", config.clients.heartbeat_s),
        *_lease(lease_s),
        NamedTimeout("round", "federated.round.timeout_s", config.round.timeout_s),
    ]


def out_of_order(timeouts: Sequence[NamedTimeout]) -> list[str]:
    """A sentence for each pair of which the one that has to be shorter is longer; none: all is well."""
    by_name = {timeout.name: timeout for timeout in timeouts}
    faults = []
    for rule in _RULES:
        shorter, longer = by_name.get(rule.shorter), by_name.get(rule.longer)
        if shorter is not None and longer is not None and shorter.seconds > longer.seconds:
            found = f"{shorter.key} ({shorter.seconds:g} s) is longer than {longer.key} ({longer.seconds:g} s)"
            faults.append(f"{found}: {rule.reason}")
    return faults


def log_timeouts(log: Any, timeouts: Sequence[NamedTimeout]) -> None:
    """Log all of them in one line, and a warning for each pair that is not in the order that it needs."""
    log.info("timeouts", order=", ".join(map(str, timeouts)))
    for fault in out_of_order(timeouts):
        log.warning("timeouts out of order", fault=fault)


def _lease(lease_s: float | None) -> list[NamedTimeout]:
    return [] if lease_s is None else [NamedTimeout("lease", "bus.lease_s", lease_s)]

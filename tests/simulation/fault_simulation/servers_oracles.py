"""What must hold at the end of a run with parameter servers, whatever has failed in it.

* Each actor ends well, within the longest deadlines after the last fault; one that was started when the run was over
  may have waited in vain.
* A gradient counts once or not at all in what a server has, from the start of the run through all resumes.
* The version of a server is the number of updates in it: it only grows, and a resume goes on with the saved one.
* A version that all servers have saved is never lost. No worker is further ahead than the staleness allows.
* Both servers have the same gradients in the version of a step, but for the last ones of a worker that was lost.
* The weights that a server saves are those that its gradients make, computed anew here.
* In synchronous mode the model is that of a run without faults, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fault_simulation.findings import COUNTED_ONCE, DEADLINES, ENDS, SAME_MODEL, STALENESS, VERSIONS
from fault_simulation.kernel import START_S, now_s
from fault_simulation.servers_world import (
    AGAIN_S,
    CHECKPOINT_S,
    COLLECTIVE_S,
    JOIN_S,
    LR,
    MOMENTUM,
    SERVERS,
    is_loss,
)
from fault_simulation.tasks import DIM, STEPS_IN_EPOCH, batch_of
from fault_simulation.world import ROUND_LIMIT_S

if TYPE_CHECKING:
    from fault_simulation.kernel import VirtualProcess
    from fault_simulation.servers_world import ServersWorld

TOLERANCE = 1e-4  # weights are of some units
Gradient = tuple[int, int]
"""Worker, and number of its gradient."""


@dataclass
class _Version:
    """What is in the weights of a server. ``updates``: gradients of each, and one over the factor of their sum."""

    updates: list[tuple[tuple[Gradient, ...], int]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)

    def copy(self) -> _Version:
        return _Version(list(self.updates), set(self.lost))

    @property
    def gradients(self) -> list[Gradient]:
        return [gradient for gradients, _ in self.updates for gradient in gradients]


@dataclass
class _Server:
    """One start of a server.

    Attributes:
        version: what it has now. lost: workers that it has dropped.
        pushed: number of the newest gradient of each worker. pending: of those that are not applied yet.
    """

    version: _Version = field(default_factory=_Version)
    lost: set[int] = field(default_factory=set)
    pushed: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)

    def apply(self, facts: dict[str, Any]) -> None:
        """Take gradients into the version, as a decision says."""
        if facts["apply"]:
            gradients = tuple((worker, self.pending.pop(worker)) for worker in facts["apply"])
            self.version.updates.append((gradients, facts["count"]))


def judge(world: ServersWorld) -> None:
    """Add to the findings of a world what does not hold."""
    saved: dict[tuple[str, int], _Version] = {}
    done: set[tuple[str, int]] = set()  # of these, what is on the disk as far as a server knows
    servers: dict[str, _Server] = {}  # by start of one
    complete = 0  # the newest step that all servers have saved
    for process, name, facts in world.journal:
        if not process.role.startswith("server-"):
            continue
        server = servers.setdefault(process.name, _Server())
        match name:
            case "load":
                server.version = _loaded(world, process, facts["step"], saved)
                done &= saved.keys()
            case "ask" if facts["kind"] == "start":
                if facts["clock"] < complete:
                    text = f"begins with step {facts['clock']}, all servers had saved step {complete}"
                    world.finding(VERSIONS, f"{process.name} {text}")
                if not facts["clock"]:  # a server removes what not all servers have
                    _remove_later(saved, process.role, 0)
                    done &= saved.keys()
            case "push":
                _check_pace(world, process.name, server, facts)
                server.pushed[facts["worker"]] = server.pending[facts["worker"]] = facts["clock"]
                server.apply(facts)
            case "lose":
                server.lost.add(facts["worker"])
                server.version.lost.add(facts["worker"])
                server.apply(facts)
            case "saving":
                _check_saved(world, process.name, server.version, facts)
                saved[process.role, facts["step"]] = server.version.copy()
                done.discard((process.role, facts["step"]))
            case "save":
                done.add((process.role, facts["step"]))
                if all((role, facts["step"]) in done for role in world.roles[:SERVERS]):
                    complete = max(complete, facts["step"])
    _servers_agree(world, saved)
    _each_has_ended_well(world)
    _nothing_has_waited(world)


def _loaded(
    world: ServersWorld, process: VirtualProcess, step: int, saved: dict[tuple[str, int], _Version]
) -> _Version:
    """Return the version with which a server goes on; those of later steps are removed."""
    _remove_later(saved, process.role, step)
    known = saved.get((process.role, step))
    if known is None:
        world.finding(VERSIONS, f"{process.name} has loaded step {step}, which was never saved")
        return _Version()
    return known.copy()


def _remove_later(saved: dict[tuple[str, int], _Version], role: str, step: int) -> None:
    for later in [key for key in saved if key[0] == role and key[1] > step]:
        del saved[later]


def _check_pace(world: ServersWorld, name: str, server: _Server, facts: dict[str, Any]) -> None:
    """A worker goes on only while it is at most so many steps ahead of the slowest one."""
    live = [worker for worker in range(world.workers) if worker not in server.lost]
    if any(worker not in server.pushed for worker in live):
        return  # not all have pushed once since this start: no decision says where they stand
    slowest = min(server.pushed[worker] + 1 for worker in live)
    ahead = facts["clock"] - slowest
    if ahead > world.staleness:
        text = f"{name} has let worker {facts['worker']} be {ahead} steps ahead, {world.staleness} at most"
        world.finding(STALENESS, text)


def _check_saved(world: ServersWorld, name: str, version: _Version, facts: dict[str, Any]) -> None:
    if facts["updates"] != len(version.updates):
        world.finding(
            VERSIONS, f"{name} saves step {facts['step']} as version {facts['updates']} of {len(version.updates)}"
        )
    gradients = version.gradients
    twice = sorted({one for one in gradients if gradients.count(one) > 1})
    if twice:
        world.finding(COUNTED_ONCE, f"{name} saves step {facts['step']} with gradients that count twice: {twice[:5]}")
    for worker in {worker for worker, _ in gradients}:
        clocks = [clock for one, clock in gradients if one == worker]
        if clocks != sorted(clocks):
            world.finding(VERSIONS, f"{name} has applied the gradients of worker {worker} in the order {clocks}")
    expected = _replayed(world, version)
    if expected is None:
        return
    for (start, stop), held in zip(facts["pieces"], facts["weights"], strict=True):
        error = float((held - expected[start:stop]).abs().max())
        if not error <= TOLERANCE:
            text = f"{name} saves step {facts['step']} with entries {start} to {stop} that are wrong by {error:g}"
            world.finding(SAME_MODEL, text)


def _replayed(world: ServersWorld, version: _Version) -> torch.Tensor | None:
    """Return the weights that a version makes; None: gradients depend on the weights of both servers, so that the run
    without faults says more."""
    if world.pulls:
        return None
    weights, velocity = torch.zeros(DIM), torch.zeros(DIM)
    for gradients, count in version.updates:
        mean = sum((_gradient(*one) for one in gradients), torch.zeros(DIM)) / count
        velocity = MOMENTUM * velocity + mean
        weights = weights - LR * velocity
    return weights


def _gradient(worker: int, clock: int) -> torch.Tensor:
    return batch_of(DIM, worker, *divmod(clock, STEPS_IN_EPOCH))


def _servers_agree(world: ServersWorld, saved: dict[tuple[str, int], _Version]) -> None:
    first, *others = world.roles[:SERVERS]
    for step in sorted(step for role, step in saved if role == first):
        versions = [saved[role, step] for role in (first, *others) if (role, step) in saved]
        lost = set().union(*(version.lost for version in versions))
        sets = [{one for one in version.gradients if one[0] not in lost} for version in versions]
        for other in sets[1:]:
            if other != sets[0]:
                text = f"the servers save step {step} with different gradients: {sorted(sets[0] ^ other)[:6]}"
                world.finding(COUNTED_ONCE, text)


def _each_has_ended_well(world: ServersWorld) -> None:
    for process in world.ended.values():
        error = process.result
        if not isinstance(error, Exception):
            continue
        if world.is_over and is_loss(error):
            world.notes.append(f"{process.name} has missed the end of the run")
        else:
            world.finding(ENDS, f"{process.name} has ended with {type(error).__name__}: {str(error)[:400]}")
    for role, steps in _steps_of(world).items():
        if steps != world.rounds:
            world.finding(ENDS, f"{role} has ended after {steps} steps of {world.rounds}")


def _steps_of(world: ServersWorld) -> dict[str, int]:
    return {role: process.result.steps for role, process in world.ended.items() if hasattr(process.result, "steps")}


def _longest_s(faults: Sequence[Any]) -> float:
    """Return how long a run may go on after its last fault: two starts in vain, as not all notice the loss of one at
    the same time, and what is left of the training."""
    noticed_s = COLLECTIVE_S + CHECKPOINT_S
    return 2 * (noticed_s + JOIN_S + AGAIN_S[1]) + ROUND_LIMIT_S / 2


def _nothing_has_waited(world: ServersWorld) -> None:
    stalled_s = now_s() - max(START_S + 1.0, world.calm_s) - world.network.lease_s
    if stalled_s > _longest_s(world.plan) and world.is_over:
        world.finding(DEADLINES, f"the run went on for {stalled_s:.0f} s after the last fault and a lease")

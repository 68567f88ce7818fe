"""What must hold at the end of a run with elastic workers, whatever has failed in it.

* A generation has one list of members, and all of them begin it at one step.
* It begins at the newest step that one of its members has applied: so no step is lost with those that go on.
* All ranks of a generation have applied a step with the same batches, and have the same weights after it.
* The steps of the run take each batch of an epoch once, and make the weights that are computed anew here.
* Each actor ends well, within the longest deadlines after the last fault; one that was started when the run was over
  may have waited in vain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fault_simulation.elastic_world import AGAIN_S, COLLECTIVE_S, LR, MOMENTUM, STEPS_IN_EPOCH, WAIT_S
from fault_simulation.findings import DEADLINES, ENDS, MEMBERS, SAME_MODEL, STEPS
from fault_simulation.kernel import START_S, now_s
from fault_simulation.oracles import more_rounds_s
from fault_simulation.tasks import DIM, batch_of
from fault_simulation.world import ROUND_LIMIT_S
from gradbus.runtime.collectives.generations import FORM_S, LOST

if TYPE_CHECKING:
    from fault_simulation.elastic_world import AppliedStep, ElasticWorld

TOLERANCE = 1e-4  # weights are of some units


def judge(world: ElasticWorld) -> None:
    """Add to the findings of a world what does not hold."""
    _members_agree(world)
    _generations_begin_at_the_newest_step(world)
    _ranks_agree(world)
    _steps_make_the_model(world)
    _each_has_ended_well(world)
    _nothing_has_waited(world)


def _members_agree(world: ElasticWorld) -> None:
    members: dict[tuple[int, int], tuple[int, ...]] = {}
    for process, name, facts in world.journal:
        if name == "generation":
            key = world.jobs[process.name], facts["generation"]
            known = members.setdefault(key, facts["members"])
            if known != facts["members"]:
                world.finding(
                    MEMBERS,
                    f"{process.name} has the members {facts['members']} of generation {key[1]}, others have {known}",
                )


def _generations_begin_at_the_newest_step(world: ElasticWorld) -> None:
    """The notes of each process are in their order, and so are those of steps, of which the time is not noted: a
    process that begins a generation has applied what it has noted for an earlier one."""
    begun: dict[tuple[int, int], dict[str, int]] = {}
    for process, event, facts in world.journal:
        if event == "started":
            key = world.jobs[process.name], facts["generation"]
            begun.setdefault(key, {})[process.name] = facts["step"]
    for (job, generation), steps in begun.items():
        if len(set(steps.values())) > 1:
            world.finding(STEPS, f"generation {generation} begins at different steps: {steps}")
        newest = max(
            (
                one.step
                for one in world.applied
                if one.process.name in steps and one.job == job and one.generation < generation
            ),
            default=0,
        )
        if newest > max(steps.values()):
            world.finding(
                STEPS, f"generation {generation} begins at step {max(steps.values())}, one of its members had {newest}"
            )


def _ranks_agree(world: ElasticWorld) -> None:
    first_of: dict[tuple[int, int, int], AppliedStep] = {}
    for one in world.applied:
        first = first_of.setdefault((one.job, one.generation, one.step), one)
        names = f"{first.process.name} and {one.process.name}"
        if (one.epoch, one.first, one.last) != (first.epoch, first.first, first.last):
            world.finding(STEPS, f"{names} have applied step {one.step} with different batches")
        elif not torch.equal(one.weights, first.weights):
            world.finding(SAME_MODEL, f"{names} have different weights after step {one.step}")


def _steps_make_the_model(world: ElasticWorld) -> None:
    """The newest generation that has applied a step is the one whose step counts."""
    if not world.finished:
        return
    counts: dict[int, AppliedStep] = {}
    for one in world.applied:
        before = counts.get(one.step)
        if before is None or (one.job, one.generation) >= (before.job, before.generation):
            counts[one.step] = one
    weights, velocity, expected = torch.zeros(DIM), torch.zeros(DIM), (0, 0)
    last = world.finished[-1].result.steps
    for step in range(1, last + 1):
        if step not in counts:
            world.finding(STEPS, f"no process has noted step {step} of {last}")
            return
        one = counts[step]
        epoch, first = expected
        if (one.epoch, one.first) != expected:
            world.finding(STEPS, f"step {step} begins with batch {one.first} of epoch {one.epoch}, expected {expected}")
            return
        gradients = [weights - batch_of(DIM, 0, epoch, number) for number in range(first, one.last)]
        velocity = MOMENTUM * velocity + torch.stack(gradients).mean(dim=0)
        weights = weights - LR * velocity
        error = float((weights - one.weights).abs().max())
        if not error <= TOLERANCE:
            world.finding(SAME_MODEL, f"after step {step} a weight of {one.process.name} is wrong by {error:g}")
            return
        expected = (epoch, one.last) if one.last < world.batches else (epoch + 1, 0)
    if expected != (world.epochs, 0):
        world.finding(STEPS, f"the run has ended at batch {expected[1]} of epoch {expected[0]}")


def _each_has_ended_well(world: ElasticWorld) -> None:
    for process in world.ended.values():
        error = process.result
        if not isinstance(error, Exception):
            continue
        if world.finished and isinstance(error, LOST):
            world.notes.append(f"{process.name} has missed the end of the run")
        else:
            world.finding(ENDS, f"{process.name} has ended with {type(error).__name__}: {str(error)[:400]}")
    hashes = {process.result.params_hash for process in world.finished}
    if len(hashes) > 1:
        world.finding(SAME_MODEL, f"those that have come to the end have models with the hashes {sorted(hashes)}")
    if len(world.ended) == len(world.roles) and not world.finished:
        world.finding(ENDS, "all have ended, and none has come to the end of the run")


def _nothing_has_waited(world: ElasticWorld) -> None:
    """A start in vain, a generation that does not form, the wait for one, and what is left of the training."""
    longest_s = 2 * (COLLECTIVE_S + FORM_S + WAIT_S + AGAIN_S[1]) + ROUND_LIMIT_S / 2
    longest_s += more_rounds_s(world, steps=STEPS_IN_EPOCH)
    stalled_s = now_s() - max(START_S + 1.0, world.calm_s) - world.network.lease_s
    if stalled_s > longest_s and world.finished:
        world.finding(DEADLINES, f"the run went on for {stalled_s:.0f} s after the last fault and a lease")

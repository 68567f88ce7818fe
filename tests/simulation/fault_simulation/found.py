"""Faults that the simulation has found in shipped code, each with the run that shows it. They are run by a test."""

from __future__ import annotations

from typing import NamedTuple

from fault_simulation.faults import CONTROLLER, Fault, Moment


class Found(NamedTuple):
    """One fault of the product, which is mended.

    Attributes:
        effect: what it would have done to a user. plan: the faults that show it, which no later version of the plan of
            a seed changes.
    """

    effect: str
    seed: int
    flavour: str
    plan: tuple[Fault, ...]


def _killed(place: str, round_id: int, again_s: float) -> tuple[Fault, ...]:
    return (Fault(Moment("place", round_id, CONTROLLER, place), "kill", CONTROLLER, again_s),)


FOUND = (
    Found(
        "The controller dies after it has committed a round and before a receipt has arrived. The next start refused "
        "the update as stale, although it counts: a client with a lossy codec kept its residual and sent what was "
        "counted once more, and its log said that the update was refused.",
        12, "s4", _killed("after_command", 4, 0.98),
    ),
    Found(
        "The same death, and the client is welcomed by the next start before it has asked for the receipt there: it "
        "gave up waiting, with the same effect, and without a line in any log.",
        23, "s4", _killed("after_commit_before_publish", 2, 0.3),
    ),
    Found(
        "A worker on another machine dies before it comes to a meeting, which is at server 0. Server 0 held the others "
        "until it dropped the dead one. Server 1 took those that were held for silent: at the same moment it dropped "
        "them, too, and the run ended with errors that name healthy workers.",
        137, "servers_stale", (Fault(Moment("decision", 1, "worker-2", "start", "after"), "kill", "worker-2", 0.06),),
    ),
    Found(
        "A server removes a version that not all servers have, and saves another one with that number later. Its power "
        "fails before that: the removed version was back, as the removal was not synced. The servers had versions of "
        "two runs, and each start ended with a ConfigError; of one run, they would have gone on from different ones.",
        300, "servers_stale",
        (
            Fault(Moment("decision", 1, "server-1", "save", "before"), "kill", "server-1", 0.5),
            Fault(Moment("decision", 2, "server-0", "save", "before"), "power", "server-0", 0.5),
        ),
    ),
    Found(
        "All members of an elastic group die, and processes that take their places are there. Each took what others "
        "told of the members for the members themselves, and waited for ever as a spare, without a sentence.",
        45, "elastic",
        (
            Fault(Moment("decision", 2, "rank-1", "generation", "before"), "power", "rank-1", 0.19),
            Fault(Moment("step", 1698, "rank-0"), "kill", "rank-0", 0.08),
        ),
    ),
)  # fmt: skip

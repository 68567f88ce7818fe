"""Faults that the simulation has found in shipped code, each with the run that shows it. They are run by a test."""

from __future__ import annotations

from typing import NamedTuple

from fault_simulation.faults import CONTROLLER, Fault, Moment
from fault_simulation.seeds import MEMORY, ZENOH


class Found(NamedTuple):
    """One fault of the product, which is mended.

    Attributes:
        effect: what it would have done to a user. plan: the faults that show it, which no later version of the plan of
            a seed changes. transport: the network under the bus.
    """

    effect: str
    seed: int
    flavour: str
    plan: tuple[Fault, ...]
    transport: str = MEMORY


def _killed(place: str, round_id: int, again_s: float) -> tuple[Fault, ...]:
    return (Fault(Moment("place", round_id, CONTROLLER, place), "kill", CONTROLLER, again_s),)


def _replaced(place: str, round_id: int, seconds: float) -> tuple[Fault, ...]:
    return (Fault(Moment("place", round_id, CONTROLLER, place), "replace", CONTROLLER, seconds),)


def _replaced_when_committed(number: int, seconds: float) -> Fault:
    return Fault(Moment("note", number, CONTROLLER, "committed", "after"), "replace", CONTROLLER, seconds)


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
        "A controller is paused when the updates of a round are in, a new start does that round again, and the first "
        "one goes on and publishes a model of it. Clients took this for the model of the round that the new start had "
        "open, and trained in no attempt at it: the new start ended with RoundTimeout, and the clients with it.",
        10, "replaced", _replaced("after_collect_before_aggregate", 5, 0.5),
    ),
    Found(
        "The same, and the round of the new start goes on without those clients, or with updates that they had made "
        "before: they held another model after it than all others, and trained from that one.",
        8, "replaced", _replaced("after_collect_before_aggregate", 1, 0.5),
    ),
    Found(
        "A controller is paused and replaced, the new start dies, and the first one goes on before the next start has "
        "the job. It was refused with JobInUse, and the run ended: clients follow no replaced controller.",
        92, "replaced",
        (
            _replaced_when_committed(2, 2.0),
            Fault(Moment("place", 5, CONTROLLER, "before_command"), "kill", CONTROLLER, 0.09),
        ),
    ),
    Found(
        "A controller commits the last round, and no longer publishes its model. The next start found all rounds done, "
        "and did not answer clients that requested it: they waited for 30 s, and ended without the last model.",
        87, "replaced", (_replaced_when_committed(6, 0.5),),
    ),
    Found(
        "The controller dies after it has committed the last round and before it has published that model. The next "
        "start found nothing to do and ended without it: clients waited 30 s, and ended with an older model.",
        1, "fp32", _killed("after_commit_before_publish", 6, 0.02),
    ),
    Found(
        "The same death in a tree: a site that knew the next start by its first topic, and not by the others yet, took "
        "it for gone, and its clients waited 30 s for a model that it did not have.",
        1, "tree", _killed("after_commit_before_publish", 6, 0.02),
    ),
    Found(
        "A site that is back from rounds alone, or starts again, is told that the run has ended before it is ready. It "
        "ended, and its clients never learned of it: they waited for controller_timeout_s and failed.",
        2, "tree_alone", _killed("after_commit_before_publish", 6, 3.2),
    ),
    Found(
        "A site did rounds alone. `gradbus check` reported I1 and I2 violated at that site, as the controller of these "
        "rounds kept no journal, and its clients did.",
        3, "tree_alone", _killed("after_commit_before_publish", 5, 3.21),
    ),
    Found(
        "The controller is away for longer than upstream.alone_after_s before it has commanded a round. Sites ended "
        "with BarrierTimeout after that time, not after upstream.timeout_s, and their clients with them.",
        29, "tree_alone", (Fault(Moment("step", 483, CONTROLLER), "disk", CONTROLLER, 5.0),),
    ),
    Found(
        "The controller begins a round anew after its start. A client that came to a site during the attempt before "
        "took no part in this round: the site had too few clients, and failed after its deadline.",
        5088, "tree",
        (
            Fault(Moment("note", 2, "client-2", "offered", "after"), "kill", "client-2", 3.23),
            Fault(Moment("note", 3, CONTROLLER, "counted", "before"), "kill", CONTROLLER, 0.31),
            Fault(Moment("note", 2, "client-0", "offered", "before"), "power", "client-0", 0.72),
        ),
    ),
    Found(
        "The power fails after the first checkpoint is written and before its folder is synced. The file system had "
        "kept the JSON and lost the tensors: no start went on, until somebody moved the folder away.",
        700880, "fp32", (Fault(Moment("sync", 5, CONTROLLER, "", "before"), "power", CONTROLLER, 0.2),),
    ),
    Found(
        "A site that was stopped in the midst of a round left a task behind, of which asyncio warned.",
        74, "tree_alone", (Fault(Moment("note", 3, "site-1", "commanded", "after"), "stop", "site-1", 0.04),),
    ),
    Found(
        "A worker on another machine dies before it comes to a meeting, which is at server 0. Server 0 held the others "
        "until it dropped the dead one. Server 1 took those that were held for silent: at the same moment it dropped "
        "them, too, and the run ended with errors that name healthy workers.",
        137, "servers_stale", (Fault(Moment("decision", 1, "worker-2", "start", "after"), "kill", "worker-2", 0.06),),
    ),
    Found(
        "A worker dies while all introduce themselves. Those that had not heard it waited until its lease ended. "
        "A server dropped them meanwhile, as they made no request, and the run ended with errors that name them.",
        189, "servers_continue",
        (Fault(Moment("decision", 1, "worker-1", "start", "before"), "kill", "worker-1", 0.63),),
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
        47, "elastic",
        (
            Fault(Moment("decision", 1, "rank-1", "generation", "before"), "power", "rank-1", 0.19),
            Fault(Moment("decision", 10, "rank-0", "view", "after"), "kill", "rank-0", 0.08),
        ),
    ),
    Found(
        "A controller is paused while it waits for its clients, and replaced: another run begins with them. When it "
        "went on it waited for these clients beside that run, until `timeouts.join_s` was over.",
        14798980035, "replaced", (Fault(Moment("sync", 2, CONTROLLER, "", "before"), "replace", CONTROLLER, 6.0),),
    ),
    Found(
        "The controller stands still for longer than a lease in the last round. At its end it waited 2 s for clients "
        "to leave, in which some had not found it again: these waited for `controller_timeout_s`, and failed.",
        14798985901, "q8", (Fault(Moment("note", 17, CONTROLLER, "counted", "before"), "pause", CONTROLLER, 6.0),),
    ),
    Found(
        "A start after the last round waits 2 s for clients that lack its end. One that came in the last moment was "
        "welcomed and left alone: it waited 30 s for the last model, and ended without it.",
        14798983135, "replaced",
        (
            _replaced("after_publish", 6, 0.5)[0],
            Fault(Moment("sync", 32, CONTROLLER, "", "before"), "pause", CONTROLLER, 6.0),
        ),
    ),
    Found(
        "A node with a key of its own is killed and starts again at once by a clock that is behind: it was taken for a "
        "second process with that key, and refused for good.",
        14798986774, "admission",
        (Fault(Moment("note", 1, "client-2", "welcomed", "after"), "kill", "client-2", 0.09),),
    ),
    Found(
        "Over the network in memory, one side loses a process and finds it again while an acknowledgement is on its "
        "way: nothing more arrived on that channel. All waited for one hello, and a server dropped healthy workers.",
        14799003818, "servers_stale",
        (Fault(Moment("step", 5378, "server-0"), "lease", "server-0", 0.0, "worker-1"),),
    ),
    Found(
        "Over the network in memory, the first beacon for a newcomer is lost, and the next one takes its place before "
        "it is sent again: the newcomer waited for the first one, and never found the controller.",
        14799007214, "admission",
        (
            Fault(Moment("step", 178, CONTROLLER), "power", CONTROLLER, 0.92),
            Fault(Moment("note", 1, "client-1", "receipt", "after"), "revoke", "client-1", 0.5),
        ),
    ),
    Found(
        "At a relay, a start after the last round waits 3 s for clients, which need longer to find and join it over a "
        "lossy link: one of them ended without the receipt for its last update, another waited in vain and failed.",
        1643364851, "admission",
        (
            Fault(Moment("place", 1, CONTROLLER, "before_command"), "kill", CONTROLLER, 3.8365761163778758),
            Fault(Moment("sync", 24, CONTROLLER, "", "after"), "kill", CONTROLLER, 1.7600209275950351),
            Fault(Moment("sync", 9, CONTROLLER, "", "before"), "power", CONTROLLER, 3.005930947484587),
            Fault(Moment("step", 1538, CONTROLLER), "reset", CONTROLLER, 3.0),
            Fault(Moment("note", 6, CONTROLLER, "committed", "after"), "power", CONTROLLER, 0.6316429694502542),
            Fault(Moment("step", 7429, CONTROLLER), "power", CONTROLLER, 3.7423043882745057),
            Fault(Moment("note", 3, CONTROLLER, "committed", "before"), "twin", "client-2", 0.5),
        ),
        ZENOH,
    ),
)  # fmt: skip

"""What must hold at the end of a run, whatever has failed in it.

* I1 to I8 of ``gradbus check``, on the journals that the actors have really written;
* all rounds are reported, each once and in their order;
* each actor ends, with nothing but a good result, or with a timeout where it has missed the end of the run;
* nothing waits beyond its deadline once the last fault is over;
* an update counts once, and its client knows that it does before it trains again, and when the run is over;
* no client gets the model of a round before the controller has noted that it is committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fault_simulation.faults import CONTROLLER
from fault_simulation.findings import COMMITTED, COUNTED_ONCE, DEADLINES, ENDS, RECEIPTS, ROUNDS
from fault_simulation.flavours import FLAVOURS
from fault_simulation.kernel import START_S, now_s
from gradbus.commands.history.invariants import check
from gradbus.commands.history.reader import read_history

if TYPE_CHECKING:
    from fault_simulation.kernel import VirtualProcess
    from fault_simulation.world import World

CALM_S = 28.0  # the longest deadline, without those of a whole round: six rounds without faults are over in less
CALM_ROUNDS = 6
MESSAGES_S = 2.0  # of a round of which messages are lost, and sent again after 0.5 s
SLOWEST = 4.0  # times the mean: in the mean of many rounds, the slowest of five trainings is below 2.3 times that
MISSED_END_S = 15.0  # who started so shortly before the end of the controller may have missed it
MISSED_WORDS_S = 4.0
REJOIN_S = 8.0  # with identities: from a start of the controller, or a cut, until its members have joined again
Key = tuple[str, int, int, int]
"""An update: run, client, incarnation, transfer."""


def judge(world: World) -> None:
    """Add to the findings of a world what does not hold."""
    flavour, controller = FLAVOURS[world.flavour], world.ended.get(CONTROLLER)
    counted = _counted(world)
    if flavour.learns_by_receipt:
        _clients_know_what_counts(world, counted)
    _clients_know_at_the_end(world, counted)
    for role in world.roles if flavour.is_checked else ():
        _check_journals(world, role)
    if controller is not None and flavour.may_end_with and flavour.may_end_with in str(controller.result):
        world.notes.append(f"the controller has ended: {str(controller.result)[:100]}")
        return
    _each_has_ended_well(world)
    _rounds_are_reported_in_order(world)
    _models_are_committed_first(world)
    _nothing_has_waited(world)


def _check_journals(world: World, role: str) -> None:
    """Check the journals of the controller, or of a site, with those of its clients."""
    folder = world.history_of(role)
    if (folder / "controller.jsonl").is_file():
        where = "" if role == CONTROLLER else f"at {role}: "
        for result in check(read_history(folder)):
            if result.violations:
                world.finding(result.name, where + "; ".join(result.violations[:3]))


def _each_has_ended_well(world: World) -> None:
    for role, process in world.ended.items():
        error = process.result
        if not isinstance(error, Exception):
            continue
        if role != CONTROLLER and _has_missed_end(world, process):
            world.notes.append(f"{process.name} has missed the end of the run")
        else:
            world.finding(ENDS, f"{process.name} has ended with {type(error).__name__}: {str(error)[:400]}")


def _has_missed_end(world: World, process: VirtualProcess) -> bool:
    """Return whether a client, or a site, that waits for its controller could not know that the run was over."""
    controller = world.ended.get(world.above(process.role))
    if controller is None or type(process.result).__name__ != "BarrierTimeout":
        return False
    if controller.role in world.retired:
        return True
    if isinstance(controller.result, Exception):  # of a site that has missed it, its clients never hear of the end
        return controller.role != CONTROLLER and _has_missed_end(world, controller)
    over_s = controller.ended_s
    if world.identities is not None and has_to_join_again(world, process, controller):
        return True
    return process.started_s > over_s - MISSED_END_S or world.excused_s[process.role] > over_s - MISSED_WORDS_S


def has_to_join_again(world: World, process: VirtualProcess, controller: VirtualProcess) -> bool:
    """Return whether a client with an identity may not have joined the last start of its controller before that ended:
    the controller had just started, or one of the two was cut off or paused."""
    since_s = controller.ended_s - REJOIN_S
    return controller.started_s > since_s or any(
        world.excused_s[role] > since_s for role in (process.role, controller.role)
    )


def _rounds_are_reported_in_order(world: World) -> None:
    controller = world.ended.get(CONTROLLER)
    if controller is not None and controller.result != list(range(1, world.rounds + 1)):
        world.finding(ROUNDS, f"the controller has reported rounds {controller.result}")
    for before, after in zip(world.reported, world.reported[1:], strict=False):
        if after <= before:
            world.finding(ROUNDS, f"round {after} was reported after round {before}")


def _models_are_committed_first(world: World) -> None:
    """Else a round that clients know is lost if the controller dies, and the next start makes another model of it."""
    committed, run = 0, ""
    for process, event, facts in world.journal:
        if process.role == CONTROLLER and event in ("started", "committed"):  # the former: what an earlier start saved
            committed, run = max(committed, facts["round"]), facts.get("run", run)
        elif event == "decoded" and facts["run"] == run and facts["round"] > committed:
            world.finding(COMMITTED, f"{process.name} has the model of round {facts['round']} before it is committed")


def more_rounds_s(world: World, *, steps: int = 1) -> float:
    """Return how long the rounds beyond six may take: ``steps`` trainings one after the other, and the messages."""
    return max(0, world.rounds - CALM_ROUNDS) * (MESSAGES_S + steps * SLOWEST * world.circumstances.train_s)


def _nothing_has_waited(world: World) -> None:
    has_failed = any(isinstance(process.result, Exception) for process in world.ended.values())
    stalled_s = now_s() - max(START_S + 1.0, world.calm_s) - world.network.lease_s
    longest_s = CALM_S + more_rounds_s(world)
    if stalled_s > longest_s and len(world.ended) == len(world.roles) and not has_failed:
        world.finding(DEADLINES, f"the run went on for {stalled_s:.0f} s after the last fault and a lease")


def _counted(world: World) -> set[Key]:
    """Return the updates that are in a committed model, or in a sum that is, and note those that are in two."""
    counted: set[Key] = set()
    pending: dict[str, list[Key]] = {}  # by start of the controller: since its last commit
    runs: dict[str, str] = {}
    for process, event, facts in world.journal:
        if event == "started" and "run" in facts:
            runs[process.name] = facts["run"]
            pending.pop(process.name, None)
        elif event == "adopted":  # by a site, whose sum does not count
            pending.pop(process.name, None)
        elif event == "counted":
            key = (runs[process.name], facts["client"], facts["incarnation"], facts["transfer"])
            pending.setdefault(process.name, []).append(key)
        elif event == "committed":
            for key in pending.pop(process.name, []):
                if key in counted:
                    world.finding(
                        COUNTED_ONCE,
                        f"an update of client {key[1]} is in two committed models, the second of {process.name}",
                    )
                counted.add(key)
    return counted


def _clients_know_what_counts(world: World, counted: set[Key]) -> None:
    """The residual of a lossy codec depends on it: what is sent twice, or never, is a fault of the model.

    In another run a client has another residual: it may leave one in the midst of an answer, as it leaves rounds alone
    when the tree is back.
    """
    incarnations: dict[str, int] = {}
    unanswered: dict[str, dict[int, Key]] = {}  # by start of a client, and number of the update
    for process, event, facts in world.journal:
        if not process.role.startswith("client"):
            continue
        if event == "started":
            incarnations[process.name] = facts["incarnation"]
        elif event == "offered":
            transfer = facts["transfer"]
            for key in unanswered.pop(process.name, {}).values():
                if key in counted and key[0] == facts["run"] and key[3] != transfer:
                    world.finding(
                        RECEIPTS,
                        f"{process.name} went on to round {facts['round']}, never knew that transfer {key[3]} counts",
                    )
            client_id = world.client_ids[process.role]
            key = (facts["run"], client_id, incarnations[process.name], transfer)
            unanswered[process.name] = {transfer: key}
        elif event == "receipt":
            answered = unanswered.get(process.name, {}).pop(facts["transfer"], None)
            if not facts["accepted"] and answered in counted:
                world.finding(
                    RECEIPTS,
                    f"{process.name} was refused its update of round {facts['round']}, which counts: {facts['reason']}",
                )


def _clients_know_at_the_end(world: World, counted: set[Key]) -> None:
    """A client that has come to the end of the run takes no update that counts for called off, and its summary says how
    many do. The end may overtake the last receipt, as nothing orders the channels."""
    for role, process in world.ended.items():
        if not role.startswith("client") or isinstance(process.result, Exception):
            continue
        own = [(event, facts) for one, event, facts in world.journal if one is process]
        accepted = {
            (facts["run"], facts["transfer"]) for event, facts in own if event == "receipt" and facts["accepted"]
        }
        if process.result.rounds != len(accepted):
            text = f"{process.name} says that {process.result.rounds} updates count, {len(accepted)} had such a receipt"
            world.finding(RECEIPTS, text)
        run = next((facts["run"] for event, facts in reversed(own) if event == "welcomed"), "")
        incarnation = next((facts["incarnation"] for event, facts in own if event == "started"), 0)
        unknown = {
            transfer
            for transfer in _offered_to_the_last_controller(world, process)
            if (run, world.client_ids[role], incarnation, transfer) in counted and (run, transfer) not in accepted
        }
        if unknown and not was_out_of_reach_at_the_end(world, process):
            world.finding(RECEIPTS, f"{process.name} has ended, never knew that transfers {sorted(unknown)} count")


def _offered_to_the_last_controller(world: World, process: VirtualProcess) -> list[int]:
    """Return the updates of a client that it can have a receipt for. Another start of the controller is asked for one,
    too, but not by a client of secure aggregation: that goes by what it has helped to unmask."""
    above, offered = world.above(process.role), list[int]()
    for one, event, facts in world.journal:
        if one is process and event == "offered":
            offered.append(facts["transfer"])
        elif one.role == above and event == "started" and not FLAVOURS[world.flavour].learns_by_receipt:
            offered.clear()
    return offered


def was_out_of_reach_at_the_end(world: World, process: VirtualProcess) -> bool:
    """Return whether a receipt may not have arrived while the client waited for it: it or its controller was cut off,
    or its controller was killed, whose next start is found after that wait. A client may wait longer than its
    controller runs: then nothing could come any more, and what counts is whether the two were apart before that."""
    above = world.above(process.role)
    controller = world.ended.get(above)
    over_s = process.ended_s if controller is None else min(process.ended_s, controller.ended_s)
    since_s = over_s - MISSED_WORDS_S
    excuses = [*world.excuses[process.role], *world.excuses[above]]
    if any(from_s < over_s and until_s > since_s for from_s, until_s in excuses):
        return True
    return any(one.killed and since_s < one.ended_s < process.ended_s for one in world.processes if one.role == above)

"""The eight invariants of every run, whatever has failed in it, checked in its event journals; see docs/reliability.md.

This runs after the run, and uses no code that it checks, except for I3 with a strategy other than fedavg (replay.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from gradbus.commands.history.reader import Event, RunHistory, Start

WARM_UP = 0.3  # share of a process's samples that do not count: pools fill, caches grow
WARM_UP_S = 20.0  # and so long at least
MIN_SAMPLES = 12  # fewer show no growth
MAX_GROWTH = 0.05
# Descriptors, or threads. A leak repeats itself: of one at each round, fault or checkpoint there are many more at the
# end. One more is none: a file that is open a little longer, another peer on this machine, the last thread of a pool.
MAX_MORE = 1
_MAX_SHOWN = 5  # violations of one invariant

TITLES = {
    "I1": "an update counts at most once",
    "I2": "one model per round, the same for all",
    "I3": "models equal those computed again",
    "I4": "no committed round is lost",
    "I5": "ranks have equal parameters",
    "I6": "memory, descriptors, threads flat",
    "I7": "what counts is what was sent",
    "I8": "clients know whether an update counts",
}


@dataclass(slots=True)
class InvariantResult:
    """The outcome of one invariant: the number of facts that were compared, and a sentence for each violation."""

    name: str
    checked: int = 0
    violations: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Count one comparison, and note a violation where it does not hold."""
        self.checked += 1
        if not holds:
            self.violations.append(otherwise)


def check(run: RunHistory) -> list[InvariantResult]:
    """Check all eight. Events that are not as their writer makes them count as a violation."""
    from gradbus.commands.history.replay import replay  # loads torch, where there is something to compute

    rules: dict[str, Callable[[RunHistory, InvariantResult], None]] = {
        "I1": _counts_once, "I2": _one_model, "I3": lambda run, result: replay(run, result.expect),
        "I4": _nothing_lost, "I5": _equal_ranks, "I6": _flat, "I7": _as_sent,
        "I8": _answered,
    }  # fmt: skip
    results = []
    for name, rule in rules.items():
        result = InvariantResult(name)
        try:
            rule(run, result)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            result.expect(False, f"an event is not as its writer makes it: {type(error).__name__} {error}"[:200])
        results.append(result)
    return results


def table_of(results: Iterable[InvariantResult]) -> list[str]:
    """A line for each invariant, and the first of its violations."""
    lines = []
    for result in results:
        bad = len(result.violations)
        verdict = f"{bad} VIOLATED" if bad else "holds" if result.checked else "nothing to check"
        lines.append(f"{result.name}  {TITLES[result.name]:<40} {verdict:<18} {result.checked:>8} compared")
        lines += [f"    {violation}" for violation in result.violations[:_MAX_SHOWN]]
        if bad > _MAX_SHOWN:
            lines.append(f"    and {bad - _MAX_SHOWN} more")
    return lines


def _counts_once(run: RunHistory, result: InvariantResult) -> None:
    counted: set[_Update] = set()
    round_of: dict[tuple[str, int, int, int], int] = {}  # an update keeps its number, whatever round is in it
    for start in run.controller:
        in_round: dict[int, list[Event]] = defaultdict(list)
        for event in start.events:
            if event["event"] == "counted":
                in_round[event["round"]].append(event)
                counted.add(_counted_as(start, event))
                update = (start.opening["run"], event["client"], event["incarnation"], event["transfer"])
                first = round_of.setdefault(update, event["round"])
                result.expect(
                    first == event["round"],
                    f"an update of client {event['client']} counted in round {first} and in round {event['round']}",
                )
            elif event["event"] == "committed":
                updates = in_round[event["round"]]
                clients = sorted(update["client"] for update in updates)
                result.expect(
                    clients == event["clients"],
                    f"round {event['round']} was committed with clients {event['clients']}, counted were {clients}",
                )
                samples = sum(update["num_samples"] for update in updates)
                result.expect(
                    samples == event["num_samples"],
                    f"round {event['round']} was committed with {event['num_samples']} samples, counted were {samples}",
                )
        for round_id, updates in in_round.items():
            for client, times in Counter(update["client"] for update in updates).items():
                result.expect(times == 1, f"client {client} counted {times} times in round {round_id}")
    if not run.controller:
        return
    for answered, event in _of_clients(run, "receipt"):
        result.expect(
            not event["accepted"] or answered in counted,
            f"client {answered.client} has a receipt for round {answered.round} that was not counted",
        )


def _one_model(run: RunHistory, result: InvariantResult) -> None:
    held: dict[tuple[str, int], set[int]] = defaultdict(set)  # by clients; with a lossy codec not the weights
    weights: dict[tuple[str, int], set[int]] = defaultdict(set)
    for start in run.controller:
        name, last = start.opening["run"], start.opening["round"]
        held[name, last].add(start.opening["held_crc32"])
        weights[name, last].add(start.opening["crc32"])
        for event in start.events:
            if event["event"] not in ("committed", "adopted"):  # a site adopts what another level has committed
                continue
            follows = event["round"] == last + 1 or event["event"] == "adopted"
            result.expect(follows, f"round {event['round']} was committed after round {last}")
            last = event["round"]
            held[name, last].add(event["held_crc32"])
            weights[name, last].add(event["crc32"])
    for found, what in ((weights, "models"), (held, "models at the clients")):
        for (_, round_id), models in found.items():
            result.expect(len(models) == 1, f"round {round_id} has {len(models)} {what}")
    for client, starts in run.clients.items():
        for start in starts:
            for event in start.all("decoded"):
                models = held.get((event["run"], event["round"]), set())
                result.expect(
                    event["crc32"] in models or not run.controller,
                    f"client {client} holds another model of round {event['round']} than the controller committed",
                )


def _nothing_lost(run: RunHistory, result: InvariantResult) -> None:
    newest: dict[
        str, Event
    ] = {}  # by run: the last event that shows what is on the disk, a start's opening or a commit
    saved: set[str] = set()  # runs that have been on the disk
    adopting = {start.opening["run"] for start in run.controller if _adopts(start)}
    before: Start | None = None
    for start in run.controller:
        opening = start.opening
        name, kept = opening["run"], opening["federated"]["checkpoint"]
        if before is not None and kept["dir"] is not None and kept["resume"]:
            lost = before.opening["run"]
            same_place = before.opening["federated"]["checkpoint"]["dir"] == kept["dir"]
            result.expect(  # a site follows the run of the level above
                name == lost or not same_place or lost not in saved or lost in adopting,
                f"run {lost} was not continued: a start from the same directory began run {name}",
            )
        if (last := newest.get(name)) is not None and kept["dir"] is not None:
            _expect_continued(result, last, opening, is_adopted=name in adopting)
        # A start that dies between the checkpoint and its note leaves the round to the next one's opening. That may
        # happen start after start, and each opening is as good as the note.
        newest[name] = opening
        for event in start.events:
            if event["event"] in ("committed", "adopted"):
                newest[name] = event
        if newest[name]["round"] > 0 or any(start.all("commanded")):
            saved.add(name)
        before = start


def _adopts(start: Start) -> bool:
    """Whether this is a start of a site, which adopts rounds of the level above and may skip some."""
    return start.opening.get("adopts") is True or any(start.all("adopted"))  # the former since 0.2.0


def _expect_continued(result: InvariantResult, last: Event, opening: Event, *, is_adopted: bool) -> None:
    """Compare a start with the last round that was known to be on the disk: at most one commit lies between them."""
    round_id, since = opening["round"], last["round"]
    known = f"a start went on from round {since}" if last["event"] == "started" else f"round {since} was committed"
    result.expect(
        round_id >= since and (round_id <= since + 1 or is_adopted),
        f"{known}, but the next start went on from round {round_id}",
    )
    result.expect(
        round_id != since or opening["crc32"] == last["crc32"],
        f"the model of round {since} is not the one that was committed",
    )


def _equal_ranks(run: RunHistory, result: InvariantResult) -> None:
    hashes: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, starts in run.ranks.items():
        for start in starts:
            for event in start.all("hash"):
                hashes[start.opening["run"], event["step"]][event["hash"]].append(rank)
    for (_, step), found in sorted(hashes.items()):
        if sum(map(len, found.values())) < 2:
            continue  # there was no other rank to compare it with
        values = ", ".join(f"ranks {sorted(set(ranks))} have {value}" for value, ranks in found.items())
        result.expect(len(found) == 1, f"step {step}: {values}")


def _flat(run: RunHistory, result: InvariantResult) -> None:
    work = _at_work(run)
    with_journal = {process for process, _ in work}
    for (process, pid), samples in sorted(_by_process(run).items()):
        # A rank that still waits for the others has a thread and a descriptor less than one at work, and 26 MiB of 513.
        # Where a machine takes 20 s to start them, the rest was compared with that. And to end takes some of each, too.
        never = inf if process in with_journal else -inf  # it was killed while it loaded its libraries
        began_s, over_s = work.get((process, pid), (never, inf))
        samples = _usually_linked(sample for sample in samples if began_s <= sample["at_s"] < over_s)
        for part in _between_pools(samples):
            _expect_flat(f"{process} (pid {pid})", part, result)


def _usually_linked(samples: Iterable[Event]) -> list[Event]:
    """Return the samples with as many links as most have, where the number is noted: a relay has descriptors for each,
    and fewer links while processes start again. A descriptor of a link that is closed is in none of these numbers."""
    samples = list(samples)
    usual = max(Counter(sample.get("links") for sample in samples).items(), key=itemgetter(1), default=(None, 0))[0]
    return [sample for sample in samples if sample.get("links") == usual]


def _between_pools(samples: Iterable[Event]) -> Iterator[list[Event]]:
    """Yield the samples of a process in parts: another one begins where a pool of threads starts.

    Libraries start a pool at its first use, and keep it: Zenoh's for accepting, with 3 descriptors and a thread, when
    the first TLS link breaks, however long the process has run. What that takes is taken once, so it is no leak; what
    each broken link takes grows after it as well.
    """
    known: set[str] = set()
    part: list[Event] = []
    for sample in samples:
        pools = set(sample.get("pools", ()))
        if not pools <= known and part:
            yield part
            part = []
        known |= pools
        part.append(sample)
    if part:
        yield part


def _expect_flat(process: str, samples: Sequence[Event], result: InvariantResult) -> None:
    """Compare the last third of samples with the first one, after a time in which they may grow."""
    warm_s = samples[0]["at_s"] + WARM_UP_S
    kept = [sample for sample in samples[int(len(samples) * WARM_UP) :] if sample["at_s"] >= warm_s]
    if len(kept) < MIN_SAMPLES:
        return
    third = len(kept) // 3
    first, last = kept[:third], kept[-third:]
    before, after = (median(sample["rss_bytes"] for sample in part) for part in (first, last))
    result.expect(
        after <= before * (1 + MAX_GROWTH),
        f"{process} grew from {before / 2**20:.1f} to {after / 2**20:.1f} MiB, {after / before - 1:+.1%}",
    )
    for what in ("fds", "threads"):
        # What leaks is never given back, so it is in the least, too. A median also has threads that end when they have
        # been idle for 10 s, and so shows what has just happened.
        before, after = (min(sample[what] for sample in part) for part in (first, last))
        # What some moment has taken before, a longer one may take now.
        most = max(before + MAX_MORE, *(sample[what] for sample in first))
        result.expect(after <= most, f"{process}: {what} grew from {before:g} to {after:g}, more than {most:g}")


def _at_work(run: RunHistory) -> dict[tuple[str, int], tuple[float, float]]:
    """From when to when each process was at work, by its name and pid, as far as its journal has it."""
    named = {"controller": run.controller}
    named |= {f"client-{number}": starts for number, starts in run.clients.items()}
    named |= {f"rank-{number}": starts for number, starts in run.ranks.items()}
    return {
        (process, start.opening["pid"]): (
            start.opening["at_s"],
            min((event["at_s"] for event in start.events if event["event"] in ("failed", "ended")), default=inf),
        )
        for process, starts in named.items()
        for start in starts
        if {"pid", "at_s"} <= start.opening.keys()
    }


def _by_process(run: RunHistory) -> dict[tuple[str, int], list[Event]]:
    found: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for sample in run.resources:
        found[sample["process"], sample["pid"]].append(sample)
    return found


def _as_sent(run: RunHistory, result: InvariantResult) -> None:
    sent = dict(_of_clients(run, "offered"))
    known = {client for client, starts in run.clients.items() if not any("ids" in start.opening for start in starts)}
    known.update(update.client for update in sent)  # the journal of a host is of several clients
    for start in run.controller:
        for event in start.all("counted"):
            if event["client"] in known:
                offer = sent.get(_counted_as(start, event))
                result.expect(
                    offer is not None and all(offer[name] == event[name] for name in ("crc32", "num_samples")),
                    f"what counted for client {event['client']} in round {event['round']} is not what it offered",
                )


def _answered(run: RunHistory, result: InvariantResult) -> None:
    """A client keeps or drops its residual by the answer to its update, so the answer must be true."""
    if not run.controller:
        return
    counted = _lasting(run)
    for update, event in _of_clients(run, "receipt"):
        result.expect(
            event["accepted"] or update not in counted,
            f"client {update.client} was told that its update of round {update.round} is refused, and it counts",
        )
    for update in _left_behind(run):
        result.expect(
            update not in counted,
            f"client {update.client} offered another update without an answer to that of round {update.round}, which "
            f"counts",
        )


class _Update(NamedTuple):
    """Identifies an update in the journals of all processes."""

    run: str
    round: int
    client: int
    incarnation: int
    transfer: int


def _counted_as(start: Start, event: Event) -> _Update:
    """Return the update of an event ``counted`` of a controller."""
    return _Update(start.opening["run"], event["round"], event["client"], event["incarnation"], event["transfer"])


def _of_clients(run: RunHistory, name: str) -> Iterator[tuple[_Update, Event]]:
    """Yield the events of this name of all clients, with the update of each."""
    for client, starts in run.clients.items():
        for start in starts:
            for event in start.all(name):
                yield _sent_as(client, start, event), event


def _sent_as(client: int, start: Start, event: Event) -> _Update:
    """Return the update of an event of a client, or of a host, whose events name the client."""
    incarnation = start.opening["incarnation"]
    return _Update(event["run"], event["round"], event.get("client", client), incarnation, event["transfer"])


def _lasting(run: RunHistory) -> set[_Update]:
    """Return the updates that count for good: of rounds that were committed, and of those that are open at the end. A
    round that a start has left open is done again by the next one."""
    updates: set[_Update] = set()
    next_opening: dict[str, int] = {}  # by run: the round that the start after it went on from
    for start in reversed(run.controller):
        name = start.opening["run"]
        committed = {event["round"] for event in start.all("committed")}
        until = next_opening.get(name, inf)
        updates.update(
            _counted_as(start, event)
            for event in start.all("counted")
            if event["round"] in committed or event["round"] <= until
        )
        next_opening[name] = start.opening["round"]
    return updates


def _left_behind(run: RunHistory) -> Iterator[_Update]:
    """Yield the updates whose client offered another one of the same session, and had no answer to the first."""
    for client, starts in run.clients.items():
        for start in starts:
            waiting: dict[int, _Update] = {}  # by client
            for event in start.events:
                if event["event"] == "welcomed":
                    waiting.clear()  # by a controller that knows nothing of them
                elif event["event"] in ("offered", "receipt"):
                    update = _sent_as(client, start, event)
                    before = waiting.pop(update.client, None)
                    if event["event"] == "offered":
                        waiting[update.client] = update
                        if before is not None:
                            yield before

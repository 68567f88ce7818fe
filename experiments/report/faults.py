"""The part of the report on a federated run that tells what did not go smoothly: drops, strikes, rounds tried again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradbus.actors.federated.quarantine import FOR_GOOD, Strike
from gradbus.actors.federated.report import RoundReport
from gradbus.actors.federated.rounds import Outcome
from gradbus.experiments.report.page import Section, Table, listed, thinned

MAX_ROWS = 60

REASONS = {
    "client lost": "died, or left, while its update was expected",
    "client silent": "lived and said nothing for too long outside of its training",
    "training failed": "its training function raised; see its log",
    "non-finite loss": "its training ended with a loss of NaN or infinity; its update was not sent",
    "non-finite model": "its training ended with NaN or infinity in the model; its update was not sent",
    "cut short": "died in the middle of an upload",
    "stalled": "sent nothing for ten seconds in the middle of an upload",
    "stale": "offered for a round that was not open any more",
    "unexpected": "offered by a client that counts already, or does not take part",
    "malformed": "bytes that no codec accepts",
    "non-finite": "NaN or infinity in the update",
    "oversized": "more bytes than this codec and model can need",
    "samples": "a number of samples out of range",
    "refused": "the strategy could not use it",
    "quarantine": "offered by a client that is kept out",
    "no room": "there was no memory for one more update; not its client's fault",
    "mismatch": "frames that do not fit their offer",
    "late frame": "came when no round was open",
    "unexpected frame": "belongs to no update that was granted",
    "repeated frame": "came twice; harmless",
    "crc": "damaged on the way",
    "handler failed": "a mistake of gradbus; the log has its traceback",
}
"""What the reasons in a report mean. Others explain themselves, or come from the wire: see docs/wire.md."""


def faults(reports: Sequence[RoundReport]) -> Section:
    """Updates and frames that did not count, and rounds that did not go smoothly."""
    counts: Counter[str] = Counter()
    rounds: dict[str, list[int]] = {}
    for report in reports:
        for reason, count in report.dropped.items():
            counts[reason] += count
            rounds.setdefault(reason, []).append(report.round_id)
    rows = [[reason, str(n), listed(rounds[reason]), REASONS.get(reason, "")] for reason, n in counts.most_common()]
    bumpy = [
        [str(r.round_id), f"{r.updates} of {r.expected}", str(r.attempt), r.outcome]
        for r in reports
        if r.attempt > 1 or r.updates < r.expected or r.outcome != Outcome.ALL.value
    ]
    shown, left_out = thinned(bumpy, MAX_ROWS)
    tables = []
    if rows:
        tables.append(
            Table(name="dropped", title="Not counted, by reason", head=("reason", "times", "in round", "meaning"),
                  rows=rows, numbers=None)
        )  # fmt: skip
    if bumpy:
        tables.append(
            Table(
                name="bumpy", title="Rounds that some client missed, or that were tried again",
                head=("round", "clients", "attempts", "ended by"), rows=shown, numbers=None,
                caption=f"{left_out} rounds are left out." if left_out else "",
            )
        )  # fmt: skip
    if (strikes := strikes_table(reports)) is not None:
        tables.append(strikes)
    if (marks := marks_table(reports)) is not None:
        tables.append(marks)
    text = "" if tables or not reports else "Every update that was expected counted, in the first attempt."
    nothing = Table(name="dropped", head=(), rows=(), caption=text)
    return Section(title="Drops and faults", tables=tables or ([nothing] if reports else []))


def strikes_table(reports: Sequence[RoundReport]) -> Table | None:
    """Bad updates, a row for each client. None: there were none."""
    of_client: dict[int, list[Strike]] = {}
    for report in reports:
        for strike in report.strikes:
            of_client.setdefault(strike.client_id, []).append(strike)
    if not of_client:
        return None
    rows = [
        [str(client_id), str(len(found)), listed([s.round_id for s in found]), found[-1].reason, found[-1].detail,
         listed_outs(found)]
        for client_id, found in sorted(of_client.items())
    ]  # fmt: skip
    shown, left_out = thinned(rows, MAX_ROWS)
    return Table(
        name="strikes", title="Clients with bad updates", rows=shown, numbers=None,
        head=("client", "strikes", "in round", "the last", "what was wrong", "kept out"),
        caption=f"{left_out} clients are left out." if left_out else "",
    )  # fmt: skip


def listed_outs(strikes: Sequence[Strike]) -> str:
    """For which rounds a client was kept out."""
    spans = [
        f"from {s.round_id + 1} on" if s.out_until == FOR_GOOD else f"{s.round_id + 1} to {s.out_until - 1}"
        for s in strikes
        if s.out_until
    ]
    return ", ".join(spans) or "no"


def marks_table(reports: Sequence[RoundReport]) -> Table | None:
    """What the strategy did to updates, by client. None: it took all as they were."""
    counts: dict[str, Counter[int]] = {}
    for report in reports:
        for mark, marked in report.marks.items():
            counts.setdefault(mark, Counter()).update(marked)
    clients = sorted({client for found in counts.values() for client in found})
    if not clients:
        return None
    rows = [[str(client), *(str(found[client]) for found in counts.values())] for client in clients]
    shown, left_out = thinned(rows, MAX_ROWS)
    return Table(
        name="marks", title="Updates that did not count as they were, in how many rounds", rows=shown, numbers=None,
        head=("client", *counts), caption=f"{left_out} clients are left out." if left_out else "",
    )  # fmt: skip

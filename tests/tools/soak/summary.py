"""What a soak has come to: the invariants, how long everybody took to come back, and what the processes took."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gradbus.commands.history.invariants import InvariantResult, check, table_of
from gradbus.commands.history.reader import Event, RunHistory, Start, read_history
from soak.nemesis import PARTITIONS

LIMITS = {
    "gap of the others when a client is killed": 1.0,
    "client: from its new start to an update": 5.0,
    "client: from the mended link to an update": 5.0,
    "controller: from its new start to a command": 10.0,
    "ranks: from the death of one to the knowledge of all": 2.0,
}
_LONG_S = 15.0  # longer than any of the limits
_MINUTES_FOR_I6 = 2.0  # in which some process can be watched for long enough


def _times(starts: Iterable[Start], name: str) -> list[float]:
    return sorted(
        event["at_s"] for start in starts for event in (start.opening, *start.events) if event["event"] == name
    )


def _after(times: list[float], at_s: float, until_s: float) -> float | None:
    """From ``at_s`` to the next of these times, or to ``until_s``, when there was none: then it took longer than that.
    None: there was none, but there was little time for it, too."""
    later = [time_s - at_s for time_s in times if at_s <= time_s <= until_s]
    return min(later, default=None if until_s - at_s < _LONG_S else until_s - at_s)


def _away(controller: list[Start]) -> list[tuple[float, float]]:
    """Return from when to when no controller ran."""
    ends = (max(event["at_s"] for event in (start.opening, *start.events)) for start in controller)
    return [(gone_s, start.opening["at_s"]) for gone_s, start in zip(ends, controller[1:], strict=False)]


def _runs(starts: list[Start], at_s: float) -> bool:
    """Whether this rank was at it then: it had started, and had neither failed nor ended."""
    before = [start for start in starts if start.opening["at_s"] < at_s]
    over = _times(before[-1:], "failed") + _times(before[-1:], "ended")
    return bool(before) and not any(time_s < at_s for time_s in over)


def recoveries(run: RunHistory, ranks: RunHistory | None, faults: list[Event]) -> dict[str, list[float]]:  # noqa: C901 - one case for each kind of event
    """Seconds, by what was waited for, one for each fault. Who has not come back counts with the time that there was,
    if that was long enough. Time in which no controller ran is not the clients'."""
    found: dict[str, list[float]] = {name: [] for name in LIMITS}
    away = _away(run.controller)

    def update_after(starts: list[Start], at_s: float, until_s: float) -> float | None:
        seconds = _after(_times(starts, "offered"), at_s, until_s)
        if seconds is None:
            return None
        over_s = at_s + seconds
        return seconds - sum(max(0.0, min(over_s, back_s) - max(at_s, gone_s)) for gone_s, back_s in away)

    def add(name: str, seconds: float | None) -> None:
        if seconds is not None:
            found[name].append(seconds)

    commits, commands = _times(run.controller, "committed"), _times(run.controller, "commanded")
    usual_s = statistics.median(b - a for a, b in itertools.pairwise(commits)) if len(commits) > 1 else 0.0
    everything = [event["at_s"] for event in faults] + [event["at_s"] for event in run.resources]
    end_s = max([*everything, *commits, *commands], default=0.0)
    for fault in faults:
        kind, at_s, begins = fault["kind"], fault["at_s"], fault["event"] == "begins"
        if kind in ("kill client", "sick client") and begins:
            gap = _after(commits, at_s, end_s)
            add("gap of the others when a client is killed", None if gap is None else max(0.0, gap - usual_s))
        elif kind in PARTITIONS and not begins:
            for starts in run.clients.values():
                offers = _times(starts, "offered")
                before = [time_s for time_s in offers if time_s < at_s]
                if before and at_s - before[-1] > 1.5:  # it was cut off
                    add("client: from the mended link to an update", update_after(starts, at_s, end_s))
        elif kind == "kill rank" and begins and ranks is not None:
            others = [starts for rank, starts in ranks.ranks.items() if f"rank-{rank}" != fault["target"]]
            if all(_runs(starts, at_s) for starts in ranks.ranks.values()):  # else there was no run to die in
                for starts in others:
                    add(
                        "ranks: from the death of one to the knowledge of all",
                        _after(_times(starts, "failed"), at_s, end_s),
                    )
    for starts in run.clients.values():
        for start, over_s in _with_end(starts, end_s):
            add("client: from its new start to an update", update_after([start], start.opening["at_s"], over_s))
    for start, over_s in _with_end(run.controller, end_s):
        add("controller: from its new start to a command", _after(commands, start.opening["at_s"], over_s))
    return found


def _with_end(starts: list[Start], end_s: float) -> Iterator[tuple[Start, float]]:
    """All but the first start, and when it was over for each."""
    for number, start in enumerate(starts[1:], start=2):
        yield start, starts[number].opening["at_s"] if number < len(starts) else end_s


def _worst(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {"count": len(ordered), "median_s": statistics.median(ordered), "p99_s": p99, "worst_s": ordered[-1]}


def summarise(path: Path, *, minutes: float, seed: int) -> dict[str, Any]:
    """Everything as JSON; ``ok`` says whether all invariants were checked and hold, and nothing was slower than it may
    be."""
    run = read_history(path / "federated")
    ranks = read_history(path / "parallel") if (path / "parallel" / "history").is_dir() else None
    faults = [json.loads(line) for line in (path / "nemesis.jsonl").read_text(encoding="utf-8").splitlines()]
    if ranks is not None:
        run.ranks = ranks.ranks  # whose parameters are compared, and whose samples are in the other history
    findings = check(run)
    commits = _times(run.controller, "committed")
    measured = {name: _worst(found) for name, found in recoveries(run, ranks, faults).items() if found}
    struck: dict[str, int] = {}
    for fault in faults:
        if fault["event"] == "begins":
            struck[fault["kind"]] = struck.get(fault["kind"], 0) + 1
    late = [name for name, worst in measured.items() if worst["p99_s"] > LIMITS[name]]
    broken = [finding.name for finding in findings if finding.violations]
    needs = {"I4": "kill controller" in struck, "I5": ranks is not None, "I6": minutes >= _MINUTES_FOR_I6}
    unseen = [finding.name for finding in findings if not finding.checked and needs.get(finding.name, True)]
    steps = [
        event["step"] for starts in (ranks.ranks if ranks else {}).values() for s in starts for event in s.all("hash")
    ]
    return {
        "ok": not broken and not late and not unseen,
        "minutes": minutes,
        "seed": seed,
        "faults": struck,
        "rounds": len(commits),
        "rounds_lost": _count(findings, "I4"),
        "counted_twice": _count(findings, "I1"),
        "hash_mismatches": sum(_count(findings, name) for name in ("I2", "I3", "I5", "I7")),
        "longest_wait_for_a_round_s": max((b - a for a, b in itertools.pairwise(commits)), default=None),
        "steps": max(steps, default=0),
        "starts": {
            "controller": len(run.controller),
            "clients": sum(map(len, run.clients.values())),
            "ranks": sum(map(len, ranks.ranks.values())) if ranks else 0,
        },
        "recoveries": measured,
        "limits": LIMITS,
        "too_slow": late,
        "nothing_to_check": unseen,
        "invariants": {f.name: {"compared": f.checked, "violations": f.violations[:20]} for f in findings},
    }


def _count(findings: list[InvariantResult], name: str) -> int:
    return sum(len(finding.violations) for finding in findings if finding.name == name)


def page(summary: dict[str, Any]) -> str:
    """One page for people."""
    verdict = "all well" if summary["ok"] else "NOT WELL"
    waited_s = summary["longest_wait_for_a_round_s"] or 0.0
    lines = [
        f"soak for {summary['minutes']:g} min, seed {summary['seed']}: {verdict}",
        "",
        "faults      " + ", ".join(f"{count} x {kind}" for kind, count in sorted(summary["faults"].items())),
        f"rounds      {summary['rounds']} committed, {summary['rounds_lost']} lost, "
        f"{summary['counted_twice']} updates counted twice, {summary['hash_mismatches']} mismatches; longest wait "
        f"{waited_s:.1f} s",
        f"steps       {summary['steps']} of the data-parallel run",
        f"starts      {summary['starts']}",
        "",
    ]  # fmt: skip
    found = summary["invariants"].items()
    lines += table_of(InvariantResult(name, result["compared"], result["violations"]) for name, result in found)
    lines.append("")
    for name, worst in summary["recoveries"].items():
        late = "" if worst["p99_s"] <= summary["limits"][name] else "  TOO SLOW"
        lines.append(
            f"{name:<54} median {worst['median_s']:6.2f} s, worst {worst['worst_s']:6.2f} s of {worst['count']:>3}, "
            f"at most {summary['limits'][name]:g} s{late}"
        )
    return "\n".join(lines) + "\n"

"""Whether a ratio got worse than a stored one by more than the spread of both. Times are shown and never judged."""

from __future__ import annotations

from dataclasses import dataclass

from gradbus.experiments.bench.results import Measurement, PartRun, Results, Summary, summary

_NOISE = 1e-6  # samples are rounded in the file


@dataclass(frozen=True, slots=True)
class Change:
    """One figure, then and now. ``before`` or ``now`` is None where the figure is missing there.

    Attributes:
        against: of what the ratio is; "" where there is none, and then nothing is judged.
        allowed: by how much the median may be above that of before: both interquartile ranges together. Beyond that
            the middle halves of the samples do not touch.
        worse: it is above that, or missing although its part was measured.
    """

    name: str
    unit: str
    against: str
    before: Summary | None
    now: Summary | None
    allowed: float = 0.0
    worse: bool = False


def compare(baseline: Results, now: Results) -> list[Change]:
    """All figures of the parts that both have."""
    changes: list[Change] = []
    for run in now.runs:
        stored = baseline.run(run.part)
        if stored is None:
            continue
        before = {one.name: one for one in stored.figures}
        after = {one.name: one for one in run.figures}
        changes += [_change(before.get(name), after.get(name)) for name in before | after]
    return changes


def known_figures(*runs: PartRun | None) -> set[str]:
    """Names of the figures that one of these has."""
    return {one.name for run in runs if run is not None for one in run.figures}


def _change(before: Measurement | None, now: Measurement | None) -> Change:
    one = now or before
    assert one is not None
    judged = [it for it in (before, now) if it is not None and it.against is not None]
    then, today = (_of(it, bool(judged)) for it in (before, now))
    against = judged[0].against.name if judged and judged[0].against else ""
    change = Change(one.name, f"x {against}" if against else one.unit, against, then, today)
    if not judged or then is None:
        return change
    if today is None:
        return Change(one.name, change.unit, against, then, None, 0.0, True)
    allowed = then.spread + today.spread + _NOISE * abs(then.median)
    return Change(one.name, change.unit, against, then, today, allowed, today.median - then.median > allowed)


def _of(one: Measurement | None, judged: bool) -> Summary | None:
    if one is None or (judged and one.against is None):
        return None
    return summary(one.ratios) if judged else one.summary


def other_machine(baseline: Results, now: Results) -> list[str]:
    """The differences of machines and versions, in words: ratios depend on them, too."""
    found = []
    for run in now.runs:
        stored = baseline.run(run.part)
        if stored is None:
            continue
        for before, after in ((stored.machine, run.machine), (stored.versions, run.versions)):
            found += [
                f"{key}: {before[key]} then, {after[key]} now"
                for key in before.keys() & after.keys()
                if key not in ("load_1min", "gradbus") and before[key] != after[key]
            ]
    return sorted(set(found))


def text_of(change: Change) -> str:
    """One line about a change: the figure, both values, and the spread."""
    if change.now is None:
        return f"{change.name}: was {_value(change.before, change.unit)}, and was not measured now"
    if change.before is None:
        return f"{change.name}: {_value(change.now, change.unit)}, new"
    line = f"{change.name}: {_value(change.before, change.unit)} then, {_value(change.now, change.unit)} now"
    return f"{line}; may be {change.allowed:.3g} more" if change.against else line


def _value(one: Summary | None, unit: str) -> str:
    return "nothing" if one is None else f"{one.median:.3g} {unit} ({one.low:.3g} .. {one.high:.3g})"

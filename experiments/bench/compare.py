"""Whether a ratio got worse than an earlier one by more than the spread of both. Times are shown and never judged."""

from __future__ import annotations

from dataclasses import dataclass

from gradbus.experiments.bench.results import Measurement, Results, Summary, summary

_NOISE = 1e-6  # samples are rounded in the file


@dataclass(frozen=True, slots=True)
class Change:
    """One figure, then and now. ``before`` or ``now`` is None where the figure is missing there.

    Attributes:
        judged: whether it is a ratio.
        allowed: by how much the median may be above that of before: both interquartile ranges together. Beyond that
            the middle halves of the samples do not touch.
        worse: it is above that, or missing although its part was measured.
        pace: samples of now by those of before, where both were measured by turns.
    """

    part: str
    name: str
    unit: str
    before: Summary | None
    now: Summary | None
    judged: bool = False
    allowed: float = 0.0
    worse: bool = False
    pace: Summary | None = None

    def __str__(self) -> str:
        """One line: the figure, both values, and the spread."""
        if self.now is None:
            return f"{self.name}: was {self._value(self.before)}, and was not measured now"
        if self.before is None:
            return f"{self.name}: {self._value(self.now)}, new"
        line = f"{self.name}: {self._value(self.before)} then, {self._value(self.now)} now"
        if self.judged:
            line += f"; may be {self.allowed:.3g} more"
        if self.pace:
            line += f"; now / then {self.pace.median:.3g} ({self.pace.low:.3g} .. {self.pace.high:.3g})"
        return line

    def _value(self, one: Summary | None) -> str:
        return "nothing" if one is None else f"{one.median:.3g} {self.unit} ({one.low:.3g} .. {one.high:.3g})"


def compare(baseline: Results, now: Results, *, by_turns: bool = False) -> list[Change]:
    """All figures of the parts that both have. ``by_turns``: both were measured by turns on one machine."""
    changes = []
    for run in now.runs:
        stored = baseline.run(run.part)
        if stored is not None:
            before = {one.name: one for one in stored.figures}
            after = {one.name: one for one in run.figures}
            for name in after if by_turns else ():  # earlier commits knew one way for rounds, and did not name it
                unnamed = name.removesuffix(", one host")
                if name not in before and unnamed in before:
                    before[name] = before.pop(unnamed)
            changes += [_change(run.part, before.get(name), after.get(name), by_turns) for name in before | after]
    return changes


def _change(part: str, before: Measurement | None, now: Measurement | None, by_turns: bool) -> Change:
    known = [it for it in (now, before) if it is not None]
    against = next((it.against.name for it in known if it.against is not None), "")
    then, today = (_of(it, bool(against)) for it in (before, now))
    unit = f"x {against}" if against else known[0].unit
    allowed, worse, pace = 0.0, False, None
    if then is not None and today is not None:
        allowed = then.spread + today.spread + _NOISE * abs(then.median)
        worse = bool(against) and today.median - then.median > allowed
    elif then is not None:
        worse = bool(against) and not by_turns  # another commit may have other figures
    if by_turns and before and now and len(before.samples) == len(now.samples) and min(before.samples) > 0:
        pace = summary([b / a for a, b in zip(before.samples, now.samples, strict=True)])
    return Change(part, known[0].name, unit, then, today, bool(against), allowed, worse, pace)


def _of(one: Measurement | None, judged: bool) -> Summary | None:
    if one is None or (judged and one.against is None):
        return None
    return summary(one.ratios) if judged else one.summary


def other_machine(baseline: Results, now: Results) -> list[str]:
    """The differences of machines and versions, in words: ratios depend on them, too."""
    found = set()
    for run in now.runs:
        stored = baseline.run(run.part)
        if stored is not None:
            before, after = stored.machine | stored.versions, run.machine | run.versions
            found |= {
                f"{key}: {before[key]} then, {after[key]} now"
                for key in before.keys() & after.keys() - {"load_1min", "gradbus"}
                if before[key] != after[key]
            }
    return sorted(found)

"""What a profile comes to: windows of steps, totals, and the lines of the JSONL file that holds them.

Amounts are kept by name: seconds of a span under its name with ``_s`` behind it (``compute_s``), counters under their
own (``bytes_out``), and two more for each step: ``step_s``, all of it, and ``other_s``, what no span accounts for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from gradbus.runtime.json_text import lines_of, parse_json
from gradbus.runtime.logs import get_logger
from gradbus.runtime.private_folder import make_private

FORMAT = 1

Amounts = dict[str, float]

log = get_logger("profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStats:
    """Consecutive steps, summed up.

    Attributes:
        first_step, last_step: both included. steps: how many were measured.
        mean: per step, by name; a step without that span or counter counts as 0. Seconds (``_s``), or as counted.
        max: of a single step.
    """

    first_step: int
    last_step: int
    steps: int
    mean: Amounts
    max: Amounts

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "mean": plain(self.mean), "max": plain(self.max)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """All steps of one rank, summed up.

    Attributes:
        steps: that were measured. failed_steps: ended with an error; they are in no mean.
        first_step, last_step: None before the first step.
        mean, max: per step, as in :class:`WindowStats`. total: sums over all steps.
        outside: sums of what was measured between steps, as evaluation and checkpoints are.
        dropped_events: that the trace had no room for any more.
        windows: the newest ones, oldest first.
    """

    rank: int
    steps: int = 0
    failed_steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    mean: Amounts = field(default_factory=dict)
    max: Amounts = field(default_factory=dict)
    total: Amounts = field(default_factory=dict)
    outside: Amounts = field(default_factory=dict)
    dropped_events: int = 0
    windows: tuple[WindowStats, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, without the windows."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "windows"}
        return {name: plain(value) if isinstance(value, dict) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse; keys that are not known are left out. Raises LookupError, TypeError...: it is not one."""
        known: dict[str, Any] = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        known.pop("windows", None)
        for name in ("rank", "steps", "failed_steps", "first_step", "last_step", "dropped_events"):
            if known.get(name) is not None:
                known[name] = _whole(known[name])
        return cls(**known | {name: _from_plain(values[name]) for name in ("mean", "max", "total", "outside")})


@dataclass(slots=True)
class Tally:
    """Sums and maxima over some steps."""

    steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    sums: Amounts = field(default_factory=dict)
    maxima: Amounts = field(default_factory=dict)

    def add_step(self, step: int, amounts: Amounts) -> None:
        """One more step."""
        self.steps += 1
        self.first_step = step if self.first_step is None else self.first_step
        self.last_step = step
        sums, maxima = self.sums, self.maxima
        for name, amount in amounts.items():
            if name in sums:
                sums[name] += amount
                if amount > maxima[name]:
                    maxima[name] = amount
            else:
                sums[name] = maxima[name] = amount

    def add(self, other: Tally) -> None:
        """Steps that came later."""
        self.steps += other.steps
        self.first_step = other.first_step if self.first_step is None else self.first_step
        self.last_step = self.last_step if other.last_step is None else other.last_step
        add_amounts(self.sums, other.sums)
        for name, amount in other.maxima.items():
            self.maxima[name] = max(amount, self.maxima.get(name, amount))

    @property
    def mean(self) -> Amounts:
        """Per step."""
        return {name: amount / self.steps for name, amount in self.sums.items()} if self.steps else {}

    def window(self) -> WindowStats:
        """As it is reported. There must have been a step."""
        if self.first_step is None or self.last_step is None:
            raise ValueError("a window without a step has no numbers")
        return WindowStats(
            first_step=self.first_step,
            last_step=self.last_step,
            steps=self.steps,
            mean=self.mean,
            max=dict(self.maxima),
        )

    @classmethod
    def of(cls, window: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`WindowStats.to_json`, to rounding. Raises LookupError, TypeError...: it is not one."""
        steps = _whole(window["steps"])
        sums = {name: amount * steps for name, amount in _from_plain(window["mean"]).items()}
        return cls(steps, _whole(window["first_step"]), _whole(window["last_step"]), sums, _from_plain(window["max"]))


def _whole(value: Any) -> int:
    """A count or a number of a step, as any program can hold it."""
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError("a number out of range")
    return number


def add_amounts(to: Amounts, more: Amounts) -> None:
    """Add ``more`` to ``to``, name by name."""
    for name, amount in more.items():
        to[name] = to.get(name, 0.0) + amount


def plain(amounts: Amounts) -> dict[str, float | int | None]:
    """For JSON: seconds to 0.1 us, whole numbers as such; NaN and infinity, which JSON does not have, as null."""
    return {name: _plain(name, amount) for name, amount in amounts.items()}


def _plain(name: str, amount: float) -> float | int | None:
    if not math.isfinite(amount):
        return None
    if name.endswith("_s"):
        return round(amount, 7)
    return int(amount) if amount.is_integer() else round(amount, 3)


def _from_plain(values: Mapping[str, float | None]) -> Amounts:
    return {name: math.nan if amount is None else float(amount) for name, amount in values.items()}


class LineFile:
    """A JSONL file that is only ever appended to. What cannot be written is dropped: training does not stop for it."""

    def __init__(self, path: Path) -> None:
        """``path`` and its folder are made with the first lines."""
        self.path = path
        self._has_failed = False
        self._may_be_cut = True  # a process before this one, or a full disk, may have left half a line

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write them at once. The first failure is logged, later calls try again."""
        data = b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)
        try:
            make_private(self.path.parent)
            # Unbuffered: bytes that a full disk refuses must not wait in a buffer, for close() to fail on them.
            with open(self.path, "a+b", buffering=0) as file:
                if self._may_be_cut and file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    data = data if file.read(1) == b"\n" else b"\n" + data
                self._may_be_cut = True
                while data:
                    data = data[file.write(data) :]
                self._may_be_cut = False
        except OSError as error:
            if not self._has_failed:
                log.warning("profile not written", path=str(self.path), error=error.strerror)
            self._has_failed = True


def read_summary(path: Path) -> ProfileSummary | None:
    """The newest run in a JSONL file. Of one that did not come to its end: its windows, added up.

    Lines that cannot be read (cut off by a crash) are left out. None: nothing of a run is there.

    Raises:
        OSError: the file cannot be read.
    """
    rank, tally, summary = None, Tally(), None
    for text in lines_of(path):
        try:
            line = parse_json(text)
            match line["kind"]:
                case "start":
                    rank, tally, summary = _whole(line["rank"]), Tally(), None
                case "window":
                    rank = _whole(line["rank"])
                    tally.add(Tally.of(line))
                case "summary":
                    summary = ProfileSummary.from_json(line)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue
    if summary is not None or rank is None:
        return summary
    return ProfileSummary(
        rank=rank, steps=tally.steps, first_step=tally.first_step, last_step=tally.last_step, mean=tally.mean,
        max=tally.maxima, total=tally.sums,
    )  # fmt: skip

"""What a profile comes to: windows of steps, totals, and the lines of the JSONL file that holds them.

Amounts are kept by name: seconds of a span under its name with ``_s`` behind it (``compute_s``), counters under their
own (``bytes_out``), and two more for each step: ``step_s``, all of it, and ``other_s``, what no span accounts for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter

from gradbus.runtime.foreign_files import lines_inside, open_to_append
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.logs import get_logger
from gradbus.runtime.private_folder import make_private

FORMAT = 1
BYTES = ("bytes_out", "bytes_in")
"""Counters of payload that was sent and received, see :mod:`gradbus.runtime.traffic`."""
MAX_PROFILE_BYTES = 256 << 20  # of one rank, that are read
MAX_PROFILE_LINES = 500_000  # the same
MAX_BAD_LINES = 1000  # behind so many that are none of a profile it is not read

log = get_logger("profile")


def plain(amounts: Mapping[str, float]) -> dict[str, float | int | None]:
    """For JSON: seconds to 0.1 us, whole numbers as such; NaN and infinity, which JSON does not have, as null."""
    return {name: _plain(name, amount) for name, amount in amounts.items()}


def _plain(name: str, amount: float) -> float | int | None:
    if not math.isfinite(amount):
        return None
    if name.endswith("_s"):
        return round(amount, 7)
    return int(amount) if amount.is_integer() else round(amount, 3)


def _from_plain(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {name: math.nan if amount is None else amount for name, amount in values.items()}


Amounts = Annotated[dict[str, float], BeforeValidator(_from_plain), PlainSerializer(plain)]
Whole = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A count or the number of a step, as any program can hold it."""
_RANK: TypeAdapter[int] = TypeAdapter(Whole)
_AMOUNTS: TypeAdapter[dict[str, float]] = TypeAdapter(Amounts)


class WindowStats(BaseModel):
    """Consecutive steps, summed up.

    Attributes:
        first_step, last_step: both included. steps: how many were measured.
        mean: per step, by name; a step without that span or counter counts as 0. Seconds (``_s``), or as counted.
        max: of a single step. total: of all steps of the window; empty in files that versions before 0.2 wrote.
    """

    model_config = ConfigDict(frozen=True)

    first_step: Whole
    last_step: Whole
    steps: Whole
    mean: Amounts
    max: Amounts
    total: Amounts = Field(default_factory=dict)

    def headline(self) -> dict[str, float | int | None]:
        """Return the numbers of a line of a log: steps, the mean and longest step and wait in seconds, and all bytes
        that the window's steps sent and received."""
        chosen = {"first_step": self.first_step, "last_step": self.last_step}
        times = {
            f"{name}_{kind}": of.get(name, 0.0)
            for name in ("step_s", "wait_s")
            for kind, of in (("mean", self.mean), ("max", self.max))
        }
        return {
            **chosen,
            **{name: round(amount, 6) if math.isfinite(amount) else None for name, amount in times.items()},
            **plain({name: self.total.get(name, 0.0) for name in ("bytes_out", "bytes_in")}),
        }

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return self.model_dump()


class ProfileSummary(BaseModel):
    """All steps of one rank, summed up.

    Attributes:
        rank: -1 for all ranks together.
        steps: that were measured. failed_steps: ended with an error; they are in no mean.
        first_step, last_step: None before the first step.
        mean, max: per step, as in :class:`WindowStats`. total: sums over all steps.
        outside: sums of what was measured between steps, as evaluation and checkpoints are, and the bytes of failed
            steps.
        earlier: bytes of earlier starts of the run by the same process, as far as its file has them.
        dropped_events: that the trace had no room for any more.
        windows: the newest ones, oldest first. They are not in the JSON object.
    """

    model_config = ConfigDict(frozen=True)

    rank: Annotated[int, Field(ge=-1, lt=1 << 63)]
    steps: Whole = 0
    failed_steps: Whole = 0
    first_step: Whole | None = None
    last_step: Whole | None = None
    mean: Amounts = Field(default_factory=dict)
    max: Amounts = Field(default_factory=dict)
    total: Amounts = Field(default_factory=dict)
    outside: Amounts = Field(default_factory=dict)
    earlier: Amounts = Field(default_factory=dict)
    dropped_events: Whole = 0
    windows: Annotated[tuple[WindowStats, ...], Field(exclude=True)] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, without the windows."""
        return self.model_dump()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse; keys that are not known are left out. Raises ValueError: it is not one."""
        return cls.model_validate({name: value for name, value in values.items() if name != "windows"})


@dataclass(slots=True)
class Tally:
    """Sums and maxima over some steps."""

    steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, later: Tally) -> None:
        """Steps that came later."""
        self.steps += later.steps
        self.first_step = later.first_step if self.first_step is None else self.first_step
        self.last_step = self.last_step if later.last_step is None else later.last_step
        add_amounts(self.sums, later.sums)
        for name, amount in later.maxima.items():
            self.maxima[name] = max(amount, self.maxima.get(name, amount))

    @property
    def mean(self) -> dict[str, float]:
        """Per step."""
        return {name: amount / self.steps for name, amount in self.sums.items()} if self.steps else {}

    def window(self) -> WindowStats:
        """As it is reported. Raises ValueError: there was no step."""
        return WindowStats.model_validate(
            {
                "first_step": self.first_step,
                "last_step": self.last_step,
                "steps": self.steps,
                "mean": self.mean,
                "max": self.maxima,
                "total": self.sums,
            }
        )

    @classmethod
    def of(cls, window: WindowStats) -> Self:
        """Return the steps of a window; without its totals to rounding."""
        sums = {name: amount * window.steps for name, amount in window.mean.items()} | window.total
        return cls(window.steps, window.first_step, window.last_step, sums, dict(window.max))


def add_amounts(to: dict[str, float], more: Mapping[str, float]) -> None:
    """Add ``more`` to ``to``, name by name."""
    for name, amount in more.items():
        to[name] = to.get(name, 0.0) + amount


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
            with os.fdopen(open_to_append(self.path), "a+b", buffering=0) as file:
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


@dataclass(slots=True)
class _Start:
    """What a file has of one start of a process. ``run``: the identity of its run; None: an earlier version of gradbus
    has not written it."""

    rank: int | None = None
    run: str | None = None
    tally: Tally = field(default_factory=Tally)
    outside: dict[str, float] = field(default_factory=dict)
    summary: ProfileSummary | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line. Raises ValueError, KeyError, TypeError: it is none of a profile."""
        match line["kind"]:
            case "start":
                run = line.get("run")
                self.rank, self.run = _RANK.validate_python(line["rank"]), None if run is None else str(run)
            case "window":
                self.rank = _RANK.validate_python(line["rank"])
                self.tally.add(Tally.of(WindowStats.model_validate(line)))
                self.outside = _AMOUNTS.validate_python(line.get("outside", {}))
            case "summary":
                self.summary = ProfileSummary.from_json(line)

    def result(self) -> ProfileSummary | None:
        """Return its summary; where it did not come to its end, that of its windows. None: nothing of it is there."""
        if self.summary is not None or self.rank is None:
            return self.summary
        tally = self.tally
        return ProfileSummary(
            rank=self.rank,
            steps=tally.steps,
            first_step=tally.first_step,
            last_step=tally.last_step,
            mean=tally.mean,
            max=tally.maxima,
            total=tally.sums,
            outside=self.outside,
        )


def _starts(path: Path) -> Iterator[_Start]:
    """Yield what a JSONL file has of each start. Lines that cannot be read (cut off by a crash) are left out. Raises
    OSError: the file cannot be read."""
    start, bad = _Start(), 0
    for text in lines_inside(path.parent, path.name, max_bytes=MAX_PROFILE_BYTES, max_lines=MAX_PROFILE_LINES):
        try:
            line = parse_json(text)
            if line["kind"] == "start":
                following = _Start()
                following.add(line)  # one that cannot be read ends nothing
                yield start
                start = following
            else:
                start.add(line)
        except (ValueError, KeyError, TypeError):
            bad += 1
            if bad > MAX_BAD_LINES:
                break
    yield start


def read_summary(path: Path) -> ProfileSummary | None:
    """Read the newest start in a JSONL file. Of one that did not come to its end: its windows, added up.

    Lines that cannot be read (cut off by a crash) are left out. None: nothing of a run is there.

    Raises:
        OSError: the file cannot be read.
    """
    newest = None
    for start in _starts(path):
        newest = start.result()
    return newest


def read_exchanged(path: Path, run: str) -> dict[str, int]:
    """Add up the bytes of all starts of a run in a JSONL file, by the names :data:`BYTES`.

    A start that was killed counts as far as its last window. Starts of which the file does not tell the run, as of an
    earlier version, count too: a run directory is of one run.

    Raises:
        OSError: the file cannot be read.
    """
    found = dict.fromkeys(BYTES, 0)
    for start in _starts(path):
        summary = start.result() if start.run in (None, run) else None
        if summary is None:
            continue
        for name in BYTES:
            amount = summary.total.get(name, 0.0) + summary.outside.get(name, 0.0)
            if 0 <= amount < 1 << 62:  # else damaged, or forged
                found[name] += round(amount)
    return found

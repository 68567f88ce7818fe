"""What a benchmark yields, and the file of it: samples with their limits, commit, machine and versions."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from gradbus.commands.rundir import versions
from gradbus.runtime.errors import ConfigError

Number = Annotated[float, Field(allow_inf_nan=False)]
_VERSIONS = ("gradbus", "python", "torch", "cyclonedds", "numpy", "uvloop")
_DIGITS = 5  # of a sample in the file: no clock here is better than that


def _rounded(samples: Iterable[float]) -> tuple[float, ...]:
    return tuple(sample if sample.is_integer() else float(f"{sample:.{_DIGITS}g}") for sample in samples)


Samples = Annotated[tuple[Number, ...], Field(min_length=1), AfterValidator(_rounded)]


class Summary(NamedTuple):
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @property
    def spread(self) -> float:
        """The interquartile range, the middle half of the samples."""
        return self.high - self.low


def summary(samples: Sequence[float]) -> Summary:
    """Quartiles by linear interpolation, with the least and the greatest sample at 0 and 100 %."""
    if len(samples) == 1:
        return Summary(samples[0], samples[0], samples[0])
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return Summary(low, median(samples), high)


class Record(BaseModel):
    """Base: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Against(Record):
    """The reference of a figure, measured in the same run, block by block. ``samples``: in the figure's unit."""

    name: str
    samples: Samples


class Measurement(Record):
    """One thing that was measured. Less is better.

    Attributes:
        name: what was measured and at which size; it is unique in a run: it is how runs are compared.
        unit: of the samples. samples: one for each block, as a rule the median of the block's calls.
        against: with it the figure has a ratio, which counts across machines; without, it is only shown.
        note: how it was measured, where the name does not tell.
        series: the line of which it is a point, and ``at``: its place on that line. Of them growth is made.
        at_most, at_least: limits of the median of the ratios, or of the samples if there is no reference.
    """

    name: str
    unit: str
    samples: Samples
    against: Against | None = None
    note: str = ""
    series: str = ""
    at: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    at_most: Number | None = None
    at_least: Number | None = None

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if self.against is not None:
            if len(self.against.samples) != len(self.samples):
                raise ValueError(
                    f"{self.name!r}: {len(self.samples)} samples, {len(self.against.samples)} of {self.against.name!r}"
                )
            if min(self.against.samples) <= 0:
                raise ValueError(f"{self.name!r}: a sample of {self.against.name!r} is not above 0")
        return self

    @property
    def summary(self) -> Summary:
        """Median and quartiles of the samples."""
        return summary(self.samples)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Samples by those of what it was measured against, block by block; empty without a reference."""
        if self.against is None:
            return ()
        return tuple(mine / other for mine, other in zip(self.samples, self.against.samples, strict=True))

    @property
    def asked(self) -> str:
        """The limit as a text such as "<= 60"; empty if there is none."""
        limits = (("<=", self.at_most), (">=", self.at_least))
        return ", ".join(f"{sign} {limit:,g}" for sign, limit in limits if limit is not None)

    @property
    def judged(self) -> float:
        """The median that limits are for."""
        return summary(self.ratios or self.samples).median

    @property
    def falls_short(self) -> bool:
        """Whether a limit is missed."""
        too_high = self.at_most is not None and self.judged > self.at_most
        return too_high or (self.at_least is not None and self.judged < self.at_least)

    def joined(self, later: Measurement) -> Measurement:
        """This figure with the samples of a later one behind its own."""
        against = self.against
        if against is not None and later.against is not None:
            against = Against(name=against.name, samples=(*against.samples, *later.against.samples))
        return self.model_copy(update={"samples": (*self.samples, *later.samples), "against": against})


def measurement(
    name: str, unit: str, samples: Iterable[float], *, against: tuple[str, Iterable[float]] | None = None, **more: Any
) -> Measurement:
    """A figure; ``against``: the name and the samples of its reference, ``more``: the other fields of a Measurement."""
    other = None if against is None else Against(name=against[0], samples=tuple(against[1]))
    return Measurement(name=name, unit=unit, samples=tuple(samples), against=other, **more)


def join_all(known: dict[str, Measurement], later: Iterable[Measurement]) -> None:
    """Add the samples of later figures to those of the same name."""
    for figure in later:
        known[figure.name] = known[figure.name].joined(figure) if figure.name in known else figure


class PartRun(Record):
    """One part of the suite, measured once.

    Attributes:
        commit: of the code, with a "+" if files were changed; "" outside of a checkout.
        date: when it began. seconds: how long it took. fault: why it ended early, with the figures until then.
        versions, machine: what decides the numbers. configuration: what was chosen for this run.
    """

    part: str
    commit: str
    date: str
    seconds: Number
    versions: dict[str, str]
    machine: dict[str, str | int | float]
    configuration: dict[str, Any]
    figures: tuple[Measurement, ...]
    fault: str = ""

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [one.name for one in self.figures]
        if len(set(names)) < len(names):
            raise ValueError(f"part {self.part!r} has figures of the same name: {sorted(names)}")
        return self

    def joined(self, later: PartRun) -> PartRun:
        """This run with the samples of a later one behind its own, of the figures that both have."""
        more = {one.name: one for one in later.figures}
        figures = tuple(one.joined(more[one.name]) for one in self.figures if one.name in more)
        return self.model_copy(update={"figures": figures, "fault": self.fault or later.fault})


class Results(Record):
    """The file: at most one run of each part."""

    format: Literal["gradbus-bench-1"] = "gradbus-bench-1"
    runs: tuple[PartRun, ...] = ()

    @model_validator(mode="after")
    def _unique(self) -> Self:
        parts = [run.part for run in self.runs]
        if len(set(parts)) < len(parts):
            raise ValueError(f"more than one run of a part: {parts}")
        return self

    def with_run(self, new: PartRun) -> Results:
        """These results with a new run, which replaces an older one of its part."""
        kept = {run.part: run for run in self.runs} | {new.part: new}
        return Results(runs=tuple(kept.values()))

    def run(self, part: str) -> PartRun | None:
        """The run of a part, or None."""
        return next((run for run in self.runs if run.part == part), None)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file. Raises ConfigError: it cannot be read, or holds no results."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"results {path}: {error.strerror or error}") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"results {path} cannot be used: {where}: {first['msg']}") from None

    def save(self, path: Path) -> None:
        """Write a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """When, where and with which versions something is measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **versions.machine(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        **versions.versions("uvloop"),
    }


def fault_of(error: Exception) -> str:
    """An error in one line: the last line of its text, which in a traceback of a rank is that rank's error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"


def commit() -> str:
    """The commit of the code that runs, with a "+" if files were changed since; "" outside of a checkout."""
    folder = Path(__file__).parent
    try:
        commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
        found, changes = (
            subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found[:12] + ("+" if changes else "")


def make_run(
    part: str,
    figures: Sequence[Measurement],
    *,
    facts: Mapping[str, Any],
    seconds: float,
    configuration: dict[str, Any],
    fault: str = "",
) -> PartRun:
    """A run with everything around it. ``facts``: :func:`machine` from before it began."""
    return PartRun(
        part=part,
        commit=commit(),
        date=facts["date"],
        seconds=round(seconds, 1),
        versions={name: facts[name] for name in _VERSIONS},
        machine={name: fact for name, fact in facts.items() if name not in (*_VERSIONS, "date")},
        configuration=configuration,
        figures=tuple(figures),
        fault=fault,
    )

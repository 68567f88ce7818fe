"""The files of a run directory, also of a run that was killed: what cannot be read is named, not hidden."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.federated.evaluation import CrossSite
from gradbus.actors.federated.report import RoundReport
from gradbus.experiments.rundir.traces import MAX_TRACE_BYTES
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import lines_of, parse_json, read_text
from gradbus.runtime.profiling.summary import ProfileSummary, WindowStats, read_summary

T = TypeVar("T")

Kind = Literal["federated", "parallel"]

MAX_FILE_BYTES = 64 << 20  # of config.json, and of summary.json
MAX_TRACES = 8  # ranks whose traces are read: each may have tens of megabytes
MAX_LOSS = 1e30
_LEFT_BY: dict[Kind, str] = {"federated": "rounds.jsonl", "parallel": "epochs.jsonl"}
_SECTION: dict[Kind, str] = {"federated": "federated", "parallel": "parallel"}


class StepSpan(NamedTuple):
    """A part of a step, timed since the first rank began it. ``row``: step, compute, network or collectives."""

    row: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """A run, as far as its files could be read.

    Attributes:
        path: its directory. kind: federated or (data) parallel.
        config, summary: as they were written; empty if they were not.
        rounds: of a federated run, oldest first. epochs: of a parallel one.
        cross_site: of a federated run that has evaluated local models.
        profiles: of its ranks. windows: by rank, oldest first. step: number of the one that ``spans`` shows, by rank.
        missing: sentences on what is not there or cannot be read.
    """

    path: Path
    kind: Kind
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    rounds: tuple[RoundReport, ...] = ()
    cross_site: CrossSite | None = None
    epochs: tuple[EpochReport, ...] = ()
    profiles: tuple[ProfileSummary, ...] = ()
    windows: Mapping[int, tuple[WindowStats, ...]] = field(default_factory=dict)
    step: int | None = None
    spans: Mapping[int, tuple[StepSpan, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.path.resolve().name

    @property
    def job(self) -> str:
        """The name of its job, else of its directory."""
        return str(self.summary.get("job") or self.setting("bus", "job") or self.name)

    @property
    def task(self) -> str:
        """Model and data in a few words; "" if neither is known."""
        model = self.setting("task", "task") or self.setting("task", "model")
        data = str(self.summary.get("data") or "").split(" from ")[0]  # the rest is the place of the files
        return " on ".join(str(part) for part in (model, data) if part)

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """One key of the configuration, such as ``rounds`` or ``codec.name``."""
        found: Any = self.config.get(section)
        for step in key.split("."):
            if not isinstance(found, Mapping) or step not in found:
                return default
            found = found[step]
        return found


def kind_of(path: Path) -> Kind:
    """Which kind of run has left this directory. Raises ConfigError: none."""
    _check_directory(path)
    return _kind(path, _json_file(path / "config.json", [], ""))


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise ConfigError(f"run directory {path} {what}. Name one that a run has left, as in runs/<job>-<time>")


def read_run(path: Path) -> RunFiles:
    """All that is there.

    Raises:
        ConfigError: it is not the directory of a run, or it cannot be read.
    """
    _check_directory(path)
    missing: list[str] = []
    try:
        config = _json_file(path / "config.json", missing, "the configuration is not known")
        kind = _kind(path, config)
        summary = _json_file(
            path / "summary.json", missing, "the run has not come to its end: it goes on, or was killed"
        )
        if kind == "federated":
            rounds = _lines(path / "rounds.jsonl", RoundReport, lambda report: report.round_id, missing)
            return RunFiles(
                path=path, kind=kind, config=config, summary=summary, rounds=rounds,
                cross_site=_cross_site(path / "cross_site.json", missing), missing=tuple(missing),
            )  # fmt: skip
        epochs = _lines(path / "epochs.jsonl", EpochReport, lambda report: report.epoch, missing)
        profiles, windows = profiles_of(path, missing)
        step, spans = _step(path, missing)
        return RunFiles(
            path=path, kind=kind, config=config, summary=summary, epochs=epochs, profiles=profiles, windows=windows,
            step=step, spans=spans, missing=tuple(missing),
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"run directory {path} cannot be read: {error}") from None


def _kind(path: Path, config: Mapping[str, Any]) -> Kind:
    for kind, section in _SECTION.items():
        if section in config:
            return kind
    for kind, name in _LEFT_BY.items():
        if (path / name).exists():
            return kind
    if any(path.glob("profile-rank-*.jsonl")):
        return "parallel"
    raise ConfigError(
        f"{path} is no run directory: it has neither rounds.jsonl (federated) nor epochs.jsonl (data parallel), nor "
        f"the config.json of either. Name one that a run has left, as in runs/<job>-<time>"
    )


def _json_file(path: Path, missing: list[str], otherwise: str) -> dict[str, Any]:
    if not path.exists():
        missing.append(f"{path.name} is not there: {otherwise}.")
        return {}
    try:
        values = _parsed(read_text(path, MAX_FILE_BYTES))
        if isinstance(values, dict):
            return values
        why = "it is no JSON object"
    except ValueError as error:
        why = f"it is no JSON ({error})"
    missing.append(f"{path.name} cannot be read, {why}: {otherwise}.")
    return {}


def _cross_site(path: Path, missing: list[str]) -> CrossSite | None:
    """The table of a cross-site evaluation; None: the run has made none."""
    if not path.exists():
        return None
    try:
        return TypeAdapter(CrossSite).validate_json(read_text(path, MAX_FILE_BYTES))
    except ValueError as error:
        missing.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}.")
        return None


def _parsed(text: str) -> Any:
    """JSON; NaN and infinities, which some writers put there, are null."""
    return parse_json(text, parse_constant=lambda _: None)


def _lines(path: Path, kind: type[T], key: Callable[[T], int], missing: list[str]) -> tuple[T, ...]:
    """The reports in a file, one a line, by their number; of two with the same the later counts."""
    if not path.exists():
        missing.append(f"{path.name} is not there: nothing was finished.")
        return ()
    check: TypeAdapter[T] = TypeAdapter(kind)
    found: dict[int, T] = {}
    bad: list[tuple[int, str]] = []
    for number, text in enumerate(lines_of(path), start=1):
        if not text.strip():
            continue
        try:
            report = report_in(text, check)
            found[key(report)] = report
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(step) for step in first["loc"])
            bad.append((number, f"{where}: {first['msg']}" if where else first["msg"]))
        except ValueError:
            bad.append((number, "no JSON; it was cut off, if it is the last one"))
    missing += [f"{path.name}, line {number} is left out: {why}." for number, why in bad[:5]]
    if len(bad) > 5:
        missing.append(f"{path.name}: {len(bad) - 5} more lines are left out.")
    if not found and not bad:
        missing.append(f"{path.name} is empty: nothing was finished.")
    return tuple(found[number] for number in sorted(found))


def report_in(text: str, check: TypeAdapter[T]) -> T:
    """The report in a line of a file. Raises ValueError: there is none; it is a ValidationError where it is JSON."""
    return check.validate_python(_with_gaps(_parsed(text)))


def _with_gaps(entry: Any) -> Any:
    """A metric or training loss that is null, or a loss beyond what an axis can show, as NaN: the run diverged, or had
    none."""
    if isinstance(entry, dict):
        for name in ("loss", "eval_loss"):
            value = entry.get(name)
            if isinstance(value, int | float) and not abs(value) < MAX_LOSS:
                entry[name] = math.nan
        for name in ("metrics", "train_metrics"):
            if isinstance(metrics := entry.get(name), dict):
                entry[name] = {key: math.nan if value is None else value for key, value in metrics.items()}
        if entry.get("loss", 0) is None:
            entry["loss"] = math.nan
    return entry


def profiles_of(
    path: Path, missing: list[str]
) -> tuple[tuple[ProfileSummary, ...], dict[int, tuple[WindowStats, ...]]]:
    """The profiles of all ranks, and the windows of each by rank."""
    profiles, windows = [], {}
    files = sorted(path.glob("profile-rank-*.jsonl"))
    for file in files:
        summary = read_summary(file)
        if summary is None:
            missing.append(f"{file.name} holds nothing that can be read.")
            continue
        profiles.append(summary)
        windows[summary.rank] = tuple(_windows(file))
    if not files:
        missing.append("There is no profile-rank-R.jsonl: where the time of a step went is not known.")
    return tuple(sorted(profiles, key=lambda profile: profile.rank)), dict(sorted(windows.items()))


def _windows(path: Path) -> list[WindowStats]:
    """Return those of all starts of the rank. Steps that were done again after a resume count once."""
    check = TypeAdapter(WindowStats)
    found: list[WindowStats] = []
    for text in lines_of(path):
        try:
            line = _parsed(text)
            if line["kind"] == "window":
                for amounts in (line["mean"], line["max"]):
                    amounts.update({name: math.nan for name, value in amounts.items() if value is None})
                window = check.validate_python(line)
                found = [earlier for earlier in found if earlier.last_step < window.first_step]
                found.append(window)
        except (ValueError, LookupError, TypeError, AttributeError):
            continue
    return found


def _step(path: Path, missing: list[str]) -> tuple[int | None, dict[int, tuple[StepSpan, ...]]]:
    """A typical step: of those that all traces have, the one of median length; and its spans, by rank."""
    files = sorted(path.glob("trace-rank-*.json"), key=lambda file: (len(file.name), file.name))
    if not files:
        missing.append("There is no trace-rank-R.json: no step can be shown in detail.")
    traces: dict[int, _Trace] = {}
    for file in files[:MAX_TRACES]:
        try:
            trace = _Trace(_parsed(read_text(file, MAX_TRACE_BYTES)))
            traces[trace.rank] = trace
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            missing.append(f"{file.name} cannot be read: {error}.")
    common = set.intersection(*(set(trace.steps) for trace in traces.values())) if traces else set()
    if not common:
        return None, {}
    lengths = sorted((max(end - start for start, end in (t.steps[n] for t in traces.values())), n) for n in common)
    step = lengths[len(lengths) // 2][1]
    origin_s = min(trace.steps[step][0] for trace in traces.values())
    return step, {rank: tuple(trace.spans_of(step, origin_s)) for rank, trace in sorted(traces.items())}


class _Trace:
    """Events of one rank, in seconds of the wall clock that all ranks of a machine share."""

    def __init__(self, trace: Any) -> None:
        # Whole seconds of the epoch are taken off: microseconds must not get lost in a float.
        origin_s = (int(trace["otherData"]["origin_unix_ns"]) % 10**15) / 1e9
        self.rank = 0
        self.steps: dict[int, tuple[float, float]] = {}
        self._events: list[StepSpan] = []
        for event in trace["traceEvents"]:
            if event["ph"] != "X":
                continue
            self.rank = int(event["pid"])
            start_s = origin_s + float(event["ts"]) / 1e6
            span = StepSpan(str(event["cat"]), str(event["name"]), start_s, start_s + float(event["dur"]) / 1e6)
            number = span.name.removeprefix("step ")
            if span.row == "step" and number.isdecimal():
                self.steps[int(number)] = (span.start_s, span.end_s)
            else:
                self._events.append(span)

    def spans_of(self, step: int, origin_s: float) -> Iterator[StepSpan]:
        """The spans that begin in the step, sorted by their start."""
        start_s, end_s = self.steps[step]
        yield StepSpan("step", f"step {step}", start_s - origin_s, end_s - origin_s)
        for span in sorted(self._events, key=lambda span: span.start_s):
            if start_s <= span.start_s <= end_s and span.end_s > span.start_s:
                yield span._replace(start_s=span.start_s - origin_s, end_s=span.end_s - origin_s)

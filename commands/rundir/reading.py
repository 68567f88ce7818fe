"""The files of a run directory, also of a run that was killed: what cannot be read is named, not hidden."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from json import JSONDecodeError
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.federated.client_names import NAMES_FILE, label_of, names_of_rows
from gradbus.actors.federated.controller.evaluation import CrossSite
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.commands.rundir.report_size import Report, check_line, check_report, weight_of
from gradbus.commands.rundir.thinned import Thinned
from gradbus.commands.rundir.traces import MAX_TRACE_BYTES
from gradbus.commands.rundir.whole_run import MAX_WHOLE, WholeRun
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.foreign_files import FileRefused, is_there, lines_inside, names_inside, text_inside
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.profiling.summary import (
    MAX_PROFILE_BYTES,
    MAX_PROFILE_LINES,
    ProfileSummary,
    WindowStats,
    read_summary,
)

T = TypeVar("T")
ReportT = TypeVar("ReportT", bound=Report)

Kind = Literal["federated", "parallel"]

MAX_FILE_BYTES = 16 << 20  # of config.json, and of summary.json
MAX_USUAL_BYTES = 1 << 20  # of config.json, where many are looked at: it has some kB
MAX_NAMED = 10_000  # clients that are shown with their names
MAX_TABLE_BYTES = 64 << 20  # of cross_site.json
MAX_TRACES = 8  # ranks whose traces are read: each may have tens of megabytes
MAX_PROFILES = 1024  # ranks whose profiles are read
MAX_WINDOWS = 2000  # of a rank, that are kept
MAX_BAD_LINES = 1000  # behind so many lines that are no reports a file is not read
_HELD_BACK = 256  # newest reports that a line further on may still replace
_MAX_HELD_WEIGHT = 1_000_000  # of these, in ids of clients: 40 MB
MAX_LOSS = 1e30
_LEFT_BY: dict[Kind, str] = {"federated": "rounds.jsonl", "parallel": "epochs.jsonl"}
_SECTION: dict[Kind, str] = {"federated": "federated", "parallel": "parallel"}


class StepSpan(NamedTuple):
    """A part of a step, timed since the first rank began it. ``row``: step, compute, network or collectives."""

    row: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """A run, as far as its files could be read.

    Attributes:
        path: its directory. kind: federated or (data) parallel.
        config, summary: as they were written; empty if they were not.
        rounds: of a federated run, oldest first; of very many those that ``counted`` keeps. epochs: of a parallel one.
        counted: all rounds, where they were counted as they were read: see :attr:`whole`.
        spent: bytes and seconds that were spent when a round or epoch was done, by its number; empty where the reports
            are all there.
        cross_site: of a federated run that has evaluated local models. names: of its clients, by id.
        profiles: of its ranks. windows: by rank, oldest first. step: number of the one that ``spans`` shows, by rank.
        missing: sentences on what is not there or cannot be read.
    """

    path: Path
    kind: Kind
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    rounds: tuple[RoundReport, ...] = ()
    cross_site: CrossSite | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    epochs: tuple[EpochReport, ...] = ()
    counted: WholeRun | None = None
    spent: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    profiles: tuple[ProfileSummary, ...] = ()
    windows: Mapping[int, tuple[WindowStats, ...]] = field(default_factory=dict)
    step: int | None = None
    spans: Mapping[int, tuple[StepSpan, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @cached_property
    def whole(self) -> WholeRun:
        """Sums, counts and medians of all rounds, also of those that are not in ``rounds``."""
        return WholeRun.of(self.rounds) if self.counted is None else self.counted

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

    def client(self, client_id: int) -> str:
        """Id and name of a client."""
        return label_of(client_id, self.names)

    def number(self, key: str) -> float | None:
        """One number of the summary; None: it has none."""
        value = self.summary.get(key)
        return value if isinstance(value, int | float) else None

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """One key of the configuration, such as ``rounds`` or ``codec.name``."""
        found: Any = self.config.get(section)
        for step in key.split("."):
            if not isinstance(found, Mapping) or step not in found:
                return default
            found = found[step]
        return found


def kind_of(path: Path) -> Kind:
    """Return which kind of run has left this directory.

    Raises:
        ConfigError: none, or its config.json is not a file that is opened.
    """
    _check_directory(path)
    refused: list[str] = []
    try:
        config = _json_file(path, "config.json", refused, "the configuration is not known", strict=True)
        return _kind(path, config, refused)
    except OSError as error:
        raise ConfigError(f"run directory {path} cannot be read: {error}") from None


def kind_if_any(path: Path) -> Kind | None:
    """Return the same; None where no run has left it. A config.json that cannot be read, or is larger than those of
    runs are, does not matter."""
    try:
        return _kind(path, _json_file(path, "config.json", [], "", max_bytes=MAX_USUAL_BYTES), [])
    except (ConfigError, OSError):
        return None


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
        config = _json_file(path, "config.json", missing, "the configuration is not known")
        kind = _kind(path, config, missing)
        summary = _json_file(
            path, "summary.json", missing, "the run has not come to its end: it goes on, or was killed"
        )
        known: dict[str, Any] = {"path": path, "kind": kind, "config": config, "summary": summary}
        if kind == "federated":
            whole = _rounds(path, missing)
            return RunFiles(
                **known,
                rounds=whole.reports,
                counted=whole,
                spent=whole.spent if whole.is_thinned else {},
                cross_site=_cross_site(path, missing),
                names=_names(path, missing),
                missing=tuple(missing),
            )
        epochs, spent = _epochs(path, missing)
        profiles, windows = profiles_of(path, missing)
        step, spans = _step(path, missing)
        return RunFiles(
            **known,
            epochs=epochs,
            spent=spent,
            profiles=profiles,
            windows=windows,
            step=step,
            spans=spans,
            missing=tuple(missing),
        )
    except OSError as error:
        raise ConfigError(f"run directory {path} cannot be read: {error}") from None


def _kind(path: Path, config: Mapping[str, Any], missing: list[str]) -> Kind:
    for kind, section in _SECTION.items():
        if section in config:
            return kind
    for kind, name in _LEFT_BY.items():
        if is_there(path, name):
            return kind
    if names_inside(path, "profile-rank-*.jsonl"):
        return "parallel"
    raise ConfigError(
        f"{path} is no run directory: it has neither rounds.jsonl (federated) nor epochs.jsonl (data parallel), nor "
        f"the config.json of either{''.join(f'. {text}' for text in missing)[:-1]}. Name one that a run has left, as "
        f"in runs/<job>-<time>"
    )


def _json_file(
    path: Path, name: str, missing: list[str], otherwise: str, *, strict: bool = False, max_bytes: int | None = None
) -> dict[str, Any]:
    """Return the object in a JSON file of a run; {} with a sentence in ``missing`` if there is none that can be read.

    Raises:
        FileRefused: with ``strict``, it is there and is not opened.
    """
    if not is_there(path, name):
        missing.append(f"{name} is not there: {otherwise}.")
        return {}
    try:
        values = _parsed(text_inside(path, name, max_bytes or MAX_FILE_BYTES))
        if isinstance(values, dict):
            return values
        why = "it is no JSON object"
    except OSError as error:
        if strict and isinstance(error, FileRefused):
            raise
        why = reason(error)
    except ValueError as error:
        why = f"it is no JSON ({error})"
    missing.append(f"{name} cannot be read, {why}: {otherwise}.")
    return {}


def _cross_site(path: Path, missing: list[str]) -> CrossSite | None:
    """The table of a cross-site evaluation; None: the run has made none."""
    name = "cross_site.json"
    if not is_there(path, name):
        return None
    try:
        return TypeAdapter(CrossSite).validate_json(text_inside(path, name, MAX_TABLE_BYTES))
    except ValueError as error:
        missing.append(f"{name} cannot be read: {str(error).splitlines()[0]}.")
    except OSError as error:
        missing.append(f"{name} cannot be read: {reason(error)}.")
    return None


def _names(path: Path, missing: list[str]) -> Mapping[int, str]:
    """Names of clients by id; {}: they have none."""
    if not is_there(path, NAMES_FILE):
        return {}
    return client_names_in(_json_file(path, NAMES_FILE, missing, "clients are shown by their ids"))


def client_names_in(values: Mapping[str, Any]) -> Mapping[int, str]:
    """Names by id from what a run directory has of them; what is wrong there is left out."""
    rows = values.get("names")
    return names_of_rows(rows, MAX_NAMED) if isinstance(rows, list) else {}


def reason(error: OSError) -> str:
    """Return why a file cannot be read, as a clause."""
    return f"it {error.strerror}" if isinstance(error, FileRefused) else str(error.strerror or error)


def _parsed(text: str) -> Any:
    """JSON; NaN and infinities, which some writers put there, are null."""
    return parse_json(text, parse_constant=lambda _: None)


def _rounds(path: Path, missing: list[str]) -> WholeRun:
    """The rounds of a federated run, counted as they are read."""
    whole = WholeRun()
    for report in _reports(path, "rounds.jsonl", RoundReport, lambda report: report.round_id, missing):
        whole.add(report)
    if whole.is_thinned:
        missing.append(
            f"The run has {whole.sums.rounds:,} rounds: curves and timelines are sampled, such that no peak is lost. "
            f"Sums, medians and counts are of all rounds."
        )
    return whole


def _epochs(path: Path, missing: list[str]) -> tuple[tuple[EpochReport, ...], dict[int, tuple[float, float]]]:
    """The epochs of a data-parallel run, and of very many what was spent until then; else {}."""
    kept: Thinned[tuple[EpochReport, float, float]] = Thinned(
        [lambda item: item[0].loss, lambda item: item[0].accuracy, lambda item: item[0].seconds], MAX_WHOLE
    )
    num_bytes, seconds, steps, count, last = 0.0, 0.0, 0, 0, None
    for report in _reports(path, "epochs.jsonl", EpochReport, lambda report: report.epoch, missing):
        num_bytes += report.bytes_out_per_step * max(0, report.step - steps)
        seconds, steps, count = seconds + report.seconds, report.step, count + 1
        last = (report, num_bytes, seconds)
        kept.add(last)
    items = kept.items()
    if not kept.is_thinned:
        return tuple(report for report, *_ in items), {}
    if last is not None and items[-1] is not last:
        items.append(last)
    missing.append(f"The run has {count:,} epochs: curves are sampled, such that no peak is lost.")
    return tuple(report for report, *_ in items), {report.epoch: (sent, spent_s) for report, sent, spent_s in items}


def _reports(
    path: Path, name: str, kind: type[ReportT], key: Callable[[ReportT], int], missing: list[str]
) -> Iterator[ReportT]:
    """Yield the reports in a file, one a line, by ascending number; of two with the same the later counts.

    No more than the newest are held back for that: a report that comes again much later is left out.
    """
    if not is_there(path, name):
        missing.append(f"{name} is not there: nothing was finished.")
        return
    held: dict[int, ReportT] = {}
    weight = 0
    bad = _BadLines(name)
    done: float = -math.inf
    try:
        for number, report in _numbered_reports(path, name, TypeAdapter(kind), bad, missing):
            if key(report) <= done:
                bad.note(number, f"number {key(report)} comes again, or far out of order")
                continue
            held[key(report)] = report
            weight += weight_of(report)
            if len(held) >= 2 * _HELD_BACK or (weight > _MAX_HELD_WEIGHT and len(held) > 1):
                for done in sorted(held)[: len(held) // 2]:
                    yield held.pop(done)
                weight = sum(map(weight_of, held.values()))
    except OSError as error:
        missing.append(f"{name} cannot be read: {reason(error)}.")
        return
    for number in sorted(held):
        yield held[number]
    missing += bad.sentences()
    if not held and not bad.count:
        missing.append(f"{name} is empty: nothing was finished.")


def _numbered_reports(
    path: Path, name: str, check: TypeAdapter[ReportT], bad: _BadLines, missing: list[str]
) -> Iterator[tuple[int, ReportT]]:
    for number, text in enumerate(lines_inside(path, name, missing.append), start=1):
        if bad.is_enough:
            return
        if not text.strip():
            continue
        try:
            yield number, report_in(text, check)
        except ValueError as error:
            bad.note(number, error)


class _BadLines:
    """Counts the lines of a file that are no reports, and names the first."""

    def __init__(self, name: str) -> None:
        self.count = 0
        self._name = name
        self._named: list[str] = []
        self._newest = 0

    @property
    def is_enough(self) -> bool:
        """Whether there were so many that the file is not read on."""
        return self.count >= MAX_BAD_LINES

    def note(self, number: int, why: ValueError | str) -> None:
        """Take a line."""
        self.count += 1
        self._newest = number
        if len(self._named) < 5:
            self._named.append(f"{self._name}, line {number} is left out: {_why(why)}.")

    def sentences(self) -> list[str]:
        """For the reader of the report."""
        found = list(self._named)
        if self.is_enough:
            found.append(
                f"{self._name}: {self.count:,} lines are no reports; nothing behind line {self._newest:,} is read."
            )
        elif self.count > len(self._named):
            found.append(f"{self._name}: {self.count - len(self._named)} more lines are left out.")
        return found


def _why(error: ValueError | str) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        return f"{where}: {first['msg']}" if where else first["msg"]
    return "no JSON; it was cut off, if it is the last one" if isinstance(error, JSONDecodeError) else str(error)


_MANY_DIGITS = re.compile("[0-9]{41}")
_MAX_SHORT = 64  # characters between two commas


def report_in(text: str, check: TypeAdapter[ReportT]) -> ReportT:
    """The report in a line of a file. Raises ValueError: there is none; it is a ValidationError where it is JSON."""
    check_line(text)
    report = _plain_report(text, check) or check.validate_python(_with_gaps(_parsed(text)))
    check_report(report, text)
    return report


def _plain_report(text: str, check: TypeAdapter[T]) -> T | None:
    """Return the report, in a fifth of the time, if nothing in it needs :func:`_with_gaps`."""
    if _is_odd(text):
        return None
    try:
        report = check.validate_json(text)
    except ValueError:
        return None
    return report if _has_plain_losses(report) else None


def _is_odd(text: str) -> bool:
    """Whether the text has something that the two readers of JSON take differently: NaN, infinity, or a whole number
    that floats have no place for."""
    if "NaN" in text or "Infinity" in text:
        return True
    return max(map(len, text.split(","))) > _MAX_SHORT and _MANY_DIGITS.search(text) is not None


def _has_plain_losses(report: Any) -> bool:
    """Whether :func:`_with_gaps` would change nothing."""
    losses = (report.loss, 0.0 if report.eval_loss is None else report.eval_loss)
    return all(loss is not None and abs(loss) < MAX_LOSS for loss in losses)


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
    for name in (names := names_of(path, "profile-rank-*.jsonl", missing))[:MAX_PROFILES]:
        try:
            summary = read_summary(path / name)
        except OSError as error:
            missing.append(f"{name} cannot be read: {reason(error)}.")
            continue
        if summary is None:
            missing.append(f"{name} holds nothing that can be read.")
            continue
        profiles.append(summary)
        windows[summary.rank] = tuple(_windows(path, name))
    if not names:
        missing.append("There is no profile-rank-R.jsonl: where the time of a step went is not known.")
    if len(names) > MAX_PROFILES:
        missing.append(f"There are {len(names):,} files profile-rank-R.jsonl, of which {MAX_PROFILES:,} are read.")
    return tuple(sorted(profiles, key=lambda profile: profile.rank)), dict(sorted(windows.items()))


def names_of(path: Path, pattern: str, missing: list[str]) -> list[str]:
    """Return the files of ranks in a run directory; none, with a sentence, if it has very many entries."""
    try:
        return names_inside(path, pattern)
    except FileRefused as error:
        missing.append(f"The directory {error.strerror}: files of ranks are not looked for.")
        return []


def _windows(path: Path, name: str) -> list[WindowStats]:
    """Return those of all starts of the rank. Steps that were done again after a resume count once. Of very many those
    with the shortest and the longest steps are kept."""
    check = TypeAdapter(WindowStats)
    found: list[WindowStats] = []
    bad = 0
    for text in lines_inside(path, name, max_bytes=MAX_PROFILE_BYTES, max_lines=MAX_PROFILE_LINES):
        try:
            line = _parsed(text)
            if line["kind"] == "window":
                for amounts in (line["mean"], line["max"]):
                    amounts.update({name: math.nan for name, value in amounts.items() if value is None})
                window = check.validate_python(line)
                if window.last_step < window.first_step:
                    continue
                while found and found[-1].last_step >= window.first_step:
                    found.pop()
                found.append(window)
        except (ValueError, LookupError, TypeError, AttributeError):
            bad += 1
        if bad > MAX_BAD_LINES:
            break
        if len(found) > 8 * MAX_WINDOWS:
            found = _fewer(found)
    return found if len(found) <= MAX_WINDOWS else _fewer(found)


def _fewer(windows: list[WindowStats]) -> list[WindowStats]:
    kept: Thinned[WindowStats] = Thinned(
        [lambda window: window.mean.get("step_s"), lambda window: window.mean.get("wait_s")], MAX_WINDOWS
    )
    for window in windows:
        kept.add(window)
    return kept.items()


def _step(path: Path, missing: list[str]) -> tuple[int | None, dict[int, tuple[StepSpan, ...]]]:
    """A typical step: of those that all traces have, the one of median length; and its spans, by rank."""
    names = sorted(names_of(path, "trace-rank-*.json", []), key=lambda name: (len(name), name))
    if not names:
        missing.append("There is no trace-rank-R.json: no step can be shown in detail.")
    traces: dict[int, _Trace] = {}
    for name in names[:MAX_TRACES]:
        try:
            trace = _Trace(_parsed(text_inside(path, name, MAX_TRACE_BYTES)))
            traces[trace.rank] = trace
        except OSError as error:
            missing.append(f"{name} cannot be read: {reason(error)}.")
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            missing.append(f"{name} cannot be read: {error}.")
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

"""What a run is doing, from the files that it writes: the reports of its rounds or epochs, and its journal.

The journal tells of a round as soon as it begins, and of each update that counts; the reports follow once it is done.
All of it is read line by line as it comes, whoever wrote it: what cannot be read is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.federated.client_names import NAMES_FILE, names_of_rows
from gradbus.actors.federated.controller.evaluation import CrossSite
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.commands.dashboard.growing_file import GrowingFile
from gradbus.commands.rundir.reading import Kind, RunFiles, client_names_in, profiles_of, reason, report_in
from gradbus.commands.rundir.report_size import names_in, weight_of
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.foreign_files import names_inside, text_inside
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.profiling.summary import ProfileSummary, WindowStats

MAX_REPORTS = 10_000  # of the newest rounds or epochs
MAX_REPORT_BYTES = 64 << 20  # at once
MAX_JOURNAL_BYTES = 1 << 20
MAX_JSON_BYTES = 4 << 20  # config.json, summary.json
MAX_JSON_VALUES = 200_000  # in one of them: 20 MB at most
MAX_PROFILE_BYTES = 8 << 20  # of all ranks together; of more nothing is shown
MAX_NAMED = 64  # clients of the open round
WITH_TIMELINES = 16  # newest rounds
WITH_CLIENTS = 500  # newest rounds whose clients are known by name
MAX_WEIGHT = 400_000  # of newest reports that are kept whole, in ids of clients: 16 MB
MAX_NAMES = 200_000  # of metrics and reasons, in all reports: 20 MB
SILENT_S = 60.0  # a run whose files do not change for so long is not called running
_PROFILES_EVERY_S = 2.0

_ROUNDS: TypeAdapter[RoundReport] = TypeAdapter(RoundReport)
_CROSS_SITE: TypeAdapter[CrossSite] = TypeAdapter(CrossSite)
_EPOCHS: TypeAdapter[EpochReport] = TypeAdapter(EpochReport)


@dataclass(slots=True)
class OpenRound:
    """The round that goes on, as the journal has it.

    Attributes:
        expected, counted: ids of clients; refused: how many updates. since_s: of its command, since the epoch.
        committed: whether its model is made. names: of clients, the first ones.
    """

    number: int
    since_s: float
    expected: frozenset[int] = frozenset()
    counted: set[int] = field(default_factory=set)
    refused: int = 0
    committed: bool = False
    names: Mapping[int, str] = field(default_factory=dict)


class Following:
    """One run directory, followed. Not for two threads at once.

    Attributes:
        version: grows whenever something has changed that a page shows.
        files: what is known, in the form of the report on a run.
        open_round: the newest round of a federated run; None before the first.
    """

    def __init__(self, path: Path, kind: Kind) -> None:
        self.version = 0
        self.open_round: OpenRound | None = None
        self.files = RunFiles(path=path, kind=kind, config={}, summary={})
        federated = kind == "federated"
        self._check: TypeAdapter[Any] = _ROUNDS if federated else _EPOCHS
        self._key: Callable[[Any], int] = (lambda r: int(r.round_id)) if federated else (lambda r: int(r.epoch))
        self._reports_tail = GrowingFile(
            path, "rounds.jsonl" if federated else "epochs.jsonl", max_bytes=MAX_REPORT_BYTES
        )
        journal = "controller.jsonl" if federated else "rank-0.jsonl"
        self._journal_tail = GrowingFile(path, f"history/{journal}", max_bytes=MAX_JOURNAL_BYTES)
        self._reports: dict[int, Any] = {}
        self._json: dict[str, tuple[tuple[float, int], dict[str, Any]]] = {}
        self._refused: dict[str, str] = {}  # files that are not read, and why
        self._ended: tuple[float, str] | None = None  # when, and how, by the journal
        self._profiles: tuple[tuple[ProfileSummary, ...], Mapping[int, tuple[WindowStats, ...]]] = ((), {})
        self._profiles_key: tuple[float, int] = (0.0, 0)
        self._profiles_at_s = 0.0
        self._state = ""

    def refresh(self) -> None:
        """Read what is new."""
        changed = [self._read_reports(), self._read_journal(), self._read_json(), self._read_profiles()]
        state, self._state = self._state, self.state
        if any(changed) or state != self._state:
            self.version += 1
            self.files = self._as_files()

    @property
    def changed_s(self) -> float:
        """When the run last wrote something, in seconds since the epoch; 0: never."""
        return max(self._reports_tail.changed_s, self._journal_tail.changed_s, self._profiles_key[0])

    @property
    def state(self) -> str:
        """running, silent, or how it ended: done, stopped, failed."""
        summary, (written_s, _) = self._entry("summary.json")[1], self._entry("summary.json")[0]
        if summary and written_s >= self.changed_s - 1.0:  # a resumed run keeps that of its last start for a while
            return str(summary.get("outcome") or "ended")[:20]
        if self._ended is not None and self._ended[0] >= self._reports_tail.changed_s - 1.0:
            return self._ended[1]
        return "running" if time.time() - self.changed_s < SILENT_S else "silent"

    @property
    def newest(self) -> Any:
        """The newest report; None before the first."""
        return self._reports[max(self._reports)] if self._reports else None

    def _entry(self, name: str) -> tuple[tuple[float, int], dict[str, Any]]:
        return self._json.get(name, ((0.0, -1), {}))

    def _as_files(self) -> RunFiles:
        reports = tuple(self._reports[number] for number in sorted(self._reports))
        old, (profiles, windows) = self.files, self._profiles
        federated = old.kind == "federated"
        return RunFiles(
            path=old.path,
            kind=old.kind,
            config=self._entry("config.json")[1],
            summary=self._entry("summary.json")[1],
            rounds=reports if federated else (),
            epochs=() if federated else reports,
            profiles=profiles,
            windows=windows,
            cross_site=self._cross_site(),
            names=client_names_in(self._entry(NAMES_FILE)[1]),
            missing=tuple(f"{name} cannot be read: {why}." for name, why in sorted(self._refused.items()) if why),
        )

    def _cross_site(self) -> CrossSite | None:
        values = self._entry("cross_site.json")[1]
        try:
            return _CROSS_SITE.validate_python(values) if values else None
        except ValueError:
            return None

    # -- the files

    def _read_reports(self) -> bool:
        is_anew, lines = self._reports_tail.new_lines()
        refusal = self._note_refused(self._reports_tail)
        if is_anew:
            self._reports.clear()
        for text in lines[-MAX_REPORTS:]:
            try:
                report: Any = report_in(text, self._check)
            except ValueError:
                continue
            self._reports[self._key(report)] = report
        numbers = sorted(self._reports) if lines else []
        if self.files.kind == "federated":
            for number in numbers[:-WITH_TIMELINES]:
                self._reports[number] = self._reports[number].without_timeline()
            for number in numbers[:-WITH_CLIENTS]:
                if self._reports[number].clients:
                    self._reports[number] = self._reports[number].without_clients()
        for number in numbers[:-MAX_REPORTS]:
            del self._reports[number]
        self._lighten(numbers[-MAX_REPORTS:])
        return is_anew or bool(lines) or refusal

    def _lighten(self, numbers: Sequence[int]) -> None:
        """Take from older reports what names clients, and then leave them out, where newer ones take the memory."""
        weight = names = 0
        for number in reversed(numbers):
            report = self._reports[number]
            names += names_in(report)
            if names > MAX_NAMES and number != numbers[-1]:
                del self._reports[number]
                continue
            weight += weight_of(report)
            if weight > MAX_WEIGHT and isinstance(report, RoundReport):
                self._reports[number] = report.without_clients()

    def _note_refused(self, file: GrowingFile) -> bool:
        """Keep why a file is not read; return whether that is new."""
        before, self._refused[file.name] = self._refused.get(file.name, ""), file.refused
        return before != file.refused

    def _read_journal(self) -> bool:
        is_anew, lines = self._journal_tail.new_lines()
        refusal = self._note_refused(self._journal_tail)
        if is_anew:
            self.open_round, self._ended = None, None
        for text in lines:
            try:
                self._note(parse_json(text))
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
                continue
        return is_anew or bool(lines) or refusal

    def _note(self, event: dict[str, Any]) -> None:
        now_s = float(event["time"])
        match event["event"]:
            case "started":
                self._ended = None
                self.open_round = None
            case "ended":
                self._ended = (now_s, str(event.get("phase") or "ended")[:20])
            case "failed":
                self._ended = (now_s, "failed")
            case "commanded":
                number = int(event["round"])
                if self.open_round is None or self.open_round.number != number:
                    self.open_round = OpenRound(number, now_s)
                self.open_round.expected = frozenset(int(one) for one in event.get("expected") or ())
                rows = [{"clients": one, "name": name} for one, name in (event.get("names") or {}).items()]
                self.open_round.names = names_of_rows(rows, MAX_NAMED)
            case "counted" | "refused" | "committed" as name:
                open_round = self.open_round
                if open_round is None or open_round.number != int(event["round"]):
                    if name == "refused":
                        return
                    open_round = self.open_round = OpenRound(int(event["round"]), now_s)
                if name == "counted":
                    open_round.counted.add(int(event["client"]))
                elif name == "refused":
                    open_round.refused += 1
                else:
                    open_round.committed = True

    def _read_json(self) -> bool:
        changed = False
        for name in ("config.json", "summary.json", "cross_site.json", NAMES_FILE):
            try:
                now = (self.files.path / name).lstat()
                key = (now.st_mtime, now.st_size)
                if key == self._entry(name)[0]:
                    continue
                text = text_inside(self.files.path, name, MAX_JSON_BYTES)
            except OSError as error:
                why = "" if isinstance(error, FileNotFoundError) else reason(error)
                changed |= self._json.pop(name, None) is not None or why != self._refused.get(name, "")
                self._refused[name] = why
                continue
            try:
                values, why = parse_json(text, parse_constant=lambda _: None, max_values=MAX_JSON_VALUES), ""
            except ValueError as error:
                values, why = {}, f"it is no JSON ({error})"
            self._json[name] = (key, values if isinstance(values, dict) else {})  # not again until it changes
            changed, self._refused[name] = True, why
        return changed

    def _read_profiles(self) -> bool:
        """Read those of ranks. They are read as a whole, so not too often, and not where they are large."""
        now_s = time.monotonic()
        if self.files.kind != "parallel" or now_s - self._profiles_at_s < _PROFILES_EVERY_S:
            return False
        self._profiles_at_s = now_s
        try:
            names = names_inside(self.files.path, "profile-rank-*.jsonl")
            found = [(self.files.path / name).lstat() for name in names]
        except OSError as error:
            before, self._refused["The directory"] = self._refused.get("The directory", ""), reason(error)
            return before != reason(error)
        key = (max((s.st_mtime for s in found), default=0.0), sum(s.st_size for s in found))
        if key == self._profiles_key or key[1] > MAX_PROFILE_BYTES:
            return False
        self._profiles_key = key
        try:
            self._profiles = profiles_of(self.files.path, [])
        except (OSError, ConfigError):
            return False
        return True

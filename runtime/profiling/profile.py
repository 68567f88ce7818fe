"""Where the time and the bytes of each step go.

    profile = Profile(rank=0, jsonl=Path("profile/rank-0.jsonl"))
    with profile.step(step_no) as step:
        with step.span("compute"): ...
        step.count("bytes_out", len(payload))

Names of spans: ``compute``, ``encode``, ``wait`` (the network alone), ``decode`` (and aggregate), ``apply``, ``eval``,
``checkpoint``; others may be added. A span counts without the spans inside it, so that the parts of a step add up.
docs/profile.md explains the files.

Where a profile is given the traffic of a bus, bytes are no reports: each step has what the bus has counted from its
begin to its end, and what is counted between two steps is outside of them. So all of it is in the profile, once.

Any thread may report at any time. A report is one ``deque.append``, which is atomic: there is no lock for the compute
thread to wait on. The thread that ends a step adds up what has come.
"""

# ruff: noqa: SLF001 - a profile, its steps and their spans are one idea, and all that users see is without underscore

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gradbus.runtime.logs import get_logger
from gradbus.runtime.profiling.chrome_trace import (
    Clock,
    Event,
    Row,
    chrome_trace,
    merge_chrome_traces,
    write_chrome_trace,
)
from gradbus.runtime.profiling.summary import (
    BYTES,
    FORMAT,
    LineFile,
    ProfileSummary,
    Tally,
    WindowStats,
    add_amounts,
    plain,
    read_exchanged,
)
from gradbus.runtime.traffic import Traffic

__all__ = ["PHASES", "Profile", "ProfileSummary", "Span", "StepProfile", "WindowStats", "merge_chrome_traces"]

PHASES = ("compute", "encode", "wait", "decode", "apply", "eval", "checkpoint")

_MAX_INBOX = 1024  # reports that may lie there between two steps
_MAX_NAMES = 64  # of spans and counters; what comes under further ones is put together as "more"
_MAX_LINES = 1000  # lines of steps that wait for the end of their window

Report = tuple[bool, str | None, float, Event | None]
"""Whether the amount belongs to a step, its name, the amount, what the trace shows of it. No name: the trace alone."""

log = get_logger("profile")


class Profile:
    """Measures the steps of one rank. Memory is bounded, whatever the number of steps.

    Attributes:
        on_window: gets each window as it ends, on the thread that ended the step; it must not take long, nor report.
    """

    def __init__(
        self,
        rank: int,
        window_steps: int = 50,
        jsonl: Path | None = None,
        *,
        jsonl_steps: bool = False,
        max_events: int = 50_000,
        max_windows: int = 1000,
        traffic: Traffic | None = None,
    ) -> None:
        """An empty one.

        Args:
            window_steps: steps of one window of means and maxima.
            jsonl: where each window is appended as a line; None: nowhere. jsonl_steps: each step as well.
            max_events: of the trace, the newest; max_windows: of the summary, the newest. Totals cover all steps.
            traffic: whose bytes, from now on, are ``bytes_out`` and ``bytes_in``. None: who measures reports them.
        """
        if min(window_steps, max_events, max_windows) < 1:
            sizes = f"{window_steps}, {max_events}, {max_windows}"
            raise ValueError(f"window_steps, max_events and max_windows must be >= 1, got {sizes}")
        self.rank = rank
        self.on_window: Callable[[WindowStats], object] = lambda window: None
        self._inbox: deque[Report] = deque()
        self._step: StepProfile | None = None
        self._clock = Clock.read()
        self._lock = threading.Lock()  # for all that is below
        self._window_steps = window_steps
        self._traffic = traffic
        self._counted = dict.fromkeys(BYTES, 0) if traffic is None else _amounts_of(traffic)
        self._exchanged = dict.fromkeys(BYTES, 0)  # since then
        self._earlier: dict[str, float] = {}
        self._file = None if jsonl is None else LineFile(jsonl)
        self._jsonl_steps = jsonl_steps and jsonl is not None
        start = {
            "kind": "start",
            "format": FORMAT,
            "rank": rank,
            "unix_s": time.time(),
            "window_steps": window_steps,
            "run": "",
        }
        self._lines: list[dict[str, Any]] = [start]
        self._in_step: dict[str, float] = {}
        self._outside: dict[str, float] = {}
        self._names: set[str] = set()
        self._window, self._totals = Tally(), Tally()
        self._windows: deque[WindowStats] = deque(maxlen=max_windows)
        self._failed_steps = 0
        self._events: deque[Event] = deque(maxlen=max_events)
        self._dropped_events = 0

    def begin_run(self, run: str) -> None:
        """Note which run this is, before its first step, and read what earlier starts of it have exchanged from the
        file. Not on an event loop. Only the first call counts.

        Args:
            run: identity of the run, the same after a resume.
        """
        with self._lock:
            path = None if self._file is None else self._file.path
            if not self._lines or self._lines[0].get("run") != "":
                return
            self._lines[0]["run"] = run
        if path is None or self._traffic is None:
            return
        try:
            earlier = read_exchanged(path, run)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning(
                "profile not read", path=str(path), error=error.strerror, effect="bytes count from this start on"
            )
            return
        with self._lock:
            self._earlier = {name: float(amount) for name, amount in earlier.items() if amount}

    @property
    def exchanged(self) -> tuple[int, int]:
        """Return the bytes of payload that were sent and received, outside of steps, too, and by earlier starts of the
        run. They are those of ``traffic``, as long as the profile is open."""
        with self._lock:
            self._take_traffic()
            sent, received = (self._exchanged[name] + int(self._earlier.get(name, 0)) for name in BYTES)
            return sent, received

    def step(self, number: int) -> StepProfile:
        """A context manager around one step; spans and counters of the step are reported to what it gives."""
        return StepProfile(self, number)

    def span(self, name: str, **args: Any) -> Span:
        """Time what is done inside: as a part of the open step, or, if none is, of the time outside of steps.

        Args:
            args: shown with it in the trace.
        """
        return Span(self, name, self._step is not None, args)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of the open step, or, if none is, of what happens outside of steps."""
        self._report((self._step is not None, name, float(amount), None))

    def add_span(self, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """A span that was measured elsewhere, by ``time.perf_counter``, in seconds.

        Names in ``PHASES`` count like :meth:`span`. All others are collectives, which are in the trace and count
        nowhere: the exchanges of a step overlap, with each other and with computing.

        Args:
            args: shown with it in the trace.
        """
        if name in PHASES:
            self._report_phase(self._step is not None, name, start_s, end_s, max(0.0, end_s - start_s), args)
        else:
            self._report((False, None, 0.0, ("collectives", name, start_s, end_s, args or None)))

    def add_inner_span(self, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Add a part of the innermost span that is open in this context: measured elsewhere, by ``time.perf_counter``,
        in seconds. It counts in place of that one."""
        outer = _innermost.get()
        took_s = max(0.0, end_s - start_s)
        if outer is not None and outer._is_open and outer._profile is self:
            outer._inner_s += took_s
        self._report_phase(self._step is not None, name, start_s, end_s, took_s, args)

    def summary(self) -> ProfileSummary:
        """Return what was measured so far, but for a step that is still open."""
        with self._lock:
            self._take()
            self._take_traffic()
            return self._summary()

    def _summary(self) -> ProfileSummary:
        tally = Tally()
        tally.add(self._totals)
        tally.add(self._window)
        if self._step is None:
            add_amounts(tally.sums, self._in_step)  # came after the end of the last step
        return ProfileSummary(
            rank=self.rank,
            steps=tally.steps,
            failed_steps=self._failed_steps,
            first_step=tally.first_step,
            last_step=tally.last_step,
            mean=tally.mean,
            max=tally.maxima,
            total=tally.sums,
            outside=dict(self._outside),
            earlier=self._earlier,
            dropped_events=self._dropped_events,
            windows=tuple(self._windows),
        )

    def chrome_trace(self) -> dict[str, Any]:
        """The newest spans, for ``chrome://tracing`` and Perfetto, as JSON data. Takes about 10 us a span."""
        with self._lock:
            self._take()
            events, dropped = list(self._events), self._dropped_events
        return chrome_trace(self.rank, events, self._clock, dropped_events=dropped)

    def write_trace(self, path: Path) -> bool:
        """Write :meth:`chrome_trace` to a file; not on an event loop, it may take a second. False: logged why not."""
        try:
            write_chrome_trace(path, self.chrome_trace())
        except OSError as error:
            log.warning("trace not written", path=str(path), error=error.strerror)
            return False
        return True

    def close(self) -> None:
        """Write the steps since the last window, and the summary. Nothing is written to the JSONL file any more."""
        with self._lock:
            self._take()
            self._take_traffic()
            self._traffic = None
            if self._window.steps:
                self._end_window()
            if self._file is not None:
                self._lines.append({"kind": "summary", "unix_s": time.time(), **self._summary().to_json()})
                self._write()
            self._file, self._jsonl_steps = None, False

    # Reports, on any thread

    def _report(self, report: Report) -> None:
        self._inbox.append(report)
        if len(self._inbox) > _MAX_INBOX and self._lock.acquire(blocking=False):  # else: another thread is at it
            try:
                self._take()
            finally:
                self._lock.release()

    def _report_phase(
        self, in_step: bool, name: str, start_s: float, end_s: float, own_s: float, args: dict[str, Any]
    ) -> None:
        row: Row = "network" if name == "wait" else "compute"
        self._report((in_step, f"{name}_s", own_s, (row, name, start_s, end_s, args or None)))

    # Under the lock

    def _take(self) -> None:
        """Add up what has come. What belongs to a step, and came after its end, goes to the one that ends next."""
        names = self._names
        for _ in range(len(self._inbox)):  # not until it is empty: other threads may fill it as fast
            in_step, name, amount, event = self._inbox.popleft()
            if event is not None:
                self._keep(event)
            if name is None:
                continue
            if name not in names:
                if len(names) < _MAX_NAMES:
                    names.add(name)
                else:
                    name = "more_s" if name.endswith("_s") else "more"
            amounts = self._in_step if in_step else self._outside
            amounts[name] = amounts.get(name, 0.0) + amount

    def _take_traffic(self) -> None:
        """Add what was exchanged since the last time: to the open step, or, if none is, to what is outside of steps."""
        if self._traffic is None:
            return
        now = _amounts_of(self._traffic)
        more = {name: now[name] - before for name, before in self._counted.items() if now[name] != before}
        self._counted = now
        for name, amount in more.items():
            self._exchanged[name] += amount
        add_amounts(self._outside if self._step is None else self._in_step, more)

    def _begin_step(self, step: StepProfile) -> None:
        with self._lock:
            self._take_traffic()
            self._step = step

    def _end_step(self, step: StepProfile, start_s: float, end_s: float, error: str | None) -> None:
        """``error``: the name of the exception that the step ended with."""
        number = step.number
        with self._lock:
            self._take_traffic()
            self._step = None
            self._take()
            amounts, self._in_step = self._in_step, {}
            if self._traffic is not None:  # a step in which nothing was exchanged has sent 0 bytes
                amounts = {**dict.fromkeys(BYTES, 0.0), **amounts}
            step.sent_bytes = int(amounts.get("bytes_out", 0))
            spans_s = sum(amount for name, amount in amounts.items() if name.endswith("_s"))
            marked = {} if error is None else {"error": error}
            exchanged = {name: amounts[name] for name in BYTES if name in amounts}
            self._keep(("step", f"step {number}", start_s, end_s, {"step": number, **marked, **plain(exchanged)}))
            amounts["step_s"] = end_s - start_s
            amounts["other_s"] = max(0.0, end_s - start_s - spans_s)
            if self._jsonl_steps:
                self._lines.append({"kind": "step", "rank": self.rank, "step": number, **plain(amounts), **marked})
                if len(self._lines) >= _MAX_LINES:
                    self._write()
            if error is not None:  # a wait for a peer that never comes tells nothing about the network
                self._failed_steps += 1
                add_amounts(self._outside, exchanged)
                return
            self._window.add(Tally(1, number, number, amounts, amounts))
            if self._window.steps >= self._window_steps:
                self._end_window()

    def _cancel_step(self) -> None:
        with self._lock:
            self._take_traffic()
            self._step = None
            self._take()
            add_amounts(self._outside, {name: self._in_step[name] for name in BYTES if name in self._in_step})
            self._in_step = {}

    def _keep(self, event: Event) -> None:
        if len(self._events) == self._events.maxlen:
            self._dropped_events += 1
        self._events.append(event)

    def _end_window(self) -> None:
        window = self._window.window()
        self._totals.add(self._window)
        self._window = Tally()
        self._windows.append(window)
        line = {"kind": "window", "rank": self.rank, "unix_s": time.time(), **window.to_json()}
        self._lines.append({**line, "outside": plain(self._outside)})
        self._write()
        log.info("window", rank=self.rank, **window.headline())
        self.on_window(window)

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if self._file is not None:
            self._file.append(lines)


class StepProfile:
    """One step. What is reported to it counts for this step, or the next one if this one has ended.

    A step that ends with an error is shown in the trace and counted as failed, but is in no mean.

    Attributes:
        sent_bytes: once it has ended, of payload.
    """

    __slots__ = ("_profile", "_start_s", "number", "sent_bytes")

    def __init__(self, profile: Profile, number: int) -> None:
        self._profile = profile
        self.number = number
        self.sent_bytes = 0
        self._start_s = 0.0

    def __enter__(self) -> Self:
        """Raises RuntimeError: another step is open."""
        open_step = self._profile._step
        if open_step is not None:
            raise RuntimeError(f"step {self.number} begins inside step {open_step.number}: steps do not overlap")
        self._profile._begin_step(self)
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end_s = time.perf_counter()
        self._profile._end_step(self, self._start_s, end_s, None if kind is None else kind.__name__)

    def cancel(self) -> None:
        """End it in place of the block's end, as it did not take place: it counts nowhere, and its bytes outside."""
        self._profile._cancel_step()

    def span(self, name: str, **args: Any) -> Span:
        """Time what is done inside, also on another thread, also if it fails. Spans of one name add up.

        Args:
            name: not ``step`` and ``other``, which are worked out.
            args: shown with it in the trace.
        """
        return Span(self._profile, name, True, args)

    def add_span(self, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """A part of this step that was measured elsewhere, by ``time.perf_counter``, in seconds."""
        self._profile._report_phase(True, name, start_s, end_s, max(0.0, end_s - start_s), args)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of this step, such as ``bytes_out`` and ``bytes_in``."""
        self._profile._report((True, name, float(amount), None))


class Span:
    """A span that is being measured. It counts without the spans inside it, for each moment belongs to one name."""

    __slots__ = ("_args", "_in_step", "_inner_s", "_is_open", "_name", "_outer", "_profile", "_start_s")

    def __init__(self, profile: Profile, name: str, in_step: bool, args: dict[str, Any]) -> None:
        self._profile = profile
        self._name = name
        self._in_step = in_step
        self._args = args
        self._inner_s = 0.0
        self._is_open = False
        self._outer: Span | None = None

    def __enter__(self) -> Self:
        outer = _innermost.get()
        # A task that was started inside a span goes on with it as its outer one, when that one has long ended.
        self._outer = outer if outer is not None and outer._is_open and outer._profile is self._profile else None
        self._is_open = True
        _innermost.set(self)
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end_s = time.perf_counter()
        took_s = end_s - self._start_s
        self._is_open = False
        outer, self._outer = self._outer, None
        # Not reset(token): a generator may be closed in another context than the one it was started in.
        _innermost.set(outer)
        if outer is not None:
            outer._inner_s += took_s
        if kind is not None:
            self._args["error"] = kind.__name__
        self._profile._report_phase(
            self._in_step, self._name, self._start_s, end_s, max(0.0, took_s - self._inner_s), self._args
        )

    def cancel(self) -> None:
        """End it in place of the block's end, where that is not known: it counts nowhere."""
        self._is_open = False
        outer, self._outer = self._outer, None
        _innermost.set(outer)


def _amounts_of(traffic: Traffic) -> dict[str, int]:
    return dict(zip(BYTES, (traffic.sent_bytes, traffic.received_bytes), strict=True))


# By context, not by thread: on an event loop the spans of different tasks are not inside each other.
_innermost: ContextVar[Span | None] = ContextVar("gradbus_profile_span", default=None)

"""Where the time and the bytes of each step go.

    profile = Profile(rank=0, jsonl=Path("profile/rank-0.jsonl"))
    with profile.step(step_no) as step:
        with step.span("compute"): ...
        step.count("bytes_out", len(payload))

Names of spans: ``compute``, ``encode``, ``wait`` (the network alone), ``decode`` (and aggregate), ``apply``, ``eval``,
``checkpoint``; others may be added. A span counts without the spans inside it, so that the parts of a step add up.
docs/profile.md explains the files.

Any thread may report at any time. A report is one ``deque.append``, which is atomic: there is no lock for the compute
thread to wait on. The thread that ends a step adds up what has come.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from gradbus.runtime.logs import get_logger
from gradbus.runtime.profiling.chrome_trace import Clock, Row, chrome_trace, merge_chrome_traces, write_chrome_trace
from gradbus.runtime.profiling.ledger import Ledger, Report
from gradbus.runtime.profiling.summary import ProfileSummary, WindowStats

__all__ = ["PHASES", "Profile", "ProfileSummary", "Span", "StepProfile", "WindowStats", "merge_chrome_traces"]

PHASES = ("compute", "encode", "wait", "decode", "apply", "eval", "checkpoint")

_MAX_INBOX = 1024  # reports that may lie there between two steps

log = get_logger("profile")


class Profile:
    """Measures the steps of one rank. Memory is bounded, whatever the number of steps.

    Attributes:
        on_window: gets each window as it ends, on the thread that ended the step; it must not take long, nor report.
    """

    def __init__(
        self, rank: int, window_steps: int = 50, jsonl: Path | None = None, *, jsonl_steps: bool = False,
        max_events: int = 50_000, max_windows: int = 1000,
    ) -> None:  # fmt: skip
        """An empty one.

        Args:
            window_steps: steps of one window of means and maxima.
            jsonl: where each window is appended as a line; None: nowhere. jsonl_steps: each step as well.
            max_events: of the trace, the newest; max_windows: of the summary, the newest. Totals cover all steps.
        """
        self.rank = rank
        self.on_window: Callable[[WindowStats], object] = lambda window: None
        self._ledger = Ledger(
            rank, window_steps, jsonl, jsonl_steps=jsonl_steps, max_events=max_events, max_windows=max_windows,
            on_window=lambda window: self.on_window(window),
        )  # fmt: skip
        self._lock = threading.Lock()  # for the ledger
        self._inbox: deque[Report] = deque()
        self._step: StepProfile | None = None
        self._clock = Clock.read()

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

    def add_span(
        self, name: str, start_s: float, end_s: float, *, category: Literal["phase", "collective"] | None = None,
        **args: Any,
    ) -> None:  # fmt: skip
        """A span that was measured elsewhere.

        Args:
            start_s, end_s: ``time.perf_counter``, seconds.
            category: ``phase`` counts like :meth:`span`; ``collective`` is shown in the trace and counts nowhere: the
                exchanges of a step overlap, with each other and with computing. None: a phase for the names in
                ``PHASES``, else a collective.
            args: shown with it in the trace.
        """
        if category == "phase" or (category is None and name in PHASES):
            self._report_phase(self._step is not None, name, start_s, end_s, max(0.0, end_s - start_s), args)
        else:
            self._report((False, None, 0.0, ("collectives", name, start_s, end_s, args or None)))

    def summary(self) -> ProfileSummary:
        """What was measured so far, but for a step that is still open."""
        with self._lock:
            self._ledger.take(self._inbox)
            return self._ledger.summary(step_is_open=self._step is not None)

    def chrome_trace(self) -> dict[str, Any]:
        """The newest spans, for ``chrome://tracing`` and Perfetto, as JSON data. Takes about 10 us a span."""
        with self._lock:
            self._ledger.take(self._inbox)
            events, dropped = list(self._ledger.events), self._ledger.dropped_events
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
            self._ledger.take(self._inbox)
            self._ledger.close()

    # Reports, on any thread

    def _report(self, report: Report) -> None:
        self._inbox.append(report)
        if len(self._inbox) > _MAX_INBOX and self._lock.acquire(blocking=False):  # else: somebody is at it already
            try:
                self._ledger.take(self._inbox)
            finally:
                self._lock.release()

    def _report_phase(
        self, in_step: bool, name: str, start_s: float, end_s: float, own_s: float, args: dict[str, Any]
    ) -> None:
        row: Row = "network" if name == "wait" else "compute"
        self._report((in_step, f"{name}_s", own_s, (row, name, start_s, end_s, args or None)))

    def _end_step(self, number: int, start_s: float, end_s: float, error: str | None) -> None:
        with self._lock:
            self._step = None
            self._ledger.take(self._inbox)
            self._ledger.end_step(number, start_s, end_s, error)


class StepProfile:
    """One step. What is reported to it counts for this step, or the next one if this one has ended.

    A step that ends with an error is shown in the trace and counted as failed, but is in no mean.
    """

    __slots__ = ("_profile", "_start_s", "number")

    def __init__(self, profile: Profile, number: int) -> None:
        self._profile = profile
        self.number = number
        self._start_s = 0.0

    def __enter__(self) -> Self:
        """Raises RuntimeError: another step is open."""
        open_step = self._profile._step
        if open_step is not None:
            raise RuntimeError(f"step {self.number} begins inside step {open_step.number}: steps do not overlap")
        self._profile._step = self
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end_s = time.perf_counter()
        self._profile._end_step(self.number, self._start_s, end_s, None if kind is None else kind.__name__)

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


# By context, not by thread: on an event loop the spans of different tasks are not inside each other.
_innermost: ContextVar[Span | None] = ContextVar("gradbus_profile_span", default=None)

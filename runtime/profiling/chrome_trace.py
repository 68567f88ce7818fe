"""Traces that ``chrome://tracing`` and https://ui.perfetto.dev load: one process per rank, rows of spans below it.

Format: "Trace Event Format", the JSON object form. Spans are complete events (``X``), ``ts`` and ``dur`` in us. ``ts``
counts from the earliest event of the trace; ``otherData.origin_unix_ns`` says when that was by the wall clock, so that
:func:`merge_chrome_traces` can put traces of several ranks on one time line. Between machines that is as exact as their
clocks are set.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradbus.runtime.foreign_files import clear_way
from gradbus.runtime.private_folder import make_private

Row = Literal["step", "compute", "network", "collectives"]
Event = tuple[Row, str, float, float, Mapping[str, Any] | None]
"""Row, name, start_s, end_s (``time.perf_counter``), arguments. A plain tuple: half as dear as a named one."""

ROWS: tuple[Row, ...] = ("step", "compute", "network", "collectives")
_COUNTERS = ("bytes_out", "bytes_in")


class Clock(NamedTuple):
    """One moment by two clocks.

    Attributes:
        unix_ns: wall clock. perf_ns: ``time.perf_counter_ns``.
    """

    unix_ns: int
    perf_ns: int

    @classmethod
    def read(cls) -> Clock:
        """Now. The closest of a few readings: between two of them the thread may lose the processor."""
        best: tuple[int, Clock] | None = None
        for _ in range(5):
            before, unix_ns, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
            if best is None or after - before < best[0]:
                best = after - before, cls(unix_ns, (before + after) // 2)
        assert best is not None
        return best[1]


def chrome_trace(rank: int, events: Iterable[Event], clock: Clock, *, dropped_events: int = 0) -> dict[str, Any]:
    """The trace of one rank, as JSON data.

    Events of a row that overlap without one lying in the other get rows of their own (``compute 2``): viewers want the
    slices of a row nested. Collectives that overlap always do, for none is a part of another.

    Args:
        events: in any order. An end before the start counts as the start.
        clock: some moment of the clock that the events were measured by.
    """
    spans = sorted((_in_ns(event) for event in events), key=lambda span: (span.start_ns, -span.end_ns))
    origin_ns = spans[0].start_ns if spans else clock.perf_ns
    lanes: dict[Row, list[list[int]]] = {row: [[]] for row in ROWS}
    body: list[dict[str, Any]] = []
    for span in spans:
        tid = _tid(span.row, _place(span, lanes[span.row], nested=span.row != "collectives"))
        at = {"pid": rank, "tid": tid, "ts": (span.start_ns - origin_ns) / 1000}
        args = {str(name): value if _is_plain(value) else str(value) for name, value in (span.args or {}).items()}
        shown = {"args": args} if args else {}
        duration = {"dur": (span.end_ns - span.start_ns) / 1000}
        body.append({"ph": "X", "name": span.name, "cat": span.row, **at, **duration, **shown})
        for name in _COUNTERS if span.row == "step" else ():
            if isinstance(args.get(name), int | float):
                title = f"{name.replace('_', ' ')} per step"
                body.append({"ph": "C", "name": title, "cat": "counter", **at, "args": {name: args[name]}})
    return {
        "traceEvents": _names(rank, {row: len(lanes[row]) for row in ROWS}) + body,
        "displayTimeUnit": "ms",
        "otherData": {
            "origin_unix_ns": clock.unix_ns + origin_ns - clock.perf_ns,
            "dropped_events": {str(rank): dropped_events},
        },
    }


def merge_chrome_traces(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One trace of all ranks: each keeps its rows, and all share one time line, from the earliest event on.

    Args:
        traces: of :func:`chrome_trace`, or merged before. They are not changed.

    Raises:
        ValueError: one of them is no such trace.
    """
    origins = [_origin(trace) for trace in traces]
    first = min(origins, default=0)
    names: dict[str, dict[str, Any]] = {}
    body: list[dict[str, Any]] = []
    dropped: dict[str, int] = {}
    for trace, origin in zip(traces, origins, strict=True):
        # Rounded to whole nanoseconds again: the sum of two floats may end a slice after the one that it lies in.
        shift_us = (origin - first) / 1000
        for event in trace["traceEvents"]:
            if event["ph"] == "M":
                names.setdefault(json.dumps(event, sort_keys=True), event)  # a rank that was started again has two
            else:
                body.append({**event, "ts": round(event["ts"] + shift_us, 3)})
        for rank, count in trace["otherData"].get("dropped_events", {}).items():
            dropped[rank] = dropped.get(rank, 0) + count
    return {
        "traceEvents": sorted(names.values(), key=lambda event: (event["pid"], event["tid"]))
        + sorted(body, key=lambda event: (event["ts"], -event.get("dur", 0.0))),
        "displayTimeUnit": "ms",
        "otherData": {"origin_unix_ns": first, "dropped_events": dropped},
    }


def write_chrome_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write it, whole or not at all; the folder is made if need be. Raises OSError."""
    make_private(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    clear_way(temporary)
    try:
        temporary.write_text(json.dumps(trace, allow_nan=False, separators=(",", ":")), encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


class _Span(NamedTuple):
    row: Row
    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] | None


def _in_ns(event: Event) -> _Span:
    """Whole nanoseconds: what viewers count in, and what can be compared without rounding."""
    row, name, start_s, end_s, args = event
    return _Span(row, name, round(start_s * 1e9), round(max(start_s, end_s) * 1e9), args)


def _place(span: _Span, lanes: list[list[int]], *, nested: bool) -> int:
    """Put a span on the first lane that has room for it. Spans come in the order of their starts.

    Args:
        lanes: the ends of the open spans of each, outermost first.
    """
    for number, ends in enumerate(lanes):
        while ends and ends[-1] <= span.start_ns:
            ends.pop()
        if not ends or (nested and span.end_ns <= ends[-1]):
            ends.append(span.end_ns)
            return number
    lanes.append([span.end_ns])
    return len(lanes) - 1


def _tid(row: Row, lane: int) -> int:
    """Return the same for equal rows of all traces, so that those of a rank that was started again can be merged."""
    return 1 + ROWS.index(row) + lane * len(ROWS)


def _names(rank: int, lanes: Mapping[Row, int]) -> list[dict[str, Any]]:
    def named(kind: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "ts": 0, "args": args}

    found = [named("process_name", 0, name=f"rank {rank}"), named("process_sort_index", 0, sort_index=rank)]
    for order, row in enumerate(ROWS):
        for lane in range(lanes[row]):
            found.append(named("thread_name", _tid(row, lane), name=f"{row} {lane + 1}" if lane else row))
            found.append(named("thread_sort_index", _tid(row, lane), sort_index=1000 * order + lane))
    return found


def _origin(trace: Mapping[str, Any]) -> int:
    try:
        trace["traceEvents"]
        return int(trace["otherData"]["origin_unix_ns"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            "not a trace of gradbus: it has no otherData.origin_unix_ns, so it fits no time line"
        ) from None


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))

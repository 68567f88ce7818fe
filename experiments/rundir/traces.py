"""The traces that the ranks of a run have left: read within a size, and put together into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from gradbus.runtime.json_text import parse_json, read_text
from gradbus.runtime.logs import get_logger
from gradbus.runtime.profiling.chrome_trace import merge_chrome_traces, write_chrome_trace

T = TypeVar("T")

MAX_TRACE_BYTES = 64 << 20  # of one rank: a trace has 50,000 events at most, of some 200 bytes

log = get_logger("profile")


def trace_of(folder: Path, rank: int) -> Path:
    """Return where this rank leaves its trace."""
    return folder / f"trace-rank-{rank}.json"


def merge_traces(folder: Path, world: int | None = None) -> Path | None:
    """Make ``trace.json`` of the traces of the ranks, and return its path; None: there is nothing to merge.

    A file that cannot be read is named in the log and left out. ``world``: only of so many ranks, as an earlier run in
    this folder may have had more. Raises OSError: the trace cannot be written.
    """
    if world is None:
        paths = sorted(folder.glob("trace-rank-*.json"))
    else:
        paths = [path for path in (trace_of(folder, rank) for rank in range(world)) if path.exists()]
    traces = readable(paths, _read)
    if not traces:
        return None
    path = folder / "trace.json"
    write_chrome_trace(path, merge_chrome_traces(traces))
    return path


def readable(paths: Iterable[Path], read: Callable[[Path], T]) -> list[T]:
    """Return what ``read`` makes of each; a file that is cut off, or something else, is named in the log and left
    out."""
    found = []
    for path in paths:
        try:
            found.append(read(path))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            log.warning("profile not read", path=str(path), error=str(error))
    return found


def _read(path: Path) -> dict[str, Any]:
    """The trace, merged with no other: raises here if it cannot be merged."""
    return merge_chrome_traces([parse_json(read_text(path, MAX_TRACE_BYTES))])

"""The traces that the ranks of a run have left: read within a size, and put together into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gradbus.runtime.foreign_files import is_there, names_inside, text_inside
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.logs import get_logger
from gradbus.runtime.profiling.chrome_trace import merge_chrome_traces, write_chrome_trace

T = TypeVar("T")

MAX_TRACE_BYTES = 24 << 20  # of one rank: a trace has 50,000 events at most, of some 200 bytes
MAX_MERGED_BYTES = 256 << 20  # of all ranks together, that are merged into one

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
        paths = files_of_ranks(folder, "trace-rank-*.json")
    else:
        paths = [path for path in (trace_of(folder, rank) for rank in range(world)) if is_there(folder, path.name)]
    traces = readable(_first_of(paths), _read)
    if not traces:
        return None
    path = folder / "trace.json"
    write_chrome_trace(path, merge_chrome_traces(traces))
    return path


def files_of_ranks(folder: Path, pattern: str) -> list[Path]:
    """Return the files of this pattern, sorted; of a folder that cannot be listed none, and the log says why."""
    try:
        return [folder / name for name in names_inside(folder, pattern)]
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("profile not read", path=str(folder), error=str(error))
        return []


def _first_of(paths: Iterable[Path]) -> Iterator[Path]:
    """As many as may be merged; of more, the log has how many are left out."""
    left, out = MAX_MERGED_BYTES, 0
    for path in paths:
        left -= path.lstat().st_size
        if left >= 0:
            yield path
        else:
            out += 1
    if out:
        log.warning("traces left out", count=out, why=f"together they have more than {MAX_MERGED_BYTES >> 20} MiB")


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
    return merge_chrome_traces([parse_json(text_inside(path.parent, path.name, MAX_TRACE_BYTES))])

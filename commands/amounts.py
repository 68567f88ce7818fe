"""Numbers as a person reads them: bytes, times, shares, lists of ids."""

from __future__ import annotations

import math
from collections.abc import Iterable

DASH = "–"  # of tables in a report; on a terminal it is "-"


def number(value: float | None, digits: int) -> str:
    """With so many digits behind the point; ``-`` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """0.9876 as ``98.76 %``; ``-`` for None."""
    return "-" if share is None else f"{100 * share:.2f} %"


def size(num_bytes: float) -> str:
    """Bytes in decimal units, as networks count."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def duration(seconds: float | None) -> str:
    """A time with three digits in the unit that fits; a dash for None and NaN."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds >= 6000:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 100:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers in short: ``0-97, 99, 100``."""
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][-1] + 1:
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}-{run[-1]}" if run[-1] > run[0] + 1 else ", ".join(map(str, run)) for run in runs)

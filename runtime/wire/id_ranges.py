"""Sets of client ids as text: ascending ranges that do not touch, as in ``0,3-7,12``. A set of consecutive ids takes a
few bytes, however large it is."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise

MAX_CHARS = 32 * 1024
MAX_ID = 0x7FFF_FFFF
_RANGE = re.compile(r"(0|[1-9][0-9]{0,9})(?:-([1-9][0-9]{0,9}))?")


def format_ids(ids: Iterable[int]) -> str:
    """The text of these ids; empty: there are none."""
    ranges: list[list[int]] = []
    for number in sorted(set(ids)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def parse_ids(text: str) -> tuple[range, ...]:
    """The ranges that a text stands for, ascending. Their memory is that of the text, not that of the ids.

    Raises:
        ValueError: it is not what :func:`format_ids` writes.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"ids in {len(text)} characters, at most {MAX_CHARS}")
    found = []
    for part in text.split(",") if text else ():
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"expected ids as in 0,3-7,12, got {part[:40]!r}")
        first = int(match[1])
        found.append(range(first, int(match[2] or first) + 1))
        if not found[-1] or found[-1][-1] > MAX_ID:
            raise ValueError(f"ids {part!r}: expected an ascending range up to {MAX_ID}")
    if any(after.start <= before.stop for before, after in pairwise(found)):
        raise ValueError("ids: expected ascending ranges that do not touch")
    return tuple(found)


def has_id(ranges: tuple[range, ...], number: int) -> bool:
    """Whether this id is in one of the ranges of :func:`parse_ids`."""
    place = bisect_right(ranges, number, key=lambda one: one.start) - 1
    return place >= 0 and number in ranges[place]


def common_ids(one: tuple[range, ...], other: tuple[range, ...]) -> Iterator[int]:
    """The ids that are in both, ascending; each as :func:`parse_ids` gives it."""
    first = second = 0
    while first < len(one) and second < len(other):
        yield from range(max(one[first].start, other[second].start), min(one[first].stop, other[second].stop))
        if one[first].stop <= other[second].stop:
            first += 1
        else:
            second += 1


def checked_ids(text: str) -> str:
    """The text itself. Raises ValueError as :func:`parse_ids`."""
    parse_ids(text)
    return text

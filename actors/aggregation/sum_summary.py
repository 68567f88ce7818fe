"""What goes up a tree of controllers with a sum of updates: samples, clients and losses. Pure, and without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SumSummary:
    """Holds what the next level needs to know of a sum beside its integers.

    Attributes:
        num_samples: sum of the weights. updates: vectors that were added.
        clients: ids of the clients whose updates they are, ascending ranges that do not touch.
        loss_parts: floats whose exact sum is that of samples times loss. loss_samples: of these updates.
    """

    num_samples: int
    updates: int
    clients: tuple[range, ...]
    loss_parts: tuple[float, ...]
    loss_samples: int

    def shared_client(self, other: SumSummary) -> int | None:
        """The lowest client that both sums contain; None: there is none."""
        mine, theirs = list(reversed(self.clients)), list(reversed(other.clients))
        while mine and theirs:
            first = max(mine[-1].start, theirs[-1].start)
            if first < min(mine[-1].stop, theirs[-1].stop):
                return first
            (mine if mine[-1].stop <= theirs[-1].stop else theirs).pop()
        return None


def ranges_of(ids: Iterable[int]) -> tuple[range, ...]:
    """The ids as ascending ranges that do not touch."""
    return merged(range(number, number + 1) for number in ids)


def merged(ranges: Iterable[range]) -> tuple[range, ...]:
    """The ids in these ranges as ascending ranges that do not touch. Its memory is that of the ranges: those that a
    site sends may have billions of ids."""
    found: list[range] = []
    for each in sorted(ranges, key=lambda each: each.start):
        if found and each.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, each.stop))
        else:
            found.append(each)
    return tuple(found)


def exact_parts(values: Iterable[float]) -> list[float]:
    """Floats that do not overlap and have exactly the sum of these (Shewchuk, Discrete & Computational Geometry 18,
    1997, section 2.4): ``math.fsum`` of the parts of several sums is that of all values. They must be finite."""
    parts: list[float] = []
    for value in values:
        grown, total = [], value
        for part in parts:
            high, low = (total, part) if abs(total) >= abs(part) else (part, total)
            total = high + low
            if rest := low - (total - high):
                grown.append(rest)
        parts = [*grown, total]
    return [part for part in parts if part]

"""A bounded number of items out of a sequence of any length, such that its extremes stay.

The sequence is cut into buckets of equal width. Each keeps its first item, and of each measure the items with the least
and with the largest value, so no peak of a curve is lost. Where that comes to too much, buckets are joined two by two:
one pass is enough, and the length need not be known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
Measure = Callable[[T], float | None]


class Thinned(Generic[T]):
    """The items that are kept; :meth:`items` returns them in the order in which they came."""

    def __init__(
        self,
        measures: Sequence[Measure[T]],
        most: int,
        *,
        weight: Callable[[T], int] = lambda item: 1,
        strip: Callable[[T], T] = lambda item: item,
    ) -> None:
        """
        Args:
            measures: what is to keep its extremes; None and NaN are in no measure.
            most: the weight of all that is kept.
            strip: takes from an item that is kept what is not needed; the measures must not need it, either.
        """
        self._measures = measures
        self._most = most
        self._weight_of = weight
        self._strip = strip
        self._width = 1  # items that a bucket stands for
        self._buckets: list[_Bucket[T]] = []
        self._count = 0
        self._weight = 0  # of the buckets that are full

    @property
    def is_thinned(self) -> bool:
        """Whether some items may have been left out."""
        return self._width > 1

    def add(self, item: T) -> None:
        """Take the next item."""
        if self._count % self._width == 0:
            self._close_last()
        if self._count % self._width == 0:  # or joining has made the last bucket one half of a new one
            self._buckets.append(_Bucket(item, len(self._measures)))
        self._buckets[-1].add(item, [measure(item) for measure in self._measures])
        self._count += 1

    def items(self) -> list[T]:
        """Return what is kept."""
        return [item for bucket in self._buckets for item in bucket.items()]

    def _close_last(self) -> None:
        """The last bucket is full. Join buckets until there is room for some more: else each new one would do it."""
        if not self._buckets:
            return
        self._buckets[-1].strip(self._strip)
        self._weight += self._weight_in(self._buckets[-1])
        if self._weight <= self._most:
            return
        while self._weight > 0.6 * self._most and len(self._buckets) > 1:
            pairs = [self._buckets[at : at + 2] for at in range(0, len(self._buckets), 2)]
            self._buckets = [first.joined(*rest) for first, *rest in pairs]
            self._width *= 2
            full = self._buckets[: self._count // self._width]
            self._weight = sum(map(self._weight_in, full))

    def _weight_in(self, bucket: _Bucket[T]) -> int:
        return sum(map(self._weight_of, bucket.items()))


class _Bucket(Generic[T]):
    """Consecutive items, of which the first and the extremes are kept, each with its place among them."""

    def __init__(self, first: T, measures: int) -> None:
        self.count = 0
        self._first = first
        self.least: list[_Extreme[T] | None] = [None] * measures
        self.largest: list[_Extreme[T] | None] = [None] * measures

    def add(self, item: T, values: Sequence[float | None]) -> None:
        for index, value in enumerate(values):
            if value is None or value != value:
                continue
            if (least := self.least[index]) is None or value < least[0]:
                self.least[index] = (value, self.count, item)
            if (largest := self.largest[index]) is None or value > largest[0]:
                self.largest[index] = (value, self.count, item)
        self.count += 1

    def joined(self, *rest: _Bucket[T]) -> _Bucket[T]:
        """This bucket with those that follow it."""
        for later in rest:
            for own, theirs, sign in ((self.least, later.least, 1), (self.largest, later.largest, -1)):
                for index, found in enumerate(theirs):
                    before = own[index]
                    if found is not None and (before is None or sign * found[0] < sign * before[0]):
                        own[index] = (found[0], self.count + found[1], found[2])
            self.count += later.count
        return self

    def strip(self, strip: Callable[[T], T]) -> None:
        stripped = {place: strip(item) for place, item in self._kept().items()}
        self._first = stripped[0]
        for ends in (self.least, self.largest):
            ends[:] = [None if end is None else (end[0], end[1], stripped[end[1]]) for end in ends]

    def items(self) -> list[T]:
        return [item for _, item in sorted(self._kept().items(), key=lambda kept: kept[0])]

    def _kept(self) -> dict[int, T]:
        ends = (end for end in (*self.least, *self.largest) if end is not None)
        return {0: self._first, **{place: item for _, place, item in ends}}


_Extreme = tuple[float, int, T]
"""A value, the place of its item in the bucket, and the item."""

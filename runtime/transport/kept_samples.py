"""The samples that an outlet may have to send: those that it retains for newcomers, and those that an inlet lacks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

LEAST_BYTES = 1 << 10  # of the window that a sample takes, so that small ones take a bounded memory, too


class NumberedSample(NamedTuple):
    """A sample with its number, and the octets of the window that it takes."""

    number: int
    num_bytes: int
    sample: Any


class KeptSamples:
    """The newest samples of an outlet, which are numbered from 1 in the order of their writes, without gaps.

    Attributes:
        last: number of the newest one. num_bytes: of the window that is taken by those that an inlet lacks.
    """

    __slots__ = ("_keeps_last", "_lacking", "_retained", "last", "num_bytes")

    def __init__(self, retained_samples: int, *, keeps_last: bool) -> None:
        """``retained_samples``: so many are retained. ``keeps_last``: an inlet lacks the newest sample at most."""
        self._retained: deque[NumberedSample] = deque(maxlen=retained_samples)
        self._lacking: deque[NumberedSample] = deque()
        self._keeps_last = keeps_last
        self.last = self.num_bytes = 0

    def append(self, sample: Any, num_bytes: int) -> NumberedSample:
        """Number a sample and keep it until :meth:`acknowledge`."""
        self.last += 1
        numbered = NumberedSample(self.last, max(LEAST_BYTES, num_bytes), sample)
        if self._keeps_last:
            self._lacking.clear()
            self.num_bytes = 0
        self._lacking.append(numbered)
        self.num_bytes += numbered.num_bytes
        self._retained.append(numbered)
        return numbered

    @property
    def first_retained(self) -> int:
        """Return the number of the oldest sample that a newcomer gets; without such a sample, of the next one."""
        return self._retained[0].number if self._retained else self.last + 1

    @property
    def first(self) -> int:
        """Return the number of the oldest sample that is here; without one, of the next one."""
        heads = (one[0].number for one in (self._lacking, self._retained) if one)
        return min(heads, default=self.last + 1)

    def since(self, number: int) -> Sequence[NumberedSample]:
        """Return the samples from this number on. On a channel that keeps the last one, older ones are gone."""
        both = self._lacking, self._retained  # each ends with the newest sample
        found = list(islice(reversed(max(both, key=len)), max(0, self.last + 1 - number)))
        found.reverse()
        return found

    def keep_since(self, number: int) -> None:
        """Keep the samples from this number on, as far as they are there: an inlet lacks them."""
        if not self._lacking or number < self._lacking[0].number:
            self._lacking = deque(self.since(number))
            self.num_bytes = sum(one.num_bytes for one in self._lacking)

    def acknowledge(self, number: int) -> None:
        """Forget the samples up to this number, as far as they are not retained."""
        while self._lacking and self._lacking[0].number <= number:
            self.num_bytes -= self._lacking.popleft().num_bytes

"""How much one client may weigh by the number of samples that it announces: at most so many times a typical client.

The weight of an update in the mean is a number that its client tells. Nobody can check it, so by default it counts up
to a multiple of the median. The median is that of all clients that have counted in the run so far, each with what it
announced last: as the controller committed it, so it is known before a round begins, does not depend on the order in
which updates come, and is the same after a restart. Only the first round has nothing to go by. There updates wait,
where they are, until all who are expected have offered theirs, and the median is that of these offers.

Of an even number it is the lower of the two in the middle: with two clients the smaller one is typical.
"""

from __future__ import annotations

from collections.abc import Iterable

CAPPED = "samples capped"  # in the marks of a round's report


class SampleCap:
    """The cap of one round at a time. Without ``times`` there is none.

    Attributes:
        cap: most samples that an update counts as; None: there is no limit, or it is not known yet.
    """

    def __init__(self, times: float | None) -> None:
        """``times``: how many typical clients one may weigh, 1 or more."""
        self._times = times
        self._round_id = -1
        self.cap: int | None = None

    def begin(self, round_id: int, known: Iterable[int]) -> None:
        """A round begins, or another attempt at it, which changes nothing. ``known``: samples of clients that have
        counted before."""
        if round_id != self._round_id:
            self._round_id, self.cap = round_id, None
            self._settle(known)

    @property
    def is_settled(self) -> bool:
        """Whether updates can be weighed now."""
        return self._times is None or self.cap is not None

    def settle(self, announced: Iterable[int]) -> None:
        """Nothing is known of earlier rounds: by these offers, then."""
        if not self.is_settled:
            self._settle(announced)

    def _settle(self, samples: Iterable[int]) -> None:
        ordered = sorted(samples)
        if self._times is not None and ordered:
            self.cap = max(1, int(self._times * ordered[(len(ordered) - 1) // 2]))

    def weight(self, num_samples: int) -> int:
        """What an update of so many samples counts as."""
        return num_samples if self.cap is None else min(num_samples, self.cap)

"""How much one client may weigh by the number of samples that it announces: at most so many times a typical client.

The weight of an update in the mean is a number that its client tells. Nobody can check it, so by default it counts up
to a multiple of the median. The median is that of all clients that have counted in the run so far, each with what it
announced last: as the controller committed it, so it is known before a round begins, does not depend on the order in
which updates come, and is the same after a restart. Only the first round has nothing to go by. There updates wait,
where they are, until all who are expected have offered theirs, and the median is that of these offers. The same holds
while but one client has counted: what it says of itself tells nothing of the others. Two numbers are enough for one
client that lies: of an even number the median is the lower of the two in the middle, so the smaller one is typical.
"""

from __future__ import annotations

from collections.abc import Mapping

CAPPED = "samples capped"  # in the marks of a round's report
ENOUGH = 2  # clients whose samples are known, to say what is typical


class SampleCap:
    """The cap of one round at a time. Without ``times`` there is none.

    Attributes:
        cap: most samples that an update counts as; None: there is no limit, or it is not known yet.
    """

    def __init__(self, times: float | None) -> None:
        """``times``: how many typical clients one may weigh, 1 or more."""
        self._times = times
        self._round_id = -1
        self._known: Mapping[int, int] = {}
        self.cap: int | None = None

    def begin(self, round_id: int, known: Mapping[int, int]) -> None:
        """A round begins, or another attempt at it, which changes nothing. ``known``: samples of each client that has
        counted before."""
        if round_id != self._round_id:
            self._round_id, self._known, self.cap = round_id, known, None
            if len(known) >= ENOUGH:
                self.settle({})

    @property
    def is_settled(self) -> bool:
        """Whether updates can be weighed now."""
        return self._times is None or self.cap is not None

    def clients(self, announced: Mapping[int, int]) -> int:
        """Of how many clients the samples are known, with these offers."""
        return len(self._known.keys() | announced.keys())

    def settle(self, announced: Mapping[int, int]) -> None:
        """Too little is known of earlier rounds: by these offers as well, then; samples of each client."""
        ordered = sorted({**self._known, **announced}.values())
        if not self.is_settled and self._times is not None and ordered:
            self.cap = max(1, int(self._times * ordered[(len(ordered) - 1) // 2]))

    def weight(self, num_samples: int) -> int:
        """What an update of so many samples counts as."""
        return num_samples if self.cap is None else min(num_samples, self.cap)

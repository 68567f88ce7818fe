"""Every envelope is opened once: the window over the counters of one stream."""

from __future__ import annotations

WINDOW = 4096
_MASK = (1 << WINDOW) - 1


class ReplayWindow:
    """The counters that have been seen: the highest one, and which of the 4096 up to it. What is older counts as seen.

    Two steps, so that a forgery changes nothing: :meth:`is_new` before the tag is checked, :meth:`note` after.
    """

    __slots__ = ("_bits", "_mark", "highest")

    def __init__(self) -> None:
        self.highest = 0
        # Of those from ``_mark`` on, all up to the highest were seen. They come in order, as a rule: then there is
        # nothing to do but to count, and the bits, half a kilobyte that each change makes anew, are left as they are.
        self._mark = 0
        self._bits = 0  # bit n: counter ``_mark - n`` was seen

    def is_new(self, counter: int) -> bool:
        """Whether an envelope with this counter may still be opened."""
        if counter > self.highest:
            return True
        return self.highest - counter < WINDOW and counter <= self._mark and not self._bits >> self._mark - counter & 1

    def note(self, counter: int) -> None:
        """It has been opened."""
        ahead = counter - self.highest
        if ahead == 1:
            self.highest = counter
            return
        in_order = min(self.highest - self._mark, WINDOW)
        self._bits = (self._bits << in_order | (1 << in_order) - 1) & _MASK
        if ahead > 0:
            self._bits = (self._bits << min(ahead, WINDOW) | 1) & _MASK
            self.highest = counter
        else:
            self._bits |= 1 << -ahead
        self._mark = self.highest

"""Every envelope is opened once: the window over the counters of one stream."""

from __future__ import annotations

WINDOW = 4096
_MASK = (1 << WINDOW) - 1


class ReplayWindow:
    """The counters that have been seen: the highest one, and which of the 4096 up to it. What is older counts as seen.

    Two steps, so that a forgery changes nothing: :meth:`is_new` before the tag is checked, :meth:`note` after.
    """

    __slots__ = ("_bits", "highest")

    def __init__(self) -> None:
        self.highest = 0
        self._bits = 0  # bit n: counter ``highest - n`` was seen

    def is_new(self, counter: int) -> bool:
        """Whether an envelope with this counter may still be opened."""
        age = self.highest - counter
        return age < 0 or (age < WINDOW and not self._bits >> age & 1)

    def note(self, counter: int) -> None:
        """It has been opened."""
        age = self.highest - counter
        if age < 0:
            self._bits = (self._bits << min(-age, WINDOW) | 1) & _MASK
            self.highest = counter
        else:
            self._bits |= 1 << age

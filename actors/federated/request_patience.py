"""When to request frames that have not arrived: pure decisions, the caller has the clock.

**Theory of operation.** The transport delivers what was sent, so most frames that are late are on their way. A request
for such a frame brings it twice, and holds up what others wait for: on a link that takes 0.7 s for a frame, requests
after 0.25 s more than double what a round sends. So the patience is twice the longest wait for a frame lately. As for
TCP's timer (P. Karn, C. Partridge, SIGCOMM 1987), a wait in which something was requested again says nothing, as what
ended it may be either of two frames; instead each request doubles the patience, which then stays until a frame has
arrived by itself.
"""

from __future__ import annotations

LEAST_S, MOST_S = 0.25, 3.0  # of patience; the longest is that of a controller for the frames of an update
_KEPT = 0.75  # of the patience, at each frame that arrives sooner


class RequestPatience:
    """Decides when to request what is missing; kept from one model to the next.

    Attributes:
        patience_s: without a new frame for so long, the missing ones are requested.
    """

    __slots__ = ("_due_s", "_has_repeated", "_is_unasked", "_is_waiting", "_since_s", "patience_s")

    def __init__(self) -> None:
        self.patience_s = LEAST_S
        self._since_s = self._due_s = 0.0
        self._is_waiting = self._is_unasked = self._has_repeated = False

    def begin(self, now_s: float, first_after_s: float | None = None) -> None:
        """Begin to wait for the frames of a model.

        Args:
            first_after_s: until the first request; 0: they are sent on request only; None: the patience.
        """
        self._is_waiting = True
        self._since_s, self._has_repeated, self._is_unasked = now_s, False, first_after_s == 0
        self._due_s = now_s + (self.patience_s if first_after_s is None else first_after_s)

    def end(self) -> None:
        """Wait for nothing: frames that arrive now have not been waited for."""
        self._is_waiting = False

    def note_frame(self, at_s: float) -> None:
        """Take note that a frame arrived at this time."""
        if not self._is_waiting:
            return
        if not self._has_repeated:
            self.patience_s = min(MOST_S, max(LEAST_S, 2 * (at_s - self._since_s), _KEPT * self.patience_s))
        self._since_s, self._has_repeated, self._is_unasked = at_s, False, False
        self._due_s = max(self._due_s, at_s + self.patience_s)

    def note_request(self, now_s: float) -> None:
        """Take note that what is missing was requested."""
        if self._is_unasked:
            self._since_s, self._is_unasked = now_s, False
        else:
            self._has_repeated = True
            self.patience_s = min(MOST_S, 2 * self.patience_s)
        self._due_s = now_s + self.patience_s

    def due_in_s(self, now_s: float) -> float:
        """Return the seconds until what is missing should be requested; 0 or less: now."""
        return self._due_s - now_s

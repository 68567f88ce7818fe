"""What came in and was not used: counted by its reason, and said aloud where somebody may want to know."""

from __future__ import annotations

import contextlib
import time
from collections import Counter

from gradbus.runtime.errors import FrameError
from gradbus.runtime.logs import get_logger

DOUBT_S = 10.0  # how often at most to say that something is not understood

_DOUBTS = frozenset({"sealed", "not sealed", "other key", "other level"})  # of other settings, or of nobody's business

log = get_logger("bus")


class Rejections:
    """Of one bus. Told of on its receive thread, or on one that does that one's work.

    Attributes:
        counts: by reason.
        doubt: what was wrong with samples of processes that are set up in another way.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.doubt = ""
        self._doubted_s = -DOUBT_S

    def refused(self, error: FrameError) -> None:
        """A sample is no message. What makes us doubt that its sender is set up as we are, is said if it is news:
        anybody can send such samples, as many as he likes."""
        self.counts[error.reason] += 1
        if error.reason not in _DOUBTS or str(error) == self.doubt:
            return
        self.doubt = str(error)
        if time.monotonic() > self._doubted_s + DOUBT_S:
            self._doubted_s = time.monotonic()
            with contextlib.suppress(Exception):  # its stream is the host's
                log.warning("samples are not understood", reason=error.reason, why=self.doubt)

    def failed(self, topic: str) -> None:
        """Who takes the frames of a topic has raised. A mistake of ours: one frame must not end the whole bus. Called
        while the exception is handled; only the first one is told, as others will be many of the same."""
        self.counts["handler failed"] += 1
        if self.counts["handler failed"] == 1:
            with contextlib.suppress(Exception):  # the log itself may be what failed
                log.exception("frame not handled", topic=topic)

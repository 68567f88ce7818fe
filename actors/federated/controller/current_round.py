"""The round that is open, and the one event that all waits of a controller wait for.

Updates, failures, answers and the coming and going of clients change the open round, each through the part that takes
them. All then call :meth:`CurrentRound.notify`, and whoever waits looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from gradbus.actors.federated.controller.masked_attempt import MaskedAttempt
from gradbus.actors.federated.controller.report import Progress
from gradbus.actors.federated.controller.rounds import Round
from gradbus.runtime.logs import get_logger

LINES_OF_A_ROUND = 20  # about how updates come in, however many clients there are

log = get_logger("controller")


class CurrentRound:
    """Knows the open round, and the newest attempt at it.

    Attributes:
        round: None: none is open.
        attempt: its number; after the round that of the last one. A site may gather one round several times.
        masked: the newest attempt with secure aggregation; None: there is none, as in every run without it.
    """

    def __init__(self, progress: Progress) -> None:
        """No round is open. ``progress``: shows how many updates the open one has."""
        self._progress = progress
        self._event = asyncio.Event()
        self._attempted = 0  # the round of which ``attempt`` is the newest attempt
        self.round: Round | None = None
        self.attempt = 0
        self.masked: MaskedAttempt | None = None

    @property
    def has_been(self) -> bool:
        """Whether any round was opened."""
        return self._attempted > 0

    def begin(self, round_: Round, masked: MaskedAttempt | None) -> None:
        """Open a round, or another attempt at it.

        Each attempt at a round has a number of its own in this start of the controller, because clients ignore an
        attempt that they know. A site may do a round again: its sum had too few updates, or the level above asks again.
        """
        self.attempt = self.attempt + 1 if round_.round_id == self._attempted else 1
        self._attempted = round_.round_id
        self.round, self.masked = round_, masked

    def end(self) -> None:
        """Close the round."""
        self.round = None

    def notify(self) -> None:
        """Wake all that waits: something has changed."""
        if (round_ := self.round) is not None:
            ready, expected, progress = round_.ready, round_.needed, self._progress
            if (ready, expected) != (progress.ready, progress.expected):
                progress.ready, progress.expected = ready, expected
                if ready % max(1, expected // LINES_OF_A_ROUND) == 0 or ready >= expected:
                    log.info("final-ready=%d/%d (min=%d)", ready, expected, round_.minimum, round=round_.round_id)
        if self.masked is not None:
            self.masked.wake()
        self._event.set()

    async def sleep_until(self, at_s: float) -> None:
        """Wait for :meth:`notify`, or until that time by ``time.monotonic``."""
        self._event.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, at_s - time.monotonic())):
                await self._event.wait()

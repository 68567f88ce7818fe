"""When a run may start: a pure decision over who is ready."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gradbus.runtime.errors import BarrierTimeout


class Gathering:
    """Waits for all expected clients, or after a grace for enough of them.

    It starts at once when all are there. With at least ``minimum`` it waits ``grace_s`` more for the others. With fewer
    it gives up at the deadline.
    """

    def __init__(
        self, *, minimum: int, expected: int | None, now_s: float, timeout_s: float, grace_s: float, what: str,
        excused: Collection[int] = (), doubt: Callable[[], str] = str, hint: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        """
        Args:
            what: begins the error. excused: ids that are not waited for, as far as they are among those expected.
            doubt: what the bus has noticed of those who are missing, see ``Bus.doubt``. hint: what to do about them.
        """
        self._minimum = minimum
        self._expected = expected
        self._excused = excused
        self._wanted = max((expected or 0) - sum(i < (expected or 0) for i in excused), minimum)
        self._timeout_s = timeout_s
        self._deadline_at_s = now_s + timeout_s
        self._grace_s = grace_s
        self._grace_until_s: float | None = None
        self._what = what
        self._doubt = doubt
        self._hint = hint

    def may_start(self, ready: Sequence[int], now_s: float) -> bool:
        """Whether to start with these clients now.

        Raises:
            BarrierTimeout: the deadline has passed with fewer than ``minimum``; it names who is missing.
        """
        if len(ready) >= self._wanted:
            return True
        if len(ready) >= self._minimum:
            if self._grace_until_s is None:
                self._grace_until_s = now_s + self._grace_s
            return now_s >= self._grace_until_s
        self._grace_until_s = None
        if now_s >= self._deadline_at_s:
            raise BarrierTimeout(
                self._what, missing=self.missing(ready), ready=len(ready), needed=self._minimum,
                timeout_s=self._timeout_s, doubt=self._doubt(), hint=self._hint(),
            )  # fmt: skip
        return False

    def missing(self, ready: Sequence[int]) -> list[int]:
        """Ids of expected clients that are not among these, as far as ids are expected."""
        here = {*ready, *self._excused}
        return [number for number in range(self._expected or 0) if number not in here]

    def next_check_s(self) -> float:
        """When the answer may change although nobody came or went."""
        return self._deadline_at_s if self._grace_until_s is None else self._grace_until_s

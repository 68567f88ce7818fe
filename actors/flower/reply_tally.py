"""Counts the replies that a ServerApp gets, and notes the rounds in which none of them was good.

Flower's strategies leave replies with errors out. With errors only, they go on with the model that they have, so that a
run in which no node has trained looks like one that has ended well.

A round is what one call pushes: the messages of a ``send_and_receive``. One that asks for an evaluation, and gets none,
is counted and does not fail the run, as many apps have no function for it; unless the run got no good reply at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradbus.runtime.plain_text import plain_line

MAX_REASON_CHARS = 300


@dataclass(slots=True, eq=False)
class _Round:
    """Messages that were pushed together. ``pending``: how many have no reply yet. ``problem``: the first error."""

    number: int
    kind: str
    pending: int
    good: int = 0
    problem: str = ""


class ReplyTally:
    """Holds what became of the messages of a run.

    Attributes:
        good: number of replies with content. errors: of those with an error, by the name of its code.
        expired: messages whose reply did not come within the timeout of the call.
        rounds: number of calls that pushed messages. failed: the calls without a good reply, evaluations left out.
    """

    def __init__(self) -> None:
        self.good = 0
        self.errors: Counter[str] = Counter()
        self.expired = 0
        self.rounds = 0
        self.failed = 0
        self._first_problem = ""
        self._by_message: dict[str, _Round] = {}

    def send(self, messages: Mapping[str, str]) -> None:
        """Begin a round with these messages: their types, by id."""
        if not messages:
            return
        self.rounds += 1
        kind = next(iter(messages.values())).partition(".")[0]
        begun = _Round(self.rounds, kind, len(messages))
        self._by_message.update(dict.fromkeys(messages, begun))

    def count_good(self, message_id: str) -> None:
        """Count a reply with content."""
        self.good += 1
        answered = self._by_message.pop(message_id)
        answered.good += 1
        self._close(answered)

    def count_error(self, message_id: str, node_id: int, code: str, reason: str | None) -> None:
        """Count a reply with an error."""
        self.errors[code] += 1
        self._fail(message_id, f"node {node_id}: {code}: {plain_line(reason or 'no reason')[:MAX_REASON_CHARS]}")

    def expire(self, message_ids: Iterable[str]) -> None:
        """Count messages that are no longer waited for."""
        for message_id in message_ids:
            self.expired += 1
            self._fail(message_id, "no reply came within the timeout that the ServerApp gave")

    def _fail(self, message_id: str, problem: str) -> None:
        failed = self._by_message.pop(message_id)
        failed.problem = failed.problem or problem
        self._close(failed)

    def _close(self, one: _Round) -> None:
        one.pending -= 1
        if one.pending or one.good:
            return
        self._first_problem = self._first_problem or f"round {one.number} ({one.kind}): {one.problem}"
        if one.kind != "evaluate":
            self.failed += 1

    @property
    def failure(self) -> str:
        """Return why the run has failed, as a sentence; empty: it has not."""
        replies = self.errors.total() + self.expired
        if self.failed:
            which = f"in {self.failed} of {self.rounds} rounds of messages no reply was good"
        elif replies and not self.good:
            which = f"none of the {replies} messages had a good reply"
        else:
            return ""
        return f"{which}, so nothing was learned from them. The first: {self._first_problem}"

    def __str__(self) -> str:
        """``12 replies``, and how many of them are errors, by code."""
        text = f"{self.good + self.errors.total()} replies"
        if self.errors:
            each = ", ".join(f"{count} {code}" for code, count in sorted(self.errors.items()))
            text += f", {self.errors.total()} of them errors ({each})"
        return text + (f", {self.expired} messages without one in time" if self.expired else "")


__all__ = ["ReplyTally"]

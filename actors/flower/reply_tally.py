"""Counts the replies that a ServerApp gets, and finds the rounds in which none of them was good.

Flower's strategies leave replies with errors out. With errors only, they go on with the model that they have, so that a
run in which no node has trained looks like one that has ended well.

A round is the messages of one type with one group id, or with one ``server-round`` in their config, as strategies set
them: some send the messages of a round in one call, and others in one call for each node. Without these it is what one
call pushes; calls with a single message are then taken together, as they may be parts of a loop over the nodes.

A round that asks for an evaluation, and gets none, is counted and does not fail the run, as many apps have no function
for it; unless the run got no good reply at all.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradbus.runtime.plain_text import plain_line

MAX_REASON_CHARS = 300
MAX_KEPT_ROUNDS = 64  # whose messages have all been answered; older ones are counted and forgotten

RoundName = tuple[str, str]
"""The type of the messages, and what Flower calls the round: empty where it has no name."""


@dataclass(slots=True, eq=False)
class _Round:
    """The messages of a round. ``number``: in the order of their first messages. ``pending``: how many have no reply
    yet. ``problem``: the first error; empty: there is none."""

    number: int
    kind: str
    pending: int = 0
    good: int = 0
    problem: str = ""

    @property
    def has_failed(self) -> bool:
        return bool(self.problem) and not self.pending and not self.good and self.kind != "evaluate"


class ReplyTally:
    """Holds what became of the messages of a run. Its methods may be called from any thread.

    Attributes:
        good: number of replies with content. errors: of those with an error, by the name of its code.
        expired: messages whose reply did not come within the timeout of the call.
        rounds: number of rounds.
    """

    def __init__(self) -> None:
        self.good = 0
        self.errors: Counter[str] = Counter()
        self.expired = 0
        self.rounds = 0
        self._failed = 0  # of the rounds that are forgotten
        self._first_failed: _Round | None = None
        self._first_problem: _Round | None = None
        self._by_name: dict[RoundName, _Round] = {}
        self._by_message: dict[str, _Round] = {}
        self._lock = threading.Lock()

    def send(self, messages: Mapping[str, RoundName]) -> None:
        """Note messages that one call pushes. ``messages``: by their ids, the rounds that they belong to."""
        with self._lock:
            for message_id, (kind, name) in messages.items():
                kind = kind.partition(".")[0]
                key = (kind, f"={name}" if name else "" if len(messages) == 1 else f"#{next(iter(messages))}")
                if key not in self._by_name:
                    self.rounds += 1
                    self._by_name[key] = _Round(self.rounds, kind)
                self._by_name[key].pending += 1
                self._by_message[message_id] = self._by_name[key]
            self._forget_older()

    def count_good(self, message_id: str) -> None:
        """Count a reply with content."""
        with self._lock:
            self.good += 1
            answered = self._by_message.pop(message_id)
            answered.good += 1
            answered.pending -= 1

    def count_error(self, message_id: str, node_id: int, code: str, reason: str | None) -> None:
        """Count a reply with an error."""
        with self._lock:
            self.errors[code] += 1
            self._fail(message_id, f"node {node_id}: {code}: {plain_line(reason or 'no reason')[:MAX_REASON_CHARS]}")

    def expire(self, message_ids: Iterable[str]) -> None:
        """Count messages that are no longer waited for."""
        with self._lock:
            for message_id in message_ids:
                self.expired += 1
                self._fail(message_id, "no reply came within the timeout that the ServerApp gave")

    def _fail(self, message_id: str, problem: str) -> None:
        failed = self._by_message.pop(message_id)
        failed.problem = failed.problem or problem
        failed.pending -= 1
        self._first_problem = self._first_problem or failed

    def _forget_older(self) -> None:
        closed = [key for key, one in self._by_name.items() if not one.pending and key[1]]
        for key in closed[: max(0, len(closed) - MAX_KEPT_ROUNDS)]:
            forgotten = self._by_name.pop(key)
            if forgotten.has_failed:
                self._failed += 1
                self._first_failed = self._first_failed or forgotten

    @property
    def failure(self) -> str:
        """Return why the run has failed, as a sentence; empty: it has not."""
        with self._lock:
            failed = [one for one in self._by_name.values() if one.has_failed]
            first = self._first_failed or next(iter(failed), None)
            without_reply = self.errors.total() + self.expired
            if first is not None:
                which = f"in {self._failed + len(failed)} of {self.rounds} rounds of messages no reply was good"
            elif without_reply and not self.good:
                which, first = f"none of {without_reply} messages had a good reply", self._first_problem
            else:
                return ""
            assert first is not None
            return (
                f"{which}, so nothing was learned from them. The first: round {first.number} ({first.kind}): "
                f"{first.problem}"
            )

    def __str__(self) -> str:
        """``12 replies``, and how many of them are errors, by code."""
        errors = self.errors.total()
        text = f"{self.good + errors} replies"
        if errors:
            each = ", ".join(f"{count} {code}" for code, count in sorted(self.errors.items()))
            text += f", {errors} of them errors ({each})"
        return text + (f", {self.expired} messages without a reply in time" if self.expired else "")


__all__ = ["ReplyTally", "RoundName"]

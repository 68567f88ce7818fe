"""When to send an instruction that nodes request one by one: pure decisions, the caller has the clock.

**Theory of operation.** What is sent of an instruction goes to all nodes that listen for it, in one message, so it
should go once all of them do. Nodes learn of it at the same time, but hundreds of them on a busy machine begin to
listen over a second or more. What is sent at the first request reaches few of them; the others request it again, and
each time it is sent to all that still wait. So the hub waits until every node that is to have it has requested it, or
else until no further node has for a quarter of the time that they have taken so far. That ends soon where few nodes
request it, as the others read it in the memory of this machine, or are busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SETTLE_S, SETTLE_SHARE = 0.02, 0.25  # without a further node: at least, and of the time since the first one
MOST_S = 2.0  # from the first request that waits


@dataclass(slots=True)
class RequestBatch:
    """The nodes that have requested an instruction, and when the last of them has.

    Attributes:
        nodes: their numbers, and the incarnation of each.
    """

    nodes: dict[int, int] = field(default_factory=dict)
    _first_s: float | None = None  # of those that wait
    _last_s: float = 0.0

    def note_request(self, node: int, incarnation: int, now_s: float) -> None:
        """Take note that a node lacks the instruction, or a part of it."""
        if self._first_s is None:
            self._first_s = self._last_s = now_s
        if self.nodes.get(node) != incarnation:
            self.nodes[node], self._last_s = incarnation, now_s

    def note_sent(self) -> None:
        """Take note that what has been requested is being sent. A later request begins another batch."""
        self._first_s = None

    def due_in_s(self, awaited: Mapping[int, int], now_s: float) -> float:
        """Return the seconds until the instruction should be sent; 0 or less: now.

        Args:
            awaited: the nodes that have not answered it, and the incarnation of each.
        """
        if self._first_s is None or all(self.nodes.get(node) == one for node, one in awaited.items()):
            return 0.0
        settle_s = max(SETTLE_S, SETTLE_SHARE * (self._last_s - self._first_s))
        return min(self._last_s + settle_s, self._first_s + MOST_S) - now_s

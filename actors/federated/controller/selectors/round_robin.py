"""Selection in turn: nobody is asked again before all others that are ready have had as many turns.

A client that comes late, or comes back, has fewer turns than the others, and catches up.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradbus.actors.federated.controller.selectors.base import ClientFacts, Draw, Selector


class RoundRobin(Selector):
    """In turn: those that were asked least often, by ascending id."""

    choice = "round_robin"
    reads_updates = False

    def select(self, ready: Sequence[ClientFacts], count: int, draw: Draw) -> Sequence[int]:
        return [facts.client_id for facts in sorted(ready, key=lambda one: (one.rounds, one.client_id))[:count]]

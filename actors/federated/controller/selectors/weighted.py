"""Selection by the number of samples: who has more data is asked more often.

A sample without replacement, one client after the other in proportion to its samples among those that are left. Li et
al., On the Convergence of FedAvg on Non-IID Data, ICLR 2020 (arXiv:1907.02189), scheme I, draws with replacement and
averages without weights; here a client trains once, and the strategy weighs its update as any other.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gradbus.actors.federated.controller.selectors.base import ClientFacts, Draw, Selector


def by_samples(ready: Sequence[ClientFacts], draw: Draw) -> list[int]:
    """All ids in a random order, weighted by samples. Of a client that has not counted yet they are not known: it has
    the median of the others."""
    known = [facts.num_samples for facts in ready if facts.num_samples > 0]
    typical = statistics.median(known) if known else 1.0
    return draw.order([facts.client_id for facts in ready], [float(facts.num_samples or typical) for facts in ready])


class Weighted(Selector):
    """At random, in proportion to the samples of the clients."""

    choice = "weighted"

    def select(self, ready: Sequence[ClientFacts], count: int, draw: Draw) -> Sequence[int]:
        return by_samples(ready, draw)[:count]

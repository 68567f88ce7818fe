"""Uniform selection: every set of as many ready clients is as likely as any other.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017
(arXiv:1602.05629), Algorithm 1: ``S_t`` is a random set of ``max(C K, 1)`` clients, where C is ``fraction``.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradbus.actors.federated.controller.selectors.base import ClientFacts, Draw, Selector


class Uniform(Selector):
    """All ready clients; with `fraction` or `count` as many at random, each with the same probability."""

    choice = "uniform"
    reads_updates = False

    def select(self, ready: Sequence[ClientFacts], count: int, draw: Draw) -> Sequence[int]:
        return draw.order([facts.client_id for facts in ready])[:count]

"""Power of choice: of some candidates those with the highest loss.

Cho, Wang and Joshi, Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection
Strategies (arXiv:2010.01243), section 3, in the variant rpow-d, which costs no message: candidates are drawn in
proportion to their samples, and their loss is that of their last training. Differs from the paper: a client that was
never asked is taken first, as there; one that was asked and has no loss, as its update did not count, has the median
of the others, so that who fails is not asked for ever. Losses are the clients' word.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from gradbus.actors.federated.controller.selectors.base import ClientFacts, Draw, Selector, SelectorOptions
from gradbus.actors.federated.controller.selectors.weighted import by_samples


class PowerOfChoiceOptions(SelectorOptions):
    """Options of power of choice."""

    candidates: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """Number of candidates, as a multiple of the clients that are asked: d / m of the paper. 1: as weighted."""


class PowerOfChoice(Selector):
    """Candidates at random, in proportion to their samples, and of these those with the highest loss."""

    choice = "power_of_choice"
    Options = PowerOfChoiceOptions

    def __init__(
        self, *, candidates: float = 2.0, fraction: float = 1.0, count: int | None = None, over_select: float = 1.0
    ) -> None:
        super().__init__(fraction=fraction, count=count, over_select=over_select)
        self._candidates = candidates

    def select(self, ready: Sequence[ClientFacts], count: int, draw: Draw) -> Sequence[int]:
        candidates = by_samples(ready, draw)[: math.ceil(self._candidates * count - 1e-9)]
        known = [facts.loss for facts in ready if facts.loss is not None]
        typical = statistics.median(known) if known else 0.0
        losses = {
            one.client_id: math.inf if not one.rounds else typical if one.loss is None else one.loss for one in ready
        }
        return sorted(candidates, key=lambda client_id: -losses[client_id])[:count]  # stable: ties as they were drawn

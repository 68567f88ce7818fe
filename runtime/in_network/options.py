"""How workers use an aggregator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

InNetworkRoute: TypeAlias = Literal["ina", "ra-ina", "ra-ina-inline"]


@dataclass(frozen=True, slots=True)
class InNetworkOptions:
    """How workers use the aggregator, equal on all of them.

    Attributes:
        route: ``ina``: all blocks go to the aggregator, which has fixed lanes for them. ``ra-ina``: groups start on a
            ring, and those that the aggregator has slots for go there. ``ra-ina-inline``: the same, and packets of the
            ring pass through the aggregator, as through a switch: for experiments.
        block_elems: entries of a block. window_groups: groups of N blocks that are under way at once.
        timeout_s: when the aggregator has been silent for so long, also when asked, it counts as lost.
        retransmit_s: first repetition.
        verify: whether sums are checked by a checksum that the aggregator does not know.
        loss: for experiments, probability that a packet is dropped by its sender.
    """

    route: InNetworkRoute = "ra-ina"
    block_elems: int = 1 << 16
    window_groups: int = 4
    timeout_s: float = 5.0
    retransmit_s: float = 0.5
    verify: bool = True
    loss: float = 0.0


class InNetworkPlan(BaseModel):
    """What an aggregator has to know of a job, as it comes from its workers."""

    model_config = ConfigDict(strict=True, frozen=True)

    route: InNetworkRoute
    block_elems: Annotated[int, Field(ge=1, le=1 << 22)]
    window_groups: Annotated[int, Field(ge=1, le=64)]

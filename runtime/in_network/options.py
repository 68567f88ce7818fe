"""How workers use an aggregator."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from gradbus.runtime.in_network.topology import SINGLE, AggregatorTopology

InNetworkRoute: TypeAlias = Literal["ina", "ra-ina", "ra-ina-inline"]


@dataclass(frozen=True, slots=True)
class InNetworkOptions:
    """How workers use aggregators, equal on all of them.

    Attributes:
        route: ``ina``: all blocks go to the aggregator, which has fixed lanes for them. ``ra-ina``: groups start on a
            ring, and those that the aggregator has slots for go there. ``ra-ina-inline``: the same, and packets of the
            ring pass through the aggregator, as through a switch: for experiments.
        block_elems: entries of a block. window_groups: groups of N blocks that are under way at once.
        topology: which aggregators there are; several of them are for route ``ina``.
        timeout_s: when an aggregator has been silent for so long, also when asked, it counts as lost.
        without: what a run does that finds no aggregator at its start: ``fail``, or ``direct``, without it until it is
            there. retry_s: after so long workers look for aggregators that were lost; twice as long after each loss;
            0: never.
        retransmit_s: first repetition.
        verify: whether sums are checked by a checksum that the aggregator does not know.
        loss: for experiments, probability that a packet is dropped by its sender, worker or aggregator.
    """

    route: InNetworkRoute = "ra-ina"
    block_elems: int = 1 << 16
    window_groups: int = 4
    topology: AggregatorTopology = SINGLE
    timeout_s: float = 5.0
    without: Literal["fail", "direct"] = "fail"
    retry_s: float = 30.0
    retransmit_s: float = 0.5
    verify: bool = True
    loss: float = 0.0

    def plan(self) -> dict[str, Any]:
        """Return what all members of a job compare, and :class:`InNetworkPlan` reads."""
        return asdict(self) | {"topology": self.topology.model_dump()}


class InNetworkPlan(BaseModel):
    """Holds what aggregators have to know of a job, as it comes from its workers."""

    model_config = ConfigDict(strict=True, frozen=True)

    route: InNetworkRoute
    block_elems: Annotated[int, Field(ge=1, le=1 << 22)]
    window_groups: Annotated[int, Field(ge=1, le=64)]
    topology: AggregatorTopology = SINGLE
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0

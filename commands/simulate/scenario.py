"""What a simulation of in-network aggregation is made of, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, get_args

from gradbus.commands.simulate.closed_forms import Fabric
from gradbus.runtime.in_network.slots import Allocation

Kind: TypeAlias = Literal[
    "ina", "hina", "mtina", "cina", "ra-ina", "ra-ina-reserve", "ring", "ps", "switchml", "atp", "esa"
]
"""How gradients are summed.

- ``ina``: one switch with a slot for each block in the window. All hosts are at it, whatever ``hosts_per_leaf`` says.
- ``hina``: leaf switches add for their hosts, a spine for the leaves. ``mtina``: ``trees`` spines, block b by spine
  ``b mod trees``; each leaf has an uplink to each. ``cina``: each leaf adds to the sum of the leaf before it, on a link
  of its own between the two; the last one sends the results through the spine.
- ``ra-ina``: groups of N blocks, N being the ranks, go around a ring through the switch, which takes those that it has
  slots for. ``ra-ina-reserve``: the ring goes past it, and ranks ask for slots. ``ring``: no switch has slots.
- ``ps``: ``trees`` parameter servers, each on a host of its own, for every job; block b by server ``b mod trees``.
- ``switchml``, ``atp``, ``esa``: see :mod:`.baselines`, on one switch; the latter two with a parameter server each job.
"""
RING_KINDS = frozenset({"ra-ina", "ra-ina-reserve", "ring"})
BASELINES = frozenset({"switchml", "atp", "esa"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A simulation. Two equal ones have equal outcomes.

    Attributes:
        kind: see :data:`Kind`. fabric: hosts, switches and links, and the ranks of *one* job, N. Every job has hosts of
            its own, at the same switches. A link's ``loss`` is the share of the packets that it loses.
        gradient_bytes: of a rank, K. blocks: that it is cut in, k; where there is a ring the next multiple of N.
        trees: of ``mtina``; servers of ``ps``.
        jobs: that are summed at once. starts_s: when each job begins; () all at 0.
        slots: blocks that a switch has memory for, shared by all jobs. None: enough for all windows. Baselines and
            trees share them out evenly; a parameter server has no limit.
        window_blocks: blocks of one rank that are under way. None: all of them, or as many as the slots are enough for.
        allocation: how ``ra-ina`` finds free slots. grabs_late: whether it takes groups that have begun on the ring.
        iterations: gradients that each job sums, one after the other. compute_s: of each rank before each of them.
        late_s: seconds that a rank, by number, takes longer to compute: stragglers, in all jobs.
        header_bytes: of a packet beside its values. ack_bytes: of one without values. The closed forms have neither.
        retransmit_s: first time after which a packet is sent again. None: three times what a full window takes.
        samples: how often slots are counted, about.
        limit_s: simulated seconds after which it is given up.
        seed: of gradients and losses.
    """

    kind: Kind
    fabric: Fabric
    gradient_bytes: int
    blocks: int
    trees: int = 1
    jobs: int = 1
    starts_s: tuple[float, ...] = ()
    slots: int | None = None
    window_blocks: int | None = None
    allocation: Allocation = "scan"
    grabs_late: bool = True
    iterations: int = 1
    compute_s: float = 0.0
    late_s: Mapping[int, float] = field(default_factory=dict)
    header_bytes: int = 0
    ack_bytes: int = 0
    retransmit_s: float | None = None
    samples: int = 200
    limit_s: float = 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError: no such kind, a number that is too small, or that does not fit another one."""
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind: expected one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        for name in ("gradient_bytes", "blocks", "trees", "jobs", "iterations", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.starts_s and len(self.starts_s) != self.jobs:
            raise ValueError(f"starts_s: expected a time for each of {self.jobs} jobs, got {len(self.starts_s)}")
        if self.fabric.world < 2:
            raise ValueError(f"fabric.world: expected at least 2 ranks, got {self.fabric.world}")
        if self.fabric.world % self.fabric.ranks_per_host:
            raise ValueError(f"{self.fabric.world} ranks do not fill hosts of {self.fabric.ranks_per_host}")
        if self.trees > 1 and self.kind not in ("mtina", "ps"):
            raise ValueError(f"trees: {self.kind} has one")
        if self.fabric.ranks_per_host > 1 and self.kind not in ("ina", "hina", "mtina", "cina"):
            raise ValueError(f"ranks_per_host: expected 1 for {self.kind}, got {self.fabric.ranks_per_host}")
        if self.window_blocks is not None and self.window_blocks < 1:
            raise ValueError(f"window_blocks: expected at least 1, got {self.window_blocks}")
        if self.slots is not None and self.slots < 0:
            raise ValueError(f"slots: expected at least 0, got {self.slots}")

    @property
    def total_blocks(self) -> int:
        """``blocks``, or the next multiple of N, where there is a ring."""
        world = self.fabric.world
        return -(-self.blocks // world) * world if self.kind in RING_KINDS else self.blocks


class SlotUse(NamedTuple):
    """Slots of all switches at one time. ``taken``: that hold something, of ``total``."""

    time_s: float
    taken: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationOutcome:
    """Holds what a simulation found. All sums were right: else it raises.

    Attributes:
        job_s: for each job, from its start until its last rank had the last sum: its completion time.
        exchange_s: for each job, what is left of that without computing, of one iteration; the waiting for late ranks
            is in it.
        bytes_by_link: that each link has carried, also those that were sent again, by its name: "RANK up" and the like.
        busy_by_link: seconds for which it carried something.
        packets: that were sent, by kind. retransmissions: of them, those that were sent again. lost: by links.
        slots: over time. slot_share: the mean share of slots that were taken, until the last job had ended.
        in_network_share: of the blocks, those whose sum a switch made, not a ring or a parameter server.
        wall_s: that the simulation took here.
    """

    scenario: Scenario
    job_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    bytes_by_link: Mapping[str, int]
    busy_by_link: Mapping[str, float]
    packets: Mapping[str, int]
    retransmissions: int
    lost: int
    slots: tuple[SlotUse, ...]
    slot_share: float
    in_network_share: float
    wall_s: float

    @property
    def time_s(self) -> float:
        """Mean of ``exchange_s``: of one job, the time of one all-reduce."""
        return sum(self.exchange_s) / len(self.exchange_s)

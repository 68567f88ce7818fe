"""The protocols of the simulator on links that lose packets: exact sums, an end, and no slot that is not given back."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from gradbus.commands.simulate.baselines import shared_slots, switchml
from gradbus.commands.simulate.closed_forms import Fabric
from gradbus.commands.simulate.in_network import WrongSum, simulate_aggregation
from gradbus.commands.simulate.rank_programs import Deadlock
from gradbus.commands.simulate.scenario import BASELINES, Kind, Scenario
from gradbus.commands.simulate.topology import LinkSpec
from gradbus.runtime.in_network.packets import Packet


def drawn(kind: Any, seed: int) -> Scenario:
    """Few and small blocks, on links that take long: so that repetitions meet what is still under way."""
    draw = random.Random(seed)
    world = draw.choice((2, 3, 4, 5))
    wire = LinkSpec(
        rate_bytes_s=1e6, latency_s=1e-3, loss=draw.choice((0, 0.01, 0.1, 0.3)), overhead_s=draw.choice((0, 1e-4))
    )
    jobs, trees = draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 3)) if kind in ("mtina", "ps") else 1
    slots = draw.choice((0, 1, 2, 5, 8, 16))
    if kind not in ("atp", "esa", "ra-ina", "ra-ina-reserve"):
        slots = 2 * jobs * trees * draw.choice((1, 2, 4))
    return Scenario(
        kind=kind,
        fabric=Fabric(world=world, network=wire, hosts_per_leaf=draw.choice((None, 1, 2))),
        gradient_bytes=12000,
        blocks=draw.choice((3, 6, 12)),
        jobs=jobs,
        trees=trees,
        slots=slots,
        window_blocks=draw.choice((1, 3, 6, None)),
        iterations=draw.choice((1, 2, 3)),
        compute_s=draw.choice((0, 2e-3)),
        starts_s=tuple(0.02 * draw.random() for _ in range(jobs)),
        late_s={draw.randrange(world): 0.03 * draw.random()},
        retransmit_s=draw.choice((3e-3, 1e-2, 3e-2)),
        ack_bytes=draw.choice((0, 100)),
        grabs_late=draw.random() < 0.7,
        limit_s=1e4,
        seed=seed,
        samples=20,  # of the use of slots, which no test here looks at
    )


@pytest.mark.parametrize("first", [0, 50])
@pytest.mark.parametrize("kind", sorted(BASELINES))
def test_a_baseline_adds_every_block_once_and_ends(kind: str, first: int) -> None:
    for seed in range(first, first + 50):
        simulate_aggregation(drawn(kind, seed))


@pytest.mark.parametrize("kind", sorted(set(get_args(Kind)) - BASELINES))
def test_a_protocol_of_the_bus_adds_every_block_once_and_ends(kind: str) -> None:
    for seed in range(12):
        simulate_aggregation(drawn(kind, seed))


def test_equal_scenarios_have_equal_outcomes_and_seeds_lose_other_packets() -> None:
    found = [simulate_aggregation(drawn("ra-ina", seed)) for seed in (7, 7, 8)]
    assert found[0].job_s == found[1].job_s
    assert found[0].lost == found[1].lost > 0
    assert found[0].job_s != found[2].job_s


def _never_clears(self: Any, packet: Packet, now_s: float) -> list[Packet]:
    before = self._slots[packet.job][packet.block][1 - packet.step]
    seen = before.seen
    answers = RECEIVE(self, packet, now_s)
    before.seen = seen
    return answers


def _has_no_memory_of_who(self: Any, packet: Packet, now_s: float) -> list[Packet]:
    self._slots[packet.job][packet.block][packet.step].seen = 0
    return RECEIVE(self, packet, now_s)


def _adds_what_overlaps(self: Any, packet: Packet, now_s: float) -> list[Packet]:
    present, values = self._sums.get(packet.group, (0, np.int32(0)))
    full = (1 << self._world) - 1
    if present == full:
        return SERVE(self, packet, now_s)
    assert packet.values is not None
    self._sums[packet.group] = present | packet.bitmap, values + packet.values
    return [self._result(packet, -2)] if present | packet.bitmap == full else []


def _keeps_what_is_not_full(self: Any, packet: Packet, now_s: float) -> list[Packet]:
    answers = SHARE(self, packet, now_s)
    return [one for one in answers if one.kind.value == "result" or one.bitmap == (1 << self._worlds[packet.job]) - 1]


RECEIVE = switchml.PoolSwitch.receive
SERVE = shared_slots.FallbackServer.receive
SHARE = shared_slots.SharedSwitch.receive


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("switchml", (switchml.PoolSwitch, _never_clears)),
        ("switchml", (switchml.PoolSwitch, _has_no_memory_of_who)),
        ("atp", (shared_slots.FallbackServer, _adds_what_overlaps)),
        ("esa", (shared_slots.SharedSwitch, _keeps_what_is_not_full)),
    ],
)
def test_an_error_in_a_baseline_is_noticed(
    kind: str, changed: tuple[type, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def search() -> None:
        for seed in range(20):
            simulate_aggregation(replace(drawn(kind, seed), limit_s=20.0))

    search()  # without the error
    monkeypatch.setattr(changed[0], "receive", changed[1])
    with pytest.raises((WrongSum, Deadlock)):
        search()

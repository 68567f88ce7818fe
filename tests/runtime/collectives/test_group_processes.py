"""Groups of processes: every collective, also beside gloo and over a network that loses packets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from group_node import all_done, group_ranks
from group_scripts import beside_gloo, every_collective

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "numels"), [(2, [0, 5, 700_000]), (3, [0, 5, 700_000]), (4, [3, 50_000]), (8, [5, 20_000])]
)
def test_every_collective_is_right_between_processes(world: int, numels: list[int]) -> None:
    with group_ranks(every_collective, world, numels=numels) as ranks:
        assert all(done["dropped"] == {} for done in all_done(ranks))


@pytest.mark.parametrize(("world", "numels"), [(2, [0, 300_000]), (3, [1, 100_000]), (4, [20_000]), (8, [2000])])
def test_every_collective_is_right_where_a_tenth_of_all_packets_is_lost(world: int, numels: list[int]) -> None:
    network = {"lease_s": 10.0, "loss_per_mille": 100}  # a busy machine that loses packets is no death
    with group_ranks(every_collective, world, numels=numels, network=network, limits={"timeout_s": 60.0}) as ranks:
        all_done(ranks)


@pytest.mark.parametrize("world", [2, 3])
def test_gloo_gets_the_same(tmp_path: Path, world: int) -> None:
    """Bit for bit, except where it adds more than two numbers in another order."""
    with group_ranks(beside_gloo, world, file=str(tmp_path / "store")) as ranks:
        compared: list[dict[str, Any]] = []
        for node in ranks.start_all():
            assert node.wait(60.0) == 0
            assert node.all("done")
            compared += node.all("compared")
        assert len({result["name"] for result in compared}) == 3 * 4 + 3 + 5
        for result in compared:
            adds = (
                world > 2 and "float" in result["dtype"] and any(w in result["name"] for w in ("sum", "reduce_scatter"))
            )
            assert result["close"], result
            assert result["equal"] or adds, result

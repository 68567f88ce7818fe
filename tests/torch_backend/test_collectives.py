"""Every collective gives what gloo gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_node import play

from gradbus.runtime.shm import mailbox

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world", [2, 3])
def test_every_collective_gives_what_gloo_gives(world: int) -> None:
    """Bit for bit at two ranks; with more, gloo adds in another order."""
    ours = play("collective_scenes", "every_case", world)
    theirs = play("collective_scenes", "every_case", world, "gloo")
    different = []
    for rank, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() >= expected.keys()
        for name, tensors in expected.items():
            if not alike(mine[name], tensors, exact=world == 2):
                different.append(f"rank {rank}: {name}: {mine[name]} is not {tensors}"[:400])
    assert different == []
    for rank, results in enumerate(ours):
        check_what_gloo_cannot_do(results, rank, world)


def alike(mine: list[Any], expected: list[Any], *, exact: bool) -> bool:
    if [t.shape for t in mine] != [t.shape for t in expected] or [t.dtype for t in mine] != [t.dtype for t in expected]:
        return False
    for one, other in zip(mine, expected, strict=True):
        if exact or not one.is_floating_point():
            if not torch.equal(one, other):
                return False
        else:
            tolerance = 1e-2 if one.dtype == torch.float16 else 1e-6  # gloo rounds after each addition
            if not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
                return False
    return True


def check_what_gloo_cannot_do(results: dict[str, Any], rank: int, world: int) -> None:
    floats = torch.stack([drawn(r, 9) for r in range(world)])
    ints = torch.stack([drawn(r, 9, ints=True) for r in range(world)])
    average, factor = results["all_reduce_average"], results["all_reduce_with_a_factor"]
    torch.testing.assert_close(average[0], floats.mean(0))
    assert torch.equal(average[1], ints.sum(0) // world)
    torch.testing.assert_close(factor[0], floats.sum(0) * 0.5)
    by_sender = [torch.full((r + 1,), float(r)) for r in range(world)]
    for name in ("all_to_all_uneven", "all_gather_uneven"):
        assert [t.tolist() for t in results[name]] == [t.tolist() for t in by_sender]
    parts = [drawn(r, world * 2).split(2)[rank].tolist() for r in range(world)]
    assert [t.tolist() for t in results["all_to_all"]] == parts
    assert [t.tolist() for t in results["coalesced_on_a_device"]] == [drawn(0, 3).tolist(), drawn(0, 2).tolist()]


def drawn(rank: int, numel: int, *, ints: bool = False) -> torch.Tensor:
    """As ``collective_scenes.values``."""
    random = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 100, (numel,), generator=random) if ints else torch.randn(numel, generator=random)


@pytest.mark.skipif(not mailbox.AVAILABLE, reason="ranks that wait do not send here")
def test_ranks_that_wait_do_not_wait_for_the_slots_of_each_other_in_a_circle() -> None:
    """One took all slots for the reader that it had heard from first, whose reader did the same, and so on."""
    world = 4
    assert play("collective_scenes", "sums_of_many_chunks", world) == [[float(world)] * 8] * world

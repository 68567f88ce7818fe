"""DistributedDataParallel over DDS trains as it does over gloo."""

from __future__ import annotations

import pytest
import torch
from torch_node import play

pytestmark = pytest.mark.slow


def test_ddp_trains_bit_equal_to_gloo() -> None:
    ours = play("ddp_scenes", "every_way")
    theirs = play("ddp_scenes", "every_way", backend="gloo")
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.keys() == expected.keys()
        unequal = [name for name in mine if not all(map(torch.equal, mine[name], expected[name]))]
        assert unequal == []


def test_hooks_whose_callbacks_call_collectives_work_with_several_buckets() -> None:
    """On gloo they hang or end the process. All replicas hold the same parameters."""
    first, *rest = play("ddp_scenes", "hooks_that_call_collectives", world=3)
    parameters = 10  # then come buffers of batch norm, which are those of rank 0 only before each step
    for other in rest:
        for name, tensors in first.items():
            assert all(map(torch.equal, tensors[:parameters], other[name][:parameters])), name

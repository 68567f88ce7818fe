"""What PyTorch builds on torch.distributed gives over dds what it gives over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_node import play

pytestmark = pytest.mark.slow

PARTS = {
    "fsdp", "zero", "checkpoint", "pipeline", "tensor_parallel", "functional", "ddp_in_debug_mode", "split_group",
    "messages", "join",
}  # fmt: skip


def test_pytorchs_stack_gives_the_bits_that_it_gives_over_gloo(tmp_path: Path) -> None:
    ours = play("stack_scenes", "every_part", folder=str(tmp_path / "dds"))
    theirs = play("stack_scenes", "every_part", backend="gloo", folder=str(tmp_path / "gloo"))
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.keys() == expected.keys() == PARTS
        for name, tensors in expected.items():
            assert len(mine[name]) == len(tensors) > 0, name
            assert all(map(torch.equal, mine[name], tensors)), name


def test_ddp_of_three_ranks_trains_as_over_gloo_but_for_the_order_of_the_sums() -> None:
    ours = play("ddp_scenes", "some_ways", world=3)
    theirs = play("ddp_scenes", "some_ways", world=3, backend="gloo")
    for mine, expected in zip(ours, theirs, strict=True):
        for name, tensors in expected.items():
            for one, other in zip(mine[name], tensors, strict=True):
                torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6)

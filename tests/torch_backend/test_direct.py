"""Collectives go past torch's dispatcher where nobody looks on, and through it where somebody does."""

from __future__ import annotations

import pytest
import torch
from torch_node import play

pytestmark = pytest.mark.slow


def test_both_ways_give_the_same() -> None:
    """A dispatch mode sees all collectives that it saw before there was a short way."""
    for found in play("collective_scenes", "both_ways", 2):
        assert found["alone"].keys() == found["watched"].keys()
        pairs = [(name, tensors, found["watched"][name]) for name, tensors in found["alone"].items()]
        assert [name for name, alone, watched in pairs if not all(map(torch.equal, alone, watched))] == []
        assert {
            "c10d::allreduce_",
            "c10d::broadcast_",
            "c10d::reduce_",
            "c10d::allgather_",
            "c10d::_allgather_base_",
            "c10d::reduce_scatter_",
            "c10d::_reduce_scatter_base_",
            "c10d::alltoall_",
            "c10d::alltoall_base_",
            "c10d::gather_",
            "c10d::scatter_",
        } <= set(found["seen"])


def test_the_profiler_modes_gradients_and_other_classes_of_tensors_are_told() -> None:
    for found in play("direct_scenes", "who_is_told", 2):
        short = {name for name, is_short in found.items() if is_short is True}
        assert short == {"plain", "parameter", "gradients, switched off"}
        assert found["profiled"] == ["c10d::allreduce_"]


def test_the_process_groups_own_methods_take_all_that_torchs_take() -> None:
    for rank, found in enumerate(play("direct_scenes", "other_ways_to_call", 2)):
        assert found == {
            "sums": [[3.0, 3.0]] * 3,
            "largest": [2.0, 2.0],
            "rooted": [1.0, 1.0],
            "gathered": [[0.0, 0.0], [1.0, 1.0]],
            "part": [1.0 + 2 * rank],
        }

"""Bad use is an error that says what is wrong, on which rank, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from torch_node import play

pytestmark = pytest.mark.slow

# What both ranks are told: what rank 0 has, and what rank 1 has.
MISMATCHES = {
    "all_reduce, shapes": ("float32 /1 6 (2,3)", "float32 /1 6 (3,2)"),
    "all_reduce, dtypes": ("float32 /1 6 (2,3)", "int64 /1 6 (2,3)"),
    "all_reduce, sizes": ("float32 /1 4 (4)", "float32 /1 5 (5)"),
    "all_reduce, ops": ("sum float32", "max float32"),
    "reduce": ("float32 /1 4 (4)", "float32 /1 5 (5)"),
    "broadcast, dtypes": ("float32 of shape (2,3)", "int64 of shape (2,3)"),
    "broadcast, sizes": ("float32 of shape (4)", "float32 of shape (5)"),
    "all_gather": ("float32 of shape (4)", "float32 of shape (5)"),
    "all_gather_into_tensor": ("float32 of shape (4)", "float32 of shape (5)"),
    "reduce_scatter_tensor": ("float32 /1 4 (4)", "float32 /1 6 (6)"),
    "gather": ("float32 of shape (4)", "float32 of shape (5)"),
    "scatter": ("float32 of shape (4)", "float32 of shape (5)"),
    "all_to_all_single": ("float32 of shape (2)", "float32 of shape (3)"),
    "send and recv": ("float32 of shape (4)", "int32 of shape (4)"),
    "reduce and broadcast": ("reduce->0", "broadcast 1"),
    "other calls": ("broadcast 0", "all_gather"),
}


def test_tensors_that_do_not_fit_are_named_on_both_ranks_at_once() -> None:
    results = play("mistake_scenes", "mismatches")
    for rank, result in enumerate(results):
        assert result.pop("afterwards") == [2.0] * 3
        assert result.keys() == MISMATCHES.keys()
        for name, (zero, one) in MISMATCHES.items():
            text = result[name]["text"]
            assert zero in text, (rank, name, text)
            assert one in text, (rank, name, text)
            assert f"rank {1 - rank} " in text
            assert "All ranks must make the same calls" in text
            assert result[name]["after_s"] < 5.0


def test_a_block_of_a_rank_for_itself_that_does_not_fit_is_named_on_both_ranks_at_once() -> None:
    results = play("mistake_scenes", "own_blocks")
    for rank, result in enumerate(results):
        assert result.pop("afterwards") == [2.0] * 3
        assert len(result) == 4
        long = result.pop("all_to_all of long shapes")["text"]
        assert "rank 0 has room for float32 of shape (10000) where it has float32 of shape (20000) for itself" in long
        for name, told in result.items():
            text = told["text"]
            assert text.startswith("DistBackendError: "), (name, text)
            faulty = "rank 0 has room for float32 of shape (2) where it has float32 of shape (3) for itself"
            assert faulty in text, (name, text)
            assert ("this rank sends it float32 of shape" in text) == (rank == 1), text
            assert told["after_s"] < 10.0


MOVED = ["complex32", "float8_e8m0fnu", "float8_e4m3fn", "float4_e2m1fn_x2"]


def test_dtypes_without_arithmetic_are_moved_by_every_collective_and_point_to_point() -> None:
    assert play("mistake_scenes", "moved", dtypes=MOVED) == [[], []]


def test_what_cannot_be_done_here_is_refused_before_anything_is_sent() -> None:
    (result,) = play("mistake_scenes", "refused_here", world=1)
    assert result.pop("devices") == "[device(type='cpu')]"
    for name in ("send", "recv", "recv from anyone", "all_reduce", "all_gather", "broadcast"):
        assert "meta tensors have no values in plain memory" in result.pop(name), name
    assert "op 'band' is for whole numbers and bool, not for float32" in result["bits of floats"]
    assert "make the tensor dense first" in result["sparse"]
    assert "no arithmetic for float8_e5m2" in result["float8"]
    assert "expected 1 tensors, one for each rank, got 0" in result["too few outputs"]
    assert "output tensor size must be equal to world_size times input tensor size" in result["sizes"]


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (2, ["rank 1 on", "says world 3, this process (rank 0) says 2", "rank 0 on", "says world 2, this process"]),
        (1, ["", "", "rank 0 has world 1, this process (rank 1) has 2", "with the same WORLD_SIZE"]),
    ],
)
def test_ranks_that_disagree_about_the_world_are_told(first: int, told: list[str]) -> None:
    zero, one = play("mistake_scenes", "other_worlds", first=first)
    assert told[0] in zero
    assert told[1] in zero
    assert told[2] in one
    assert told[3] in one


def test_a_second_process_of_a_rank_is_told_and_the_group_goes_on() -> None:
    results: list[Any] = play("mistake_scenes", "the_same_rank", world=3)
    assert results[:2] == [2.0, 2.0]
    assert "ConfigError: process group 'world': rank 1 is taken by" in results[2]
    assert "Give every process its own rank (RANK=0 .. 1), or end that one" in results[2]


def test_a_rank_beyond_the_world_is_told() -> None:
    (text,) = play("mistake_scenes", "a_rank_that_does_not_exist", world=1)
    assert "rank" in text
    assert "2" in text


def test_who_waits_for_rank_0_in_vain_is_told() -> None:
    (text,) = play("mistake_scenes", "nobody_else", world=1)
    assert "process group 'world', rank 1: 1 of 2 ready after 1 s, missing [0]" in text

"""Scripts of Horovod's with the import changed: what its names give, on real ranks, and what replaces those that are
not there. Expected values are computed here by Horovod's definitions, with the sums in the order of the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_node import play

import gradbus.torch as hvd
from gradbus.torch.horovod import REPLACEMENTS

# The public names of Horovod's torch module, in its last release.
HOROVOD = [
    "elastic", "Compression", "allgather_object", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "allreduce", "allreduce_async", "allreduce_", "allreduce_async_", "grouped_allreduce",
    "grouped_allreduce_async", "grouped_allreduce_", "grouped_allreduce_async_", "sparse_allreduce_async",
    "allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async", "broadcast", "broadcast_async",
    "broadcast_", "broadcast_async_", "alltoall", "alltoall_async", "reducescatter", "reducescatter_async",
    "grouped_reducescatter", "grouped_reducescatter_async", "join", "barrier", "poll", "synchronize", "init",
    "shutdown", "is_initialized", "start_timeline", "stop_timeline", "size", "local_size", "cross_size", "rank",
    "local_rank", "cross_rank", "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built",
    "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "ProcessSet", "global_process_set",
    "add_process_set", "remove_process_set", "Average", "Sum", "Adasum", "Min", "Max", "Product",
    "HorovodInternalError", "DistributedOptimizer", "SyncBatchNorm",
]  # fmt: skip


def drawn(rank: int) -> Tensor:
    """As ``horovod_scenes.values_of``."""
    return torch.randn(33, generator=torch.Generator().manual_seed(31 + rank))


def added(tensors: list[Tensor]) -> Tensor:
    """In rank order."""
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        result += tensor
    return result


def halves(tensors: list[Tensor], divided_by: float = 1.0) -> list[Tensor]:
    """What travels of these as fp16, as float32."""
    return [(tensor.half() / divided_by).float() for tensor in tensors]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_reductions_compression_and_factors_are_those_of_horovod(world: int) -> None:
    results = play("horovod_scenes", "as_horovod_has_it", world)
    everybody = [drawn(rank) for rank in range(world)]
    stacked, total = torch.stack(everybody), added(everybody)
    mean = total * (1.0 / world)
    gradients = [tensor * 100.0 for tensor in everybody]
    product = everybody[0].clone()
    for tensor in everybody[1:]:
        product *= tensor
    half_mean = (added(halves(everybody)) * (1.0 / world)).half().float()
    expected = {
        "Average": mean, "no op": mean, "Sum": total, "Min": stacked.amin(0), "Max": stacked.amax(0),
        "Product": product,
    }  # fmt: skip
    expected_gradients = {
        "average": added(gradients) * (1.0 / world),
        "sum": added(gradients),
        "predivided": added([one / 4.0 for one in gradients]) * (4.0 / world),
        "predivided by 3": added([one / 3.0 for one in gradients]) * (3.0 / world),
        "fp16": (added(halves(gradients)) * (1.0 / world)).half().float(),
        "fp16 predivided": (added(halves(gradients, 2.0)).half() * (2.0 / world)).float(),
    }
    for rank, result in enumerate(results):
        one_machine, many, nonsense, told = result["places"]
        assert one_machine == [rank, world, 0, 1]
        assert many == [0, 1, rank, world]
        assert "has LOCAL_RANK 1 and LOCAL_WORLD_SIZE 1, so ranks are not numbered machine by machine" in nonsense
        assert told == [4, 7]
        assert {name for name, one in expected.items() if not torch.equal(result["reductions"][name], one)} == set()
        assert result["whole numbers"] == [[0, 0, 6, 24][world], 5**world]
        assert torch.equal(result["fp16"], half_mean)
        assert not torch.equal(result["fp16"], mean)
        assert torch.equal(result["none"], mean)
        assert torch.equal(result["scaled"], added([one * 0.5 for one in everybody]) * 3.0)
        assert torch.equal(result["in place"], added([one * 2.0 for one in everybody]))
        assert result["kept"]
        found = result["gradients"]
        assert {name for name, one in expected_gradients.items() if not torch.equal(found[name], one)} == set()
        assert [result["before"], result["initialized"], result["after"]] == [False, True, False]
        assert "expected op 'mean', got 'sum'" in result["errors"][0]
        assert "must be positive and finite, got 0.0" in result["errors"][1]
        assert "need a floating point tensor, got torch.int64" in result["errors"][2]


def test_every_name_of_horovod_is_here_or_names_its_replacement() -> None:
    assert set(REPLACEMENTS).isdisjoint(hvd.__all__)
    for name in HOROVOD:
        if name in hvd.__all__:
            assert getattr(hvd, name) is not None
        else:
            with pytest.raises(AttributeError, match=f"gradbus.torch has no '{name}' of Horovod's: use "):
                getattr(hvd, name)
    for name in ("nccl_built", "mpi_enabled", "gloo_built", "cuda_built", "mpi_threads_supported"):
        assert getattr(hvd, name)() is False
    assert not hasattr(hvd, "Adasum")


@pytest.mark.parametrize("name", sorted(REPLACEMENTS))
def test_replacements_that_are_names_of_torch_or_ours_exist(name: str) -> None:
    """The first word of a replacement, where it is a dotted name or one of ours."""
    first = REPLACEMENTS[name].split("(")[0].split(",")[0].split(" ")[0].removesuffix("'s")
    if first in ("torchrun", "one", "the"):
        return
    found: Any = hvd
    if first.startswith("torch."):
        found, first = torch, first.removeprefix("torch.")
        __import__("torch.distributed.algorithms.join")
    for part in first.split("."):
        found = getattr(found, part)


def test_places_on_machines_are_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="LOCAL_WORLD_SIZE is '', expected the number of processes"):
        hvd.local_size()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    with pytest.raises(RuntimeError, match="LOCAL_WORLD_SIZE is '0'"):
        hvd.local_size()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    assert (hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (4, 1, 3)

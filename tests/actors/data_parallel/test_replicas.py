"""Replicas: copies of rank 0, and the proof that they still are."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from torch import nn

import gradbus
from gradbus.actors.data_parallel import replicas
from gradbus.actors.data_parallel.replicas import (
    Replicas,
    check_equal,
    check_equal_layouts,
    describe_layout,
    empty_tensors,
)
from gradbus.runtime.algorithms.replicas import fingerprint
from gradbus.runtime.collectives import join_group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.errors import CollectiveError, ConfigError, ReplicasDiverged


def model(seed: int) -> nn.Module:
    """Parameters of three dtypes, one frozen, one not contiguous; buffers, scalars and empty ones among them."""
    torch.manual_seed(seed)
    net = nn.Module()
    net.weight = nn.Parameter(torch.randn(5, 7).t())
    net.short = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    net.frozen = nn.Parameter(torch.randn(2, dtype=torch.float64), requires_grad=False)
    net.nothing = nn.Parameter(torch.empty(0))
    net.norm = nn.BatchNorm1d(4)
    net.register_buffer("count", torch.tensor(seed))
    net.register_buffer("mask", torch.rand(6) < 0.5, persistent=False)
    with torch.no_grad():
        net.norm(torch.randn(8, 4))
    return net


def run(world: int, script: Callable[[Replicas, Any, int], Awaitable[Any]]) -> list[Any]:
    """``script(replicas, net, rank)`` on all ranks, each with the model of its own seed. Errors are results."""
    job, domain = f"replicas-{os.getpid()}-{random.randrange(1 << 30)}", new_domain()

    async def one(rank: int) -> Any:
        async with (
            gradbus.connect(job=job, domain=domain) as bus,
            join_group(bus, rank=rank, world=world, timeout_s=20.0) as group,
        ):
            with ComputeThread() as compute:
                net = model(rank)
                return await script(Replicas(group, compute, net, timeout_s=10.0), net, rank)

    async def everybody() -> list[Any]:
        async with asyncio.timeout(30):
            return await asyncio.gather(*(one(rank) for rank in range(world)), return_exceptions=True)

    return asyncio.run(everybody())


@pytest.fixture(params=["one message", "many messages"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many messages":
        monkeypatch.setattr(replicas, "PIECE_BYTES", 20)


@pytest.mark.usefixtures("pieces")
def test_the_model_of_rank_0_with_all_its_dtypes_and_buffers_comes_to_all() -> None:
    async def script(mine: Replicas, net: Any, rank: int) -> dict[str, torch.Tensor]:
        weight = net.weight
        before = await mine.hash()
        await mine.broadcast_model()
        assert net.weight is weight  # in place: optimizers and hooks hold on to it
        assert (before == await mine.check(0)) == (rank == 0)
        return {**dict(net.named_parameters()), **dict(net.named_buffers())}

    results = run(3, script)
    first = model(0)
    for result in results:
        for name, tensor in {**dict(first.named_parameters()), **dict(first.named_buffers())}.items():
            assert torch.equal(result[name], tensor), name


@pytest.mark.usefixtures("pieces")
def test_named_tensors_come_from_rank_0_whatever_the_others_have() -> None:
    async def script(mine: Replicas, net: Any, rank: int) -> dict[str, torch.Tensor]:
        own = {"optimizer/momentum_buffer/a.b": torch.arange(6.0).view(2, 3), "step": torch.tensor(7)}
        return await mine.broadcast_named("state", own if rank == 0 else {"other": torch.ones(9)})

    for result in run(2, script):
        assert list(result) == ["optimizer/momentum_buffer/a.b", "step"]
        assert torch.equal(result["optimizer/momentum_buffer/a.b"], torch.arange(6.0).view(2, 3))
        assert (result["step"].dtype, int(result["step"])) == (torch.int64, 7)


def test_parameters_that_differ_are_found_on_all_ranks() -> None:
    async def script(mine: Replicas, net: Any, rank: int) -> int:
        await mine.broadcast_model()
        if rank == 2:
            with torch.no_grad():
                net.frozen[0] += 1e-9
        return await mine.check(5)

    for error in run(3, script):
        assert isinstance(error, ReplicasDiverged)
        assert (error.step, error.ranks) == (5, (2,))


def test_the_fingerprint_is_of_the_bits_in_their_order() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([0.0])
    assert fingerprint([a, b]) == fingerprint([a.clone(), b]) == fingerprint([torch.stack([a, a], 1)[:, 0], b])
    assert fingerprint([b, a]) != fingerprint([a, b])
    assert fingerprint([a, -b]) != fingerprint([a, b])  # -0.0
    assert 0 <= fingerprint([]) < 1 << 64


def test_settings_that_differ_are_named() -> None:
    check_equal("settings", [{"lr": 0.1}, {"lr": 0.1}])
    with pytest.raises(ConfigError, match=r"lr is 0\.1, but rank 1 has 0\.2"):
        check_equal("settings", [{"lr": 0.1}, {"lr": 0.2}])  # two opinions: that of rank 0 is the usual one
    with pytest.raises(ConfigError, match=r"rank 0 has 'missing'"):
        check_equal("settings", [{}, {"lr": 0.2}, {"lr": 0.2}])


def test_layouts_that_differ_are_named_with_the_first_line_that_does() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layout = describe_layout(net)
    assert layout[0] == "0.weight torch.float32 (3, 2) trained"
    assert layout[-1] == "1.num_batches_tracked torch.int64 () buffer"
    check_equal_layouts([layout, layout])
    net[0].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"rank 2 differs .* '0\.weight torch\.float32 \(3, 2\) frozen' where they"):
        check_equal_layouts([layout, layout, describe_layout(net)])
    with pytest.raises(ConfigError, match=r"rank 1 differs .* 'nothing' where they have '1\.weight"):
        check_equal_layouts([layout, layout[:2]])


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ([["w", "float32", [1 << 20, 1 << 20]]], "4398046511104 bytes"),
        ([["w", "float32", [200]], ["v", "float32", [100]]], "1200 bytes"),
        ([["w", "float32", [0, 1 << 70]]], "at most 1024"),
        ([["w", "float32", [1] * 65]], "at most 1024"),
        ([["w", "float32", [-1]]], "expected its name, type and shape"),
        ([["w", "float32", [True]]], "expected its name, type and shape"),
        ([["w", ["float32"], [1]]], "expected its name, type and shape"),
        ([["w", "nn", [1]]], "unknown type 'nn'"),
        (7, "expected its name, type and shape"),
    ],
)
def test_tensors_that_another_rank_describes_are_refused_before_memory_is_taken(described: Any, says: str) -> None:
    with pytest.raises(CollectiveError, match=says):
        empty_tensors(described, max_bytes=1024)

"""Tensors of an accelerator: what comes of them is what comes of the same tensors on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch_node import play

from gradbus.runtime.choices import ALGORITHMS

pytestmark = pytest.mark.slow
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")]


@pytest.mark.parametrize("device", ["toy", pytest.param("gpu", marks=needs_gpu)])
def test_collectives_give_the_same_on_a_device_as_on_the_cpu(device: str) -> None:
    for found in play("device_scenes", "collectives", 2, device=device):
        assert len(found) == 14
        for name, results in found.items():
            half = len(results) // 2
            assert len(results) == 2 * half, name
            assert all(map(torch.equal, results[:half], results[half:])), name


@pytest.mark.parametrize("device", ["toy", pytest.param("gpu", marks=needs_gpu)])
def test_algorithms_give_tensors_on_a_device_the_bits_of_those_on_the_cpu(device: str) -> None:
    for found in play("device_scenes", "programs", 2, device=device):
        assert {case.partition(",")[0] for case in found} == set(ALGORITHMS.table)
        for case, results in found.items():
            half = len(results) // 2
            assert half >= 3, case
            assert all(map(torch.equal, results[:half], results[half:])), case


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_replicas_of_ddp_on_a_gpu_are_equal_and_close_to_those_on_the_cpu() -> None:
    first, second = play("device_scenes", "training", 2)
    assert all(map(torch.equal, first["cuda:0"], second["cuda:0"]))
    for on_gpu, on_cpu in zip(first["cuda:0"], first["cpu"], strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-4)

"""Copies on the CPU of parameters that are elsewhere, or of less precision."""

from __future__ import annotations

import pytest
import torch

from gradbus.torch.cpu_copies import CpuCopies, needs_copies


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_is_read_back_as_it_was_written_and_training_is_added_to_it(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    parameter = torch.nn.Parameter(torch.linspace(0.1, 3.0, 60, device=device).to(dtype).view(6, 10))
    assert needs_copies([parameter]) == (device == "cuda" or dtype != torch.float32)
    copies = CpuCopies({"one": parameter})
    wanted = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    with copies.edit() as weights:
        assert torch.equal(weights["one"], parameter.detach().cpu().float())
        weights["one"].copy_(wanted)
    assert torch.equal(parameter.detach().cpu(), wanted.to(dtype))
    for _ in range(2):  # reading changes nothing
        torch.testing.assert_close(copies.read()["one"], wanted, rtol=1e-7, atol=1e-8)
    with torch.no_grad():
        parameter += 1.0
    moved = parameter.detach().cpu().float() - wanted.to(dtype).float()
    torch.testing.assert_close(copies.read()["one"], wanted + moved, rtol=1e-6, atol=1e-7)

"""What torch 2.6 does otherwise than newer versions. `make test PART=oldest` runs this with torch 2.6 itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from backend_support import HAS_TORCH_BACKEND

from gradbus.runtime import torch_compat
from gradbus.runtime.collectives.staging import can_be_staged, copier, to_host
from gradbus.runtime.torch_compat import available_accelerator

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


def _raise_as_torch_2_6_does() -> torch.device:
    raise RuntimeError("Cannot access accelerator device when none is available.")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_machine_without_an_accelerator_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_accelerator() is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", _raise_as_torch_2_6_does)
    assert available_accelerator() is None


def test_a_tensor_of_another_device_cannot_be_staged() -> None:
    assert can_be_staged(torch.empty(3))
    assert not can_be_staged(torch.empty(3, device="meta"))


OLDER = """
import sys
import torch.distributed as dist
import gradbus.actors.federated.client.client, gradbus.actors.data_parallel.elastic, gradbus.commands.run.commands

assert not [name for name in sys.modules if name.startswith("gradbus.torch")]
for attempt in (
    lambda: dist.init_process_group("dds", store=dist.HashStore(), rank=0, world_size=1),
    lambda: __import__("gradbus.torch"),
    lambda: __import__("gradbus.torch.functions"),
):
    try:
        attempt()
    except (AssertionError, ImportError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.skipif(HAS_TORCH_BACKEND, reason="this torch is new enough for gradbus.torch")
def test_an_older_torch_has_all_but_the_backend_of_torch_and_says_what_that_needs() -> None:
    done = subprocess.run([sys.executable, "-c", OLDER], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    unknown, *needed = done.stdout.splitlines()
    assert "dds" in unknown
    assert needed == 2 * [
        f"ImportError: backend 'dds' needs torch 2.14 or newer, this is {torch.__version__}, which takes no backend "
        f"written in Python. Upgrade torch, or use gradbus.join_group, which works with it"
    ]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "has_context",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(not torch_compat.HAS_STREAM_CONTEXT, reason="this torch cannot enter a stream"),
        ),
    ],
)
def test_copies_are_complete_whether_or_not_torch_can_enter_a_stream(
    monkeypatch: pytest.MonkeyPatch, has_context: bool
) -> None:
    monkeypatch.setattr(torch_compat, "HAS_STREAM_CONTEXT", has_context)
    on_device = torch.ones(1 << 20, device="cuda:0")
    host = to_host(on_device)
    assert bool(host.eq(1).all())
    copier(on_device, host.mul_(2))()
    assert bool(on_device.eq(2).all())

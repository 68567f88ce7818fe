"""Optimizers of torch without torch's compiler. Many things load it, so each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_commands import Forked

SCRIPT = """
import sys
import torch
from gradbus.runtime.optimization.deferred_compiler import defer_compiler

def trained(kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), number + 1.0)).square().sum().backward()
        optimizer.step()
    again = kind(model.parameters(), lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    again.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert torch.is_grad_enabled()
    return [value.detach().clone() for value in model.parameters()]

def is_loaded():
    return "torch._dynamo" in sys.modules

KINDS = [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop]
"""


def play(script: str) -> None:
    subprocess.run([sys.executable, "-P", "-c", SCRIPT + script], check=True, timeout=100)


@pytest.mark.slow
def test_optimizers_make_the_same_steps_without_the_compiler_and_are_torchs_own_once_it_is_loaded() -> None:
    play(
        "defer_compiler()\n"
        "without = [trained(kind) for kind in KINDS]\n"
        "assert not is_loaded()\n"
        "import torch._dynamo\n"
        "for before, kind in zip(without, KINDS, strict=True):\n"
        "    assert all(map(torch.equal, before, trained(kind))), kind\n"
        "parameter = torch.ones(2, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([parameter], lr=0.5)\n"
        "parameter.grad = torch.ones(2)\n"
        "torch.compile(optimizer.step, backend='eager')()\n"
        "assert parameter.tolist() == [0.5, 0.5]\n"
    )


@pytest.mark.slow
def test_where_the_compiler_is_loaded_already_nothing_is_changed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"{SCRIPT}\n"
        "assert is_loaded()\n"
        "before = torch.optim.SGD.step, torch.optim.Optimizer.add_param_group\n"
        "defer_compiler()\n"
        "assert before == (torch.optim.SGD.step, torch.optim.Optimizer.add_param_group)\n"
    )
    process = Forked([], tmp_path, os.environ, program=program)
    _, errors = process.communicate()
    assert process.returncode == 0, errors

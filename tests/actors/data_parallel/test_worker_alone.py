"""A data-parallel worker brings nothing of federated learning into its process."""

from __future__ import annotations

import subprocess
import sys

from dds_domains import new_domain

PROGRAM = """
import asyncio, sys
import gradbus
from gradbus.models import ClassificationTask, glyphs, mnist_mlp

async def main():
    async with (
        gradbus.connect("alone", domain={domain}, load_actors=False) as bus,
        gradbus.join_group(bus, rank=0, world=1) as group,
    ):
        task = ClassificationTask(mnist_mlp, lambda: glyphs(train=64, test=16), batch_size=32)
        summary = await gradbus.Worker(group, task, gradbus.DataParallelConfig()).run()
        assert summary.steps == 2

asyncio.run(main())
packages = ("gradbus.actors.federated", "gradbus.actors.aggregation")
found = sorted(name for name in sys.modules if name.startswith(packages))
assert not found, found
"""

HOOKS = """
import torch
from torch.optim import optimizer as of_torch
import gradbus.actors.federated.client.client
from gradbus.actors.federated.client.rules.base import after_steps_of

tables = of_torch._global_optimizer_pre_hooks, of_torch._global_optimizer_post_hooks
assert [len(table) for table in tables] == [0, 0]
model, steps = torch.nn.Linear(1, 1), []
for _ in range(2):
    with after_steps_of(model, lambda: steps.append(1)):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
assert [len(table) for table in tables] == [1, 1]
assert len(steps) == 2
"""


def run(program: str) -> None:
    """Run a program in a fresh process; fails with what it has written to stderr."""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_worker_runs_without_any_module_of_federated_learning() -> None:
    run(PROGRAM.format(domain=new_domain()))


def test_hooks_on_all_optimizers_are_registered_by_the_first_training_that_has_some() -> None:
    run(HOOKS)

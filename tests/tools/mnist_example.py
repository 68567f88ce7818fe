"""PyTorch's MNIST example as a client: the lines of docs/script.md in the example's own file, and the bits of a Task.

    PYTHONPATH=tests/tools python -P -m mnist_example FILE

FILE is ``mnist/main.py`` of a clone of github.com/pytorch/examples, which is not part of gradbus. The program applies
the diff of the page to it, runs it as two clients, and then runs two clients with a Task that calls the functions of
the unchanged file. MNIST is read from the folder that ``GRADBUS_DATA`` names, where torchvision has unpacked it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms

import gradbus
from gradbus.models import TrainResult

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, CLIENTS, IMAGES = 2, 2, 6000
PLACE: dict[str, Any] = {"job": f"mnist-{os.getpid()}", "domain": 0}


def changed(source: str, page: str) -> tuple[str, int]:
    """Apply the diff of the page to the example. Returns the new file, and how many lines it adds.

    Raises:
        ValueError: a line of the diff is not in the example.
    """
    found = re.search(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError("the page has no diff")
    first, *lines = found[1].splitlines()
    removed = [line[1:] for line in lines if line.startswith("-")]
    placed = [line[1:] for line in lines if not line.startswith("-")]
    kept = [line.strip() for line in lines if line.startswith(" ")]
    begin = source.index("\n".join(removed))
    end = source.index(f"{kept[-1]}\n", begin) + len(kept[-1])
    body = [line.strip() for line in source[begin:end].splitlines()]
    if body != [*(line.strip() for line in removed), *kept]:
        raise ValueError(f"the example has other lines than the diff of the page: {body}")
    changed_part = "\n".join(placed)
    added = 1 + sum(line.startswith("+") for line in lines)
    return f"{first[1:]}\n{source[:begin]}{changed_part}{source[end:]}", added


def load(file: Path) -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("main", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mnist(_: str, train: bool, transform: Any, **__: Any) -> Subset[Any]:
    """The first images of MNIST, in place of all."""
    whole = datasets.MNIST(os.environ["GRADBUS_DATA"], train=train, transform=transform, download=True)
    return Subset(whole, range(IMAGES))


class ExampleTask:
    """The same as a Task: it calls ``train`` of the example, and what the example does between two epochs."""

    def __init__(self, example: ModuleType, seed: int) -> None:
        self._example, self._seed = example, seed
        self._args = SimpleNamespace(log_interval=10_000, dry_run=False)
        self._optimizer: torch.optim.Optimizer | None = None

    def build_model(self) -> nn.Module:
        """Return the model, which is the same at the controller of each run."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = self._example.Net()
        return model

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Load the data as the example does."""
        plain = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
        self._data = DataLoader(mnist("", train=True, transform=plain), batch_size=64)
        self._test_data = DataLoader(mnist("", train=False, transform=plain), batch_size=1000)

    def train(self, model: nn.Module, *, round_id: int, **_: Any) -> TrainResult:
        """Do an epoch of the example."""
        device = torch.device("cpu")
        if self._optimizer is None:
            torch.manual_seed(self._seed)
            self._example.Net()  # the example has drawn its weights by now
            self._optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
            self._scheduler = torch.optim.lr_scheduler.StepLR(self._optimizer, step_size=1, gamma=0.7)
        else:
            self._example.test(model, device, self._test_data)
            self._scheduler.step()
        self._example.train(self._args, model, device, self._data, self._optimizer, round_id)
        return TrainResult(IMAGES, None)

    def evaluate(self, model: nn.Module) -> None:
        """Return None: the example tests by itself."""


def be_a_client(kind: str, file: Path, seed: int) -> None:
    """Run as one client, by the changed example or by the Task."""
    example = load(file)
    if kind == "task":
        asyncio.run(_follow(ExampleTask(example, seed), seed - 1))
        return
    plain = gradbus.client
    gradbus.client = lambda _, **named: plain(PLACE["job"], domain=PLACE["domain"], **named)
    vars(example)["datasets"] = SimpleNamespace(MNIST=mnist)
    sys.argv = ["main.py", "--seed", str(seed), "--no-accel"]
    example.main()


async def _follow(task: ExampleTask, client_id: int) -> None:
    async with gradbus.connect(PLACE["job"], domain=PLACE["domain"]) as bus:
        await gradbus.Client(bus, task, client_id=client_id).run()


async def checksums(kind: str, file: Path, example: ModuleType) -> list[int]:
    """A run with two clients of a kind, in processes of their own. Returns those of the global models."""
    config = gradbus.FederatedConfig(rounds=ROUNDS, eval_every=0, clients={"num": CLIENTS})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MNIST_PLACE": json.dumps(PLACE)}
    async with gradbus.connect(PLACE["job"], domain=PLACE["domain"]) as bus:
        command = [sys.executable, "-P", __file__, str(file), "--kind", kind]
        started = [
            subprocess.Popen([*command, "--seed", str(seed)], env=environment, stdout=subprocess.DEVNULL)  # noqa: ASYNC220 - they run beside
            for seed in range(1, CLIENTS + 1)
        ]
        try:
            controller = gradbus.Controller(bus, ExampleTask(example, 0), config)
            found = [report.weights_crc32 async for report in controller.rounds()]
        finally:
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(process.wait, 60)
                process.kill()
    return found


def main() -> int:
    """Compare, and print what was found as JSON. Returns 1 where the bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kind", choices=["script", "task"])
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.kind:
        PLACE.update(json.loads(os.environ["MNIST_PLACE"]))
        be_a_client(chosen.kind, chosen.file, chosen.seed)
        return 0
    page = (ROOT / "docs" / "script.md").read_text(encoding="utf-8")
    mnist("", train=True, transform=None)  # before two processes may unpack it
    source, added = changed(chosen.file.read_text(encoding="utf-8"), page)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "main.py"
        script.write_text(source, encoding="utf-8")
        example = load(chosen.file)
        by_script = asyncio.run(checksums("script", script, example))
        by_task = asyncio.run(checksums("task", chosen.file, example))
    print(json.dumps({"lines": added, "script": by_script, "task": by_task, "equal": by_script == by_task}))
    return int(by_script != by_task)


if __name__ == "__main__":
    sys.exit(main())

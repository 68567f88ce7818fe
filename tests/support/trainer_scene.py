"""What the scenes of trainers have in common: a model, its data, a controller, and the plain loop that they equal.

The scenes are programs, as the libraries are in an environment of their own, and take seconds to load. A program writes
``FOLDER/NAME.json`` for each scene, with what the test of that name asserts, or ``{"error": ...}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from doc_pages import fenced_blocks, python_blocks, section
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradbus
from gradbus.runtime.errors import TrainingFailed
from gradbus.runtime.security import Security
from gradbus.runtime.security.job_key import load_user_key

SAMPLES, BATCH, LR = 110, 20, 0.05  # the last batch of an epoch is a half
PATIENT_S = 60.0
DOMAIN = int(os.environ.get("SCENE_DOMAIN", "0"))
# The user's key, by its file: a Trainer that is made empties os.environ for an instant (Accelerate does so),
# and here clients on other threads would not find the home of the tests then.
SECURITY = Security(level="psk", key_file=Path(load_user_key().origin))
_jobs = itertools.count()

Script = Callable[[str, int], Any]  # job, client id


class Network(nn.Module):
    """Two layers, with batch normalisation, whose buffers are of floats and integers."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 2))
        generator = torch.Generator().manual_seed(5)  # torch's own is one for all threads
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.normal_(std=0.5, generator=generator)


def dataset(client_id: int) -> TensorDataset:
    """Points, float32, shape (SAMPLES, 4), and labels, int64, shape (SAMPLES,)."""
    points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(client_id))
    return TensorDataset(points, (points[:, 0] > points[:, 1]).long())


def loader(client_id: int) -> DataLoader[tuple[Tensor, ...]]:
    """The data of a client, shuffled by a generator of its own."""
    generator = torch.Generator().manual_seed(100 + client_id)
    return DataLoader(dataset(client_id), batch_size=BATCH, shuffle=True, generator=generator)


def loss_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model.network(batch[0]), batch[1])  # type: ignore[operator]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


class Loop:
    """The plain loop of a script: rounds of epochs, or of steps that go on through the epochs."""

    def __init__(
        self,
        *,
        accumulate: int = 1,
        steps: int = 0,
        resets: bool = False,
        make_model: Callable[[], nn.Module] = Network,
    ) -> None:
        self.accumulate, self.steps, self.resets, self.make_model = accumulate, steps, resets, make_model

    def __call__(self, job: str, client_id: int) -> list[bool]:
        model, data = self.make_model(), loader(client_id)
        optimizer, counts = sgd(model), []
        endless = itertools.chain.from_iterable(iter(data) for _ in itertools.count())
        with client(job, client_id) as fed:
            while fed.receive(model):
                optimizer = sgd(model) if self.resets else optimizer
                batches = itertools.islice(endless, self.steps) if self.steps else iter(data)
                counts.append(fed.send(model, **self._train(model, optimizer, list(batches))))
        return counts

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any]) -> dict[str, Any]:
        model.train()
        samples, total = 0, 0.0
        for number, batch in enumerate(batches, 1):
            loss = loss_of(model, batch)
            (loss / self.accumulate).backward()
            samples, total = samples + len(batch[1]), total + loss.item() * len(batch[1])
            if number % self.accumulate == 0 or number == len(batches):
                optimizer.step()
                optimizer.zero_grad()
        return {"samples": min(samples, SAMPLES), "loss": total / samples}


def settings(client_id: int) -> dict[str, Any]:
    """What a client is made with."""
    config = gradbus.ClientConfig(controller_timeout_s=PATIENT_S)
    return {"client_id": client_id, "domain": DOMAIN, "config": config, "security": SECURITY}


def client(job: str, client_id: int) -> gradbus.ScriptClient:
    return gradbus.client(job, **settings(client_id))


class SceneTask:
    """The controller's side: the model alone."""

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        self.build_model = make_model

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def evaluate(self, model: nn.Module) -> None:
        return None


class Outcome(NamedTuple):
    """A run. ``state``: of the global model after it. ``results``: of the scripts."""

    reports: list[gradbus.RoundReport]
    results: list[Any]
    state: Mapping[str, Tensor]

    @property
    def checksums(self) -> list[int]:
        return [one.weights_crc32 for one in self.reports]


def new_job() -> str:
    return f"trainers-{os.getpid()}-{next(_jobs)}"


def run(
    *scripts: Script,
    job: str = "",
    clients: int = 0,
    make_model: Callable[[], nn.Module] = Network,
    starts_after: threading.Event | None = None,
    **rules: Any,
) -> Outcome:
    """A run with the scripts on threads of this process. ``clients``: with those of other processes. ``starts_after``:
    the controller does."""
    name, reports = job or new_job(), []
    chosen = {"num": clients or len(scripts), "dead_after_s": PATIENT_S, **rules.pop("clients_rules", {})}
    config = gradbus.FederatedConfig(**{"rounds": 3, "eval_every": 0, "clients": chosen, **rules})

    async def main() -> Outcome:
        async with asyncio.timeout(90), gradbus.connect(name, domain=DOMAIN, security=SECURITY) as bus:
            controller = gradbus.Controller(bus, SceneTask(make_model), config)  # type: ignore[arg-type]
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(asyncio.to_thread(one, name, number)) for number, one in enumerate(scripts)
                ]
                if starts_after is not None:
                    assert await asyncio.to_thread(starts_after.wait, PATIENT_S)
                with contextlib.suppress(TrainingFailed):  # which the scripts raise as well
                    reports.extend([report async for report in controller.rounds()])
            return Outcome(reports, [one.result() for one in running], await controller.state_dict())

    return asyncio.run(main())


def is_equal(module: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Whether a module has exactly this state."""
    own = module.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[name].cpu(), state[name].cpu()) for name in own)


class Children:
    """Processes forked before anything runs here, each of which waits for its scene."""

    def __init__(self) -> None:
        self._processes: list[Any] = []

    def fork(self, entry: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
        """Returns the process, and the pipe whose first message is the job to join."""
        here, there = multiprocessing.get_context("fork").Pipe()
        process = multiprocessing.get_context("fork").Process(target=_enter, args=[entry, there, *arguments])
        process.start()
        there.close()
        self._processes.append(process)
        return process, here

    def end(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(PATIENT_S)


def _enter(entry: Callable[..., Any], pipe: Any, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = pipe.recv()
    if job:
        entry(job, pipe, *arguments)


def program_of_the_page(title: str) -> ModuleType:
    """The whole program in a section of docs/trainers.md, loaded as ``cells``."""
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
    (source,) = python_blocks(section(page, title))
    file = Path(tempfile.mkdtemp()) / "cells.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("cells", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def follow_the_page(job: str, pipe: Any, program: ModuleType, site: str) -> None:
    """Entry of a process that is a client as the page has it."""
    program.main(site, domain=DOMAIN)
    pipe.send("done")


def run_the_page(program: ModuleType, children: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """The run of the page, with its two clients."""
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
    (text,) = fenced_blocks(page, "json")
    settings = json.loads(text)
    assert settings["task"] == {"model": f"cells:{program.Classifier.__name__}"}
    for _, pipe in children:
        pipe.send("cells")
    rules = {key: value for key, value in settings["federated"].items() if key != "clients"}
    clients = settings["federated"]["clients"]["num"]
    found = run(job=settings["bus"]["job"], clients=clients, make_model=program.Classifier, **rules)
    return {
        "clients": [one.clients for one in found.reports],
        "losses": [one.loss for one in found.reports],
        "samples": [one.num_samples for one in found.reports],
        "ended": [pipe.recv() for _, pipe in children],
    }


def play(scenes: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """The scenes that the command line names, one after the other; without names, all."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(scenes)
    for name in names:
        try:
            found = scenes[name]()
        except BaseException:
            found = {"error": traceback.format_exc()}
        (folder / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")

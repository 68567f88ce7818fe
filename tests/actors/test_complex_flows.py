"""Complex parameters and buffers in real rounds, over real DDS: pairs of floats, averaged as any other number."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from torch import Tensor, nn

import gradbus
from gradbus.actors.federated.client.rules.base import RoundStart
from gradbus.actors.federated.client.rules.fedprox import FedProx
from gradbus.actors.federated.controller.saved_run import restore_weights
from gradbus.actors.federated.controller.saved_state import saved_state
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.models.task import EvalResult, TrainResult
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.config.federated import ClientConfig

SAMPLES = (10, 30)
_jobs = itertools.count()
pytestmark = pytest.mark.usefixtures("one_thread")


class Spectral(nn.Module):
    """Complex parameters of both sizes, tied ones, a frozen one and a buffer; an odd number of floats before them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.filter = nn.Parameter(torch.full((2, 2), 1 + 2j, dtype=torch.complex64))
        self.fine = nn.Parameter(torch.full((3,), 0.5 - 1j, dtype=torch.complex128))
        self.tied = self.filter
        self.base = nn.Parameter(torch.full((2,), 4 - 4j, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2, dtype=torch.complex64))


def moved_by(client_id: int) -> complex:
    return complex(0.25 * (client_id + 1), -0.5 * (client_id + 1))


class SpectralTask:
    """Moves each complex number by one that differs from client to client; notes what a training begins with."""

    def __init__(self) -> None:
        self.before: list[dict[str, Tensor]] = []

    def build_model(self) -> nn.Module:
        return Spectral()

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: Any, *, client_id: int, **_: Any) -> TrainResult:
        self.before.append({name: one.clone() for name, one in model.state_dict().items()})
        with torch.no_grad():
            for one in (model.filter, model.fine, model.mean):
                one += moved_by(client_id)
        return TrainResult(SAMPLES[client_id], 0.5)

    def evaluate(self, model: Any) -> EvalResult | None:
        return None


def federated(
    tasks: list[SpectralTask], folder: Path | None = None, clients: Path | None = None, **rules: Any
) -> dict[str, Tensor]:
    """A run of two rounds. Returns the state of the global model."""
    job, domain = f"complex-{os.getpid()}-{next(_jobs)}", new_domain()
    many = {"num": len(tasks), "min": len(tasks), "dead_after_s": 30.0}
    given = {"rounds": 2, "eval_every": 0, "clients": many, "checkpoint": {"dir": folder}, **rules}

    async def client(client_id: int, task: SpectralTask) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            own = ClientConfig(state_dir=clients)
            await gradbus.Client(bus, task, client_id=client_id, config=own).run()

    async def main() -> dict[str, Tensor]:
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as group:
            for number, task in enumerate(tasks):
                group.create_task(client(number, task))
            async with gradbus.connect(job=job, domain=domain) as bus:
                controller = gradbus.Controller(bus, SpectralTask(), gradbus.FederatedConfig(**given))
                await controller.run()
                return await controller.state_dict()

    return asyncio.run(main())


def test_complex_tensors_end_at_the_weighted_mean(tmp_path: Path) -> None:
    tasks = [SpectralTask(), SpectralTask()]
    found = federated(tasks, tmp_path)
    step = sum(SAMPLES[one] * moved_by(one) for one in (0, 1)) / sum(SAMPLES)
    built = Spectral().state_dict()
    for name in ("filter", "tied", "fine", "mean"):
        assert found[name].dtype == built[name].dtype
        torch.testing.assert_close(found[name], built[name] + 2 * step, rtol=1e-6, atol=1e-6)
    for task in tasks:
        torch.testing.assert_close(task.before[1]["fine"], built["fine"] + step, rtol=1e-6, atol=1e-6)
    assert torch.equal(found["base"], built["base"])
    store = CheckpointStore.to_read(tmp_path)
    checkpoint, restored = store.load(2), Spectral()
    restore_weights(restored, checkpoint, store.load_constant)
    for state in (saved_state(checkpoint, store.load_constant).tensors, restored.state_dict()):
        assert all(torch.equal(state[name], one) and state[name].dtype == one.dtype for name, one in found.items())


def test_complex_tensors_travel_in_a_codec_that_rounds() -> None:
    found = federated([SpectralTask()], codec="q8", downlink_codec="q8")
    torch.testing.assert_close(found["mean"], torch.full((2,), 2 * moved_by(0)), rtol=0.05, atol=0.0)


def test_a_personal_complex_tensor_stays_at_its_client_and_outlives_it(tmp_path: Path) -> None:
    exclude, state = {"exclude": ["fine"]}, tmp_path / "clients"
    tasks = [SpectralTask(), SpectralTask()]
    found = federated(tasks, clients=state, share=exclude)
    built = Spectral().fine.detach()
    assert torch.equal(found["fine"], built)
    assert torch.equal(tasks[1].before[1]["fine"], built + moved_by(1))
    store, folder = CheckpointStore.to_read(state / "client-1"), FlatModel(Spectral(), Sharing(exclude=("fine",)))
    kept = {name.removeprefix("personal."): one for name, one in store.load(2).tensors.items() if "personal." in name}
    folder.write_personal(kept)
    assert torch.equal(folder.module.state_dict()["fine"], built + 2 * moved_by(1))


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex32))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_vector_has_pairs_of_complex32() -> None:
    model = FlatModel(Halves())
    model.write(torch.arange(8.0))
    assert torch.equal(model.read(), torch.arange(8.0))
    assert complex(model.module.state_dict()["filter"][0, 1].to(torch.complex64)) == 2 + 3j
    assert model.shapes == [(2, 2, 2)]


def test_fedprox_draws_both_parts_of_a_complex_parameter() -> None:
    module = Spectral()
    model, rule = FlatModel(module), FedProx(mu=0.5)
    base = model.read().clone()
    begin = RoundStart(
        round_id=1, lr=0.1, model=module, base=base, parameters=model.parameters(), local_loss=lambda: 0.0
    )
    rule.start(begin)
    with torch.no_grad():
        module.filter += 2 - 3j
    term = rule.loss_term(module)
    assert term is not None
    term.backward()
    assert float(term.detach()) == pytest.approx(0.5 / 2 * 4 * (4 + 9))
    assert torch.equal(module.filter.grad, torch.full((2, 2), 0.5 * (2 - 3j)))

"""Bytes of a round in which adapters alone are shared, beside one of the whole model; and what a personal model gains.

A small transformer is trained by two clients on text: first all of it, then low-rank adapters beside what that has left
as a frozen base. Controller and clients are processes of their own, and nothing is shared in memory: what they receive
is counted, frame by frame. In a third run one client begins with another base, which it is sent once. Then four
clients, two with sentences and two with sources of Python, train with Ditto, and each one's personal model is compared
with the global one on text of its own kind that none has seen.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gradbus
from gradbus.actors.federated.model.own_tensors import OWN_MODEL
from gradbus.experiments.bench.federation import UPDATES, OpenBus, RoleWork, controller_of, run_federation, take_part
from gradbus.experiments.bench.processes import DOMAIN, LEASE_S
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.models.client_text import ClientTextTask
from gradbus.models.lora import PATTERN
from gradbus.models.text import corpus

CLIENTS = 2
SAMPLES = 128
LORA = {"rank": 4, "alpha": 16.0, "targets": ["*.qkv", "*.out"]}


class TextRun(NamedTuple):
    """The settings that all processes of a run share. ``task``: arguments of ClientTextTask. ``rules``: of the run."""

    job: str
    task: Mapping[str, Any]
    rules: Mapping[str, Any]

    def connect(self) -> OpenBus:
        """A bus without shared memory, as between machines."""
        return gradbus.connect(self.job, domain=DOMAIN, lease_s=LEASE_S, shared_memory=False)


class Received(NamedTuple):
    """Bytes of one run: updates at the controller, and models at each client. ``loss``: at the end."""

    updates: int
    models: list[int]
    loss: float


async def _controller(run: TextRun, to: str) -> tuple[int, float]:
    """Bytes of updates, and the loss of the last model, which is written to a file."""
    async with controller_of(run.connect(), ClientTextTask(**run.task), run.rules) as (bus, controller):
        reports = await controller.run()
        if to:
            state = await controller.state_dict()
            save_file({name: tensor.clone() for name, tensor in state.items()}, to)
        return int(bus.received_bytes[UPDATES]), float(reports[-1].eval_loss or 0.0)


async def _client(run: TextRun, client_id: int, changed: Mapping[str, Any]) -> int:
    """Bytes of models that it has received. ``changed``: of the task, at this client alone."""
    return await take_part(run.connect(), ClientTextTask(**{**run.task, **changed}), client_id)


def count_bytes(
    rounds: int, task: Mapping[str, Any], *, to: str = "", other: Mapping[str, Any] | None = None, **rules: Any
) -> Received:
    """Run so many rounds. ``to``: a file for the model. ``other``: of the task of the last client alone."""
    clients = {"num": CLIENTS, "min": CLIENTS, "dead_after_s": 60.0}
    run = TextRun(
        f"bench-personal-{os.getpid()}",
        task,
        {"rounds": rounds, "eval_every": rounds, "clients": clients, "training": {"lr": 3e-3}, **rules},
    )
    works = {
        f"client {client_id}": RoleWork(_client, (run, client_id, (other or {}) if client_id == CLIENTS - 1 else {}))
        for client_id in range(CLIENTS)
    }
    (updates, loss), models = run_federation(RoleWork(_controller, (run, to)), works, 600.0)
    return Received(updates, models, loss)


def measure(rounds: int = 6, samples: int = SAMPLES, model: Mapping[str, int] | None = None) -> Iterator[Measurement]:
    """The figures. ``samples``: windows of each client in a round. ``model``: another size of it."""
    task: dict[str, Any] = {"samples": samples, **({} if model is None else {"model": dict(model)})}
    with tempfile.TemporaryDirectory() as directory:
        base = str(Path(directory) / "base.safetensors")
        full = count_bytes(rounds, task, to=base)
        adapted = {**task, "base": base, "lora": LORA}
        share = {"include": [PATTERN]}
        lora = count_bytes(rounds, adapted, share=share)
        other = count_bytes(1, adapted, other={"base": None}, share=share)
    updates, models = full.updates / (rounds * CLIENTS), full.models[0] / rounds
    yield measurement(
        "update of a client, adapters alone, of one of the whole model",
        "%",
        [100 * lora.updates / full.updates],
        at_most=2,
        note=f"{lora.updates / (rounds * CLIENTS):,.0f} of {updates:,.0f} bytes",
    )
    yield measurement(
        "models that a client gets in a round, adapters alone, of the whole one",
        "%",
        [100 * lora.models[0] / full.models[0]],
        at_most=2,
        note=f"{lora.models[0] / rounds:,.0f} of {models:,.0f} bytes",
    )
    once = other.models[-1] - lora.models[0] / rounds
    yield measurement(
        "frozen base, sent once where the base of a client differs",
        "MB",
        [once / 1e6],
        note=f"{models / 1e6:.1f} MB in each round where all of the model is sent",
    )
    yield measurement("loss after the whole model was trained", "nats", [full.loss], note=f"{rounds} rounds")
    yield measurement("loss after as many rounds more of adapters alone", "nats", [lora.loss], at_most=full.loss)
    yield from measure_ditto(rounds, task)


def measure_ditto(rounds: int, task: Mapping[str, Any], clients: int = 4, lam: float = 0.1) -> Iterator[Measurement]:
    """The loss on unseen text of a client's own kind, of its personal model and of the global one."""
    with tempfile.TemporaryDirectory() as directory:
        made = ClientTextTask(**{**task, "num_clients": clients})
        config = gradbus.FederatedConfig(
            rounds=rounds,
            eval_every=0,
            training={"lr": 3e-3, "rule": {"name": "ditto", "lam": lam}},
            clients={"dead_after_s": 60.0},
        )
        options = gradbus.SimulationOptions(domain=DOMAIN, state_dir=Path(directory))
        result = gradbus.simulate(made, clients, config=config, options=options)
        personal, common = [], []
        for client_id in range(clients):
            kind = client_id * 2 // clients
            common.append(_loss(made, result.model, kind))
            kept = load_file(Path(directory) / f"client-{client_id}" / f"round-{rounds:06d}.safetensors")
            own = made.build_model()
            tensors = {name.removeprefix(OWN_MODEL): one for name, one in kept.items() if name.startswith(OWN_MODEL)}
            own.load_state_dict(tensors, strict=False)  # tied weights are kept once
            personal.append(_loss(made, own, kind))
    yield measurement(
        "loss of a client's personal model on text of its own kind, Ditto",
        "nats",
        personal,
        against=("global model", common),
        at_most=1,
        note=f"{clients} clients, {rounds} rounds, lam {lam:g}",
    )


@torch.no_grad()
def _loss(task: ClientTextTask, model: nn.Module, kind: int) -> float:
    """On unseen text. ``kind``: 0: sentences, 1: sources."""
    _, text = corpus()
    half = text.numel() // 2
    own: Tensor = text[kind * half : (kind + 1) * half]
    starts = torch.linspace(0, own.numel() - task.context - 2, task.windows).long()[:, None]
    model.eval()
    return float(task.loss(model, own[starts + torch.arange(task.context + 1)]))

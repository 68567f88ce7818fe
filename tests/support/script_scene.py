"""A small model, its data, and a training loop that a Task and a script of three lines have in common."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradbus
from gradbus.models import TrainResult


def build_model() -> nn.Module:
    """The model: with a buffer of floats and one of integers, as BatchNorm has them."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(5)  # torch's own is one for all threads, which build at the same time
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return model


def draw(client_id: int) -> tuple[Tensor, Tensor]:
    """The data of a client: points, float32, shape (120, 4), and labels, int64, shape (120,)."""
    points = torch.randn(120, 4, generator=torch.Generator().manual_seed(client_id))
    return points, (points[:, 0] > points[:, 1]).long()


def train(
    model: nn.Module,
    client_id: int,
    round_id: int,
    lr: float,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    with_closure: bool = False,
) -> tuple[int, float]:
    """One epoch in shuffled batches; samples and mean loss. ``with_closure``: the optimizer computes the gradients."""
    points, labels = draw(client_id)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(100 * round_id + client_id))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    model.train()
    for batch in order.split(20):
        if should_stop():
            break

        def gradients(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points[batch]), labels[batch])
            loss.backward()
            return loss

        if with_closure:
            loss = optimizer.step(gradients)
        else:
            loss = gradients()
            optimizer.step()
        total += loss.item() * len(batch)
    return len(points), total / len(points)


class SceneTask:
    """The same as a Task."""

    def build_model(self) -> nn.Module:
        return build_model()

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: nn.Module, *, client_id: int, round_id: int, lr: float, **_: Any) -> TrainResult:
        samples, loss = train(model, client_id, round_id, lr)
        return TrainResult(samples, loss)

    def evaluate(self, model: nn.Module) -> None:
        return None


def receive_and_wait(spec: dict[str, Any], pipe: Any) -> None:
    """Entry of a forked process, which is killed while it has a round."""
    with gradbus.client(spec["job"], client_id=spec["client_id"], domain=spec["domain"]) as fed:
        pipe.send({"event": "ready"})
        assert fed.receive(build_model())
        pipe.send({"event": "received"})
        signal.pause()


def fork_in_a_round(spec: dict[str, Any], pipe: Any) -> None:
    """Entry of a forked process, which forks in each round: its child tries to send, and leaves the block."""
    model = build_model()
    with gradbus.client(spec["job"], client_id=spec["client_id"], domain=spec["domain"]) as fed:
        while fed.receive(model):
            read, write = os.pipe()
            child = os.fork()
            if not child:
                error = "none"
                try:
                    with contextlib.ExitStack() as block:
                        block.push(fed)  # as if the block ended here
                        fed.send(model, samples=1)
                except BaseException as raised:
                    error = f"{type(raised).__name__}: {raised}"
                os.write(write, error.encode())
                os._exit(0)
            os.close(write)
            with os.fdopen(read) as told:
                error = told.read()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            counts = fed.send(model, samples=1)
            pipe.send({"event": "round", "error": error, "child": code, "counts": counts})

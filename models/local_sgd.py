"""The steps of a client between two rounds, for tasks of any kind: the order of its samples, the optimizer, the end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from .seeds import seeded_generator
from .task import TrainingStopped, TrainResult

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
"""Parameters -> their optimizer."""


def local_sgd(  # noqa: PLR0913 (of a round, as a task gets it)
    model: nn.Module,
    samples: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    *,
    client_id: int,
    round_id: int,
    epochs: int,
    lr: float,
    seed: int,
    subset_size: int,
    should_stop: Callable[[], bool],
    make_optimizer: MakeOptimizer | None = None,
    steps: int = 0,
    batch_size: int = 32,
    momentum: float = 0.9,
) -> TrainResult:
    """Train in place on the samples of a client: what :meth:`gradbus.models.Task.train` of a task can be made of, which
    passes on the keywords that it gets.

    Args:
        samples: int64 (K,): the indices of this client's samples.
        loss_of: the mean loss of the model on the samples at these indices, int64 (B,): a scalar with its graph.
        make_optimizer: in place of SGD with this ``momentum``.
        steps: of the optimizer, in place of ``epochs``; 0: ``epochs`` holds.

    Raises:
        ValueError: an argument is out of range.
        TrainingStopped: ``should_stop`` was true.
    """
    if epochs < 1 or not lr > 0 or subset_size < 0:
        raise ValueError(f"need epochs >= 1, lr > 0, subset_size >= 0, got {epochs}, {lr}, {subset_size}")
    generator = seeded_generator("train", seed, client_id, round_id)
    if 0 < subset_size < len(samples):
        samples = samples[torch.randperm(len(samples), generator=generator)[:subset_size]]
    made = make_optimizer or partial(torch.optim.SGD, lr=lr, momentum=momentum)
    optimizer = made([parameter for parameter in model.parameters() if parameter.requires_grad])
    most = steps or epochs * math.ceil(len(samples) / batch_size)
    return run_steps(model, samples, loss_of, optimizer, (most, batch_size), generator, should_stop)


def run_steps(
    model: nn.Module,
    samples: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    amounts: tuple[int, int],
    generator: torch.Generator,
    should_stop: Callable[[], bool],
) -> TrainResult:
    """So many steps over the samples, pass after pass, each in an order of its own. ``amounts``: steps, and samples of
    a step. Raises TrainingStopped, with the result so far."""
    most, batch_size = amounts
    device = next(model.parameters()).device
    loss_sum = torch.zeros((), device=device)  # stays on the device: reading it would wait for every step
    done = seen = 0

    def result() -> TrainResult:
        return TrainResult(min(seen, len(samples)), loss_sum.item() / seen)

    model.train()
    while done < most:
        order = samples[torch.randperm(len(samples), generator=generator)]
        for batch in itertools.islice(torch.split(order, batch_size), most - done):
            if should_stop():
                raise TrainingStopped(done, result() if done else None)
            optimizer.zero_grad()
            loss = loss_of(batch)
            torch.autograd.backward(loss)
            optimizer.step()
            loss_sum += loss.detach() * len(batch)
            done += 1
            seen += len(batch)
    return result()

"""A rank that makes one step with the int8 baseline. In a module of its own: rank processes import it."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from gradbus.experiments.bench.processes import BenchRank
from gradbus.experiments.figures.int8_exchange import Int8Exchange
from gradbus.runtime.config.data_parallel import DataParallelConfig

SHAPES = {"weight": (40, 30), "bias": (30,), "scale": ()}


def gradients(rank: int) -> dict[str, torch.Tensor]:
    """Of one rank, by parameter."""
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


async def int8_step(place: BenchRank) -> dict[str, Any]:
    """Gradients and parameters after a step of SGD at a learning rate of 1, from zeros, and the bytes sent.

    The role of a rank; its spec: the rank that has no data, or None.
    """
    parameters = {name: torch.zeros(shape, requires_grad=True) for name, shape in SHAPES.items()}
    async with place.group() as group:
        exchange = Int8Exchange(DataParallelConfig(optimizer={"lr": 1.0, "momentum": 0.0}), group, parameters)
        exchange.begin(0, place.world - (place.spec is not None))
        for name, gradient in gradients(place.rank).items():
            parameters[name].grad = gradient
        (handle,) = await asyncio.to_thread(exchange.send, has_data=place.rank != place.spec)
        assert exchange.decode([await handle]) is None
        exchange.apply()
    means = {name: parameter.grad for name, parameter in parameters.items()}
    return {
        "mean": {name: mean.numpy() for name, mean in means.items() if mean is not None},
        "after": {name: parameter.detach().numpy() for name, parameter in parameters.items()},
        "sent": handle.sent_bytes,
    }

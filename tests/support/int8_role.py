"""A rank that makes one step with the int8 baseline. In a module of its own: rank processes import it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import torch

from gradbus.experiments.gallery.int8_exchange import Int8Exchange
from gradbus.runtime.collectives import Group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.dds.network import NetworkConfig

SHAPES = {"weight": (40, 30), "bias": (30,), "scale": ()}


def gradients(rank: int) -> dict[str, torch.Tensor]:
    """Of one rank, by parameter."""
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@dataclass(frozen=True, slots=True)
class Int8Step:
    """See :class:`gradbus.experiments.bench_ddp_process.Role`. ``idle``: this rank has no data."""

    world: int = 2
    network: NetworkConfig | None = None
    idle: int | None = None

    async def run(self, group: Group) -> dict[str, Any]:
        """Gradients and parameters after a step of SGD at a learning rate of 1, from zeros, and the bytes sent."""
        parameters = {name: torch.zeros(shape, requires_grad=True) for name, shape in SHAPES.items()}
        exchange = Int8Exchange(DataParallelConfig(lr=1.0, momentum=0.0), group, parameters)
        has_data = group.rank != self.idle
        exchange.begin(0, self.world - (self.idle is not None))
        for name, gradient in gradients(group.rank).items():
            parameters[name].grad = gradient
        (handle,) = await asyncio.to_thread(exchange.send, has_data=has_data)
        assert exchange.decode([await handle]) is None
        exchange.apply()
        means = {name: parameter.grad for name, parameter in parameters.items()}
        return {
            "mean": {name: mean.numpy() for name, mean in means.items() if mean is not None},
            "after": {name: parameter.detach().numpy() for name, parameter in parameters.items()},
            "sent": handle.sent_bytes,
        }

"""A rank that makes one step with the int8 baseline. In a module of its own: rank processes import it."""

from __future__ import annotations

from typing import Any

import torch

from gradbus.experiments.bench.processes import BenchRank
from gradbus.experiments.figures.int8 import Int8
from gradbus.runtime.algorithms.base import Place, Step, bucket_of
from gradbus.runtime.collectives.programs import ProgramRun

SHAPES = {"weight": (40, 30), "bias": (30,), "scale": ()}


def gradients(rank: int) -> dict[str, torch.Tensor]:
    """Of one rank, by parameter."""
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


async def int8_step(place: BenchRank) -> dict[str, Any]:
    """The mean of the gradients, and the bytes sent.

    The role of a rank; its spec: the rank that has no data, or None.
    """
    own = gradients(place.rank)
    if place.rank == place.spec:
        own = {name: torch.zeros_like(gradient) for name, gradient in own.items()}
    bucket, active = bucket_of(own), place.world - (place.spec is not None)
    async with place.group() as group:
        algorithm = Int8(Place(group.rank, group.world), Int8.Options())
        run = ProgramRun(group, algorithm.exchange(bucket, Step(0, active=active)), "int8")
        assert run.start()
        (handle,) = run.handles
        assert not run.resume([await handle])
    return {"mean": {name: mean.numpy() for name, mean in bucket.tensors.items()}, "sent": handle.sent_bytes}

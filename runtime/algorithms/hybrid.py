"""Hybrid compression: large matrices by PowerSGD, other large tensors by top-k, small ones dense, all at once.

The choice follows from the name and the shape of a tensor, so it is equal on all ranks. The exchanges run side by side,
and small tensors travel with PowerSGD's: a step waits for two phases, as many as PowerSGD has alone.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator
from torch import Tensor

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket
from gradbus.runtime.algorithms.powersgd import PowerSGD
from gradbus.runtime.algorithms.requests import Program, side_by_side
from gradbus.runtime.algorithms.topk import TopK

Method = Literal["powersgd", "topk", "dense"]


class Hybrid(Algorithm):
    """PowerSGD, top-k and dense by the name and shape of a tensor."""

    choice = "hybrid"
    own = PowerSGD.own | TopK.own
    shared = PowerSGD.shared | TopK.shared

    class Options(base.Options):
        """Options of ``hybrid``."""

        rank: int = Field(default=4, ge=1, le=1024)
        """Rank of PowerSGD."""
        power_iterations: int = Field(default=1, ge=1, le=16)
        """How often PowerSGD computes its two factors in a step."""
        density: float = Field(default=0.01, gt=0, le=1)
        """Share of the entries that top-k sends."""
        small_numel: int = Field(default=1024, ge=0)
        """Number of entries below which a tensor is dense."""
        patterns: dict[str, Method] = Field(default={}, max_length=64)
        """Method of the tensors whose name a regular expression finds, before all else: the first one that does."""
        seed: int = Field(default=0, ge=0)
        """Seed of PowerSGD."""

        @field_validator("patterns")
        @classmethod
        def _are_expressions(cls, value: dict[str, Method]) -> dict[str, Method]:
            for pattern in value:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None
            return value

    options: Any

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        given = PowerSGD.Options(rank=options.rank, power_iterations=options.power_iterations, seed=options.seed)
        self._powersgd = PowerSGD(place, given)
        self._topk = TopK(place, TopK.Options(density=options.density))
        self._powersgd.memory = self._topk.memory = self.memory

    def regroup(self, place: Place) -> None:
        super().regroup(place)
        self._powersgd.place = self._topk.place = place

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        chosen: dict[Method, dict[str, Tensor]] = {"powersgd": {}, "topk": {}, "dense": {}}
        for name, tensor in bucket.tensors.items():
            chosen[self.method_of(name, tensor)][name] = tensor
        yield from side_by_side(
            self._powersgd.factors(chosen["powersgd"], chosen["dense"], step),
            self._topk.exchange_largest(chosen["topk"], step),
        )

    def method_of(self, name: str, tensor: Tensor) -> Method:
        """How a tensor is exchanged."""
        for pattern, method in self.options.patterns.items():
            if re.search(pattern, name):
                return "dense" if method == "powersgd" and self._powersgd.rank_of(tensor.shape) is None else method
        if tensor.numel() < self.options.small_numel:
            return "dense"
        return "topk" if self._powersgd.rank_of(tensor.shape) is None else "powersgd"

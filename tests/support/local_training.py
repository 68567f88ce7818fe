"""Ranks with weights of their own that train in lockstep by an algorithm of scope ``weights``, as drivers run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.base import Place, Step, bucket_of, make_algorithm


class LocalTraining:
    """SGD on given gradients.

    Attributes:
        weights: of each rank, shape (n,). algorithms, lockstep: theirs. fails_at: steps whose exchange all ranks take
            back.
    """

    def __init__(self, name: str, world: int, start: Tensor, lr: float, **options: Any) -> None:
        self.algorithms = [make_algorithm(name, Place(rank, world), options) for rank in range(world)]
        self.lockstep = Lockstep(world)
        self.weights = [start.clone() for _ in range(world)]
        self.lr = lr
        self.number = 0
        self.fails_at: Sequence[int] = ()
        self._late: list[tuple[int, Step, list[Tensor], list[Tensor]]] = []
        for algorithm, own in zip(self.algorithms, self.weights, strict=True):
            algorithm.begin(bucket_of({"w": own}))

    def step(self, gradients: Sequence[Tensor]) -> None:
        """All ranks step, exchange if that is due, and apply what is there."""
        step, delay = Step(self.number), self.algorithms[0].delay_steps
        for own, gradient in zip(self.weights, gradients, strict=True):
            own.sub_(self.lr * gradient)
        self._apply(self.number)
        if self.algorithms[0].is_due(step):
            buckets = [bucket_of({"w": own}) for own in self.weights]
            before = [bucket.flat.clone() for bucket in buckets]
            self.lockstep.run([a.exchange(b, step) for a, b in zip(self.algorithms, buckets, strict=True)])
            fails = self.number in self.fails_at or not all(bool(bucket.flat.isfinite().all()) for bucket in buckets)
            for algorithm in self.algorithms:
                (algorithm.roll_back if fails else algorithm.commit)()
            if not fails:
                self._late.append((self.number + delay, step, before, [bucket.flat for bucket in buckets]))
        if not delay:
            self._apply(self.number)
        self.number += 1

    def drain(self) -> None:
        """Apply what is late."""
        self._apply(None)

    def _apply(self, until: int | None) -> None:
        while self._late and (until is None or self._late[0][0] <= until):
            due, step, before, results = self._late.pop(0)
            for rank, own in enumerate(self.weights):
                late = due > step.number
                made = self.algorithms[rank].applied_late(step, own, before[rank], results[rank])
                own.copy_(made if late else results[rank])

    def shared(self) -> list[Mapping[str, Tensor]]:
        """Of all ranks, copied."""
        return [{key: one.clone() for key, one in a.shared_state().items()} for a in self.algorithms]


def gradients_of(world: int, steps: int, size: int, seed: int = 0) -> list[list[Tensor]]:
    """Random ones, ``[step][rank]``."""
    random = torch.Generator().manual_seed(seed)
    return [[torch.randn(size, generator=random) for _ in range(world)] for _ in range(steps)]

"""The geometric median: the vector with the smallest sum of distances to all updates.

Pillutla et al., Robust Aggregation for Federated Learning, IEEE TSP 2022 (arXiv:1912.13445), Algorithm 2, the smoothed
Weiszfeld algorithm: ``v <- sum b_k w_k / sum b_k`` with ``b_k = 1 / max(nu, ||v - w_k||)``. Every iterate is a mean of
the updates with some weights, so one pass over them, for the products of all pairs, is enough. Differs from the paper:
clients weigh alike, as the number of their samples cannot be checked, and it begins with the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gradbus.actors.aggregation.robust import BUDGET_BYTES, Block, Robust, RobustOptions, pair_products, places
from gradbus.runtime.choices import Options
from gradbus.runtime.config.settings import Positive


class GeometricMedianOptions(RobustOptions):
    """Options of the geometric median."""

    iterations: Annotated[int, Field(ge=1, le=1000)] = 32
    """Number of iterations."""
    nu: Positive = 1e-6
    """Least distance, as far as weights go."""


class GeometricMedian(Robust):
    """The vector with the smallest sum of distances to all updates."""

    choice = "geometric_median"
    Options: ClassVar[type[Options]] = GeometricMedianOptions

    def __init__(
        self, dim: int, *, byzantine: int = 1, budget_bytes: int = BUDGET_BYTES, iterations: int = 32, nu: float = 1e-6
    ) -> None:
        super().__init__(dim, byzantine=byzantine, budget_bytes=budget_bytes)
        self._iterations, self._nu = iterations, nu

    @property
    def least(self) -> int:
        return 2 * self._byzantine + 1

    @property
    def bound(self) -> str:
        return "2 f + 1"

    def _combined(self, rows: list[Block]) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        products = pair_products(rows)
        weights: NDArray[Any] = np.full(len(rows), 1 / len(rows))
        for _ in range(self._iterations):
            towards = products @ weights
            squares = weights @ towards - 2 * towards + np.diag(products)  # |v - w_k|^2
            weights = 1 / np.maximum(self._nu, np.sqrt(np.maximum(squares, 0.0)))
            weights /= weights.sum()
        for place in places(self._dim):
            total = np.zeros(place.stop - place.start)
            for weight, row in zip(weights, rows, strict=True):
                total += weight * row[place]
            yield place, total

"""Bulyan: a selection by Krum, then a trimmed mean of each coordinate.

El Mhamdi et al., The Hidden Vulnerability of Distributed Learning in Byzantium, ICML 2018 (arXiv:1802.07927), section
4: of n >= 4 f + 3 updates, n - 2 f are chosen by Krum, one after the other; then of each coordinate the n - 4 f values
next to their median are averaged. Differs from the paper: of two scores that are equal the smaller id comes first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradbus.actors.aggregation.robust import (
    Block,
    Robust,
    nearest_sums,
    pair_products,
    places,
    squared_distances,
)


class Bulyan(Robust):
    """A selection of updates by Krum, then of each coordinate the mean of the values next to the median."""

    choice = "bulyan"

    @property
    def least(self) -> int:
        return 4 * self._byzantine + 3

    @property
    def bound(self) -> str:
        return "4 f + 3"

    def _combined(self, rows: list[Block]) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        f, left = self._byzantine, list(range(len(rows)))
        distances = squared_distances(pair_products(rows))
        picked: list[int] = []
        while len(picked) < len(rows) - 2 * f:
            among = distances[np.ix_(left, left)]
            picked.append(left.pop(int(np.argmin(nearest_sums(among, nearest=max(1, len(left) - f - 2))))))
        ids = sorted(self._rows)
        self.chosen = tuple(sorted(ids[index] for index in picked))
        kept = len(picked) - 2 * f
        for place in places(self._dim):
            block = np.sort(np.stack([rows[index][place] for index in picked]).astype(np.float64), axis=0)
            middle = (block[(len(block) - 1) // 2] + block[len(block) // 2]) / 2
            order = np.argsort(np.abs(block - middle), axis=0, kind="stable")[:kept]
            yield place, np.take_along_axis(block, order, axis=0).mean(axis=0)

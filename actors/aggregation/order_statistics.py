"""Order statistics along the rows of a matrix, column by column, for many columns at once.

A sorting network compares whole rows, which NumPy does with vector instructions: for ten rows that is ten times as fast
as ``np.sort`` along the rows, which takes one short column after the other. Only comparators that the wanted rows
depend on are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = list[NDArray[Any]]


@lru_cache(maxsize=64)
def sorting_network(num_rows: int, wanted: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """Pairs (i, j), i < j, to be put in order one after the other; then the wanted rows are as if all were sorted.

    Batcher's merge exchange: Knuth, The Art of Computer Programming 3, 5.2.2, Algorithm M.
    """
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (num_rows - 1).bit_length() - 1)  # M1
    p = top
    while p > 0 and num_rows > 1:
        q, r, d = top, 0, p  # M2
        while True:
            pairs += [(i, i + d) for i in range(num_rows - d) if i & p == r]  # M3, M4
            if q == p:
                break
            d, q, r = q - p, q // 2, p  # M5
        p //= 2  # M6
    needed, kept = set(wanted), []
    for i, j in reversed(pairs):
        if i in needed or j in needed:
            needed |= {i, j}
            kept.append((i, j))
    return tuple(reversed(kept))


def sort_rows(rows: Sequence[NDArray[Any]], spare: NDArray[Any], wanted: Collection[int]) -> Rows:
    """The rows, such that those with the ``wanted`` indices hold what they would hold if each column were sorted in
    ascending order. What the others hold is not said.

    Args:
        rows: one-dimensional arrays of one length, without NaN. They are used up.
        spare: another one, used up as well.
    """
    rows = list(rows)
    for i, j in sorting_network(len(rows), frozenset(wanted)):
        low, high = rows[i], rows[j]
        np.minimum(low, high, out=spare)
        np.maximum(low, high, out=high)
        rows[i], spare = spare, low
    return rows

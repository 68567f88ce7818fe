"""Strategies that tolerate hostile clients: of n updates, f may be anything.

    CoordinateMedian   median of each coordinate                         Yin et al., ICML 2018 (arXiv:1803.01498)
    TrimmedMean        mean of each without its f largest and f smallest  the same
    Krum               the update that is nearest to its n - f - 2        Blanchard et al., NIPS 2017 (arXiv:1703.02757)
                       nearest others
    MultiKrum          mean of the m updates that are best in that sense  the same

Differs from the papers: what is combined are the changes of the model that clients trained for a round, where there
they are gradients at one model; f is a number where TrimmedMean has a share of the clients; and MultiKrum has
m = n - f - 2, unless `strategy.keep` says otherwise, where it is a parameter.

All updates weigh alike, as the number of samples cannot be checked. The controller holds n models in place of one sum,
which :meth:`Robust.check` bounds before a run starts. Updates are taken in the order of ids, so their order of arrival
changes no bit.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from gradbus.actors.aggregation.clipping import differences
from gradbus.actors.aggregation.exact_sum import OutOfRange
from gradbus.actors.aggregation.strategies import NoRoom, Strategy
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.codecs import DenseBlock
from gradbus.runtime.choices import Options
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError

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
    ascending order. What the others hold is not defined.

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


BUDGET_BYTES = 1 << 30
LARGEST = 2.0**32  # no honest weight moves so far in a round, and no mean of such overflows
LEFT_OUT = "left out"
BLOCK_ELEMS = 8 * 1024  # ten rows of it stay in the second-level cache

Block = NDArray[np.float32]


class RobustOptions(Options):
    """Options of a strategy that keeps the updates of a round."""

    byzantine: Annotated[int, Field(ge=0, le=100_000)] = 1
    """Number of hostile clients in a round that are tolerated. It decides the least `federated.clients.min`."""
    budget_bytes: Annotated[int, Field(ge=1)] = BUDGET_BYTES
    """Memory, in bytes, that the updates of a round may take."""


class Robust(Strategy):
    """Keeps the updates of a round, as differences, and combines them at its end.

    Attributes:
        chosen: ids of the clients whose updates made the last model; empty: all.
    """

    weighs_samples = False
    buffer_rule = "median"  # one hostile client alone would decide over a maximum
    takes_repeats = False
    chosen: tuple[int, ...] = ()
    Options: ClassVar[type[Options]] = RobustOptions

    def __init__(self, dim: int, *, byzantine: int = 1, budget_bytes: int = BUDGET_BYTES) -> None:
        """A strategy without updates.

        Args:
            dim: D, size of the model.
            byzantine: f, how many of the updates of a round may be hostile.
            budget_bytes: for the updates of one round, together.
        """
        if byzantine < 0:
            raise ValueError(f"byzantine must be >= 0, got {byzantine}")
        self._dim = dim
        self._byzantine = byzantine
        self._budget_bytes = budget_bytes
        self._rows: dict[int, Block] = {}
        self._free: list[Block] = []  # of the round before
        self._base: Tensor | None = None

    def lay_out(self, shapes: Sequence[Sequence[int]]) -> None:
        self._dim = sum(map(math.prod, shapes))

    @property
    @abstractmethod
    def least(self) -> int:
        """The fewest updates that tolerate f hostile ones."""

    @property
    @abstractmethod
    def bound(self) -> str:
        """:attr:`least` as a formula."""

    def check(self, config: FederatedConfig) -> None:
        named = f"strategy {self.choice} with byzantine={self._byzantine}"
        least = config.clients.min
        if least < self.least:
            raise ConfigError(
                f"{named} needs {self.bound} = {self.least} updates in every round, but clients.min lets a round end "
                f"with {least}: set federated.clients.min={self.least} or more, or a smaller "
                f"federated.strategy.byzantine"
            )
        clients = max(config.clients.num or 0, least)
        need = 4 * self._dim * clients
        if need > self._budget_bytes:
            raise ConfigError(
                f"{named} keeps the updates of all clients: {clients} x {self._dim:,} values of 4 bytes are "
                f"{need:,} bytes, more than federated.strategy.budget_bytes={self._budget_bytes:,}. Raise it if the "
                f"controller has the memory, or use fedavg with federated.limits.clip_norm, which needs one sum"
            )

    def begin(self, round_id: int, base: Tensor) -> None:
        self._free += self._rows.values()
        self._rows = {}
        self._base = base
        self.chosen = ()

    def add(self, update: Update, facts: Facts) -> None:
        assert self._base is not None, "begin() comes first"
        model, client_id = update.model, facts.client_id
        if model.is_sparse and not model.is_delta:
            raise ValueError(f"a sparse {model.codec} update holds weights: expected a difference")
        if client_id in self._rows:
            raise ValueError(f"client {client_id} has an update in this round already")
        row = self._new_row()
        if model.is_sparse:
            row.fill(0.0)
        for block in differences(model, self._base):
            if isinstance(block, DenseBlock):
                row[block.start : block.start + block.values.numel()] = block.values.numpy()
            else:
                row[block.indices.numpy()] = block.values.numpy()
        largest = max(float(row.max()), -float(row.min()))
        if not largest <= LARGEST:  # NaN, too
            self._free.append(row)
            raise OutOfRange(f"update with a value of {largest:.3g}: expected a difference of at most {LARGEST:g}")
        row += 0.0  # -0 becomes 0: which of the two a minimum gives depends on the order
        self._rows[client_id] = row

    def _new_row(self) -> Block:
        if self._free:
            return self._free.pop()
        if 4 * self._dim * (len(self._rows) + 1) > self._budget_bytes:
            raise NoRoom(f"{len(self._rows)} updates fill federated.strategy.budget_bytes={self._budget_bytes:,}")
        return np.empty(self._dim, np.float32)

    def finish(self, weights: Tensor) -> None:
        if len(self._rows) < self.least:
            raise ValueError(
                f"{type(self).__name__} with byzantine={self._byzantine} needs {self.bound} = {self.least} updates, "
                f"got {len(self._rows)}: set clients.min={self.least} or more"
            )
        out = weights.numpy()
        for place, delta in self._combined([self._rows[client_id] for client_id in sorted(self._rows)]):
            out[place] = out[place].astype(np.float64) + delta

    def marks(self) -> Mapping[str, tuple[int, ...]]:
        left_out = tuple(sorted(self._rows.keys() - set(self.chosen)))
        return {LEFT_OUT: left_out} if left_out and self.chosen else {}

    @abstractmethod
    def _combined(self, rows: list[Block]) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        """The change of the weights, piece by piece; ``rows`` are in the order of client ids."""


class _Sorting(Robust):
    """Works on each coordinate by itself, in sorted order."""

    @property
    def least(self) -> int:
        return 2 * self._byzantine + 1

    @property
    def bound(self) -> str:
        return "2 f + 1"

    @abstractmethod
    def _kept(self, num_rows: int) -> range:
        """Which of the sorted rows are averaged."""

    def _combined(self, rows: list[Block]) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        kept = self._kept(len(rows))
        scratch = np.empty((len(rows) + 1, min(BLOCK_ELEMS, self._dim)), np.float32)
        for place in places(self._dim):
            block = scratch[:, : place.stop - place.start]
            for index, row in enumerate(rows):
                block[index] = row[place]
            found = sort_rows(list(block[:-1]), block[-1], kept)
            total = np.zeros(place.stop - place.start)
            for index in kept:
                total += found[index]
            yield place, total / len(kept)


class CoordinateMedian(_Sorting):
    """The median of each coordinate; of an even number, the mean of the two in the middle."""

    choice = "median"

    def _kept(self, num_rows: int) -> range:
        return range((num_rows - 1) // 2, num_rows // 2 + 1)


class TrimmedMean(_Sorting):
    """The mean of each coordinate without its f largest and its f smallest values."""

    choice = "trimmed_mean"

    def _kept(self, num_rows: int) -> range:
        return range(self._byzantine, num_rows - self._byzantine)


class MultiKrumOptions(RobustOptions):
    """Options of MultiKrum."""

    keep: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Number of updates that are averaged. null: as many as it may."""


class MultiKrum(Robust):
    """The mean of the m updates with the smallest scores. The score of an update is the sum of the squared distances to
    the n - f - 2 others that are nearest to it; of two that are equal the smaller id comes first."""

    choice = "multi_krum"
    Options: ClassVar[type[Options]] = MultiKrumOptions

    def __init__(
        self, dim: int, *, byzantine: int = 1, keep: int | None = None, budget_bytes: int = BUDGET_BYTES
    ) -> None:
        """``keep``: m; None: n - f - 2, the most for which the authors' proof holds."""
        super().__init__(dim, byzantine=byzantine, budget_bytes=budget_bytes)
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self._keep = keep

    @property
    def least(self) -> int:
        return max(2 * self._byzantine + 3, (self._keep or 0) + self._byzantine + 2)

    @property
    def bound(self) -> str:
        most = (self._keep or 0) + self._byzantine + 2 > 2 * self._byzantine + 3
        return f"{self._keep} + f + 2" if most else "2 f + 3"

    def _combined(self, rows: list[Block]) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        spare = len(rows) - self._byzantine - 2
        scores = krum_scores(rows, nearest=spare)
        best = sorted(np.argsort(scores, kind="stable")[: spare if self._keep is None else self._keep])
        ids = sorted(self._rows)
        self.chosen = tuple(ids[index] for index in best)
        for place in places(self._dim):
            total = np.zeros(place.stop - place.start)
            for index in best:
                total += rows[index][place]
            yield place, total / len(best)


class Krum(MultiKrum):
    """The one update with the smallest score."""

    choice = "krum"
    Options = RobustOptions

    def __init__(self, dim: int, *, byzantine: int = 1, budget_bytes: int = BUDGET_BYTES) -> None:
        super().__init__(dim, byzantine=byzantine, keep=1, budget_bytes=budget_bytes)


def krum_scores(rows: list[Block], *, nearest: int) -> NDArray[np.float64]:
    """Return for each row the sum of the squared distances to the ``nearest`` others next to it. float64, shape
    (n,)."""
    return nearest_sums(squared_distances(pair_products(rows)), nearest=nearest)


def pair_products(rows: list[Block]) -> NDArray[np.float64]:
    """The products of all pairs of rows, float64, shape (n, n), symmetric.

    In float64 products of float32 are exact. A matrix product per block is in place of n^2 / 2 passes over the model.
    """
    count, dim = len(rows), len(rows[0])
    products = torch.zeros(count, count, dtype=torch.float64)
    scratch = torch.empty(count, min(BLOCK_ELEMS, dim), dtype=torch.float64)
    for place in places(dim):
        block = scratch[:, : place.stop - place.start]
        for index, row in enumerate(rows):
            block[index] = torch.from_numpy(row[place])
        products.addmm_(block, block.T)  # torch's, which keeps to the threads that the task was given
    gram: NDArray[np.float64] = products.numpy()
    return (gram + gram.T) / 2


def squared_distances(products: NDArray[np.float64]) -> NDArray[np.float64]:
    """``|a - b|^2 = |a|^2 + |b|^2 - 2 a b`` of all pairs; infinite on the diagonal."""
    squares = np.diag(products)
    distances: NDArray[np.float64] = np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0.0)
    np.fill_diagonal(distances, np.inf)
    return distances


def nearest_sums(distances: NDArray[np.float64], *, nearest: int) -> NDArray[np.float64]:
    """Return for each row the sum of its ``nearest`` smallest distances: the score of Krum."""
    sums: NDArray[np.float64] = np.sort(distances, axis=1)[:, :nearest].sum(axis=1)
    return sums


def places(dim: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK_ELEMS, dim)) for start in range(0, dim, BLOCK_ELEMS))

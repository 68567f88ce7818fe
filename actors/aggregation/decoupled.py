"""The merge of decoupled DiLoCo (arXiv:2604.21428): Nesterov momentum over a mean that keeps the length of the steps.

The mean of vectors that point apart is shorter than they are, the more so the more learners there are. So for each
matrix the direction and the length are averaged apart: with weights w_i,

    Delta = (sum_i w_i |d_i| / W) * u / |u|,   u = sum_i w_i d_i / |d_i| / W,   W = sum_i w_i

Both sums are of integers, as in :class:`.exact_sum.ExactMean`, and do not depend on the order. Vectors, such as biases,
are averaged as they are. It differs from the paper: the model is merged as a whole, and not in fragments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field
from torch import Tensor, from_numpy

from gradbus.actors.aggregation.clipping import differences
from gradbus.actors.aggregation.exact_sum import LARGEST, OutOfRange
from gradbus.actors.aggregation.partial_sum import FRACTION_BITS
from gradbus.actors.aggregation.strategies import FedAvgM, FedAvgMOptions
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.codecs import DenseBlock
from gradbus.codecs.base import Block


class DecoupledOptions(FedAvgMOptions):
    """Options of the merge of decoupled DiLoCo."""

    lr: float = Field(default=0.7, gt=0, allow_inf_nan=False)
    """Learning rate of the server."""
    nesterov: bool = True
    """Whether the step looks ahead: `w <- w + lr (delta + momentum v)`."""
    directions: bool = True
    """Whether lengths and directions of matrices are averaged apart. false: the mean, as fedavgm has it."""


class Decoupled(FedAvgM):
    """FedAvgM with Nesterov momentum, over the mean length times the mean direction of each matrix."""

    choice = "decoupled"
    adds_sums = False
    Options = DecoupledOptions

    def __init__(
        self, dim: int, *, lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True, directions: bool = True
    ) -> None:
        super().__init__(dim, lr=lr, momentum=momentum, nesterov=nesterov)
        self._directions = directions
        self._matrices: list[slice] = []
        self._lengths: list[int] = []  # of each matrix: sum of samples times norm, in units of 2^-30

    def lay_out(self, shapes: Sequence[Sequence[int]]) -> None:
        super().lay_out(shapes)
        start, self._matrices = 0, []
        for shape in shapes:
            size = math.prod(shape)
            if len(shape) > 1 and size and self._directions:
                self._matrices.append(slice(start, start + size))
            start += size
        self._lengths = [0] * len(self._matrices)

    def begin(self, round_id: int, base: Tensor) -> None:
        super().begin(round_id, base)
        self._lengths = [0] * len(self._matrices)

    def add(self, update: Update, facts: Facts) -> None:
        assert self._base is not None, "begin() comes first"
        model = update.model
        if model.is_sparse and not model.is_delta:
            raise ValueError(f"a sparse {model.codec} update holds weights: expected a difference")
        row = np.zeros(self._dim, np.float32)
        for block in differences(model, self._base):
            if isinstance(block, DenseBlock):
                row[block.start : block.start + block.values.numel()] = block.values.numpy()
            else:
                row[block.indices.numpy()] = block.values.numpy()
        norms = [math.sqrt(float(np.square(row[place], dtype=np.float64).sum())) for place in self._matrices]
        if not facts.num_samples * max(norms, default=0.0) < LARGEST:  # the unit vectors below would hide it
            raise OutOfRange(
                f"update with a matrix of norm {max(norms):.3g}: expected less than {LARGEST:g} by samples"
            )
        for place, norm in zip(self._matrices, norms, strict=True):
            if norm:
                row[place] /= norm

        def blocks(block_elems: int) -> Iterator[Block]:
            for start in range(0, self._dim, block_elems):
                yield DenseBlock(start, from_numpy(row[start : start + block_elems]))

        super().add(update.with_model(model.replaced(blocks, is_sparse=False)), facts)
        for index, norm in enumerate(norms):
            self._lengths[index] += facts.num_samples * round(norm * 2.0**FRACTION_BITS)

    def finish(self, weights: Tensor) -> None:
        assert self._mean is not None, "begin() comes first"
        squares = [0.0] * len(self._matrices)
        for place, mean in self._mean.blocks():
            for index, part in self._parts(place):
                squares[index] += float(mean[part].square().sum())
        total = self._mean.num_samples * 2.0**FRACTION_BITS
        factors = [n / total / math.sqrt(s) if s else 0.0 for n, s in zip(self._lengths, squares, strict=True)]
        for place, mean in self._mean.blocks():
            for index, part in self._parts(place):
                mean[part] *= factors[index]
            self._step(place, mean, weights[place])

    def _parts(self, place: slice) -> Iterator[tuple[int, slice]]:
        """The matrices that this piece of the model has part of, by index, and the part within the piece."""
        for index, matrix in enumerate(self._matrices):
            start, stop = max(place.start, matrix.start), min(place.stop, matrix.stop)
            if start < stop:
                yield index, slice(start - place.start, stop - place.start)

"""PowerSGD: each matrix of gradients is sent as two narrow ones, with error feedback and a warm start.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS
2019 (arXiv:1905.13727), algorithms 1 and 2, in the variant of PyTorch's hook (``powerSGD_hook``): Q is made orthonormal
as well as P, and the error is taken against the mean.

    M = G + E;  Q = orthonormal(Q);  P = orthonormal(all_reduce(M Q));  Q = mean(M^T P);  G = P Q^T;  E = M - G

A tensor is the matrix (shape[0], rest). It is compressed if (rows + columns) * rank * min_rate < rows * columns; the
others go dense, together with P.

Differs from the paper and the hook: orthonormal is Gram-Schmidt in float64 with a fixed order, and P Q^T is a sum of
outer products in a fixed order, not fused: ranks with processors of one kind get the same bits, and others nearly
always, where QR and matrix products differ between libraries. A column of Q that has become zero, as after a step
without a gradient, is drawn anew: it would stay zero.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.parts import copy_into, flattened, mean_of
from gradbus.runtime.algorithms.requests import AllReduce, Program, side_by_side

_TINY = 1e-10  # a column of which so little is left, of its length, depends on those before it: the rest is rounding


class PowerSGD(Algorithm):
    """Low-rank matrices, with error feedback and a warm start."""

    choice = "powersgd"
    own = frozenset({"error"})
    shared = frozenset({"q"})

    class Options(base.Options):
        """Options of ``powersgd``."""

        rank: int = Field(default=4, ge=1, le=1024)
        """Rank of the approximation."""
        min_rate: float = Field(default=2.0, ge=0)
        """How many times smaller than the matrix its two factors have to be; others are sent dense."""
        start_step: int = Field(default=0, ge=0)
        """Number of first steps that send whole gradients (full-rank warm-up)."""
        seed: int = Field(default=0, ge=0)
        """Seed of the first Q of each matrix."""

        @model_validator(mode="before")
        @classmethod
        def _known_name(cls, values: Any) -> Any:
            if isinstance(values, Mapping) and "matrix_approximation_rank" in values:
                raise ValueError("matrix_approximation_rank is called rank here")
            return values

    options: Any

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        if step.number < self.options.start_step:
            yield from mean_of("dense", bucket.tensors, step.active)
            return
        matrices = {name: t for name, t in bucket.tensors.items() if self.rank_of(t.shape) is not None}
        others = {name: tensor for name, tensor in bucket.tensors.items() if name not in matrices}
        yield from side_by_side(self._factors(matrices, step), mean_of("dense", others, step.active))

    def rank_of(self, shape: torch.Size) -> int | None:
        """The rank of the approximation of a tensor of this shape; None: it is sent dense."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(self.options.rank, rows, columns)
        return rank if (rows + columns) * rank * self.options.min_rate < rows * columns else None

    @torch.no_grad()
    def _factors(self, tensors: dict[str, Tensor], step: Step) -> Program[None]:
        if not tensors:
            return
        ms: dict[str, Tensor] = {}
        qs: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            gradient = tensor.reshape(tensor.shape[0], -1) * (self.place.world / step.active)
            ms[name] = gradient + self.memory.find_or_zeros("error", name, gradient)
            qs[name] = orthonormal(self._q(name, gradient.shape))
        ps = {name: m @ qs[name] for name, m in ms.items()}
        copy_into(ps, (yield AllReduce("p", flattened(ps), "sum")))  # no mean: it is made orthonormal
        ps = {name: orthonormal(p) for name, p in ps.items()}
        qs = {name: m.T @ ps[name] for name, m in ms.items()}
        qs = {name: q.contiguous() for name, q in qs.items()}
        copy_into(qs, (yield AllReduce("q", flattened(qs), "mean")))
        for name, tensor in tensors.items():
            approximation = product(ps[name], qs[name])
            self.memory.stage("q", name, qs[name])
            self.memory.stage("error", name, ms[name] - approximation)
            tensor.copy_(approximation.view(tensor.shape))

    def _q(self, name: str, shape: torch.Size) -> Tensor:
        """The Q of the step before, equal on all ranks; columns of zeros are drawn anew."""
        first, q = self._first_q(name, shape), self.memory.find("q", name)
        return first if q is None or q.shape != first.shape else q.where((q != 0).any(0), first)

    def _first_q(self, name: str, shape: torch.Size) -> Tensor:
        rank = self.rank_of(shape)
        assert rank is not None
        text = f"{self.options.seed} {name}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return torch.randn(shape[1], rank, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def orthonormal(matrix: Tensor) -> Tensor:
    """Make the columns orthonormal from left to right: Gram-Schmidt in float64, in a fixed order.

    A column that depends on those before it becomes zero. Sums over a column are torch's, in float64: processors of
    other kinds differ by far less than a rounding of float32.

    Args:
        matrix: float32, shape (rows, rank).
    """
    columns = list(matrix.double().unbind(1))
    before = [math.sqrt(float((column * column).sum())) for column in columns]
    for i, column in enumerate(columns):
        length = math.sqrt(float((column * column).sum()))
        is_new = length > _TINY * before[i] or math.isnan(length)
        columns[i] = column = column / length if is_new else torch.zeros_like(column)
        for j in range(i + 1, len(columns)):
            columns[j] = columns[j] - column * float((column * columns[j]).sum())
    return torch.stack(columns, 1).float()


@torch.no_grad()
def product(p: Tensor, q: Tensor) -> Tensor:
    """``p @ q.T`` as a sum of outer products from left to right, a multiplication and an addition each.

    Args:
        p: float32, shape (rows, rank). q: float32, shape (columns, rank).
    """
    total = p[:, :1] * q[:, 0]
    for i in range(1, p.shape[1]):
        total += p[:, i : i + 1] * q[:, i]
    return total

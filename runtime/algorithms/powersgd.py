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
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket
from gradbus.runtime.algorithms.parts import copy_into, flattened, mean_of
from gradbus.runtime.algorithms.requests import AllReduce, Program, side_by_side

_TINY = 1e-10  # a column of which so little is left, of its length, depends on those before it: the rest is rounding
_BLOCK_ELEMS = 1 << 17  # of a product at a time: what is computed twice with stays in the cache


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
        reshape: Literal["rows", "square"] = "rows"
        """Which matrix a tensor is: `rows`, shape[0] by the rest, as in the paper; `square`, the one nearest to a
        square, whose factors are the smallest."""
        seed: int = Field(default=0, ge=0)
        """Seed of the first Q of each matrix."""

        @model_validator(mode="before")
        @classmethod
        def _known_name(cls, values: Any) -> Any:
            if isinstance(values, Mapping) and "matrix_approximation_rank" in values:
                raise ValueError("matrix_approximation_rank is called rank here")
            return values

    options: Any

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}  # by parameter: the kept error, and that of the next step

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        if step.number < self.options.start_step:
            yield from mean_of("dense", bucket.tensors, step.active)
            return
        matrices = {name: t for name, t in bucket.tensors.items() if self.rank_of(t.shape) is not None}
        others = {name: tensor for name, tensor in bucket.tensors.items() if name not in matrices}
        yield from side_by_side(self.factors(matrices, step), mean_of("dense", others, step.active))

    @property
    def largest_rank(self) -> int:
        """The largest one that a step may have: it decides which tensors are compressed."""
        return int(self.options.rank)

    def rank_at(self, step: Step) -> int:
        """The rank of a step, equal on all ranks. Called once for each bucket."""
        return self.largest_rank

    def rank_of(self, shape: torch.Size) -> int | None:
        """The largest rank of the approximation of a tensor of this shape; None: it is sent dense."""
        if len(shape) < 2:
            return None
        rows, columns = self.matrix_of(shape)
        rank = min(self.largest_rank, rows, columns)
        return rank if (rows + columns) * rank * self.options.min_rate < rows * columns else None

    def matrix_of(self, shape: torch.Size) -> tuple[int, int]:
        """Rows and columns of the matrix that a tensor of this shape is taken as."""
        numel = math.prod(shape)
        if self.options.reshape == "rows" or not numel:
            return shape[0], math.prod(shape[1:])
        rows = next(rows for rows in range(math.isqrt(numel), 0, -1) if numel % rows == 0)
        return rows, numel // rows

    @torch.no_grad()
    def factors(self, tensors: dict[str, Tensor], step: Step) -> Program[None]:
        """Replace matrices, those for which :meth:`rank_of` has a rank, by their approximations."""
        if not tensors:
            return
        most = self.rank_at(step)
        ms: dict[str, Tensor] = {}
        qs: dict[str, Tensor] = {}  # these and P lie transposed: each column in one piece
        for name, tensor in tensors.items():
            gradient = tensor.reshape(self.matrix_of(tensor.shape))
            ms[name] = self._with_error(name, gradient, self.place.world / step.active)
            qs[name] = orthonormal(self._q(name, min(most, *gradient.shape), gradient.shape[1]))
        ps = {name: qs[name] @ m.T for name, m in ms.items()}
        copy_into(ps, (yield AllReduce("p", flattened(ps), "sum")))  # no mean: it is made orthonormal
        ps = {name: orthonormal(p) for name, p in ps.items()}
        qs = {name: ps[name] @ m for name, m in ms.items()}
        copy_into(qs, (yield AllReduce("q", flattened(qs), "mean")))
        for name, tensor in tensors.items():
            m = ms[name]
            approximation = tensor.view(m.shape) if tensor.is_contiguous() else torch.empty_like(m)
            multiply(ps[name], qs[name], approximation, minuend=m)
            if not tensor.is_contiguous():
                tensor.copy_(approximation.view(tensor.shape))
            self.memory.stage("q", name, qs[name].T.contiguous())
            self.memory.stage("error", name, m)

    def _with_error(self, name: str, gradient: Tensor, scale: float) -> Tensor:
        """M, in memory that the error of this step will stay in: that of the step before is kept, and may come back."""
        kept = self.memory.find("error", name)
        if name not in self._buffers or self._buffers[name][0].shape != gradient.shape:
            self._buffers[name] = (torch.empty_like(gradient), torch.empty_like(gradient))
        first, second = self._buffers[name]
        m = second if first is kept else first
        if kept is None or kept.shape != gradient.shape:
            return torch.mul(gradient, scale, out=m)
        return torch.add(kept, gradient, alpha=scale, out=m)

    def _q(self, name: str, rank: int, columns: int) -> Tensor:
        """The Q of the step before, equal on all ranks: shape (rank, columns).

        Where the rank has changed its last columns are left out, or drawn. Columns of zeros are drawn anew.
        """
        kept = self.memory.find("q", name)
        if kept is None or kept.shape[0] != columns:
            return self._first_q(name, rank, columns)
        q = torch.zeros(rank, columns)
        q[: kept.shape[1]] = kept.T[:rank]
        is_live = (q != 0).any(1, keepdim=True)
        return q if bool(is_live.all()) else q.where(is_live, self._first_q(name, rank, columns))

    def _first_q(self, name: str, rank: int, columns: int) -> Tensor:
        text = f"{self.options.seed} {name}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return torch.randn(rank, columns, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def orthonormal(matrix: Tensor) -> Tensor:
    """Make the rows orthonormal from first to last: Gram-Schmidt in float64, in a fixed order.

    A row that depends on those before it becomes zero. Sums over a row are torch's, in float64: processors of other
    kinds differ by far less than a rounding of float32.

    Args:
        matrix: float32, shape (rank, n).
    """
    rows = list(matrix.double().unbind(0))
    before = [math.sqrt(float((row * row).sum())) for row in rows]
    for i, row in enumerate(rows):
        length = math.sqrt(float((row * row).sum()))
        is_new = length > _TINY * before[i] or math.isnan(length)
        rows[i] = row = row / length if is_new else torch.zeros_like(row)
        for j in range(i + 1, len(rows)):
            rows[j] = rows[j] - row * float((row * rows[j]).sum())
    return torch.stack(rows).float()


@torch.no_grad()
def multiply(p: Tensor, q: Tensor, out: Tensor, minuend: Tensor) -> None:
    """``out = p.T @ q`` as a sum of outer products in their order, a multiplication and an addition each; and
    ``minuend -= out``.

    Args:
        p: float32, shape (rank, rows). q: float32, shape (rank, columns). out, minuend: of shape (rows, columns).
    """
    rows, columns = out.shape
    block = max(1, _BLOCK_ELEMS // max(1, columns))
    product = torch.empty(min(block, rows), columns)
    for start in range(0, rows, block):
        here = slice(start, min(rows, start + block))
        total, term = out[here], product[: here.stop - start]
        torch.mul(p[0, here].unsqueeze(1), q[0], out=total)
        for i in range(1, p.shape[0]):
            total += torch.mul(p[i, here].unsqueeze(1), q[i], out=term)
        minuend[here] -= total

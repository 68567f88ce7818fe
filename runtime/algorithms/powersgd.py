"""PowerSGD: each matrix of gradients is sent as two narrow ones, with error feedback and a warm start.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS
2019 (arXiv:1905.13727), algorithms 1 and 2, in the variant of PyTorch's hook (``powerSGD_hook``): the error is taken
against the mean.

    M = G + E;  P = orthonormal(all_reduce(M Q));  Q = mean(M^T P);  G = P Q^T;  E = M - G

The hook makes Q orthonormal, too, first. That is left out, as in the paper: it would multiply M Q by a triangular
matrix, of which Gram-Schmidt leaves nothing in P. Columns of Q are scaled, so that M Q is neither too large nor too
small for float32.

``power_iterations`` > 1 repeats the two products of a step, from the Q of the one before: P and Q come closer to the
largest singular vectors of the mean, for as many times the bytes. The warm start does so over the steps, for nothing.

A tensor is the matrix (shape[0], rest). It is compressed if (rows + columns) * rank * min_rate < rows * columns; the
others go dense, together with P.

Differs from the paper and the hook: ``max_aspect``, if it is set, makes other matrices of long ones; orthonormal is
Gram-Schmidt in float64 with a fixed order, and P Q^T is a sum of outer products in a fixed order, by addcmul, or by
BLAS for shapes of which it gives the same bits. So processors with AVX2 or AVX-512, where that is one fused operation,
get the same bits, or nearly always, where QR and matrix products differ between libraries. One without them rounds
differently: do not mix it with those. A column of Q that has become zero, as after a step without a gradient, is drawn
anew: it would stay zero.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket
from gradbus.runtime.algorithms.parts import copy_into, flattened, mean_of
from gradbus.runtime.algorithms.requests import AllReduce, Program

_TINY = 1e-10  # a column of which so little is left, of its length, depends on those before it: the rest is rounding
_FLOATS_OF_A_LINE = 16  # of the cache
# Of a matrix at a time: what is computed twice with stays in the cache, and BLAS multiplies narrow matrices by a whole
# one in 1.5 times the time.
_BLOCK_ELEMS = 1 << 17


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
        power_iterations: int = Field(default=1, ge=1, le=16)
        """How often a step computes P and Q, each time from the Q before. Each time costs the bytes of both factors and
        two more exchanges that wait for each other; 1: the paper's."""
        start_step: int = Field(default=0, ge=0)
        """Number of first steps that send whole gradients (full-rank warm-up)."""
        max_aspect: float | None = Field(default=None, ge=1)
        """How many times longer than wide a matrix should be at most: longer rows are cut into equal parts, or rows are
        joined. Its factors are smaller then, and fit it less. null: the matrix of the paper."""
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
        self._errors: dict[str, tuple[Tensor, Tensor]] = {}  # by parameter, allocated once

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        if step.number < self.options.start_step:
            yield from mean_of("dense", bucket.tensors, step.active)
            return
        matrices = {name: t for name, t in bucket.tensors.items() if self.rank_of(t.shape) is not None}
        others = {name: tensor for name, tensor in bucket.tensors.items() if name not in matrices}
        yield from self.factors(matrices, others, step)

    @property
    def largest_rank(self) -> int:
        """The largest one that a step may have: it decides which tensors are compressed."""
        return int(self.options.rank)

    def decide_rank(self, step: Step) -> int:
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
        rows, columns = shape[0], math.prod(shape[1:])
        most = self.options.max_aspect
        if most is None or not rows * columns or max(rows, columns) <= most * min(rows, columns):
            return rows, columns
        short, long = min(rows, columns), max(rows, columns)
        cuts = [cut for cut in range(1, math.isqrt(long // short) + 2) if long % cut == 0]
        aspects = {cut: max(long / short / cut**2, short / long * cut**2) for cut in cuts}
        fitting = [cut for cut in cuts if aspects[cut] <= most]
        cut = fitting[0] if fitting else min(cuts, key=aspects.__getitem__)
        return (rows * cut, columns // cut) if rows == short else (rows // cut, columns * cut)

    @torch.no_grad()
    def factors(self, tensors: dict[str, Tensor], others: dict[str, Tensor], step: Step) -> Program[None]:
        """Replace matrices, those for which :meth:`rank_of` has a rank, by their approximations, and ``others`` by
        their means: these travel with P, as a request costs more than a few entries."""
        if not tensors:
            yield from mean_of("dense", others, step.active)
            return
        most = self.decide_rank(step)
        ms: dict[str, Tensor] = {}
        qs: dict[str, Tensor] = {}  # these and P lie transposed: each column in one piece
        ps: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            ms[name] = m = tensor.reshape(self.matrix_of(tensor.shape))  # the gradient itself, if it lies in one piece
            if step.active < self.place.world:
                m *= self.place.world / step.active
            kept = self.memory.find("error", name)
            q = qs[name] = self._q(name, min(most, *m.shape), m.shape[1])
            ps[name] = added_product(q, m, kept if kept is not None and kept.shape == m.shape else None)
        both = {**ps, **others}
        flat = flattened(both)
        copy_into(both, (yield AllReduce("p", flat, "sum", out=flat)))  # no mean of P: it is made orthonormal
        for other in others.values():
            other *= 1 / step.active
        yield from self._finish_iteration(ms, ps, qs)
        for _ in range(1, self.options.power_iterations):
            for name, m in ms.items():
                ps[name] = added_product(self._scaled(name, qs[name]), m, None)
            flat = flattened(ps)
            copy_into(ps, (yield AllReduce("p", flat, "sum", out=flat)))
            yield from self._finish_iteration(ms, ps, qs)
        for name, tensor in tensors.items():
            m, error = ms[name], self._memory_of_error(name, ms[name])
            approximate(m, ps[name], qs[name], error)
            if not tensor.is_contiguous():
                tensor.copy_(m.view(tensor.shape))
            self.memory.stage("q", name, qs[name].T)
            self.memory.stage("error", name, error)

    def _finish_iteration(self, ms: dict[str, Tensor], ps: dict[str, Tensor], qs: dict[str, Tensor]) -> Program[None]:
        """Make the sums of P orthonormal, and replace Q by the mean of M^T P."""
        for name, m in ms.items():
            ps[name] = orthonormal(ps[name])
            qs[name] = narrow_product(ps[name], m)
        flat = flattened(qs)
        copy_into(qs, (yield AllReduce("q", flat, "mean", out=flat)))

    def _memory_of_error(self, name: str, like: Tensor) -> Tensor:
        """One of two tensors by turns: the other one is kept until this step is committed."""
        if name not in self._errors or self._errors[name][0].shape != like.shape:
            self._errors[name] = (torch.empty_like(like), torch.empty_like(like))
        first, second = self._errors[name]
        return second if first is self.memory.find("error", name) else first

    def _q(self, name: str, rank: int, columns: int) -> Tensor:
        """The Q of the step before, equal on all ranks: shape (rank, columns), with 1 as the largest entry of a row.

        Where the rank has changed its last columns are left out, or drawn. Columns of zeros are drawn anew.
        """
        kept = self.memory.find("q", name)
        if kept is None or kept.shape[0] != columns:
            return self.first_q(name, rank, columns)
        q = kept.T.contiguous()  # no copy, but for one of a checkpoint: BLAS adds strided rows in another order
        if len(q) != rank:
            q = torch.zeros(rank, columns, dtype=torch.float32)
            q[: kept.shape[1]] = kept.T[:rank]
        return self._scaled(name, q)

    def _scaled(self, name: str, q: Tensor) -> Tensor:
        """Return Q with 1 as the largest entry of each row; rows of zeros are drawn anew."""
        largest = q.abs().amax(1, keepdim=True)
        is_live, scaled = largest > 0, q / largest
        return scaled if bool(is_live.all()) else scaled.where(is_live, self.first_q(name, *q.shape))

    def first_q(self, name: str, rank: int, columns: int) -> Tensor:
        """The Q that a tensor begins with: drawn from seed and name, so equal on all ranks."""
        text = f"{self.options.seed} {name}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        random = torch.Generator().manual_seed(seed)
        return torch.randn(rank, columns, generator=random, dtype=torch.float32)


@np.errstate(invalid="ignore")  # infinity in the gradients of some rank: NaN comes of it
def orthonormal(matrix: Tensor) -> Tensor:
    """Make the rows orthonormal from first to last: Gram-Schmidt in float64, in a fixed order.

    A row that depends on those before it becomes zero. Sums over a row are NumPy's, in float64: processors of other
    kinds differ by far less than a rounding of float32.

    Args:
        matrix: float32, shape (rank, n).
    """
    x = matrix.numpy().astype(np.float64)  # of a few rows: a call of torch takes longer than what it computes
    before = np.linalg.norm(x, axis=1).tolist()
    for i, row in enumerate(x):
        length = math.sqrt(row @ row)
        if not length > _TINY * before[i] and not math.isnan(length):
            row[:] = 0
            continue
        row /= length
        rest = x[i + 1 :]
        rest -= np.outer(rest @ row, row)
    return torch.from_numpy(x.astype(np.float32))


def added_product(q: Tensor, m: Tensor, error: Tensor | None) -> Tensor:
    """``m += error``, then ``q @ m.T``, some rows after the others: they are still in the cache when they are added.

    Args:
        q: float32, shape (rank, columns). m, error: float32, shape (rows, columns). None: nothing is added.

    Returns:
        float32, shape (rank, rows).
    """
    out = torch.empty(len(q), len(m), dtype=torch.float32)
    for here in _row_blocks(m):
        part = m[here]
        if error is not None:
            part += error[here]
        out[:, here] = q @ part.T
    return out


def _row_blocks(m: Tensor) -> Iterator[slice]:
    """Slices of the rows of a matrix, of as many entries as stay in the cache."""
    block = max(1, _BLOCK_ELEMS // max(1, m.shape[1]))
    return (slice(start, min(len(m), start + block)) for start in range(0, len(m), block))


def narrow_product(p: Tensor, m: Tensor) -> Tensor:
    """``p @ m``, some rows of ``m`` after the others, so that they are in the cache together with the result.

    Args:
        p: float32, shape (rank, rows). m: float32, shape (rows, columns).

    Returns:
        float32, shape (rank, columns).
    """
    out = torch.zeros(len(p), m.shape[1], dtype=torch.float32)
    for here in _row_blocks(m):
        out.addmm_(p[:, here], m[here])
    return out


@torch.no_grad()
def approximate(m: Tensor, p: Tensor, q: Tensor, error: Tensor) -> None:
    """``error = m - p.T @ q``, then ``m = p.T @ q``: a sum of outer products in their order.

    Args:
        m, error: float32, shape (rows, columns). p: shape (rank, rows). q: shape (rank, columns).
    """
    columns = m.shape[1]
    for here in _row_blocks(m):
        total, rest, factor = m[here], error[here], p[:, here].contiguous()  # as it was tried out
        rest.copy_(total)
        if total.is_contiguous() and blas_adds_in_order(len(p), len(total), columns, torch.get_num_threads()):
            torch.mm(factor.T, q, out=total)
        else:
            sum_outer_products(factor, q, total)
        rest -= total


def sum_outer_products(p: Tensor, q: Tensor, out: Tensor) -> None:
    """``out = p.T @ q``, added up in the order of their rows, for tensors as of :func:`approximate`."""
    torch.mul(p[0].unsqueeze(1), q[0], out=out)
    for one, other in zip(p[1:], q[1:], strict=True):
        out.addcmul_(one.unsqueeze(1), other)


@functools.lru_cache(maxsize=1024)
def blas_adds_in_order(rank: int, rows: int, columns: int, threads: int) -> bool:
    """Whether a product of BLAS has the bits of :func:`sum_outer_products`, which takes longer.

    That depends on the processor, the shape, the number of threads and perhaps on where in memory a result lies, not on
    the values, so it is tried out once, for each place that a gradient may have in a line of 64 bytes of its bucket.
    But for the sign of zero: where all products are -0.0, as may be with columns of zeros, BLAS adds them to 0.0.
    """
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(rank, size, generator=generator, dtype=torch.float32) for size in (rows, columns))
    expected, memory = p.new_empty(rows, columns), p.new_empty(rows * columns + _FLOATS_OF_A_LINE)
    sum_outer_products(p, q, expected)
    places = [memory[start : start + expected.numel()].view(rows, columns) for start in range(_FLOATS_OF_A_LINE)]
    return all(torch.equal(torch.mm(p.T, q, out=place), expected) for place in places)

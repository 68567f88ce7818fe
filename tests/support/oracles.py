"""Algorithms of data-parallel training in NumPy, for all ranks at once: written from the papers, without our code.

Each function takes the gradients of a run, ``gradients[step][rank][name]`` float32, and returns what the ranks train
with, ``[step][name]`` float64 or float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradbus import codecs

Array = NDArray[Any]
Gradients = Sequence[Sequence[dict[str, Array]]]
Means = list[dict[str, Array]]


def mean(values: Sequence[Array]) -> Array:
    """In rank order, multiplied once, in float32."""
    total = values[0].astype(np.float32).copy()
    for value in values[1:]:
        total += value
    return total * np.float32(1 / len(values))


def each_tensor(gradients: Gradients, one: Callable[[str, list[list[Array]]], list[Array]]) -> Means:
    """Apply a function of ``[step][rank]`` to each tensor."""
    names = list(gradients[0][0])
    found = {name: one(name, [[rank[name] for rank in step] for step in gradients]) for name in names}
    return [{name: found[name][step] for name in names} for step in range(len(gradients))]


def dense(gradients: Gradients) -> Means:
    return each_tensor(gradients, lambda _, steps: [mean(step) for step in steps])


def largest(x: Array, k: int) -> Array:
    """The indices of the k largest magnitudes; among equal ones the lower index."""
    return np.sort(np.lexsort((np.arange(x.size), -np.abs(x)))[:k])


def topk(gradients: Gradients, density: float) -> Means:
    def one(name: str, steps: list[list[Array]]) -> list[Array]:
        if steps[0][0].ndim < 2:
            return [mean(step) for step in steps]
        residuals = [np.zeros(steps[0][0].size, np.float32) for _ in steps[0]]
        k, results = max(1, math.ceil(steps[0][0].size * density)), []
        for step in steps:
            total = np.zeros(steps[0][0].size, np.float32)
            for rank, gradient in enumerate(step):
                p = gradient.reshape(-1) + residuals[rank]
                chosen = largest(p, k)
                total[chosen] += p[chosen]
                p[chosen] = 0
                residuals[rank] = p
            results.append((total * np.float32(1 / len(step))).reshape(steps[0][0].shape))
        return results

    return each_tensor(gradients, one)


def randomk(gradients: Gradients, chosen: Callable[[str, int], Array]) -> Means:
    """``chosen``: the entries of a tensor that a step sends, by name and step."""

    def one(name: str, steps: list[list[Array]]) -> list[Array]:
        if steps[0][0].ndim < 2:
            return [mean(step) for step in steps]
        residuals = [np.zeros(steps[0][0].size, np.float32) for _ in steps[0]]
        results = []
        for number, step in enumerate(steps):
            entries, ps = chosen(name, number), [g.reshape(-1) + e for g, e in zip(step, residuals, strict=True)]
            result = np.zeros(steps[0][0].size, np.float32)
            result[entries] = mean([p[entries] for p in ps])
            residuals = [np.where(np.isin(np.arange(p.size), entries), np.float32(0), p) for p in ps]
            results.append(result.reshape(steps[0][0].shape))
        return results

    return each_tensor(gradients, one)


def hybrid(
    gradients: Gradients, rank: int, density: float, first_q: Callable[[str], Array | None], by_topk: set[str]
) -> Means:
    """``first_q``: as for :func:`powersgd`. ``by_topk``: names of the tensors of which the largest entries are sent."""
    of_topk = topk([[{name: ranks[name] for name in by_topk} for ranks in step] for step in gradients], density)
    of_rest = powersgd(
        [[{name: one for name, one in ranks.items() if name not in by_topk} for ranks in step] for step in gradients],
        rank,
        first_q,
    )
    return [{**some, **others} for some, others in zip(of_topk, of_rest, strict=True)]


def ef21(gradients: Gradients, density: float, eta: float = 1.0) -> Means:
    def one(name: str, steps: list[list[Array]]) -> list[Array]:
        if steps[0][0].ndim < 2:
            return [mean(step) for step in steps]
        size, world = steps[0][0].size, len(steps[0])
        known = [gradient.reshape(-1).astype(np.float64) for gradient in steps[0]]
        average = [one.copy() for one in known]
        common = sum(known) / world
        results = [common.reshape(steps[0][0].shape)]
        for step in steps[1:]:
            change = np.zeros(size)
            for rank, gradient in enumerate(step):
                average[rank] = (1 - eta) * average[rank] + eta * gradient.reshape(-1)
                difference = average[rank] - known[rank]
                chosen = largest(difference.astype(np.float32), max(1, math.ceil(size * density)))
                known[rank][chosen] += difference[chosen]
                change[chosen] += difference[chosen]
            common = common + change / world
            results.append(common.reshape(steps[0][0].shape))
        return results

    return each_tensor(gradients, one)


def gram_schmidt(matrix: Array) -> Array:
    """Columns made orthonormal from left to right, float64."""
    done: list[Array] = []
    for column in matrix.astype(np.float64).T:
        for other in done:
            column = column - other * (other @ column)
        done.append(column / np.linalg.norm(column))
    return np.stack(done, 1)


def powersgd(
    gradients: Gradients,
    rank: int,
    first_q: Callable[[str], Array | None],
    matrix: Callable[[tuple[int, ...]], tuple[int, int]] = lambda shape: (shape[0], math.prod(shape[1:])),
    iterations: int = 1,
) -> Means:
    """``first_q``: the first Q of a matrix; None: it goes dense. ``matrix``: rows and columns of a shape.
    ``iterations``: of P and Q in a step."""

    def one(name: str, steps: list[list[Array]]) -> list[Array]:
        q = first_q(name)
        if q is None:
            return [mean(step) for step in steps]
        shape = steps[0][0].shape
        errors = [np.zeros(matrix(shape)) for _ in steps[0]]
        results = []
        for step in steps:
            ms = [gradient.reshape(matrix(shape)) + error for gradient, error in zip(step, errors, strict=True)]
            for _ in range(iterations):
                q = gram_schmidt(q)
                p = gram_schmidt(sum(m @ q for m in ms))
                q = sum(m.T @ p for m in ms) / len(ms)
            approximation = p @ q.T
            errors = [m - approximation for m in ms]
            results.append(approximation.reshape(shape))
        return results

    return each_tensor(gradients, one)


def ranks_by_loss(losses: Sequence[float], start: int, lowest: int, highest: int, window: int) -> list[int]:
    """The rank of the step after each loss: a window of losses at a time, up by 1 or down by 1."""
    ranks = []
    for count in range(1, len(losses) + 1):
        if count % window == 0:
            part = np.array(losses[count - window : count])
            line = np.polyval(np.polyfit(np.arange(window), part, 1), np.arange(window))
            spread = np.std(part - line) / abs(part.mean())
            start = min(max(start + int(spread > 0.1) - int(spread < 0.01), lowest), highest)
        ranks.append(start)
    return ranks


def averaged_late(
    gradients: Sequence[Sequence[Array]], start: Array, lr: float, every: int, delay: int
) -> tuple[list[list[Array]], list[Array]]:
    """Weights ``[step][rank]`` of ranks that train by themselves, and add what an average changes so many steps after
    it was taken; and those after the last average."""
    x = [start.astype(np.float64) for _ in gradients[0]]
    taken: dict[int, list[Array]] = {}
    found = []
    for step, own in enumerate(gradients):
        x = [one - lr * gradient for one, gradient in zip(x, own, strict=True)]
        change = taken.pop(step - delay, None)
        x = x if change is None else [one + by for one, by in zip(x, change, strict=True)]
        if step % every == every - 1:
            taken[step] = [np.mean(x, axis=0) - one for one in x]
        found.append(x)
    for step in sorted(taken):
        x = [one + by for one, by in zip(x, taken[step], strict=True)]
    return found, x


def signsgd(gradients: Gradients) -> Means:
    """Entries of 0 vote 1 and -1 by turns: by their place in the vector of all tensors, plus the step."""
    results = []
    for number, step in enumerate(gradients):
        votes = []
        for rank in step:
            flat = np.concatenate([tensor.reshape(-1) for tensor in rank.values()])
            turns = np.where((np.arange(flat.size) + number) % 2 == 1, 1, -1)
            votes.append(np.where(flat == 0, turns, np.sign(flat)))
        results.append(split(np.sign(sum(votes)), step[0]))
    return results


def split(flat: Array, like: dict[str, Array]) -> dict[str, Array]:
    """A vector as tensors, one after the other."""
    found, start = {}, 0
    for name, tensor in like.items():
        found[name] = flat[start : start + tensor.size].reshape(tensor.shape)
        start += tensor.size
    return found


def bytes_of(x: Array, chunk: int) -> tuple[Array, float]:
    """``x`` after 8 bits between the smallest and largest of each chunk, and the largest step."""
    out, largest_step = np.empty_like(x, dtype=np.float64), 0.0
    for start in range(0, x.size, chunk):
        part = x[start : start + chunk].astype(np.float64)
        step = (part.max() - part.min()) / 255
        out[start : start + chunk] = part.min() + np.round((part - part.min()) / step) * step if step else part
        largest_step = max(largest_step, step)
    return out, largest_step


def bytegrad(gradients: Gradients, chunk: int) -> tuple[Means, float]:
    """Over all tensors of a step as one vector; also the largest quantization step."""
    results, largest_step = [], 0.0
    for step in gradients:
        flats = [np.concatenate([tensor.reshape(-1) for tensor in rank.values()]) for rank in step]
        parts = []
        for pieces in zip(*(np.array_split(flat, len(flats)) for flat in flats), strict=True):
            decoded = [bytes_of(piece, chunk) for piece in pieces]
            total = sum(piece for piece, _ in decoded) / len(flats)
            final, last_step = bytes_of(total.astype(np.float32), chunk)
            largest_step = max(largest_step, last_step, *(step for _, step in decoded))
            parts.append(final)
        results.append(split(np.concatenate(parts), step[0]))
    return results, largest_step


def one_bit_adam(gradients: Sequence[Sequence[Array]], warmup: int) -> list[Array]:
    """Steps, without the learning rate, from gradients ``[step][rank]`` of shape (n,)."""

    def one_bit(x: Array) -> Array:
        return np.where(x >= 0, 1.0, -1.0) * np.linalg.norm(x) / math.sqrt(x.size)

    world, numel = len(gradients[0]), gradients[0][0].size
    m, v, worker, found = np.zeros(numel), np.zeros(numel), [np.zeros(numel)] * world, []
    server = np.array_split(np.zeros(numel), world)
    for t, own in enumerate(gradients, start=1):
        if t <= warmup:
            g = sum(one.astype(np.float64) for one in own) / world
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        else:
            momenta = [0.9 * m + 0.1 * g + error for g, error in zip(own, worker, strict=True)]
            sent = [np.concatenate([one_bit(part) for part in np.array_split(one, world)]) for one in momenta]
            worker = [one - decoded for one, decoded in zip(momenta, sent, strict=True)]
            totals = [sum_of + e for sum_of, e in zip(np.array_split(sum(sent) / world, world), server, strict=True)]
            server = [total - one_bit(total) for total in totals]
            m = np.concatenate([one_bit(total) for total in totals])
        found.append((m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999 ** min(t, warmup))) + 1e-8))
    return found


def low_precision_ring(start: Sequence[Array], steps: int, chunk: int) -> tuple[list[list[Array]], float]:
    """Weights ``[step][rank]`` of ranks that take no steps of their own, and the largest quantization step. The first
    exchange sends whole weights, and changes none."""
    x, world, largest_step = [one.astype(np.float64) for one in start], len(start), 0.0
    errors, found = [np.zeros(start[0].size)] * world, [x]
    for _ in range(1, steps):
        means = [(x[r - 1] + x[r] + x[(r + 1) % world]) / 3 for r in range(world)]
        changes = [means[r] - x[r] + errors[r] for r in range(world)]
        decoded = [bytes_of(change, chunk) for change in changes]
        errors = [change - one for change, (one, _) in zip(changes, decoded, strict=True)]
        x = [before + one for before, (one, _) in zip(x, decoded, strict=True)]
        largest_step = max(largest_step, *(step for _, step in decoded))
        found.append(x)
    return found, largest_step


class LocalRank:
    """A rank that takes SGD steps by itself: its weights, float32, shape (n,)."""

    def __init__(self, start: Array, lr: float) -> None:
        self.theta, self.lr = start.astype(np.float32).copy(), np.float32(lr)

    def step(self, gradient: Array) -> None:
        self.theta = self.theta - self.lr * gradient


class DilocoOracle:
    """Streaming DiLoCo by its formulas, all ranks at once, in float32: DiLoCo with one fragment and no delay."""

    def __init__(self, start: Array, world: int, lr: float, **options: Any) -> None:
        self.ranks = [LocalRank(start, lr) for _ in range(world)]
        self.steps, self.count = options["steps"], options.get("fragments", 1)
        self.lr, self.momentum = (np.float32(options[name]) for name in ("outer_lr", "outer_momentum"))
        self.delay, self.alpha = options.get("delay", 0), np.float32(options.get("alpha", 0))
        bounds = np.array_split(np.arange(start.size), self.count)
        self.places = [slice(part[0], part[-1] + 1) for part in bounds]
        self.theta, self.m = start.astype(np.float32).copy(), np.zeros(start.size, np.float32)
        self.pending: list[tuple[int, slice, Array]] = []  # step at which it is applied, of which entries, theta
        self.number = 0

    def step(self, gradients: Sequence[Array]) -> None:
        """All ranks take a step, then what is due is exchanged, and applied."""
        for rank, gradient in zip(self.ranks, gradients, strict=True):
            rank.step(gradient)
        self._apply(self.number)
        self.number += 1
        for fragment, place in enumerate(self.places):
            if (self.number - fragment * self.steps // self.count) % self.steps:
                continue
            change = mean([self.theta[place] - rank.theta[place] for rank in self.ranks])
            self.m[place] = self.momentum * self.m[place] + change
            self.theta[place] = self.theta[place] - self.lr * (change + self.momentum * self.m[place])
            self.pending.append((self.number - 1 + self.delay, place, self.theta[place].copy()))
        if not self.delay:
            self._apply(self.number)

    def _apply(self, until: int | None) -> None:
        while self.pending and (until is None or self.pending[0][0] <= until):
            _, place, theta = self.pending.pop(0)
            for rank in self.ranks:
                rank.theta[place] = self.alpha * rank.theta[place] + (1 - self.alpha) * theta

    def end(self) -> None:
        """Apply what is late."""
        self._apply(None)


class NolocoOracle:
    """NoLoCo by its formulas, in float64, with given pairs."""

    def __init__(self, start: Array, world: int, lr: float, **options: Any) -> None:
        self.ranks = [LocalRank(start, lr) for _ in range(world)]
        self.options = options
        self.phi = [start.astype(np.float64).copy() for _ in range(world)]
        self.d = [np.zeros(start.size) for _ in range(world)]

    def step(self, gradients: Sequence[Array], partners: Sequence[int | None] | None) -> None:
        """``partners``: of each rank; None: no exchange is due."""
        for rank, gradient in zip(self.ranks, gradients, strict=True):
            rank.step(gradient)
        if partners is None:
            return
        phi = [one.copy() for one in self.phi]
        for number, partner in enumerate(partners):
            pair = [number] if partner is None else [number, partner]
            change = np.mean([phi[one] - self.ranks[one].theta for one in pair], axis=0)
            apart = phi[number] - np.mean([phi[one] for one in pair], axis=0)
            self.d[number] = (
                self.options["outer_momentum"] * self.d[number]
                - self.options["outer_lr"] * change
                - self.options["consensus"] * apart
            )
            self.phi[number] = phi[number] + self.d[number]
        for rank, weights in zip(self.ranks, self.phi, strict=True):
            rank.theta = weights.astype(np.float32)


class SparseLocoOracle:
    """SparseLoCo by its formulas; what is sent of a vector is told by the codec, which has an oracle of its own."""

    def __init__(self, start: Array, world: int, lr: float, **options: Any) -> None:
        self.ranks = [LocalRank(start, lr) for _ in range(world)]
        self.options = options
        self.theta = start.astype(np.float32).copy()
        self.e = [np.zeros(start.size, np.float32) for _ in range(world)]
        self.number = 0

    def step(self, gradients: Sequence[Array]) -> None:
        for rank, gradient in zip(self.ranks, gradients, strict=True):
            rank.step(gradient)
        self.number += 1
        if self.number % self.options["steps"]:
            return
        sent = []
        for number, rank in enumerate(self.ranks):
            p = np.float32(self.options["decay"]) * self.e[number] + (self.theta - rank.theta)
            message = codecs.get("loco").encode(torch.from_numpy(p))
            entries = codecs.decode(message, expected_dim=p.size).vector.numpy()
            self.e[number] = p - entries
            sent.append(entries.astype(np.float64))
        blocks = [slice(at, at + 4096) for at in range(0, self.theta.size, 4096)] if self.options["clip"] else []
        counts = np.sum([one != 0 for one in sent], axis=0)
        for block in blocks:
            norms = [np.linalg.norm(one[block]) for one in sent]
            for one, norm in zip(sent, norms, strict=True):
                one[block] *= min(1.0, float(np.median(norms)) / norm) if norm else 1.0
        self.theta = (self.theta - np.sum(sent, axis=0) / np.maximum(counts, 1)).astype(np.float32)
        for rank in self.ranks:
            rank.theta = self.theta.copy()

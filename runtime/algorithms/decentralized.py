"""Decentralized SGD: ranks average their weights with some others, and need not be equal.

Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017 (arXiv:1705.09056),
algorithm 1; the choice of peers and the low-precision ring of Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499);
Koloskova, Stich and Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed communication",
ICML 2019 (arXiv:1902.00340), algorithm 2 (CHOCO-SGD).

The weights that the gradients of a step were computed with are averaged, then the optimizer takes its step:
x_{t+1} = average(x_t) - lr g(x_t). The model of a run is the mean of all ranks' weights.

Differs from the sources: with an odd number of ranks one of them sits a step out in ``shift-one`` (circle method: all
pairs meet in N steps), where the authors' code refuses; the ring has error feedback; CHOCO averages before the step.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradbus.codecs import CodecError
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.parts import decode_sparse, dequantized, max_sparse_bytes, quantized, take_largest
from gradbus.runtime.algorithms.requests import AllReduce, Program, Swap
from gradbus.runtime.errors import ConfigError


class Decentralized(Algorithm):
    """Averages of weights with all ranks, one other rank, or both neighbours of a ring."""

    choice = "decentralized"
    scope = "weights"
    overlaps = True
    equal_replicas = False
    is_elastic = False  # what a rank knows of its neighbours is of these neighbours
    own = relative = frozenset({"replica", "left", "right", "residual", "known", "around"})

    class Options(base.Options):
        """Options of ``decentralized``."""

        peers: Literal["all", "shift-one", "ring", "choco"] = "shift-one"
        """Whose weights are averaged: ``all``; ``shift-one``, one other rank, another one in each step; ``ring``, both
        neighbours, in 8 bits; ``choco``, both neighbours, the largest changes only."""
        interval_steps: int = Field(default=1, ge=1)
        """Number of steps between two averages."""
        density: float = Field(default=0.1, gt=0, le=1)
        """For choco: share of the entries that is sent."""
        consensus: float = Field(default=0.2, gt=0, le=1)
        """For choco: step size of the averaging (gamma)."""
        chunk_elems: int = Field(default=8192, ge=1, le=1 << 24)
        """For ring: number of entries that share a smallest and a largest value."""

    options: Any

    @property
    def interval_steps(self) -> int:
        return int(self.options.interval_steps)

    def is_due(self, step: Step) -> bool:
        return self.place.world > 1 and step.number % int(self.options.interval_steps) == 0

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        if not self.is_due(step):
            return
        match self.options.peers:
            case "all":
                yield AllReduce("weights", bucket.flat, "mean", out=bucket.flat)
            case "shift-one":
                yield from self._shift_one(bucket.flat, step.number // self.options.interval_steps)
            case "ring":
                yield from self._ring(bucket)
            case "choco":
                yield from self._choco(bucket)

    def _shift_one(self, weights: Tensor, number: int) -> Program[None]:
        peer = partner(self.place.rank, self.place.world, number)
        if peer is None:
            return
        came = yield Swap("weights", {peer: weights}, {peer: torch.empty_like(weights)})
        weights.add_(came[peer]).mul_(0.5)

    def _neighbours(self) -> tuple[int, int]:
        return (self.place.rank - 1) % self.place.world, (self.place.rank + 1) % self.place.world

    def _ring(self, bucket: TensorBucket) -> Program[None]:
        """Each rank has replicas of its neighbours, which change by what they send: the change in 8 bits.

        d = (w + left + right) / 3 - w + (x - w) + e, with w what the others know of this rank's x, as in BAGUA's
        low-precision ring; all three replicas move by the decoded q, so that they stay bit-equal where they are kept.
        """
        key, x, (left, right) = f"bucket{bucket.index}", bucket.flat, self._neighbours()
        known = {kind: self.memory.find(kind, key) for kind in ("replica", "left", "right")}
        if known["replica"] is None:  # the first time whole weights
            came = yield self._both(x, left, right)
            self.memory.stage("left", key, came[left].clone())
            self.memory.stage("right", key, came[right].clone())
            self.memory.stage("replica", key, x.clone())  # the first average is the next step's, of these
            return
        w, at_left, at_right = (one for one in known.values() if one is not None)
        residual = self.memory.find_or_zeros("residual", key, x)
        wanted = (w + at_left + at_right) / 3 + (x - w)
        change = wanted - w + residual
        q = quantized(change, self.options.chunk_elems)
        came = yield self._both(q, left, right)
        decoded = dequantized(q, x.numel(), self.options.chunk_elems)
        self.memory.stage("residual", key, change - decoded)
        self.memory.stage("replica", key, w + decoded)
        for kind, before, peer in (("left", at_left, left), ("right", at_right, right)):
            self.memory.stage(kind, key, before + dequantized(came[peer], x.numel(), self.options.chunk_elems))
        x.copy_(w + decoded)

    def _both(self, message: Tensor, left: int, right: int) -> Swap:
        if left == right:
            return Swap("neighbour", {left: message}, {left: torch.empty_like(message)})
        return Swap(
            "neighbour",
            {left: message, right: message},
            {left: torch.empty_like(message), right: torch.empty_like(message)},
        )

    def _choco(self, bucket: TensorBucket) -> Program[None]:
        """x_hat, kept as ``known``: what the others know of this rank's weights, from zeros on; not the
        ring's ``replica``. around: the sum of both neighbours' x_hat, over 3.

        q = top-k(x - x_hat); x_hat += q; around += (q_left + q_right) / 3; x += gamma (around - 2/3 x_hat).
        """
        key, x, (left, right) = f"bucket{bucket.index}", bucket.flat, self._neighbours()
        x_hat = self.memory.find_or_zeros("known", key, x)
        around = self.memory.find_or_zeros("around", key, x)
        difference = x - x_hat
        message, rest = take_largest(difference.clone(), [x.numel()], self.options.density)
        sizes = yield self._both(torch.tensor([message.numel()]), left, right)
        peers = sorted({left, right})
        most = max_sparse_bytes([x.numel()], self.options.density)
        for peer in peers:
            if not 0 < int(sizes[peer]) <= most:
                raise CodecError(f"rank {peer} announces a message of {int(sizes[peer])} bytes, at most {most}")
        receive = {peer: torch.empty(int(sizes[peer]), dtype=torch.uint8) for peer in peers}
        came = yield Swap("changes", dict.fromkeys(peers, message), receive)
        x_hat = x_hat + (difference - rest)
        around = around.clone()
        weight = 1 / 3 if left != right else 2 / 3
        for peer in (left, right) if left != right else (left,):
            entries = decode_sparse(came[peer], x.numel())
            if entries is None:
                x.fill_(torch.nan)
                return
            around[entries[0]] += entries[1] * weight
        self.memory.stage("known", key, x_hat)
        self.memory.stage("around", key, around)
        x.add_(around - x_hat * (2 / 3), alpha=self.options.consensus)


def partner(rank: int, world: int, number: int) -> int | None:
    """The other rank that this one averages with: round-robin, all pairs meet in world - 1 (odd: world) rounds.

    Args:
        number: of the average, from 0.

    Returns:
        None: this rank sits this one out, as one does where their number is odd.

    Raises:
        ConfigError: no such rank.
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} in a world of {world}")
    seats = world + world % 2  # with an empty one, if need be
    turn = number % (seats - 1) if seats > 1 else 0
    if rank == seats - 1:
        peer = next(one for one in range(seats - 1) if 2 * one % (seats - 1) == turn)
    else:
        peer = (turn - rank) % (seats - 1)
        if peer == rank:
            peer = seats - 1
    return peer if peer < world else None

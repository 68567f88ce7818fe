"""Adam with momentum in place of gradients on the wire: QAdam in 8 bits, 1-bit Adam with two-sided error feedback.

QAdam: Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499). 1-bit Adam: Tang et al., "1-bit Adam: communication efficient
large-scale training with Adam's convergence speed", ICML 2021 (arXiv:2102.02888), algorithm 1.

Both train with plain Adam for ``warmup_steps``, then v is frozen, and each step averages m:

    warm-up:    g = mean(g);  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    afterwards: m = mean over the ranks of compressed(b1 m + (1 - b1) g)
    gradient := (m / (1 - b1^t)) / (sqrt(v / (1 - b2^T)) + eps)          T = min(t, warmup_steps)

The optimizer that follows is SGD without momentum: its ``lr`` is Adam's, its ``weight_decay`` is decoupled, as in
AdamW.

Differs from the sources: the bias correction of the frozen v is frozen, too, where BAGUA's code goes on with it; 1-bit
Adam has bias corrections, which the paper leaves out, so that the end of the warm-up makes no jump; entries whose v is
0 (always zero so far) are left alone, as DeepSpeed's mask does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket
from gradbus.runtime.algorithms.bytegrad import ByteGrad
from gradbus.runtime.algorithms.parts import copy_into, flattened
from gradbus.runtime.algorithms.requests import AllGather, AllReduce, Program, Swap
from gradbus.runtime.algorithms.signsgd import ballot, signs


class AdamOptions(base.Options):
    """Options that both have."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the momentum."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Constant that is added to the denominator."""
    warmup_steps: int = Field(default=100, ge=1)
    """Number of first steps with plain Adam, after which the second moment is frozen."""


class CompressedAdam(Algorithm):
    """Holds what both have in common. Not for use."""

    makes_steps = True
    shared = frozenset({"m", "v"})

    options: Any

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        options, t = self.options, step.number + 1
        is_in_order = all(one.is_contiguous() for one in bucket.tensors.values())
        gradient = bucket.flat if is_in_order else flattened(bucket.tensors)  # m and v are in the order of the entries
        m = flattened({name: self._kept("m", name, one) for name, one in bucket.tensors.items()})
        v = flattened({name: self._kept("v", name, one) for name, one in bucket.tensors.items()})
        if t <= options.warmup_steps:
            mean = yield AllReduce("gradients", gradient, "mean", divisor=step.active)
            m = m.mul_(options.beta1).add_(mean, alpha=1 - options.beta1)
            v = v.mul_(options.beta2).addcmul_(mean, mean, value=1 - options.beta2)
        else:
            scale = self.place.world / step.active
            m = m.mul_(options.beta1).add_(gradient, alpha=(1 - options.beta1) * scale)
            m = yield from self.mean_momentum(m, bucket, step)
            m = m.where(v > 0, 0.0) if are_finite([m]) else m
        self._stage("m", bucket.tensors, m)
        self._stage("v", bucket.tensors, v)
        frozen = min(t, options.warmup_steps)
        denominator = (v / (1 - options.beta2**frozen)).sqrt_().add_(options.eps)
        copy_into(bucket.tensors, (m / (1 - options.beta1**t)).div_(denominator))

    def mean_momentum(self, m: Tensor, bucket: TensorBucket, step: Step) -> Program[Tensor]:
        """The mean of the momenta of all ranks: float32, shape (n,), bit-equal on all ranks."""
        raise NotImplementedError

    def _kept(self, kind: str, name: str, like: Tensor) -> Tensor:
        return self.memory.find_or_zeros(kind, name, like)

    def _stage(self, kind: str, tensors: Mapping[str, Tensor], flat: Tensor) -> None:
        staged = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        copy_into(staged, flat)
        for name, tensor in staged.items():
            self.memory.stage(kind, name, tensor)


class QAdam(CompressedAdam):
    """Adam with 8-bit momentum."""

    choice = "qadam"

    class Options(AdamOptions):
        """Options of ``qadam``."""

        chunk_elems: int = Field(default=8192, ge=1, le=1 << 24)
        """Number of entries that share a smallest and a largest value."""

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        self._bytegrad = ByteGrad(place, ByteGrad.Options(chunk_elems=options.chunk_elems))

    def regroup(self, place: Place) -> None:
        super().regroup(place)
        self._bytegrad.place = place

    def mean_momentum(self, m: Tensor, bucket: TensorBucket, step: Step) -> Program[Tensor]:
        yield from self._bytegrad.exchange(
            TensorBucket(bucket.index, m, {}), Step(step.number, active=self.place.world)
        )
        return m


class OneBitAdam(CompressedAdam):
    """Adam with one bit for each entry of the momentum."""

    choice = "onebit-adam"
    own = frozenset({"worker_error", "server_error"})
    relative = frozenset({"server_error"})  # of the part that goes with the number of this rank

    class Options(AdamOptions):
        """Options of ``onebit-adam``."""

        warmup_steps: int = Field(default=1000, ge=1)
        """Number of first steps with plain Adam, a quarter of the run or so. Then the second moment is frozen."""

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        self._exchanged: list[str] = []  # keys of the buckets of this step

    def commit(self) -> None:
        """Forget the errors of buckets that tensors of this step have been in before, in another selection: there is no
        end of these where a step leaves out what it does not use."""
        super().commit()
        names = {name for key in self._exchanged for name in key.split("+")}
        for full_name in self.memory.tensors(frozenset({"server_error"})):
            key = full_name.removeprefix("server_error/")
            if key not in self._exchanged and not names.isdisjoint(key.split("+")):
                self.memory.forget("server_error", key)
        self._exchanged.clear()

    def roll_back(self) -> None:
        super().roll_back()
        self._exchanged.clear()

    def mean_momentum(self, m: Tensor, bucket: TensorBucket, step: Step) -> Program[Tensor]:
        """Both errors are of this rank: that of what it sends, and that of the part that it adds up."""
        rank, world = self.place.rank, self.place.world
        m = m + flattened({name: self._kept("worker_error", name, one) for name, one in bucket.tensors.items()})
        sizes = [part.numel() for part in m.tensor_split(world)]
        sent = [one_bit(part) for part in m.tensor_split(world)]
        decoded = [decoded_bit(message, size) for message, size in zip(sent, sizes, strict=True)]
        self._stage("worker_error", bucket.tensors, m - torch.cat(decoded))
        others = [peer for peer in range(world) if peer != rank]
        came = yield Swap(
            "parts", {peer: sent[peer] for peer in others}, {peer: torch.empty_like(sent[rank]) for peer in others}
        )
        size = sizes[rank]
        total = torch.zeros(size, dtype=torch.float32)
        for peer in range(world):
            total += decoded[rank] if peer == rank else decoded_bit(came[peer], size)
        total *= 1 / world
        key = "+".join(bucket.tensors)  # a bucket of other tensors starts without
        total += self.memory.find_or_zeros("server_error", key, total)
        message = one_bit(total)
        self.memory.stage("server_error", key, total - decoded_bit(message, size))
        self._exchanged.append(key)
        means = yield AllGather("means", message)
        return torch.cat([decoded_bit(one, count) for one, count in zip(means, sizes, strict=True)])


def one_bit(x: Tensor) -> Tensor:
    """A scale, float32, and a bit for each entry: uint8, shape (5 + ceil(n / 8),). sign(0) is 1.

    The scale is |x|_2 / sqrt(n), so that the decoded vector is as long as x.
    """
    length = torch.linalg.vector_norm(x, dtype=torch.float64) / math.sqrt(max(1, x.numel()))
    return torch.cat([length.float().reshape(1).view(torch.uint8), ballot(x >= 0, are_finite([x]))])


def decoded_bit(message: Tensor, numel: int) -> Tensor:
    """The inverse: float32, shape (numel,); all NaN if the vector was not finite.

    Raises:
        CodecError: a message of another length.
    """
    bits = signs(message[4:], numel)
    scale = float(message[:4].clone().view(torch.float32))
    if not message[4]:
        return torch.full((numel,), math.nan, dtype=torch.float32)
    return bits.float().mul_(scale)

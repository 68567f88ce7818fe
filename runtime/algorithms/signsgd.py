"""signSGD with majority vote: one bit for each entry, and the sign that most ranks have.

Bernstein, Zhao, Azizzadenesheli and Anandkumar, "signSGD with majority vote is communication efficient and fault
tolerant", ICLR 2019 (arXiv:1810.05291), algorithm 1.

    gradient = sign(sum over the ranks of sign(g))

Differs from the paper: a bit has no third value, so an entry that is 0 votes 1 and -1 by turns; a rank whose gradient
is 0 everywhere, as one without data, does not vote; a tie gives 0. The step has the length of the learning rate in each
entry, so that has to be much smaller than that of SGD (0.0001 to 0.001).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gradbus.codecs import CodecError
from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllGather, Program

_NOT_FINITE, _FINITE, _ABSTAINS = range(3)  # kinds of a ballot


class SignSGD(Algorithm):
    """The majority of the signs."""

    choice = "signsgd"

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        flat = bucket.flat
        ups = flat > 0
        zeros = (flat == 0).nonzero().view(-1)
        ups[zeros] = (zeros + step.number) % 2 == 1
        kind = _NOT_FINITE if not are_finite([flat]) else _ABSTAINS if zeros.numel() == flat.numel() else _FINITE
        ballots = yield AllGather("signs", ballot(ups, kind))
        votes = torch.zeros(flat.numel(), dtype=torch.int32)
        for one in ballots:
            cast = signs(one, flat.numel())
            if one[0] == _NOT_FINITE:
                flat.fill_(math.nan)
                return
            if one[0] == _FINITE:
                votes += cast
        flat.copy_(votes.sign())


def ballot(ups: Tensor, kind: int) -> Tensor:
    """A byte (0: not all entries are finite, 1: they are, 2: this rank does not vote), then a bit for each entry.

    Args:
        ups: bool, shape (n,).

    Returns:
        uint8, shape (1 + ceil(n / 8),).
    """
    packed = np.packbits(ups.numpy(), bitorder="little")
    return torch.from_numpy(np.concatenate([np.array([kind], np.uint8), packed]))


def signs(ballot: Tensor, numel: int) -> Tensor:
    """The inverse: int8, shape (numel,), of 1 and -1. Raises CodecError: a ballot of another length."""
    if ballot.numel() != 1 + -(-numel // 8):
        raise CodecError(f"a ballot of {ballot.numel()} bytes for {numel} entries, expected {1 + -(-numel // 8)}")
    bits = np.unpackbits(ballot[1:].numpy(), count=numel, bitorder="little")
    return torch.from_numpy(bits.view(np.int8)).mul_(2).sub_(1)

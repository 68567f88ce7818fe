"""signSGD with majority vote: one bit for each entry, and the sign that most ranks have.

Bernstein, Zhao, Azizzadenesheli and Anandkumar, "signSGD with majority vote is communication efficient and fault
tolerant", ICLR 2019 (arXiv:1810.05291), algorithm 1.

    gradient = sign(sum over the ranks of sign(g))

Differs from the paper: sign(0) counts as 1, as a bit has no third value; a tie of the votes gives 0. The step has the
length of the learning rate in each entry, so that has to be much smaller than that of SGD (0.0001 to 0.001).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllGather, Program


class SignSGD(Algorithm):
    """The majority of the signs."""

    choice = "signsgd"

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        flat = bucket.flat
        ballots = yield AllGather("signs", ballot(flat))
        votes = torch.zeros(flat.numel(), dtype=torch.int32)
        for one in ballots:
            if not one[0]:
                flat.fill_(math.nan)
                return
            votes += signs(one, flat.numel())
        flat.copy_(votes.sign())


def ballot(flat: Tensor) -> Tensor:
    """A byte that is 1 if all entries are finite, then a bit for each entry: uint8, shape (1 + ceil(n / 8),)."""
    bits = torch.nn.functional.pad((flat >= 0).to(torch.uint8), (0, -flat.numel() % 8)).view(-1, 8)
    packed = (bits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
    return torch.cat([torch.tensor([are_finite([flat])], dtype=torch.uint8), packed])


def signs(ballot: Tensor, numel: int) -> Tensor:
    """The inverse: int32, shape (numel,), of 1 and -1."""
    bits = (ballot[1:].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.reshape(-1)[:numel].to(torch.int32) * 2 - 1

"""What drivers that run the programs of all ranks in one process have in common: errors, and the sum of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbus.runtime.algorithms.requests import ReduceOp
from gradbus.runtime.collectives.arithmetic import Arithmetic
from gradbus.runtime.collectives.tensors import as_bytes, plain


class Deadlock(RuntimeError):
    """No rank can go on: they wait for requests that nobody makes. The text says which rank waits for what."""


class Mismatch(RuntimeError):
    """Ranks made requests of one name that do not fit together. The text says which and how."""


def reduced(tensors: Sequence[Tensor], op: ReduceOp, divisor: int | None = None) -> Tensor:
    """The tensors of all ranks combined in rank order, with the arithmetic of the bus.

    Args:
        divisor: of a mean; None: the number of tensors.
    """
    operands = [plain(tensor) for tensor in tensors]
    out = torch.empty_like(operands[0])
    divisor = (divisor or len(tensors)) if op == "mean" else 1
    Arithmetic(out.dtype, op, divisor).reduce([as_bytes(one) for one in operands], as_bytes(out))
    return out

"""How the tensors of Horovod's functions travel: as they are, or as halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class Compressor(Protocol):
    """How tensors travel. Horovod's compressors are such objects, too."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is combined in place of the tensor, of one dtype and shape on all ranks; and what undoes it."""

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Return the combined tensor from what was combined."""


@dataclass(frozen=True, slots=True)
class AsDtype:
    """Sends floating point tensors in another dtype. The engine adds halves in float32 and rounds once."""

    dtype: torch.dtype | None  # None: no other one

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        changes = self.dtype is not None and tensor.is_floating_point()
        return (tensor.to(self.dtype) if changes else tensor), tensor.dtype

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        return tensor.to(context)


class Compression:
    """Horovod's names of what a ``DistributedOptimizer`` and an ``allreduce`` take as ``compression``.

    Attributes:
        none: as they are. fp16, bf16: floating point tensors in that dtype.
    """

    none: Compressor = AsDtype(None)
    fp16: Compressor = AsDtype(torch.float16)
    bf16: Compressor = AsDtype(torch.bfloat16)


_BY_NAME: dict[str | None, Compressor] = {
    None: Compression.none,
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
}


def compression_of(given: Any) -> Compressor:
    """Return the compressor that an argument ``compression`` names, or is.

    Raises:
        ValueError: it is none.
    """
    if given is None or isinstance(given, str):
        if given not in _BY_NAME:
            raise ValueError(
                f"compression {given!r}: expected None, 'fp16', 'bf16' or an object with compress and decompress"
            )
        return _BY_NAME[given]
    for method in ("compress", "decompress"):
        if not callable(getattr(given, method, None)):
            raise ValueError(f"compression: {type(given).__name__} has no method {method}")
    return cast(Compressor, given)

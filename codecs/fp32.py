"""``fp32``: the vector as it is.

Version 1 is the bare values, recognised only by its length. Version 2 puts the 16-byte header before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradbus.codecs.base import (
    V2_HEADER,
    VERSIONS,
    BothVersions,
    Codec,
    DenseBlock,
    Parsed,
    check_finite,
    check_length,
    pack_header,
    tensor_bytes,
    tensor_view,
    unpack_header,
)

MAGIC_V2 = b"F4\x00\x02"


def parse_fp32_v1(view: memoryview, expected_dim: int) -> Parsed:
    """``view`` is exactly ``4 * expected_dim`` bytes: nothing else tells this format from any other bytes."""
    check_length("FP32 v1", view, 4 * expected_dim, f"{expected_dim} elements without a header")
    return _parsed(view, 0, version=1, is_delta=False, dim=expected_dim)


def parse_fp32_v2(view: memoryview, expected_dim: int) -> Parsed:
    """Header, then ``dim`` float32."""
    header = unpack_header(view, "FP32", expected_dim)
    check_length("FP32", view, V2_HEADER.size + 4 * header.dim, f"{header.dim} elements")
    return _parsed(view, V2_HEADER.size, version=2, is_delta=header.is_delta, dim=header.dim)


def _parsed(view: memoryview, offset: int, *, version: int, is_delta: bool, dim: int) -> Parsed:
    values = tensor_view(view, torch.float32, offset, dim)
    max_abs = check_finite(values, "FP32 payload")

    def blocks(block_elems: int) -> Iterator[DenseBlock]:
        for start in range(0, dim, block_elems):
            yield DenseBlock(start, values[start : start + block_elems])

    return Parsed("fp32", version, is_delta, dim, False, blocks, max_abs)


@dataclass(frozen=True, kw_only=True)
class Fp32(Codec):
    """Four bytes per element, exact."""

    Options = BothVersions
    name = choice = "fp32"
    lossless = True
    versions = VERSIONS
    formats = ((MAGIC_V2, parse_fp32_v2),)
    v1_is_delta = False

    def max_bytes(self, dim: int) -> int:
        return V2_HEADER.size + 4 * dim

    def _encode(self, vector: Tensor, version: int, is_delta: bool) -> bytes:
        check_finite(vector, "vector")
        header = b"" if version == 1 else pack_header(MAGIC_V2, is_delta=is_delta, dim=vector.numel())
        return b"".join((header, tensor_bytes(vector)))

    @staticmethod
    def difference(vector: Tensor, base: Tensor) -> tuple[memoryview, Tensor]:
        """The message of version 2 of ``vector - base``, computed where it lies in the message, so that it is copied
        nowhere.

        Args:
            vector, base: float32, shape (D,), on the CPU.

        Returns:
            The message, and the difference, float32, shape (D,), which shares memory with it.

        Raises:
            NonFiniteError: NaN or infinity in the difference.
        """
        dim = vector.numel()
        message = np.empty(V2_HEADER.size + 4 * dim, dtype=np.uint8)
        message[: V2_HEADER.size] = np.frombuffer(pack_header(MAGIC_V2, is_delta=True, dim=dim), dtype=np.uint8)
        difference = torch.from_numpy(message[V2_HEADER.size :].view("<f4"))
        torch.sub(vector, base, out=difference)
        check_finite(difference, "vector")
        return message.data, difference

"""A codec of your own: three values for each entry, in two bits, with two options.

Start the controller and each client in the folder that holds this file, or install it on every machine:

    gradbus controller controller.json --set federated.codec.name=custom_codec:Ternary \\
        --set federated.codec.threshold=0.4
    gradbus client client.json --id 0 --set 'client.codecs=["custom_codec:Ternary"]'

The quantization is that of ternary weight networks (Li, Zhang and Liu, 2016, arXiv:1605.04711): entries above a
threshold become plus or minus the mean magnitude of these, all others 0. What that leaves out is sent later, as with
all lossy codecs.
"""

from __future__ import annotations

import struct
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradbus.codecs import CodecError, CodecOptions, CustomCodec, NonFiniteError

_CHUNK = struct.Struct("<I")  # chunk_elems


class Ternary(CustomCodec):
    """Plus, minus or zero times one magnitude for each chunk."""

    name = "ternary"
    magic = b"TER1"

    class Options(CodecOptions):
        """Options of Ternary."""

        threshold: Annotated[float, Field(ge=0, le=1)] = 0.7
        """Magnitude, as a multiple of the mean magnitude of a chunk, above which an entry is not 0."""
        chunk_elems: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
        """Number of entries that share a magnitude."""

    def max_body_bytes(self, dim: int) -> int:
        return _body_bytes(dim, self.options.chunk_elems)

    def encode_body(self, vector: Tensor) -> bytes:
        chunk, dim = self.options.chunk_elems, vector.numel()
        rows = torch.nn.functional.pad(vector.cpu(), (0, -dim % chunk)).view(-1, chunk)
        filled = torch.full((rows.shape[0], 1), chunk)  # the last chunk may be shorter
        filled[-1:] -= -dim % chunk
        sizes = rows.abs()
        is_sent = sizes > self.options.threshold * (sizes / filled).sum(1, keepdim=True)
        scales = (sizes * is_sent / is_sent.sum(1, keepdim=True).clamp(min=1)).sum(1)
        sent, signs = is_sent.view(-1)[:dim].numpy(), (vector.cpu() < 0).numpy()
        return b"".join(
            [
                _CHUNK.pack(chunk),
                scales.numpy().astype("<f4").tobytes(),
                *(np.packbits(b).tobytes() for b in (sent, signs)),
            ]
        )

    @classmethod
    def decode_body(cls, body: memoryview, dim: int) -> Tensor:
        if len(body) < _CHUNK.size:
            raise CodecError(f"ternary body of {len(body)} bytes: expected at least {_CHUNK.size}")
        (chunk,) = _CHUNK.unpack_from(body)
        if chunk < 1 or len(body) != _body_bytes(dim, chunk):
            raise CodecError(f"ternary body of {len(body)} bytes with chunks of {chunk}: they do not fit {dim} entries")
        chunks, bits = -(-dim // chunk), -(-dim // 8)
        scales = np.frombuffer(body, "<f4", chunks, _CHUNK.size)
        if not np.isfinite(scales).all():
            raise NonFiniteError("non-finite ternary scales")
        at = _CHUNK.size + 4 * chunks
        sent, negative = (
            np.unpackbits(np.frombuffer(body, np.uint8, bits, start), count=dim) for start in (at, at + bits)
        )
        values = scales[np.arange(dim) // chunk] * sent * (1.0 - 2.0 * negative)
        return torch.from_numpy(values.astype(np.float32))


def _body_bytes(dim: int, chunk_elems: int) -> int:
    return _CHUNK.size + 4 * -(-dim // chunk_elems) + 2 * -(-dim // 8)

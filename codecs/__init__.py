"""Tensor to bytes and back: pure functions, no I/O, no clock, no global state.

    codec = get("sq8", density=0.1)
    payload = codec.encode(delta)                         # bytes
    decode(payload, expected_dim=delta.numel()).vector    # what the receiver sees

``docs/codecs.md`` describes every byte.
"""

from gradbus.codecs.base import Codec, Decoded, DenseBlock, Parsed, SparseBlock
from gradbus.codecs.errors import CodecError, DimMismatchError, NonFiniteError
from gradbus.codecs.feedback import residual_step
from gradbus.codecs.flat import flat_size, flatten, unflatten_into
from gradbus.codecs.indices import Coding, decode_indices, encode_indices
from gradbus.codecs.registry import ALL, decode, get, parse
from gradbus.codecs.sparse import SparseVector, top_k

__all__ = [
    "ALL",
    "Codec",
    "CodecError",
    "Coding",
    "Decoded",
    "DenseBlock",
    "DimMismatchError",
    "NonFiniteError",
    "Parsed",
    "SparseBlock",
    "SparseVector",
    "decode",
    "decode_indices",
    "encode_indices",
    "flat_size",
    "flatten",
    "get",
    "parse",
    "residual_step",
    "top_k",
    "unflatten_into",
]

"""Tensor to bytes and back: pure functions, no I/O, no clock, no global state.

    codec = get("sq8", density=0.1)
    payload = codec.encode(delta)                         # bytes
    decode(payload, expected_dim=delta.numel()).vector    # what the receiver sees

``docs/codecs.md`` describes every byte. A codec of your own inherits :class:`CustomCodec`. Deep gradient compression,
which has a state and one message for all tensors, is apart: :func:`dgc_step`, ``docs/dgc.md``.
"""

from gradbus.codecs.base import Codec, CodecOptions, Decoded, DenseBlock, Parsed, SparseBlock
from gradbus.codecs.custom import CustomCodec
from gradbus.codecs.dgc.config import PAPER_WARMUP, DgcConfig, DgcLayout, geometric_warmup, warmup_density
from gradbus.codecs.dgc.sgd import DenseMomentum, DgcSgd, dense_momentum_step
from gradbus.codecs.dgc.step import DgcState, dgc_step, undo_step
from gradbus.codecs.dgc.wire import DgcMean, DgcMessage, combine_dgc, decode_dgc, max_dgc_bytes
from gradbus.codecs.errors import CodecError, DimMismatchError, NonFiniteError
from gradbus.codecs.feedback import add_into, residual_step
from gradbus.codecs.index_coding import Coding, decode_indices, encode_indices
from gradbus.codecs.registry import ALL, check_codec_class, decode, get, parse
from gradbus.codecs.sparse import SparseVector, random_k, top_k

__all__ = [
    "ALL",
    "PAPER_WARMUP",
    "Codec",
    "CodecError",
    "CodecOptions",
    "Coding",
    "CustomCodec",
    "Decoded",
    "DenseBlock",
    "DenseMomentum",
    "DgcConfig",
    "DgcLayout",
    "DgcMean",
    "DgcMessage",
    "DgcSgd",
    "DgcState",
    "DimMismatchError",
    "NonFiniteError",
    "Parsed",
    "SparseBlock",
    "SparseVector",
    "add_into",
    "check_codec_class",
    "combine_dgc",
    "decode",
    "decode_dgc",
    "decode_indices",
    "dense_momentum_step",
    "dgc_step",
    "encode_indices",
    "geometric_warmup",
    "get",
    "max_dgc_bytes",
    "parse",
    "random_k",
    "residual_step",
    "top_k",
    "undo_step",
    "warmup_density",
]
